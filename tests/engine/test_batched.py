"""Answers of sessions that run simultaneously on the native runtime: each has the tokens that it has alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Text
from edgespec.runtimes.native import scheduler as scheduler_module
from tests.support.kernel_calls import require_native
from tests.support.started_threads import started_threads
from tests.support.tiny_models import TinyModels, answer

WATCHDOG_S = 120.0
ANSWERS = 200
WORDS = ("hello", "world", "the", "a", "of", "and", "in", "that")


@dataclass(frozen=True)
class Wanted:
    """One answer: what is asked, and after how many tokens it is cancelled, if it is."""

    prompt: str
    sampling: Sampling | None
    depth: int
    tokens: int
    cancel_after: int | None


def wanted(number: int) -> Wanted:
    source = random.Random(number)
    words = source.choice([2, 5, 30, 30, 300])
    return Wanted(
        prompt=" ".join(source.choice(WORDS) for _ in range(words)),
        sampling=None if source.random() < 0.5 else Sampling(temperature=1.0, top_p=0.95, seed=number),
        depth=source.choice([0, 2, 4]),
        tokens=source.randint(3, 16),
        cancel_after=source.randint(1, 3) if source.random() < 0.15 else None,
    )


def answered(engine: Engine, each: Wanted) -> tuple[int, ...]:
    with engine.session() as session:
        events = session.generate(each.prompt, max_tokens=each.tokens, sampling=each.sampling, depth=each.depth)
        if each.cancel_after is None:
            return answer(events).token_ids
        found: list[int] = []
        for event in events:
            if isinstance(event, Text):
                found.extend(each.id for each in event.tokens)
            if len(found) >= each.cancel_after:
                break
        events.close()
        return tuple(found)


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    require_native()
    with tiny.load_speculating(runtime="native", draft_runtime="native", context=2000, threads=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[tuple[int, ...]]:
    return [answered(engine, wanted(number)) for number in range(ANSWERS)]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of entries of each forward."""
    found: list[int] = []
    shares_of = scheduler_module.shares_of

    def counted(*given: Any, **named: Any) -> list[scheduler_module.Share]:
        shares = shares_of(*given, **named)
        found.append(len(shares))
        return shares

    monkeypatch.setattr(scheduler_module, "shares_of", counted)
    return found


@pytest.mark.parametrize(("clients", "answers"), [(2, 60), (4, 60), (8, ANSWERS)])
def test_answers_in_batches_have_the_tokens_of_answers_alone(
    engine: Engine, alone: list[tuple[int, ...]], steps: list[int], clients: int, answers: int
) -> None:
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(lambda number: answered(engine, wanted(number)), range(answers), timeout=WATCHDOG_S))
    for number, (expected, ours) in enumerate(zip(alone[:answers], found, strict=True)):
        shorter = min(len(expected), len(ours))
        assert ours[:shorter] == expected[:shorter], wanted(number)
        assert wanted(number).cancel_after is not None or len(ours) == len(expected), wanted(number)
    if clients == 8:  # two threads may never meet
        assert max(steps) > 1, "no forward was shared"


def test_more_sessions_add_workers_and_no_threads_that_compute(engine: Engine) -> None:
    counts = []
    with ExitStack() as opened:
        for _ in range(8):
            session = opened.enter_context(engine.session())
            answer(session.generate("hello", max_tokens=3, depth=2))
            counts.append(threads_of_process())
    assert counts[-1] - counts[0] <= 2 * 7, "a worker for the target and one for the drafter"


def threads_of_process() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else len(started_threads())
