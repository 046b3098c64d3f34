"""How long does it take to leave an answer while the drafter loads, the prompt is read, or a round runs?

    python -m benchmarks.leaving

Every way to leave is timed at every moment, five times; the longest counts. For `cancel` and `Session.close` the
time until the call returns counts too. `Engine.close` and the end of `edgespec generate` free the models' memory,
which is reported separately. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT
from edgespec.bench.suite import builtin_suite
from edgespec.cli.terminal.interrupts import Interrupts
from edgespec.engine.engine import Engine
from edgespec.engine.events import Round, Text
from edgespec.engine.session import Session

TURNS = 5
ANSWER_TOKENS = 400
CODE = builtin_suite("verify")[0].prompt
LONG = "def next_number(number: int) -> int:\n    return number + 1\n\n\n" * 120  # 2000 tokens and more


@dataclass
class _Moment:
    """When an answer is left: ``after_s`` seconds after ``due``, provided that ``right`` is true then."""

    prompt: str
    after_s: float
    prepare: Callable[[Engine], object]
    due: Callable[[Engine, _Moment], bool]
    right: Callable[[Engine, _Moment], bool]
    texts: int = 0
    proposed: int = 0


def _load_again(engine: Engine) -> None:
    engine.pair.pool.use_threads(engine.pair.target.settings.threads)


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


def measure() -> dict[str, Any]:
    """The longest seconds by way and moment."""
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
        for moment, after_s in COMMAND_MOMENTS.items():
            seconds = max(_command_left_after(moment, after_s + 0.05 * turn) for turn in range(TURNS))
            freed["edgespec generate"][moment] = seconds
    finally:
        signal.signal(signal.SIGINT, before)
    return {"longest_s": longest, "with_freeing_s": freed, "turns": TURNS}


def _engine(moment: str) -> Engine:
    """The default pair; once the drafter is loaded, it proposes in every round.

    For the moment ``load`` the weights are converted again, without the sidecar, which takes seconds.
    """
    return Engine.load(
        profile="laptop", download=True, runtime="native", draft_runtime="native", native_sidecar=moment != "load",
        lookup=False, depth=4,
    )  # fmt: skip


def _left_after(engine: Engine, moment: _Moment, way: str) -> tuple[float, float]:
    """Seconds from leaving an answer to its end, and to the return of the leaving call.

    Raises RuntimeError if the moment had passed.
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
            interrupts = Interrupts()
            with interrupts.installed(), interrupts.during(session.cancel):
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


def main() -> None:
    """Print one JSON object."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    print(json.dumps(measure()))


if __name__ == "__main__":
    main()
