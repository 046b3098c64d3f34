"""The sleeping drafter: its accuracy is as set, its delays follow its clock, and it can be cancelled."""

from __future__ import annotations

import itertools
import threading

import pytest

from benchmarks.sleeping_drafter import SleepingDrafter, SleepingState
from edgespec.bench.controls import Script
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import DraftRequest

VOCABULARY = 20
TEXT = [place * 7 % VOCABULARY for place in range(400)]


def started(drafter: SleepingDrafter) -> SleepingState:
    return drafter.start(DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=VOCABULARY, context_length=999))


def drafter(token_s: float = 0.0, **settings: object) -> SleepingDrafter:
    script = Script()
    script.tokens = TEXT
    return SleepingDrafter(script, token_s=token_s, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9, 1.0])
def test_the_sleeping_drafters_accuracy_is_as_set_and_repeatable(acceptance: float) -> None:
    own = drafter(acceptance=acceptance, seed=4)
    state = started(own)
    said = state.propose(Context(TEXT[:1]), len(TEXT)).tokens
    right = [token == want for token, want in zip(said, TEXT[1:], strict=True)]
    assert sum(right) / len(right) == pytest.approx(acceptance, abs=0.08)
    assert right == [own.is_right(place) for place in range(1, len(TEXT))]
    assert state.propose(Context(TEXT[:50]), 9).tokens == said[49:58]
    assert all(0 <= token < VOCABULARY for token in said)
    other = [drafter(acceptance=0.5, seed=seed).is_right(7) for seed in range(20)]
    assert len(set(other)) == 2, "the seed decides"
    assert drafter(acceptance=0.5).is_right(3) == drafter(acceptance=0.5, seed=0).is_right(3)


def test_the_sleeping_drafter_waits_until_deadlines_not_per_token() -> None:
    jumps = itertools.count()
    # A clock that is always far beyond the next deadline: the drafter never waits.
    late = started(drafter(token_s=30.0, clock=lambda: 1000.0 * next(jumps)))
    assert late.propose(Context(TEXT[:3]), 4).tokens == tuple(TEXT[3:7])
    waits: list[float] = []
    state = started(drafter(token_s=0.5, clock=lambda: 0.0))

    class Recording(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            return False

    state._cancelled = Recording()
    state.propose(Context(TEXT[:3]), 3)
    assert waits == [0.5, 1.0, 1.5]
