"""Sessions and answers that are dropped in cycles on several threads: no hang, no thread more, no wrong text."""

from __future__ import annotations

import gc
import random
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from edgespec.engine.engine import Engine
from edgespec.engine.events import Text
from edgespec.files.home import Home
from tests.fuzz.findings import Findings
from tests.support.forgetting import eager_collector
from tests.support.started_threads import started_threads
from tests.support.tiny_models import TinyModels

PROMPTS = ("hello", "who are you", "the word " * 30)
TOKENS = 20
AT_ONCE = 4
WAIT_S = 10.0


def text(generation: Any) -> str:
    return "".join(event.text for event in generation if isinstance(event, Text))


def one(engine: Engine, chance: random.Random, expected: dict[str, str], findings: Findings) -> None:
    """An answer of a new session, whole or dropped."""
    session, prompt = engine.session(), chance.choice(PROMPTS)
    generation = session.generate(prompt, max_tokens=TOKENS)
    cycle: list[object] = [session, generation]
    cycle.append(cycle)
    if chance.random() < 0.4:
        findings.unless(text(generation) == expected[prompt], f"another text for {prompt[:10]!r}")
        findings.counts["whole"] += 1
        return
    for _ in range(chance.randint(0, 6)):
        next(generation, None)
    findings.counts["dropped"] += 1
    chance.choice((session.close, session.cancel, lambda: None))()


def _left(threads: int) -> bool:
    """Whether no more than these threads are left, soon."""
    end = time.monotonic() + WAIT_S
    while len(started_threads()) > threads and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    return len(started_threads()) <= threads


def fuzz(chance: random.Random, rounds: Iterable[int], findings: Findings) -> None:
    with tempfile.TemporaryDirectory() as place:
        tiny = TinyModels(Path(place), Home(Path(place) / "home"))
        for mode in ("serial", "pipelined"):
            with tiny.load_speculating(mode=mode) as engine, eager_collector():
                expected = {}
                for prompt in PROMPTS:
                    with engine.session() as session:
                        expected[prompt] = text(session.generate(prompt, max_tokens=TOKENS, depth=0))
                threads = len(started_threads())
                for _ in rounds:
                    batch = [
                        threading.Thread(
                            target=one, args=(engine, random.Random(chance.random()), expected, findings)
                        )
                        for _ in range(AT_ONCE)
                    ]
                    for each in batch:
                        each.start()
                    for each in batch:
                        each.join()
                    if mode == "serial" and chance.random() < 0.01:
                        break  # the other mode has its share
                findings.unless(_left(threads), f"threads are left after {mode} answers")
