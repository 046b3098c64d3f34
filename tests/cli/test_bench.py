"""``edgespec bench``: what it prints, what it refuses before measuring, and when it fails."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edgespec.bench.draft_log as draft_log
import edgespec.bench.plots as plots_module
import edgespec.bench.run as run_module
import edgespec.calibration.measurement_store as store_module
from edgespec.bench.run import RunSettings
from edgespec.bench.suite import BUILTIN_SUITES, Prompt, builtin_suite, suite_sha256
from edgespec.cli import bench as module
from edgespec.cli.terminal.output import State
from edgespec.decoding.sampling import Sampling
from edgespec.errors import InvalidRequestError
from tests.support.bench_answers import FakeRun, made
from tests.support.command_line import InProcess, Result, command, environment, run_cli
from tests.support.tiny_models import TinyModels

WAIT_S = 60.0


@pytest.fixture(scope="module")
def pair(tiny: TinyModels) -> tuple[str, ...]:
    """Options that name the tiny pair, of which everything is known: nothing is calibrated."""
    tiny.load_speculating().close()
    return ("--target", str(tiny.target), "--draft", str(tiny.drafter))


@pytest.fixture
def here(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InProcess:
    return InProcess(tiny.home.root, monkeypatch, capsys)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Two prompts of ours and one of Spec-Bench's shape."""
    lines: list[dict[str, object]] = [
        {"id": "greeting", "category": "chat", "prompt": "hello world"},
        {"id": "water", "category": "qa", "prompt": "what is water", "further": ["keys"]},
        {"question_id": 81, "category": "qa", "turns": ["what is the water", "and then"]},
    ]
    return written(tmp_path / "mine.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# -------------------------------------------------------------------------------------------- fake answers


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    run = FakeRun(lambda _prompt, _arm, _turn: {})
    monkeypatch.setattr(run_module, "run_passes", run)
    return run


def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr(module, "open_engine", refuse)


# ------------------------------------------------------------------------------------------ the JSON object


def check_speedup(found: dict[str, Any]) -> None:
    low, high = found["ci95"]
    assert 0 < low <= found["geomean"] <= high
    for own in found["by_category"].values():
        assert own["geomean"] > 0
        assert len(own["ci95"]) == 2


def check_finite(value: object) -> None:
    if isinstance(value, dict):
        for own in value.values():
            check_finite(own)
    elif isinstance(value, list):
        for own in value:
            check_finite(own)
    elif isinstance(value, float):
        assert math.isfinite(value)


def check_report(found: dict[str, Any], arms: tuple[str, ...]) -> None:
    """The shape of ``bench --json``."""
    assert found["schema_version"] == 1
    assert found["machine"].keys() >= {"processor", "read_bytes_per_s"}
    assert found["suite"].keys() >= {"name", "sha256"}
    assert tuple(found["arms"]) == arms
    for name, arm in found["arms"].items():
        assert arm.keys() >= {"decode_tokens_per_s_geomean", "speedup", "identical_fraction", "predicted_vs_measured"}
        assert arm["decode_tokens_per_s_geomean"] > 0
        assert arm["identical_fraction"] == 1.0
        if name == "plain":
            assert arm["speedup"] is None
        else:
            check_speedup(arm["speedup"])
    for pair in found["pairs"]:
        assert pair.keys() >= {"id", "category", "arm", "tokens", "decode_s", "ttft_s", "tokens_per_round"}
        assert pair["identical_to_plain"] is True
    assert found["identical_fraction"] == 1.0
    assert found["noise"].keys() >= {"aa_ci95"}
    assert found.keys() >= {"speedup", "predicted_vs_measured"}
    check_finite(found)


def test_bench_json_is_one_object_with_the_documented_keys(
    here: InProcess, pair: tuple[str, ...], suite: Path
) -> None:
    result = here("bench", *pair, "--suite", suite, "--passes", "1", "--max-tokens", "16", "--json")
    assert result.code == 0, result.err
    found = result.json
    check_report(found, ("plain", "again", "planned"))
    drawn = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0, "rule": "keyed"}
    assert found["sampling"] == drawn
    check_speedup(found["speedup"])
    low, high = found["noise"]["aa_ci95"]
    assert 0 < low <= high
    prompts = [
        Prompt(id="greeting", category="chat", prompt="hello world"),
        Prompt(id="water", category="qa", prompt="what is water"),
        Prompt(id="81", category="qa", prompt="what is the water"),
    ]
    assert found["suite"] == {"name": "mine.jsonl", "sha256": suite_sha256(prompts), "prompts": 3}
    assert (found["max_tokens"], found["passes"], found["cold"]) == (16, 1, False)
    assert {pair["tokens"] for pair in found["pairs"]} == {16}
    passes = [each["passes"] for each in found["noise"]["by_prompt"]]
    assert all(1 <= each <= 4 for each in passes)
    assert len(found["pairs"]) == 3 * 2 * sum(passes)
    assert all(pair["ttft_s"] is None for pair in found["pairs"])
    assert list(found["speedup"]["by_category"]) in (["chat", "qa"], ["qa", "chat"])
    assert found["plan"]["target"]["model"] == "target"


def test_bench_teaches_later_answers_neither_lengths_nor_acceptance(
    here: InProcess, pair: tuple[str, ...], suite: Path, tiny: TinyModels
) -> None:
    """A chat would take all answers to be as short as these."""

    def learned() -> dict[str, bytes]:
        paths = [path for kind in ("history", "acceptance") for path in tiny.home.measurements.glob(f"{kind}-*")]
        return {path.name: path.read_bytes() for path in paths}

    options = ("--suite", suite, "--passes", "1", "--max-tokens", "4")
    assert here("bench", *pair, *options).code == 0  # the first one calibrates, which measures acceptance
    before = learned()
    assert here("bench", *pair, *options).code == 0
    assert learned() == before


def test_bench_cold_measures_times_to_the_first_token(here: InProcess, pair: tuple[str, ...], suite: Path) -> None:
    options = ("--suite", suite, "--limit", "1", "--passes", "1", "--max-tokens", "4", "--arms", "planned", "--cold")
    found = here("bench", *pair, *options, "--json").json
    check_report(found, ("plain", "planned"))
    assert found["cold"] is True
    assert all(pair["ttft_s"] > 0 for pair in found["pairs"])
    assert found["noise"]["aa_ci95"] is None, "nothing says how noisy it was"
    check_speedup(found["arms"]["planned"]["request_speedup"])
    check_speedup(found["arms"]["planned"]["ttft_ratio"])
    text = here("bench", *pair, *options)
    assert "whole requests, planned against plain, by category" in text.out
    assert "time to the first token, over that of plain: " in text.out
    assert "fewer than 3 passes: no interval" in text.out
    assert "plain against itself" not in text.out


def test_sampled_answers_equal_plain_decoding(here: InProcess, pair: tuple[str, ...], suite: Path) -> None:
    drawn = ("--temperature", "0.7", "--top-p", "0.95", "--top-k", "40", "--min-p", "0.01", "--seed", "5")
    options = ("--suite", suite, "--passes", "1", "--max-tokens", "24", "--arms", "planned,oracle", *drawn)
    found = here("bench", *pair, *options, "--json").json
    check_report(found, ("plain", "planned", "oracle"))
    assert found["sampling"] == {
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 40,
        "min_p": 0.01,
        "seed": 5,
        "rule": "keyed",
    }
    told = here("bench", *pair, *options)
    words = "temperature 0.7, top-k 40, top-p 0.95, min-p 0.01, seed 5"
    assert f"every arm sampled with {words}\n" in told.out
    unseeded = here("bench", *pair, *options[:-2])
    assert "every arm sampled with temperature 0.7, top-k 40, top-p 0.95, min-p 0.01, seed 0\n" in unseeded.out


def test_an_interval_that_contains_1_is_printed_as_no_difference_found() -> None:
    gain = {"geomean": 1.204, "ci95": [1.19, 1.221], "told_apart": True, "narrow": True, "prompts": 3, "passes": 3}
    assert module._gain(gain) == "1.204 (1.190-1.221)"
    assert module._gain({**gain, "ci95": [1.1, 1.3], "narrow": False}) == "1.204 (1.100-1.300, wider than 2 %)"
    same = {"geomean": 1.002, "ci95": [0.99, 1.01], "told_apart": False, "narrow": True, "prompts": 1, "passes": 6}
    assert module._gain(same) == "no difference found (0.990-1.010)"
    for few in ({"passes": 2}, {"prompts": 2}, {"prompts": 1, "passes": 5}):
        assert module._gain({**gain, **few}) == "1.204"


# --------------------------------------------------------------------------------------------- for people


@pytest.mark.slow
def test_bench_prints_its_table_without_a_terminal(tiny: TinyModels, pair: tuple[str, ...], suite: Path) -> None:
    arms = "planned,again,oracle,depth-1"
    result = run_cli("bench", *pair, "--suite", suite, "--passes", "1", "--max-tokens", "8", "--arms", arms,
                     home=tiny.home.root)  # fmt: skip
    assert result.code == 0, result.err
    assert "\x1b" not in result.out + result.err
    assert "{" not in result.out
    header, *rows = result.out.splitlines()[-6:]
    assert header.split() == ["tok/s", "x", "plain", "95", "%", "identical", "tok/round", "expected/measured"]
    assert [row.split()[0] for row in rows] == ["plain", "planned", "again", "oracle", "depth-1"]
    assert all("100 %" in row for row in rows)
    assert "planned against plain, by category" in result.out
    assert "best fixed" in result.out
    assert "plain against itself: " in result.out
    assert "memory: plain " not in result.out
    assert "- target on cpu, 1 thread" not in result.out
    ways = "plain, planned, again, oracle, depth-1"
    assert f"3 prompts, each answered 2 times in each way ({ways}): less than a minute\n" in result.err
    assert "30 of 30 answers" in result.err


def test_values_that_were_not_measured_are_printed_as_a_dash(
    here: InProcess, pair: tuple[str, ...], suite: Path, fake: FakeRun
) -> None:
    fake.make = lambda *_: {"tokens": 1, "decode_s": 0.0}
    result = here("bench", *pair, "--suite", suite)
    assert result.code == 0, result.err
    for row in result.out.splitlines()[-3:]:
        assert row.split()[1] == "-"
        assert row.split()[-1] == "-"
    assert "memory:" not in result.out
    assert "by category" not in result.out
    assert "plain against itself" not in result.out
    found = here("bench", *pair, "--suite", suite, "--json").json
    assert found["speedup"] is None
    assert found["arms"]["planned"]["decode_tokens_per_s_geomean"] is None


def test_bench_reports_the_bandwidth_if_it_was_measured(
    here: InProcess, pair: tuple[str, ...], suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--suite", suite, "--limit", "1", "--passes", "1", "--max-tokens", "4", "--arms", "plain")
    monkeypatch.setattr(store_module, "load_bandwidth", lambda *_: None)
    without = here("bench", *pair, *options, "--json").json
    assert without["machine"]["read_bytes_per_s"] is None
    assert without["arms"]["plain"]["bandwidth_used"] is None
    monkeypatch.setattr(store_module, "load_bandwidth", lambda *_: SimpleNamespace(read_bytes_per_s=5e12))
    found = here("bench", *pair, *options, "--json").json
    assert found["machine"]["read_bytes_per_s"] == 5e12
    assert 0 < found["arms"]["plain"]["bandwidth_used"] < 1
    assert "% of the bandwidth)" in here("--verbose", "bench", *pair, *options).out


def test_bench_prints_a_progress_line_after_each_tenth_of_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    show = module._Progress()
    prompt = Prompt(id="p", category="c", prompt="p")
    for done in range(1, 101):
        show(made(prompt, "planned", 0, {"identical": done != 50}), done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert 9 <= len([line for line in lines if "answers" in line]) <= 11
    assert lines[-1] == "100 of 100 answers"
    assert "p differs from plain decoding in arm planned" in lines


def test_on_a_terminal_one_line_is_renewed_and_gone_before_anything_else(capsys: pytest.CaptureFixture[str]) -> None:
    show = module._Progress(live=True)
    prompt = Prompt(id="p", category="c", prompt="p")
    for done in (1, 2, 3):
        show(made(prompt, "planned", 0, {"identical": done != 2}), done, 3)
    show.again([prompt], 1)
    shown = re.sub(r"\d+ s left", "N s left", capsys.readouterr().err)
    first, second = (f"\r\x1b[2m{done}\x1b[0m\x1b[K" for done in ("1 of 3 answers", "2 of 3 answers · N s left"))
    differs = "p differs from plain decoding in arm planned\n"
    assert shown.startswith(f"{first}{second}\r\x1b[K{differs}\r\x1b[K\r\x1b[Ktimes of plain decoding varied by more")
    show.close()
    assert capsys.readouterr().err == "\r\x1b[K"


def test_the_renewed_line_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "stderr_columns", lambda: 12)
    module._Progress(live=True)(made(Prompt(id="p", category="c", prompt="p"), "planned", 0, {}), 1, 30)
    assert capsys.readouterr().err == "\r\x1b[2m1 of 30 ans\x1b[0m\x1b[K"


def test_bench_help_names_every_option(here: InProcess) -> None:
    result = here("bench", "--help")
    assert result.code == 0
    own = "--suite --arms --passes --max-tokens --limit --category --compare --cold --plot --log --json"
    own += " --temperature --top-p --top-k --min-p --seed"
    for name in (*own.split(), "MODEL", "--draft", "--profile", "--context", "--set", "ABBA"):
        assert name in result.out, name
    words = " ".join(result.out.split())
    assert all(name in words for name in BUILTIN_SUITES)


# ---------------------------------------------------------------------------------------------- the defaults


def test_bench_without_options_runs_the_quick_suite_in_three_passes(
    here: InProcess, pair: tuple[str, ...], fake: FakeRun
) -> None:
    result = here("bench", *pair, "--json")
    assert result.code == 0, result.err
    ((arms, prompts, settings, first_turn),) = fake.calls
    assert arms == ("plain", "again", "planned")
    assert prompts == builtin_suite("quick")
    assert settings == RunSettings(passes=3, max_tokens=20, cold=False, sampling=Sampling(seed=0))
    assert first_turn == 0
    assert result.json["suite"] == {"name": "quick", "sha256": suite_sha256(prompts), "prompts": len(prompts)}


def test_options_of_bench_reach_the_run(here: InProcess, pair: tuple[str, ...], fake: FakeRun) -> None:
    options = ("--suite", "long-prompts", "--arms", "worst", "--passes", "5", "--max-tokens", "2", "--cold")
    drawn = ("--temperature", "0.5", "--top-p", "0.9", "--top-k", "7", "--min-p", "0.1", "--seed", "11")
    assert here("bench", *pair, *options, *drawn).code == 0
    ((arms, prompts, settings, _),) = fake.calls
    assert arms == ("plain", "worst")
    assert prompts == builtin_suite("long-prompts")
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=11)
    assert settings == RunSettings(passes=5, max_tokens=2, cold=True, sampling=sampling)


def test_only_disturbed_prompts_are_run_again(
    here: InProcess, pair: tuple[str, ...], suite: Path, fake: FakeRun
) -> None:
    fake.make = lambda prompt, arm, turn: {
        "decode_s": 0.2 if (prompt.id, arm, turn) == ("water", "again", 0) else 0.1
    }
    result = here("bench", *pair, "--suite", suite, "--passes", "3", "--json")
    assert [([prompt.id for prompt in prompts], first) for _, prompts, _, first in fake.calls] == [
        (["greeting", "water", "81"], 0), (["water"], 6), (["water"], 12)
    ]  # fmt: skip
    assert fake.calls[0][0] == fake.calls[1][0]
    assert fake.calls[0][2] == fake.calls[1][2]
    assert len(result.json["pairs"]) == 3 * 3 + 2 * 3, "everything is kept"
    said = "times of plain decoding varied by more than 2 % on water: run again (1 of at most 3 times)"
    assert said in result.err.splitlines()
    assert result.err.count("9 of 9 answers") == 1
    assert result.err.count("3 of 3 answers") == 2, "progress begins again"
    assert result.json["noise"]["disturbed"] == []
    fake.calls.clear()
    fake.make = lambda *_: {}
    quiet = here("bench", *pair, "--suite", suite)
    assert len(fake.calls) == 1
    assert "plain against itself: 1.000 (1.000-1.000), quiet enough" in quiet.out
    assert "run again" not in quiet.out
    fake.make = lambda *_: {"ttft_s": 0.1}
    cold = here("bench", *pair, "--suite", suite, "--cold")
    assert "plain against itself, whole requests: 1.000 (1.000-1.000), quiet enough" in cold.out


def test_prompts_that_stay_disturbed_are_reported(
    here: InProcess, pair: tuple[str, ...], suite: Path, fake: FakeRun
) -> None:
    fake.make = lambda prompt, arm, _: {"decode_s": 0.2 if (prompt.id, arm) == ("81", "again") else 0.1}
    result = here("bench", *pair, "--suite", suite, "--passes", "1")
    assert len(fake.calls) == 4, "three times again, not for ever"
    assert "plain against itself: 0.794 (0.794-0.794), noisy: do not trust small differences" in result.out
    assert "run again: 81; still disturbed: 81" in result.out
    assert "fewer than 3 passes: no interval" in result.out, "of the other two"
    fake.make = lambda _, arm, __: {"decode_s": 0.2 if arm == "again" else 0.1}
    all_again = here("bench", *pair, "--suite", suite, "--passes", "1")
    assert "fewer than 3 passes" not in all_again.out, "each has four by now"
    assert "no 95 % interval" not in all_again.out
    alone = here("bench", *pair, "--suite", suite, "--passes", "1", "--category", "chat")
    assert "no 95 % interval: that takes 6 passes of one prompt, or 9 of several together" in alone.out


# -------------------------------------------------------------------------------------------- which prompts


def test_category_and_limit_select_prompts(
    here: InProcess, pair: tuple[str, ...], suite: Path, fake: FakeRun
) -> None:
    for options, ids in (
        (("--category", "qa"), ["water", "81"]),
        (("--category", "qa", "--category", "chat"), ["greeting", "water", "81"]),
        (("--limit", "1"), ["greeting", "water"]),
        (("--category", "qa", "--limit", "1"), ["water"]),
        (("--limit", "99"), ["greeting", "water", "81"]),
    ):
        fake.calls.clear()
        found = here("bench", *pair, "--suite", suite, *options, "--json").json
        assert [prompt.id for prompt in fake.calls[0][1]] == ids
        assert found["suite"]["prompts"] == len(ids)


def test_bench_names_prompts_that_need_missing_python_sources(
    here: InProcess, pair: tuple[str, ...], fake: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "without" not in here("bench", *pair, "--suite", "quick").err
    monkeypatch.setattr(module, "missing_prompts", lambda _: ("edit-1", "edit-2"))
    assert "without edit-1, edit-2:" in here("bench", *pair, "--suite", "quick").err


SUITES = {
    "nothing": ("", "has no prompts"),
    "blank lines": ("\n\n  \n", "has no prompts"),
    "no JSON": ("hello\n", "line 1: not JSON"),
    "a list": ("[1]\n", "must be a JSON object"),
    "no prompt": ('{"id": "a", "category": "c"}\n', '"prompt" is missing'),
    "an empty prompt": ('{"id": "a", "category": "c", "prompt": " "}\n', "not empty"),
    "half a pair": ('{"id": "a", "category": "c", "prompt": "\\ud800"}\n', "half of a surrogate pair"),
    "no turns": ('{"question_id": 1, "category": "c", "turns": []}\n', "whose first item is a text"),
    "twice": ('{"id": "a", "category": "c", "prompt": "x"}\n' * 2, "occurs twice"),
    "nesting": ("[" * 100_000 + "\n", "line 1"),
}


@pytest.mark.parametrize("name", SUITES)
def test_a_bad_suite_is_refused(name: str, here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_measured(monkeypatch)
    content, words = SUITES[name]
    path = written(tmp_path / "bad.jsonl", content)
    here("bench", "--suite", path).failed_well(words, "bad.jsonl", code=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--suite", "nowhere.jsonl"), "nowhere.jsonl cannot be read"),
        (("--suite", "quik"), "there is no suite 'quik'"),
        (("--suite", "."), "cannot be read"),
        (("--suite", "x" * 300), "there is no suite"),
        (("--log", f"{'x' * 300}/log.jsonl"), "does not exist"),
        (("--plot", f"{'x' * 300}/figure.png"), "does not exist"),
        (("--arms", "planned,plan"), 'there is no arm "plan"'),
        (("--category", "poetry"), 'the suite quick has no category "poetry"'),
        (("--category", "qa", "--category", "poetry"), "poetry"),
        (("--limit", "0"), "--limit"),
        (("--passes", "0"), "--passes"),
        (("--passes", "two"), "--passes"),
        (("--max-tokens", "1"), "--max-tokens"),
        (("--temperature", "-1"), "temperature cannot be -1.0"),
        (("--top-p", "0"), "top_p cannot be 0.0"),
        (("--seed", "-1"), "seed cannot be -1"),
        (("--plot", "figure.txt"), "figure.txt"),
        (("--plot", "figure"), "cannot be written as figure"),
        (("--plot", "nowhere/figure.png"), "the folder nowhere for the plot figure.png does not exist"),
        (("--log", "nowhere/log.jsonl"), "the folder nowhere for the log log.jsonl does not exist"),
        (("--log", "."), "the log . is a folder"),
        (("--exactness", "sometimes"), "exactness"),
        (("model", "extra"), "extra"),
    ],
)
def test_a_wrong_option_of_bench_is_an_error_before_measuring(
    options: tuple[str, ...], words: str, here: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_measured(monkeypatch)
    here("bench", *options).failed_well(words, code=2)
    failed = here("bench", *options, "--json")
    failed.failed_well(words, code=2)
    assert failed.json["error"]["type"] in ("InvalidRequestError", "ProfileError")


def test_hints_of_bench_list_the_valid_values(here: InProcess) -> None:
    assert "code-edit" in here("bench", "--category", "poetry").hint
    assert "depth-N" in here("bench", "--arms", "poetry").hint
    assert ".svg" in here("bench", "--plot", "figure.txt").hint


def test_a_bench_arm_that_needs_a_drafter_is_an_error_without_one(
    here: InProcess, tiny: TinyModels, suite: Path, fake: FakeRun
) -> None:
    options = ("--target", tiny.target, "--draft", "none", "--suite", suite, "--arms", "model-depth-1")
    result = here("bench", *options)
    result.failed_well("the arm model-depth-1 needs a drafter", code=2)
    assert "--draft" in result.hint
    assert fake.calls == []


def test_bench_names_a_prompt_longer_than_the_context(here: InProcess, tiny: TinyModels, tmp_path: Path) -> None:
    long = {"id": "endless", "category": "qa", "prompt": "water " * 300}
    suite = written(tmp_path / "long.jsonl", json.dumps(long))
    result = here("bench", "--target", tiny.target, "--depth", "0", "--context", "128", "--suite", suite)
    result.failed_well("the prompt endless has", "holds 128")
    assert "--context" in result.hint
    assert "answers" not in result.err


# ------------------------------------------------------------------------------------------- logs and plots


def test_bench_writes_the_report_and_a_log_of_predictions(
    here: InProcess, pair: tuple[str, ...], suite: Path, tmp_path: Path, fake: FakeRun
) -> None:
    path = tmp_path / "log.jsonl"
    result = here("bench", *pair, "--suite", suite, "--log", path, "--max-tokens", "4", "--json")
    assert result.code == 0, result.err
    header, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert header["answers"] == len(lines) == result.json["suite"]["prompts"]
    assert all(1 <= len(line["target"]) == len(line["token_ids"]) <= 4 for line in lines)


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_bench_writes_a_plot(
    here: InProcess, pair: tuple[str, ...], suite: Path, tmp_path: Path, suffix: str, begins: bytes, fake: FakeRun
) -> None:
    pytest.importorskip("matplotlib", reason="plots are optional")
    path = tmp_path / f"figure{suffix}"
    result = here("bench", *pair, "--suite", suite, "--plot", path, "--json")
    assert result.code == 0, result.err
    assert path.read_bytes().startswith(begins)
    assert f"plot written to {path}" in result.err
    assert len(fake.calls) == 1
    assert result.json["arms"]


@pytest.mark.parametrize("fails", ["plot", "log"])
def test_the_report_is_printed_even_if_its_plot_or_log_fails(
    here: InProcess,
    pair: tuple[str, ...],
    suite: Path,
    tmp_path: Path,
    fake: FakeRun,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
) -> None:
    if fails == "plot":
        pytest.importorskip("matplotlib", reason="plots are optional")

    def refuse(*_: object, **_more: object) -> None:
        raise InvalidRequestError("the disk is full")

    monkeypatch.setattr(plots_module, "plot_report", refuse)
    monkeypatch.setattr(draft_log, "write_draft_log", refuse)
    for as_json in (True, False):
        file = tmp_path / {"plot": "figure.png", "log": "log.jsonl"}[fails]
        options = (f"--{fails}", file, *(("--json",) if as_json else ()))
        result = here("bench", *pair, "--suite", suite, *options)
        result.failed_well("the disk is full")
        assert "plot written" not in result.err
        if as_json:
            assert result.json["arms"].keys() == {"plain", "again", "planned"}
        else:
            assert "planned against plain" in result.out


# -------------------------------------------------------------------------------------------------- failing


def differing(_prompt: Prompt, arm: str, _turn: int) -> dict[str, Any]:
    return {"identical": arm != "planned"}


def test_bench_fails_after_the_report_if_an_answer_differs(
    here: InProcess, pair: tuple[str, ...], suite: Path, fake: FakeRun
) -> None:
    fake.make = differing
    result = here("bench", *pair, "--suite", suite, "--json")
    result.failed_well("an answer differs from plain decoding's")
    assert result.json["identical_fraction"] == 0.5, "one object, and it is the report"
    assert result.json["arms"]["planned"]["identical_fraction"] == 0.0
    assert "verify" in result.hint
    assert "greeting differs from plain decoding in arm planned" in result.err
    text = here("bench", *pair, "--suite", suite)
    text.failed_well("an answer differs from plain decoding's")
    assert "planned against plain, by category" in text.out


def test_bench_with_near_exactness_accepts_answers_that_differ(
    here: InProcess, pair: tuple[str, ...], suite: Path, fake: FakeRun
) -> None:
    fake.make = differing
    result = here("bench", *pair, "--suite", suite, "--exactness", "near", "--json")
    assert result.code == 0, result.err
    assert result.json["identical_fraction"] == 0.5
    assert "greeting differs" in result.err, "said all the same"


def test_bench_accepts_answers_that_the_rejection_rule_draws_otherwise(
    here: InProcess, pair: tuple[str, ...], suite: Path, fake: FakeRun
) -> None:
    fake.make = differing
    options = ("--set", "rule=rejection", "--suite", suite, "--json")
    result = here("bench", *pair, *options, "--temperature", "0.7")
    assert result.code == 0, result.err
    assert result.json["sampling"]["rule"] == "rejection"
    assert "differs" not in result.err
    here("bench", *pair, *options).failed_well("an answer differs from plain decoding's")


def test_ctrl_c_in_bench_prints_one_line_and_exits(
    here: InProcess, pair: tuple[str, ...], suite: Path, fake: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    fake.make = interrupt
    result: Result = here("bench", *pair, "--suite", suite)
    assert result.code == 130
    assert result.out == ""
    assert result.err.splitlines()[-1] == "interrupted"
    monkeypatch.setattr(module, "stderr_is_rich", lambda: True)
    assert here("bench", *pair, "--suite", suite).err.endswith("\r\x1b[Kinterrupted\n")
    as_json = here("bench", *pair, "--suite", suite, "--json")
    assert as_json.code == 130
    assert as_json.json["error"]["message"] == "interrupted"


def test_a_signal_ends_the_wait_for_a_suite_on_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> tuple[Prompt, ...]:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it was awaited further")

    monkeypatch.setattr(module, "read_suite", read)
    state = State()
    with state.interrupts.installed(), pytest.raises(KeyboardInterrupt):
        module._prompts("-", None, [], state)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are a matter of POSIX")
def test_sigint_during_a_bench_answer_ends_the_process(tiny: TinyModels, suite: Path) -> None:
    options = (
        "--target",
        tiny.slow,
        "--draft",
        "none",
        "--suite",
        suite,
        "--max-tokens",
        "2000",
        "--context",
        "8192",
    )
    process = subprocess.Popen(
        command("bench", *map(str, options)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tiny.home.root, {"EDGESPEC_LOOKUP": "false"}),  # nothing drafts: nothing to calibrate
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "each answered" in line:
            break
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines() == ["interrupted"]
