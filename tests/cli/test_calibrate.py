"""``edgespec calibrate``, and a chat that measures between answers."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import filelock
import pytest

import edgespec.calibration.measurement_store as measurement_store
import edgespec.engine.pair.calibration_run as learning_module
import edgespec.hardware.bandwidth as bandwidth_module
from edgespec.cli.chat.idle_calibration import IdleCalibration
from edgespec.engine.pair.loaded_pair import LoadedPair
from edgespec.errors import ForwardError, MemoryLimitError
from edgespec.files.home import Home
from edgespec.files.locks import locked
from edgespec.files.progress import Job
from edgespec.hardware import neighbours
from edgespec.hardware.bandwidth import BandwidthMeasurement, ThreadBandwidth
from edgespec.hardware.neighbours import Used
from edgespec.planning.choice.planner import ESTIMATED
from tests.support.calibrating import fix_plain_ratio, measured, shorten_calibration, stored
from tests.support.command_line import InProcess, command, environment, run_cli, status_lines, succeeded
from tests.support.processor import first_runtime, processor_runtimes
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels

WAIT_S = 60.0
GIGABYTES_PER_S = 25e9

# In llama.cpp nothing is drafted before it is measured.
NOTHING_KNOWN = {"EDGESPEC_RUNTIME": "llama", "EDGESPEC_DRAFT_RUNTIME": "llama"}


def _bandwidth(threads: int) -> ThreadBandwidth:
    return ThreadBandwidth(threads=threads, best_bytes_per_s=GIGABYTES_PER_S, median_bytes_per_s=GIGABYTES_PER_S)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make measurements short, because these tests check no figures."""
    shorten_calibration(monkeypatch)
    fix_plain_ratio(monkeypatch, 1.5)  # another ratio may change the target's setting

    def measure(threads: list[int]) -> BandwidthMeasurement:
        by_threads = [_bandwidth(count) for count in threads]
        return BandwidthMeasurement(buffer_bytes=2**28, by_threads=tuple(by_threads))

    monkeypatch.setattr(bandwidth_module, "measure_read_bandwidth", measure)


@pytest.fixture
def options(tiny: TinyModels) -> tuple[str, ...]:
    return ("--target", str(tiny.target), "--draft", str(tiny.drafter), "--context", "300")


# ------------------------------------------------------------------------------------------------ calibrate


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["auto", *processor_runtimes()])
def test_calibrate_stores_measurements_that_plans_use(
    here: InProcess, options: tuple[str, ...], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_RUNTIME", wanted)
    monkeypatch.setenv("EDGESPEC_DRAFT_RUNTIME", wanted)
    runtimes = len(processor_runtimes()) if wanted == "auto" else 1
    before = succeeded(here("generate", "hello", *options, "--max-tokens", "5", "--json")).json
    estimated = before["plan"]["target"]["runtime"] == "native"
    assert ("not calibrated yet" in (before["speculation_off"] or "")) != estimated
    assert (ESTIMATED.text in before["plan"]["reasons"]) == estimated
    assert before["plan"]["predicted_tokens_per_s"] is None, "nothing is measured"
    succeeded(here("calibrate", "--quick", *options))
    counts = stored(Home(here.home))
    assert {kind: counts[kind] for kind in ("contention", "times", "widths")} == {
        "contention": 1,
        "times": 2 * runtimes,
        "widths": runtimes,
    }
    after = succeeded(here("generate", "hello", *options, "--max-tokens", "5", "--json")).json
    assert "not calibrated" not in (after["speculation_off"] or "")
    assert after["plan"]["predicted_tokens_per_s"] > 0
    begun, chosen = (found["plan"]["target"]["runtime"] for found in (before, after))
    assert begun == (first_runtime() if wanted == "auto" else wanted)
    assert chosen == begun, "one calibration moves no target"
    assert chosen != begun or after["token_ids"] == before["token_ids"]


def test_too_little_memory_skips_only_the_bandwidth(
    here: InProcess, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(_threads: list[int]) -> BandwidthMeasurement:
        raise MemoryLimitError("measuring bandwidth takes too much", needed_bytes=2, available_bytes=1)

    monkeypatch.setattr(bandwidth_module, "measure_read_bandwidth", measure)
    found = succeeded(here("calibrate", "--quick", *options, "--json"))
    assert found.json["read_bytes_per_s"] is None
    assert found.json["curves"]
    assert "measuring bandwidth takes too much" in found.err


def number(value: Any, *, null: bool = False) -> bool:
    return (null and value is None) or (isinstance(value, int | float) and not isinstance(value, bool) and value > 0)


@pytest.mark.parametrize("quick", [True, False])
def test_calibrate_json_has_the_documented_keys(here: InProcess, options: tuple[str, ...], quick: bool) -> None:
    found = succeeded(here("calibrate", *(["--quick"] if quick else []), *options, "--json")).json
    assert found["schema_version"] == 1
    assert found["machine"]["physical_cores"] >= 1
    assert found["machine"]["fingerprint"]
    assert found["read_bytes_per_s"] == GIGABYTES_PER_S
    keys = ("model", "runtime", "device", "threads", "context", "width", "forward_s")
    for curve in found["curves"]:
        assert tuple(curve) == keys
        assert (curve["runtime"], curve["device"], curve["threads"]) == (first_runtime(), "cpu", 1)
        assert len(curve["width"]) == len(curve["forward_s"]) > 1
        assert curve["width"][0] == 1
        assert all(number(seconds) for seconds in curve["forward_s"])
    contexts = [(curve["model"], curve["context"]) for curve in found["curves"]]
    read, near = [("target", 96), ("target", 250)], ("drafter", 96)
    filled = [("target", 268), near, ("drafter", 296)]  # the kernels' last context is not read
    assert contexts == ([*read[: 1 if quick else 2], *filled] if first_runtime() == "native" else [*read, near])
    (classes,) = found["width_classes"]
    assert classes.keys() >= {"model", "runtime", "settings", "context", "widths", "max_abs_diff"}
    assert (classes["model"], classes["runtime"]) == ("target", first_runtime())
    assert classes["settings"]["kv_type"]
    assert classes["context"] == ([0, 12] if first_runtime() == "native" else [96, 262])
    assert classes["widths"][0][0] == 1
    assert number(classes["max_abs_diff"], null=True) or classes["max_abs_diff"] == 0
    assert found["contention"].keys() == {"target_factor", "drafter_factor"}
    assert found["drafting"]["model"] == "drafter"
    assert number(found["drafting"]["token_s"])
    assert number(found["took_s"])
    assert found["stored"] is True
    assert found["others_share"] == 0.0
    assert found["plan"]["target"]["model"] == "target"


@pytest.mark.skipif("native" not in processor_runtimes(), reason="experts are counted by our kernels")
def test_calibrate_says_how_many_experts_the_rows_of_a_text_read(
    here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_RUNTIME", "native")
    path = write_tiny_gguf(tmp_path / "mixture.gguf", architecture="qwen3moe", experts=(6, 2), quant="Q8_0")
    options = ("--target", str(path), "--draft", "none", "--context", "140", "--quick")
    curve, *_ = succeeded(here("calibrate", *options, "--json")).json["curves"]
    assert curve["experts"] == sorted(curve["experts"])
    assert (curve["experts"][0], len(curve["experts"])) == (4, len(curve["width"]))
    assert 4 < curve["experts"][-1] <= 12
    assert "experts      one row reads 4 of 12, " in succeeded(here("calibrate", *options)).out


def test_calibrate_json_has_null_for_values_not_measured(here: InProcess, tiny: TinyModels) -> None:
    found = succeeded(here("calibrate", "--quick", "--target", tiny.target, "--draft", "none", "--json")).json
    assert found["drafting"] is None
    assert found["contention"] is None
    assert {curve["model"] for curve in found["curves"]} == {"target"}


def test_calibrate_prints_curves_exactness_and_plan(here: InProcess, options: tuple[str, ...]) -> None:
    result = succeeded(here("calibrate", "--quick", *options))
    assert re.search(r"^target on cpu, 1 thread, after 96 tokens$", result.out, re.MULTILINE)
    assert re.search(r"^ +width +1 +\d+\.\d ms +1\.00x$", result.out, re.MULTILINE)
    assert re.search(r"^ +width +12 +\d+\.\d ms +\d+\.\d\dx$", result.out, re.MULTILINE)
    for start in ("reading", "drafting", "in parallel", "exactness", "speed", "to do"):
        assert re.search(rf"^{start} ", result.out, re.MULTILINE), start
    assert "of the 25.0 GB/s that the memory delivers" in result.out
    assert re.search(r"measured in \d+ s and stored", result.err)
    assert result.err.startswith("measuring takes at most 50 seconds\n")
    assert "measuring target" in result.err
    assert "\x1b" not in result.out + result.err


def test_calibrating_again_measures_again(
    here: InProcess, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real: Callable[..., Any] = learning_module.measure_target

    def measure(*arguments: Any, **settings: Any) -> Any:
        calls.append(arguments[0].facts.runtime)
        return real(*arguments, **settings)

    monkeypatch.setattr(learning_module, "measure_target", measure)
    for count in (1, 2):
        succeeded(here("calibrate", "--quick", *options, "--json"))
        assert Counter(calls) == dict.fromkeys(processor_runtimes(), count)


@pytest.mark.slow
def test_calibrate_json_is_alone_on_stdout(options: tuple[str, ...], home: Home) -> None:
    """In a separate process, without patches."""
    result = succeeded(run_cli("calibrate", "--quick", *options, "--json", home=home.root))
    assert result.json["schema_version"] == 1
    assert number(result.json["read_bytes_per_s"])
    assert result.err == ""


@pytest.mark.parametrize("as_json", [True, False])
def test_calibrate_fails_if_measurements_cannot_be_stored(
    here: InProcess, options: tuple[str, ...], as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _value: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("edgespec.calibration.measurement_store.write_json", full)
    found = here("calibrate", "--quick", *options, *(["--json"] if as_json else []))
    found.failed_well("some measurements could not be stored", "No space left on device", "EDGESPEC_HOME")
    assert "and stored" not in found.err
    assert stored(Home(here.home)) == {}
    if as_json:
        assert found.json["stored"] is False
        assert found.json["curves"]
    else:
        assert "width" in found.out
    monkeypatch.undo()


def test_calibrate_reports_a_busy_machine(
    here: InProcess, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()
    half = lambda: Used(own_s=0.0, busy_s=0.5 * (now := float(next(looks))), total_s=now)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(neighbours, "processor_seconds", half)
        found = succeeded(here("calibrate", "--quick", *options))
        assert "other programs used 50 % of the processor: calibrate again when it is idle" in found.err
        rough = "stored as rough times, which choose nothing"
        assert re.search(rf"measured in \d+ s; target: {rough}; drafter: {rough}\n", found.err)
        assert "while other programs ran" in found.out
        again = succeeded(here("calibrate", "--quick", *options, "--json")).json
        assert again["others_share"] == 0.5
        shown = succeeded(here("plan", *options)).out
        assert re.search(r"^speed .*measured (only )?while other programs ran$", shown, re.MULTILINE)
        assert re.search(r"^to do +calibrate again when the machine is idle; ", shown, re.MULTILINE)
    quiet = succeeded(here("calibrate", "--quick", *options))
    assert "other programs" not in quiet.err + quiet.out
    assert re.search(r"measured in \d+ s and stored\n", quiet.err)
    with monkeypatch.context() as patch:
        patch.setattr(neighbours, "processor_seconds", half)
        busy = succeeded(here("calibrate", "--quick", *options, "--json")).json
        assert (busy["stored"], outcomes(busy)) == (False, {"target": "kept", "drafter": "kept"})
        kept = "nothing stored, the earlier times stay"
        assert f"; target: {kept}; drafter: {kept}\n" in succeeded(here("calibrate", "--quick", *options)).err
    found_json = succeeded(here("calibrate", "--quick", *options, "--json")).json
    assert (found_json["others_share"], found_json["stored"]) == (0.0, True)
    assert outcomes(found_json) == {"target": "stored", "drafter": "stored"}


def outcomes(found: dict[str, Any]) -> dict[str, str]:
    """What became of each model's times."""
    return {each["model"]: each["outcome"] for each in found["times"]}


def test_calibrate_quick_keeps_its_time_limit_and_names_what_it_skipped(
    here: InProcess, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert learning_module.QUICK_BUDGET_S <= 50
    with monkeypatch.context() as patch:
        patch.setattr(learning_module, "QUICK_BUDGET_S", 0.0)
        found = succeeded(here("calibrate", "--quick", *options))
        assert "not measured for lack of time: target, drafter" in found.err
        nothing = "nothing stored, no measurement was complete"
        assert f"; target: {nothing}; drafter: {nothing}\n" in found.err
        left = succeeded(here("calibrate", "--quick", *options, "--json")).json
        assert left["left_out"][:2] == ["target", "drafter"]
        assert (left["stored"], outcomes(left)) == (False, {"target": "missing", "drafter": "missing"})
    assert succeeded(here("calibrate", "--quick", *options, "--json")).json["left_out"] == []
    whole = succeeded(here("calibrate", *options, "--json")).json
    assert whole["left_out"] == []
    assert whole["curves"]


def test_a_second_calibration_waits_and_says_so(
    here: InProcess, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(here.home)
    held, told = threading.Event(), threading.Event()

    def locked_and_told(path: Path, doing: str, job: Job, *, timeout_s: float) -> AbstractContextManager[None]:
        return locked(path, doing, Job(lambda _event: told.set(), job.cancelled), timeout_s=timeout_s)

    def hold() -> None:
        with filelock.FileLock(home.create(home.locks) / "calibration.lock"):
            held.set()
            told.wait(WAIT_S)

    monkeypatch.setattr(measurement_store, "locked", locked_and_told)
    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(WAIT_S)
    found = succeeded(here("calibrate", "--quick", *options))
    other.join()
    assert found.err.count("waiting for another calibration to finish") == 1


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (("--target", "missing.gguf"), "missing.gguf", 1),
        (("--target", "qwen2.5-coder-1b"), "qwen2.5-coder-1b", 1),
        (("--profile", "laptob"), "laptob", 2),
        (("--context", "1"), "context", 2),
        (("--nonsense",), "--nonsense", 2),
        (("--quick", "now"), "now", 1),
    ],
)
def test_errors_of_calibrate_are_one_sentence(
    arguments: tuple[str, ...], words: str, code: int, here: InProcess
) -> None:
    result = here("calibrate", *arguments, "--json")
    result.failed_well(words, code=code)
    assert result.json["error"].keys() == {"type", "message", "hint"}
    assert stored(Home(here.home)) == {}


def test_calibrate_replaces_damaged_measurements(here: InProcess, options: tuple[str, ...]) -> None:
    succeeded(here("calibrate", "--quick", *options))
    for path in (here.home / "measurements").glob("*.json"):
        path.write_bytes(b"{")
    succeeded(here("calibrate", "--quick", *options))
    spoken = succeeded(here("generate", "hello", *options, "--max-tokens", "3", "--json")).json
    assert not any("ignored" in reason for reason in spoken["plan"]["reasons"])


@pytest.mark.slow
@pytest.mark.parametrize("when", ["measuring slow", "measuring drafter"])
def test_calibrate_works_again_after_ctrl_c(tiny: TinyModels, home: Home, when: str) -> None:
    target = tiny.slow if when.endswith("slow") else tiny.target
    draft = "none" if when.endswith("slow") else str(tiny.drafter)
    arguments = command("calibrate", "--quick", "--target", target, "--draft", draft, "--context", "300")
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(home.root),
    )
    assert process.stderr is not None
    told = b""
    until = time.monotonic() + WAIT_S
    while not re.search(rb"%b.*\n" % when.encode(), told) and time.monotonic() < until:
        told += os.read(process.stderr.fileno(), 4096)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, (told, err)
    assert b"Traceback" not in told + err
    assert (told + err).splitlines()[-1] == b"interrupted"
    assert out == b""
    again = subprocess.run(arguments, capture_output=True, env=environment(home.root), timeout=200, check=False)
    assert again.returncode == 0, again.stderr
    assert stored(home)["widths"] == len(processor_runtimes())


# ----------------------------------------------------------------------------------------------------- chat


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="terminals are a matter of POSIX")
def test_a_chat_measures_the_machine_between_answers(tiny: TinyModels, home: Home, options: tuple[str, ...]) -> None:
    from tests.support.terminal import Terminal

    arguments = command("chat", *options, "--max-tokens", "12", "--verbose")
    for terminal in opened(Terminal(arguments, environment(home.root, NOTHING_KNOWN))):
        terminal.wait_for(r"is ready.*\n")
        terminal.wait_for(r"> ")
        assert stored(home) == {}
        terminal.type("hello\r")
        terminal.wait_for(r"no\s+guesses:\s+measuring\s+this\s+machine\s+between\s+answers")
        terminal.wait_for(r"> ")
        until = time.monotonic() + 2 * WAIT_S
        while measured(home) != {"contention": 1, "times": 2, "widths": 1} and time.monotonic() < until:
            time.sleep(0.05)
        # The result is printed before the next answer. A drafter that may be faster takes one more pause.
        status = ""
        while "measured: " not in terminal.screen and time.monotonic() < until:
            time.sleep(0.5)
            terminal.type("hello again\r")
            status = terminal.wait_for(r"tok/s(.|\n)*?> ")
        assert re.search(r"^measured: .+ here \(/plan says why\)|faster \(/plan says why\)", terminal.screen, re.M)
        assert "between answers" not in status
        terminal.type("once more\r")
        assert "between answers" not in terminal.wait_for(r"tok/s(.|\n)*?> ")
        assert terminal.screen.count("measured: ") == 1
        terminal.type("/exit\r")
        assert terminal.exit_code() == 0


def opened(terminal: Any) -> Iterator[Any]:
    """The terminal, closed in any case."""
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.mark.skipif(sys.platform == "win32", reason="terminals are a matter of POSIX")
def test_a_chat_can_be_left_while_it_measures(tiny: TinyModels, home: Home) -> None:
    from tests.support.terminal import Terminal

    arguments = command("chat", "--target", tiny.slow, "--draft", "none", "--max-tokens", "3", "--verbose")
    for terminal in opened(Terminal(arguments, environment(home.root, NOTHING_KNOWN))):
        terminal.wait_for(r"> ")
        terminal.type("hello\r")
        terminal.wait_for(r"machine\s+between\s+answers")
        terminal.wait_for(r"> ")
        terminal.type("/exit\r")
        assert terminal.exit_code() == 0


@pytest.mark.slow
def test_a_piped_chat_does_not_measure(home: Home, options: tuple[str, ...]) -> None:
    arguments = ("chat", *options, "--max-tokens", "5", "--verbose")
    lines_typed = "hello\nhello again\nonce more\n"
    result = succeeded(run_cli(*arguments, home=home.root, stdin=lines_typed, env=NOTHING_KNOWN))
    lines = status_lines(result.err)
    assert len(lines) == 3
    assert ["not calibrated yet" in line for line in lines] == [True, False, False], "shown once"
    assert "measured: " not in result.err
    assert stored(home) == {}
    found = succeeded(run_cli(*arguments, "--json", home=home.root, stdin="hello\nmore\n", env=NOTHING_KNOWN))
    answers = [json.loads(line) for line in found.out.splitlines()]
    assert ["not calibrated yet" in answer["speculation_off"] for answer in answers] == [True, True]


class Failing:
    """An engine that cannot be measured."""

    can_calibrate = True

    def __init__(self) -> None:
        self.calls = 0
        self.called = threading.Event()

    def calibrate_for(self, **_settings: object) -> tuple[str, ...]:
        self.calls += 1
        self.called.set()
        raise ForwardError("the device went away", code=-3)


def test_a_chat_continues_if_measuring_fails() -> None:
    """A failed forward while measuring is reported once and ends the measuring."""
    engine = Failing()
    with IdleCalibration(engine) as idle:  # type: ignore[arg-type]
        idle.start()
        assert engine.called.wait(WAIT_S)
        assert idle.stop() == "measuring this machine failed: the device went away"
        idle.start()
        assert idle.stop() is None
    assert engine.calls == 1


def test_without_a_thread_a_chat_measures_nothing_and_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    engine = Failing()
    with IdleCalibration(engine) as idle:  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            idle.start()
        assert idle.stop() is None
        assert engine.calls == 0
        idle.start()
        assert engine.called.wait(WAIT_S), "it is tried again behind the next answer"


def test_ctrl_c_before_the_measuring_thread_starts_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may begin later, or never: leaving waits for neither, and a late one measures nothing."""
    late: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        late.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    engine = Failing()
    idle = IdleCalibration(engine)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt), idle:
        idle.start()
    assert idle.stop() is None
    late[0].run()
    assert engine.calls == 0


def test_after_ctrl_c_in_thread_start_stop_waits_for_the_measuring_thread() -> None:
    """It is waited for as any other: nothing is closed under a measurement."""
    engine, begin = Failing(), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        begin(thread)
        assert engine.called.wait(WAIT_S)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        idle = IdleCalibration(engine)  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            idle.start()
    assert idle.stop() == "measuring this machine failed: the device went away"


def test_a_model_that_cannot_be_rewound_has_nothing_to_measure(
    here: InProcess, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadedPair, "can_rewind", False)
    monkeypatch.setattr(learning_module, "measure_target", None)
    done = here("calibrate", tiny.target, "--draft", "none")
    assert done.code == 0
    assert "target: nothing to measure, it is always decoded plainly" in done.err
    found = json.loads(here("calibrate", tiny.target, "--draft", "none", "--json").out)
    assert (found["times"], found["stored"]) == ([{"model": "target", "outcome": "plain"}], False)
