"""The acceptance steps that counts decide: one text whoever drafts, leaving, forgotten answers, a busy calibration.

    UNSEEN_SUITE=FILE.jsonl python scripts/acceptance_sound.py [--only STEP]

``one-text`` needs ``UNSEEN_SUITE``. Drafters with a trimmed head and as ONNX are exported for it, unless
``EXPORTED_DRAFTERS`` names a folder with both of them (``trimmed``, ``onnx``).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from acceptance_bench import edgespec
from acceptance_promises import Answers, answers, fresh_home, unseen

from edgespec.bench.suite import builtin_suite, load_suite
from edgespec.cli.ending import Ending
from edgespec.cli.interrupts import Interrupts
from edgespec.engine.answer import Generation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Round, Text
from edgespec.engine.session import Session
from edgespec.hardware.machine import usable_processors

ROOT = Path(__file__).resolve().parent.parent

DRAFTER = "qwen2.5-coder-0.5b"
HEAD_ROWS = "40960"  # what `--trim-vocab auto` chose for it (docs/results/exported-models.md)
TEXT_PROMPTS, TEXT_TOKENS = 20, "48"
SAMPLINGS = {"greedy": (), "seeded": ("--temperature", "0.7", "--top-p", "0.95", "--seed", "7")}

LEAVING_S = 0.150
TURNS = 5
ANSWER_TOKENS = 400
CODE = builtin_suite("verify")[0].prompt
LONG = "def next_number(number: int) -> int:\n    return number + 1\n\n\n" * 120  # 2000 tokens and more

FORGOTTEN = 500
PAUSE_S = 0.03  # about a forward of the target
GROWTH_BYTES = 32 * 2**20  # an answer that stays has its tokens, events and text: 0.1 MB, 50 MB of them all

CALIBRATE_S = 60.0


# ---------------------------------------------------------------------------------------------------- one text


def exported(folder: Path) -> dict[str, Path]:
    """The drafter with a trimmed head, and as ONNX."""
    made = os.environ.get("EXPORTED_DRAFTERS")
    places = {name: Path(made or folder) / name for name in ("trimmed", "onnx")}
    if not made:
        texts = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "edgespec" / "engine" / "session.py"]
        trim = [option for text in texts for option in ("--trim-from", str(text))]
        gguf = ("--to", "gguf", "--quant", "q4_0", "--trim-vocab", HEAD_ROWS, *trim)
        for name, options in {"trimmed": gguf, "onnx": ("--to", "onnx", "--quant", "q4")}.items():
            edgespec("export", DRAFTER, *options, "-o", str(places[name]), profile=False)
    return places


def text_prompts(suite: str, path: Path) -> str:
    """The first two prompts of each category, twenty in all, as a suite in that file."""
    taken: dict[str, int] = defaultdict(int)
    lines = []
    for prompt in load_suite(Path(suite)):
        taken[prompt.category] += 1
        if taken[prompt.category] <= 2:
            lines.append(json.dumps({"id": prompt.id, "category": prompt.category, "prompt": prompt.prompt}))
    path.write_text("\n".join(lines[:TEXT_PROMPTS]) + "\n", encoding="utf-8")
    return str(path)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that only spin, on the processors that this one may use."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def calibrate(environment: dict[str, str], *options: str) -> dict[str, Any]:
    """What `calibrate --quick` took and left out. Raises RuntimeError with its errors."""
    command = [sys.executable, "-m", "edgespec", "calibrate", "--quick", "--profile", "laptop", "--json", *options]
    started = time.monotonic()
    done = subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, check=False)
    command_s = time.monotonic() - started
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    report = json.loads(done.stdout)
    kept = {key: report[key] for key in ("took_s", "others_share", "left_out", "stored")}
    return {**kept, "command_s": command_s, "target": report["plan"]["target"]}


def one_text(results: Any, name: str) -> bool:
    """The same ids whoever drafts, before and after three calibrations: one beside busy loops, two without."""
    with tempfile.TemporaryDirectory() as place:
        suite = text_prompts(unseen(), Path(place) / "prompts.jsonl")
        environment, drafters = fresh_home(Path(place) / "home"), exported(Path(place))
        # The arms of an engine: as planned, and what --plain asks for. A depth given as a number drafts in any case.
        ways: dict[str, tuple[str, ...]] = {
            "default": ("--arms", "planned,plain"),
            "--draft none": ("--draft", "none"),
            "--depth 0": ("--depth", "0"),
            f"--draft {DRAFTER}": ("--draft", DRAFTER),
            "--draft TRIMMED": ("--draft", str(drafters["trimmed"])),
            "--draft TRIMMED --depth 2": ("--draft", str(drafters["trimmed"]), "--depth", "2"),
            "--draft ONNX": ("--draft", str(drafters["onnx"])),
            "--draft ONNX --depth 2": ("--draft", str(drafters["onnx"]), "--depth", "2"),
        }
        found = _Texts()

        def take(when: str) -> None:
            for way, options in ways.items():
                for how, sampling in SAMPLINGS.items():
                    rows = answers(environment, suite, *options, "--max-tokens", TEXT_TOKENS, *sampling)
                    found.add(when, way, how, rows)
                results.save(name, ways=found.table(), different=found.different())

        take("before")
        calibrations = []
        for busy, options in (
            (2, ()),
            (0, ("--draft", str(drafters["trimmed"]))),
            (0, ("--draft", str(drafters["onnx"]))),
        ):
            with busy_loops(busy):
                calibrations.append({"busy_loops": busy, **calibrate(environment, *options)})
            results.save(name, calibrations=calibrations)
        take("after")
    drafted = [row for row in found.table() if "--depth 2" in row["way"]]  # the others draft where it pays
    return not found.different() and all(row.get("model", 0) > 0 for row in drafted)


class _Texts:
    """Ids by prompt and sampling, and by who had drafted them and when."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, str], dict[tuple[str, str], tuple[int, ...]]] = defaultdict(dict)
        self._guesses: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)

    def add(self, when: str, way: str, how: str, rows: Answers) -> None:
        for row in rows:
            named = "--plain" if row["arm"] == "plain" else way
            self._ids[row["id"], how][when, named] = tuple(row["token_ids"])
            counted = {"guesses": row["proposed"], "right": row["accepted"]}
            self._guesses[when, named].update(counted | row["rounds_by_source"])

    def _first(self, key: tuple[str, str]) -> tuple[int, ...]:
        return self._ids[key]["before", "--plain"]

    def different(self) -> list[dict[str, Any]]:
        """Answers that are not what plain decoding said before anything was measured."""
        return [
            {"prompt": key[0], "sampling": key[1], "when": when, "way": way, "at": _parting(ids, self._first(key))}
            for key, own in self._ids.items()
            for (when, way), ids in own.items()
            if ids != self._first(key)
        ]

    def table(self) -> list[dict[str, Any]]:
        """A row for each way to ask: how many of its answers are the same, and how much was guessed for them."""
        rows = []
        for (when, way), guesses in self._guesses.items():
            own = [(key, ids[when, way]) for key, ids in self._ids.items() if (when, way) in ids]
            same = sum(ids == self._first(key) for key, ids in own)
            tokens = sum(len(ids) for _, ids in own)
            rows.append({"when": when, "way": way, "same": same, "of": len(own), "tokens": tokens, **guesses})
        return rows


def _parting(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The first place in which they differ."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


# ----------------------------------------------------------------------------------------------------- leaving


@dataclass
class _Moment:
    """When an answer is left: ``after_s`` once that is ``due``, and only if it is ``right`` then."""

    prompt: str
    after_s: float
    prepare: Callable[[Engine], object]
    due: Callable[[Engine, _Moment], bool]
    right: Callable[[Engine, _Moment], bool]
    texts: int = 0
    proposed: int = 0


def _load_again(engine: Engine) -> None:
    engine.pair.pool.use_threads(engine.target_model.settings.threads)


def _loading(engine: Engine, _seen: _Moment) -> bool:
    pool = engine.pair.pool
    return pool.names != () and pool.drafter_model().waits_because is not None


def _loaded(engine: Engine) -> None:
    engine.pair.pool.drafter_model().wait()


def _always(_engine: Engine, _seen: _Moment) -> bool:
    return True


def _nothing_said(_engine: Engine, seen: _Moment) -> bool:
    return seen.texts == 0


def _guessing(_engine: Engine, seen: _Moment) -> bool:
    return seen.proposed > 0


MOMENTS: dict[str, Callable[[int], _Moment]] = {
    "load": lambda turn: _Moment(CODE, 0.2 + 0.05 * turn, _load_again, _loading, _loading),
    "prompt": lambda turn: _Moment(LONG, 0.5 + 0.05 * turn, _loaded, _always, _nothing_said),
    "round": lambda turn: _Moment(CODE, 0.5 + 0.013 * turn, _loaded, _guessing, _guessing),
}


def _cancel(session: Session, _engine: Engine) -> None:
    session.cancel()


def _close(session: Session, _engine: Engine) -> None:
    session.close()


def _close_engine(_session: Session, engine: Engine) -> None:
    engine.close()


def _interrupt(_session: Session, _engine: Engine) -> None:
    os.kill(os.getpid(), signal.SIGINT)


LEAVE: dict[str, Callable[[Session, Engine], None]] = {
    "cancel": _cancel,
    "Session.close": _close,
    "Engine.close": _close_engine,
    "Ctrl-C, library": _interrupt,
    "Ctrl-C, command": _interrupt,
}


# Seconds after the first text, or after the start: a prompt of 2000 tokens is read for longer than that.
COMMAND_MOMENTS = {"load": 0.1, "prompt": 8.0, "round": 4.0}
COMMAND_PROFILE = 'inherits = "laptop"\nlookup = false\n[advanced]\nnative_sidecar = {sidecar}\n'


def leaving(results: Any, name: str) -> bool:
    """Seconds from leaving an answer to its end, where one side leaves by a call to its return as well.

    Told beside it, since they free the models' memory: how long ``Engine.close`` and the end of a command take.
    """
    longest: dict[str, dict[str, float]] = {way: {} for way in LEAVE}
    freed: dict[str, dict[str, float]] = {"Engine.close": {}, "edgespec generate": {}}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for way in LEAVE:
            for moment, make in MOMENTS.items():
                took = []
                with ExitStack() as engines:
                    engine = engines.enter_context(_engine(moment))
                    for turn in range(TURNS):
                        took.append(_left_after(engine, make(turn), way))
                        if way == "Engine.close":
                            engine = engines.enter_context(_engine(moment))
                ends, returns = (max(column) for column in zip(*took, strict=True))
                if way == "Engine.close":
                    longest[way][moment], freed[way][moment] = ends, returns
                else:
                    longest[way][moment] = max(ends, returns)
                results.save(name, longest_s=longest, with_freeing_s=freed, turns=TURNS)
        for moment, after_s in COMMAND_MOMENTS.items():
            seconds = max(_command_left_after(moment, after_s + 0.05 * turn) for turn in range(TURNS))
            freed["edgespec generate"][moment] = seconds
            results.save(name, longest_s=longest, with_freeing_s=freed, turns=TURNS)
    finally:
        signal.signal(signal.SIGINT, before)
    return all(seconds <= LEAVING_S for own in longest.values() for seconds in own.values())


def _engine(moment: str) -> Engine:
    """The default pair, whose drafter guesses from the first round on, once it is loaded.

    To be left while it loads its weights are laid out anew, which takes seconds.
    """
    return Engine.load(
        profile="laptop", download=True, runtime="native", draft_runtime="native", native_sidecar=moment != "load",
        lookup=False, depth=4,
    )  # fmt: skip


def _left_after(engine: Engine, moment: _Moment, way: str) -> tuple[float, float]:
    """Seconds from leaving an answer to its end, and to the return of what left it.

    Raises RuntimeError where it was not the moment.
    """
    left: list[float] = []
    right = False
    over = threading.Event()
    moment.prepare(engine)
    session = engine.session()

    def leave() -> None:
        nonlocal right
        while not moment.due(engine, moment) and not over.wait(0.002):
            pass
        time.sleep(moment.after_s)
        right = moment.right(engine, moment)
        left.append(time.perf_counter())
        LEAVE[way](session, engine)
        left.append(time.perf_counter())

    leaver = threading.Thread(target=leave)
    leaver.start()
    try:
        if way == "Ctrl-C, command":
            interrupts = Interrupts(session, Ending())
            with interrupts.installed(), interrupts.answering():
                _read(session, moment)
        else:
            _read(session, moment)
    except KeyboardInterrupt:
        if way != "Ctrl-C, library":
            raise
    ended = time.perf_counter()
    over.set()
    leaver.join()
    session.close()
    if not right:
        raise RuntimeError(f"{way}: the answer was at another point: {moment}")
    return ended - left[0], left[1] - left[0]


def _command_left_after(moment: str, after_s: float) -> float:
    """Seconds from Ctrl-C to the end of the process of ``edgespec generate``. Raises RuntimeError with its errors."""
    command = [sys.executable, "-m", "edgespec", "generate", "-", "--max-tokens", str(ANSWER_TOKENS)]
    with tempfile.TemporaryDirectory() as place:
        profile = Path(place) / "command.toml"
        sidecar = "false" if moment == "load" else "true"
        profile.write_text(COMMAND_PROFILE.format(sidecar=sidecar), encoding="utf-8")
        command += ["--profile", str(profile), "--depth", "4"]
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write((LONG if moment == "prompt" else CODE).encode())
            process.stdin.close()
            if moment != "prompt":
                process.stdout.read(1)
            time.sleep(after_s)
            left = time.perf_counter()
            process.send_signal(signal.SIGINT)
            code = process.wait()
            took_s = time.perf_counter() - left
            if code != 130:
                raise RuntimeError(f"exit code {code}: {process.stderr.read() if process.stderr else b''!r}")
    return took_s


def _read(session: Session, moment: _Moment) -> None:
    for event in session.generate(moment.prompt, max_tokens=ANSWER_TOKENS):
        moment.texts += isinstance(event, Text)
        moment.proposed += event.record.proposed if isinstance(event, Round) else 0


# --------------------------------------------------------------------------------------------------- forgotten


def forgotten(results: Any, name: str) -> bool:
    """Five hundred answers of the default pair in each form: none stays, no thread, no memory, and no hang."""
    sys.path.insert(0, str(ROOT))
    from tests.support.forgetting import Forget, alive, eager_collector, in_cycles, in_tasks, in_threads

    forms: dict[str, Forget] = {"in cycles": in_cycles, "in threads": in_threads, "in asyncio tasks": in_tasks}
    found: dict[str, dict[str, Any]] = {}
    with Engine.load(profile="laptop", download=True, lookup=False) as engine:
        engine.pair.pool.drafter_model().wait()
        for form, forget in forms.items():
            with eager_collector():
                forget(engine, 40, PAUSE_S)
                threads, bytes_before = threading.active_count(), psutil.Process().memory_info().rss
                started = time.monotonic()
                forget(engine, FORGOTTEN, PAUSE_S)
                seconds = time.monotonic() - started
                left = alive(Generation)
            found[form] = {
                "answers": FORGOTTEN,
                "left": left,
                "threads_more": threading.active_count() - threads,
                "bytes_more": psutil.Process().memory_info().rss - bytes_before,
                "seconds": seconds,
            }
            results.save(name, forms=found)
    return all(
        own["left"] == 0 and own["threads_more"] <= 0 and own["bytes_more"] < GROWTH_BYTES for own in found.values()
    )


# ------------------------------------------------------------------------------------------------- calibration


def calibrate_busy(results: Any, name: str) -> bool:
    """`calibrate --quick` beside a busy loop for each processor, three times: the whole command within a minute."""
    runs = []
    with tempfile.TemporaryDirectory() as place, busy_loops(usable_processors()):
        environment = fresh_home(Path(place) / "home")
        for _ in range(3):
            runs.append(calibrate(environment))
            results.save(name, runs=runs)
    return all(run["command_s"] <= CALIBRATE_S for run in runs)


SOUND_STEPS: dict[str, Callable[[Any, str], bool]] = {
    "one-text": one_text,
    "leaving": leaving,
    "forgotten": forgotten,
    "calibrate-busy": calibrate_busy,
}


class _Printed:
    def save(self, name: str, **values: Any) -> None:
        print(json.dumps({"step": name, **values}), flush=True)


def main() -> int:
    """Run the steps asked for and print what they find; 0 if all of it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[*SOUND_STEPS], help="run this step (repeatable)")
    arguments = parser.parse_args()
    verdicts = {name: SOUND_STEPS[name](_Printed(), name) for name in arguments.only or SOUND_STEPS}
    print(json.dumps({"holds": verdicts}))
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
