"""Which answers a step waits for: those that draft, and those between two forwards, as their threads show."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from edgespec.runtimes.native.cache import NativeCancel
from edgespec.runtimes.native.library import OK
from edgespec.runtimes.native.scheduler import (
    ACTIVE_S,
    BETWEEN_S,
    PATIENCE,
    RECENT_S,
    RIDE_S,
    BatchScheduler,
    Member,
    Share,
)
from edgespec.runtimes.native.turns import Caller, Turns
from tests.runtimes.test_native_scheduler import WATCHDOG_S, Model, request
from tests.runtimes.test_native_turns import Clock

STEP_S = 0.04
WEIGHT = 4.0


class Gathering:
    """A scheduler of a model of ``WEIGHT`` on an invented clock, whose leader has a request."""

    def __init__(self, *, tokens: int = 1) -> None:
        self.clock = Clock()
        self.turns = Turns(self.clock)
        self.scheduler = BatchScheduler(
            lambda shares: [OK] * len(shares), turns=self.turns, weight=WEIGHT, clock=self.clock
        )
        self.scheduler._times.add(1, STEP_S)
        self.leader = self.answer(0.0)
        self.scheduler._waiting = [request(tokens, member=self.leader)]

    def answer(self, ended_s: float, caller: Caller | None = None) -> Member:
        """A member whose last step ended that long ago."""
        member = Member(NativeCancel(), ended_at=self.clock.now - ended_s, answers=True, caller=caller or Caller())
        self.scheduler._members.add(member)
        return member

    def wait_s(self, since_s: float = 0.0) -> float:
        return self.scheduler._wait_s(self.clock.now - since_s, self.clock.now)


def test_a_step_waits_while_a_lighter_model_computes_for_one_of_its_answers() -> None:
    gathering = Gathering()
    other = Caller()
    gathering.answer(STEP_S, other)
    gathering.turns.came(other, WEIGHT / 10)
    assert gathering.wait_s() == pytest.approx(PATIENCE * STEP_S)
    assert gathering.wait_s(since_s=STEP_S) == pytest.approx((PATIENCE - 1.0) * STEP_S)
    assert gathering.wait_s(since_s=PATIENCE * STEP_S) == 0.0, "its rows alone would take a step"


def test_a_step_does_not_wait_for_an_unrelated_lighter_model() -> None:
    gathering = Gathering()
    stranger = Caller()
    gathering.turns.came(stranger, WEIGHT / 10)
    assert gathering.wait_s() == 0.0


@pytest.mark.parametrize("weight", [10 * WEIGHT, float("inf")])
def test_a_drafters_step_does_not_wait_for_answers_that_the_target_verifies_or_that_read(weight: float) -> None:
    gathering = Gathering()
    other = Caller()
    gathering.answer(STEP_S, other)
    gathering.turns.came(other, weight)
    assert gathering.wait_s() == 0.0


def test_a_step_waits_a_moment_for_each_answer_between_two_forwards() -> None:
    gathering = Gathering()
    callers = [Caller(), Caller()]
    for caller in callers:
        gathering.answer(STEP_S, caller)
        gathering.turns.went(caller)
    assert gathering.wait_s() == pytest.approx(2 * BETWEEN_S), "they draw one after another"
    gathering.turns.came(callers[0], 10 * WEIGHT)
    gathering.clock.now += BETWEEN_S / 2
    assert gathering.wait_s() == pytest.approx(BETWEEN_S / 2)
    gathering.clock.now += BETWEEN_S / 2
    assert gathering.wait_s() == 0.0, "its answer has ended, or does something else"


def test_an_answer_that_comes_takes_none_of_the_moment_that_the_others_have() -> None:
    gathering = Gathering()
    answers = [gathering.answer(STEP_S, Caller()) for _ in range(3)]
    for member in answers:
        gathering.turns.went(member.caller)
    began = gathering.clock.now
    for left, member in zip((2, 1), answers, strict=False):
        gathering.clock.now += 0.9 * BETWEEN_S
        gathering.turns.came(member.caller, WEIGHT)
        came = request(1, member=member)
        came.since = gathering.clock.now
        gathering.scheduler._waiting.append(came)
        spent_s = gathering.clock.now - began
        assert gathering.wait_s(since_s=spent_s) == pytest.approx(3 * BETWEEN_S - spent_s), f"{left} are away"


def test_an_answer_whose_step_has_just_ended_is_awaited_before_its_thread_wakes() -> None:
    gathering = Gathering()
    other = Caller(weight=WEIGHT)
    gathering.answer(0.0, other)
    assert gathering.wait_s() == pytest.approx(BETWEEN_S)


def test_a_drafter_that_reads_does_not_draft() -> None:
    model, places = Model(weight=WEIGHT), list[float | None]()
    member = Member(NativeCancel())
    computed = model.scheduler._compute

    def seen(shares: Sequence[Share]) -> Sequence[int]:
        places.append(member.caller.weight)
        return computed(shares)

    model.scheduler._compute = seen
    for scored in (1, 0):
        assert model.scheduler.run(request(16, scored, member=member)) == OK
    assert places == [WEIGHT, float("inf")]


def test_a_thread_with_two_sequences_of_a_model_does_not_wait_for_itself() -> None:
    gathering = Gathering()
    gathering.answer(0.0, gathering.leader.caller)
    gathering.leader.caller.weight = WEIGHT
    assert gathering.wait_s() == 0.0


def test_a_cancelled_step_waits_for_none() -> None:
    gathering = Gathering()
    other = Caller()
    gathering.answer(STEP_S, other)
    gathering.turns.came(other, WEIGHT / 10)
    gathering.scheduler._leader = gathering.scheduler._waiting[0]
    gathering.leader.cancel.set(True)
    assert gathering.wait_s() == 0.0


def test_no_step_waits_longer_than_it_would_take_twice() -> None:
    gathering = Gathering()
    gathering.scheduler._times.add(1, BETWEEN_S / 10)
    other = Caller()
    gathering.answer(STEP_S, other)
    gathering.turns.went(other)
    assert gathering.wait_s() == pytest.approx(PATIENCE * BETWEEN_S / 10)


@pytest.mark.parametrize("silent", ["for long", "cancelled"])
def test_answers_that_are_over_are_not_awaited(silent: str) -> None:
    gathering = Gathering()
    other = Caller()
    member = gathering.answer(2 * ACTIVE_S if silent == "for long" else STEP_S, other)
    gathering.turns.came(other, WEIGHT / 10)
    if silent == "cancelled":
        member.cancel.set(True)
    assert gathering.wait_s() == 0.0


def test_a_prompt_waits_for_rows_of_answers_and_not_for_drafts() -> None:
    gathering = Gathering(tokens=200)
    other = Caller()
    member = gathering.answer(STEP_S, other)
    gathering.turns.came(other, WEIGHT / 10)
    assert gathering.wait_s() == pytest.approx(RIDE_S)
    assert gathering.wait_s(since_s=RIDE_S) <= 0.0
    assert member.missed
    assert gathering.wait_s() <= 0.0, "what did not come is not awaited again"


def test_two_answers_that_draft_stay_together() -> None:
    """Whatever one drafts more than the other: no step of the target is with one of them alone."""
    turns = Turns()
    drafter, target = Model(turns=turns, weight=1.0), Model(turns=turns, weight=WEIGHT)
    computed = target.scheduler._compute

    def slow(shares: Sequence[Share]) -> Sequence[int]:
        time.sleep(0.02)
        return computed(shares)

    target.scheduler._compute = slow
    begin = threading.Barrier(2)

    def answer(drafts: int) -> None:
        members = [Member(NativeCancel(), caller=turns.caller) for _ in range(2)]
        begin.wait(WATCHDOG_S)
        for _ in range(12):
            for _ in range(drafts):
                drafter.scheduler.run(request(1, member=members[0]))
            target.scheduler.run(request(1, member=members[1]))

    threads = [threading.Thread(target=answer, args=(drafts,), daemon=True) for drafts in (1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG_S)
    together = [len(step) == 2 for step in target.steps]
    assert sum(together) >= 8, f"of {len(together)}"


@pytest.mark.parametrize(("silent_s", "stays"), [(RECENT_S / 2, True), (2 * RECENT_S, False)])
def test_a_sequence_that_is_silent_for_long_does_not_slow_the_steps_of_others(
    monkeypatch: pytest.MonkeyPatch, silent_s: float, stays: bool
) -> None:
    """A server keeps the sequences of eight conversations, of which one may be in use."""
    model = Model()
    silent = Member(NativeCancel(), ended_at=time.perf_counter() - silent_s, answers=True, missed=True)
    member = Member(NativeCancel())
    model.scheduler._members.add(silent)
    assert model.scheduler.run(request(1, member=member)) == OK
    assert model.scheduler._members == ({silent, member} if stays else {member})
    entered: list[bool] = []

    def enter(_wait_s: Callable[[float, float], float]) -> bool:
        entered.append(True)
        return False

    monkeypatch.setattr(model.scheduler._turns, "enter", enter)
    assert model.scheduler.run(request(1, member=member)) == OK
    assert entered == [True] * stays
    assert model.scheduler.run(request(1, member=silent)) == OK
    assert silent in model.scheduler._members, "it is in use again"
