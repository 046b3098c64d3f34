"""Pipelined drafting with a real runtime: all rejection patterns, chunk sizes, leaving points, random delays."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.sleeping_drafter import SleepingDrafter
from edgespec.bench.controls import Script
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Text
from edgespec.engine.pair.loaded_pair import Speculation
from edgespec.engine.session import Session
from edgespec.planning.cost.costs import Costs
from edgespec.planning.depth.base import FixedDepth
from edgespec.planning.depth.pipeline_budget import MeasuredBudget
from tests.engine.answers import SAMPLED, plain_text
from tests.support.budgets import FixedBudget
from tests.support.tiny_models import answer
from tests.support.watched_sequences import watch_forwards

# A hanging round fails here, long before the suite's own limit.
pytestmark = pytest.mark.timeout(180)

PROMPT = "the water of the river"
TOKENS = 24
DEEPEST = 3  # deeper chunks repeat these patterns


class Pattern(SleepingDrafter):
    """A drafter that is right or wrong by the position in the text."""

    def __init__(self, script: Script, pattern: tuple[bool, ...], token_s: float = 0.0) -> None:
        super().__init__(script, token_s=token_s)
        self._pattern = pattern

    def is_right(self, place: int) -> bool:
        return self._pattern[place % len(self._pattern)]


@pytest.fixture(scope="module")
def script(engine: Engine) -> Script:
    own = Script()
    own.tokens = [*engine.pair.prompts.request_tokens(PROMPT), *plain_text(engine, PROMPT, max_tokens=96).token_ids]
    return own


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Callable[[Sampling, int], Done]:
    known: dict[tuple[Sampling, int], Done] = {}

    def written(sampling: Sampling, tokens: int) -> Done:
        if (sampling, tokens) not in known:
            known[sampling, tokens] = plain_text(engine, PROMPT, max_tokens=tokens, sampling=sampling)
        return known[sampling, tokens]

    return written


def cap_of(engine: Engine) -> int:
    return min(DEEPEST, engine.plan.depth_cap)


def open_session(engine: Engine, drafter: SleepingDrafter, budget: Callable[[], Any]) -> Session:
    cap = cap_of(engine)
    return engine.session(
        _speculation=Speculation(drafters=(drafter,), policy=FixedDepth(cap + 1), depth_cap=cap, budget=budget)
    )


@pytest.mark.slow
@pytest.mark.parametrize("pattern", list(itertools.product((True, False), repeat=3)), ids=str)
def test_every_pattern_of_rejections_at_every_chunk_size(
    engine: Engine, script: Script, plain: Callable[[Sampling, int], Done], pattern: tuple[bool, ...]
) -> None:
    cap, accepted = cap_of(engine), 0
    for most, ahead in itertools.product(range(cap + 1), range(1, cap + 2)):
        with open_session(
            engine, Pattern(script, pattern), lambda most=most, ahead=ahead: FixedBudget(most=most, ahead=ahead)
        ) as session:
            for sampling in (Sampling(), SAMPLED):
                session.clear()
                done = answer(session.generate(PROMPT, max_tokens=TOKENS, sampling=sampling))
                assert done.token_ids == plain(sampling, TOKENS).token_ids
                accepted += done.stats.accepted
    assert bool(accepted) is any(pattern)


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["cancel", "close"])
def test_leaving_a_pipelined_answer_at_any_token_keeps_the_text_of_plain_decoding(
    engine: Engine, script: Script, plain: Callable[[Sampling, int], Done], leave: str
) -> None:
    want = plain(Sampling(), TOKENS).token_ids
    with open_session(
        engine, Pattern(script, (True, True, False), token_s=2e-4), lambda: FixedBudget(most=2, ahead=3)
    ) as session:
        for point in range(1, TOKENS):
            session.clear()
            generation, seen = session.generate(PROMPT, max_tokens=TOKENS), 0
            for event in generation:
                if isinstance(event, Done):
                    assert event.token_ids == want[: len(event.token_ids)]
                seen += isinstance(event, Text)
                if seen >= point:
                    if leave == "close":
                        generation.close()
                        break
                    session.cancel()
            session.clear()
            assert answer(session.generate(PROMPT, max_tokens=TOKENS)).token_ids == want


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Every forward first sleeps for a random time."""
    source = random.Random(12)
    watch_forwards(monkeypatch, lambda _sequence, _tokens, _rows: time.sleep(source.random() * 1e-3))
    return source


class Fitful(Pattern):
    """A drafter with random delays that is right at random."""

    def __init__(self, script: Script, source: random.Random) -> None:
        super().__init__(script, (True, True, True, False, True))
        self._source = source

    def is_right(self, place: int) -> bool:
        time.sleep(self._source.random() * 1e-3)
        return super().is_right(place)


@pytest.mark.slow
def test_pipelined_text_is_plain_decodings_over_thousands_of_randomly_delayed_rounds(
    engine: Engine, script: Script, plain: Callable[[Sampling, int], Done], slowly: random.Random
) -> None:
    cap, rounds, accepted, left, until = cap_of(engine), 0, 0, 0, time.monotonic() + 120
    budgets: list[Callable[[], Any]] = [
        lambda: FixedBudget(most=cap, ahead=cap + 1, patience=0.0),
        lambda: FixedBudget(most=cap, ahead=cap + 1, patience=0.0005, reuse=True),
        lambda: FixedBudget(most=1, ahead=cap + 1, overlaps_prefill=True),
        lambda: MeasuredBudget(cap, Costs()),
    ]
    # All of them, and on a busy machine, whose drafter is late more often, as many again as it takes.
    for number, budget in enumerate(itertools.cycle(budgets)):
        if number >= len(budgets) and ((rounds > 2000 and accepted > 1000 and left) or time.monotonic() > until):
            break
        with open_session(engine, Fitful(script, slowly), budget) as session:
            for turn in range(20):
                sampling = SAMPLED if turn % 2 else Sampling()
                session.clear(keep_cache=turn % 3 != 0)
                done = answer(session.generate(PROMPT, max_tokens=64, sampling=sampling))
                assert done.token_ids == plain(sampling, 64).token_ids
                rounds += done.stats.rounds
                accepted += done.stats.accepted
                if turn % 4 == 0:  # the reader sometimes leaves in the middle of a round
                    for event in session.generate(PROMPT, max_tokens=64):
                        if isinstance(event, Text) and slowly.random() < 0.2:
                            session.cancel()
                            left += 1
    assert rounds > 2000
    assert accepted > 1000
    assert left > 0


def test_after_cancel_a_sleeping_drafter_does_not_delay_the_next_answer(engine: Engine, script: Script) -> None:
    asleep = Pattern(script, (True,), token_s=30.0)
    with open_session(engine, asleep, lambda: FixedBudget(most=2, ahead=3)) as session:
        for event in session.generate(PROMPT, max_tokens=8):
            if isinstance(event, Text):
                session.cancel()
        quick = answer(session.generate(PROMPT, max_tokens=4, depth=0))
        assert len(quick.token_ids) == 4
