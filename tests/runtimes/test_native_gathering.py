"""Which answers a step waits for, so that those that draft stay together, and which models wait for that step."""

from __future__ import annotations

import time

import pytest

from edgespec.runtimes.native.cache import NativeCancel
from edgespec.runtimes.native.library import OK
from edgespec.runtimes.native.scheduler import ACTIVE_S, FIRST_SHARE, PATIENCE, RECENT_S, Member
from tests.runtimes.test_native_scheduler import Model, request


class Gathering:
    """A scheduler whose waits take no time: ``waits`` has the longest of each, and no other arrives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, step_s: float) -> None:
        self.now, self.waits = 100.0, []  # type: ignore[var-annotated]
        self.model = Model(clock=lambda: self.now)
        self.scheduler = self.model.scheduler
        self.scheduler._times.add(1, step_s)
        gathering = self

        class Arrival:
            def acquire(self, timeout: float | None = None) -> bool:
                if timeout is not None:
                    gathering.waits.append(timeout)
                    gathering.now += timeout
                return timeout is None

        monkeypatch.setattr("edgespec.runtimes.native.scheduler.threading.Lock", Arrival)

    def answer(self, ended_s: float, *, gap_s: float) -> Member:
        """A member whose last step ended that long ago, and whose last request followed ``gap_s`` after a step."""
        member = Member(NativeCancel(), ended_at=self.now - ended_s, answers=True, gaps_s=(gap_s, gap_s))
        self.scheduler._members.add(member)
        return member

    def gather(self, leader: Member) -> list[float]:
        wanted = request(1, member=leader)
        self.scheduler._waiting, self.scheduler._leader = [wanted], wanted
        self.waits.clear()
        self.scheduler._gather()
        return self.waits


def test_the_first_forward_of_a_round_waits_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = Gathering(monkeypatch, step_s=0.01)
    leader, other = gathering.answer(0.05, gap_s=0.05), gathering.answer(0.05, gap_s=0.05)
    assert gathering.gather(leader) == [pytest.approx(FIRST_SHARE * 0.01)]
    assert (other.late, other.missed) == (True, False), "a prompt may still wait for it"
    assert gathering.gather(leader) == [], "what did not come is not awaited again"


def test_a_later_forward_of_a_round_does_not_wait_for_those_that_are_away(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = Gathering(monkeypatch, step_s=0.01)
    leader, _other = gathering.answer(0.0004, gap_s=0.0004), gathering.answer(0.05, gap_s=0.05)
    assert gathering.gather(leader) == []


@pytest.mark.parametrize("away", [False, True])
def test_a_step_with_all_answers_waits_for_no_drafts(monkeypatch: pytest.MonkeyPatch, away: bool) -> None:
    model = Model()
    patience: list[float] = []
    turns = model.scheduler._turns
    turns.crowd()
    monkeypatch.setattr(turns, "enter", lambda _weight, patience_s: patience.append(patience_s))
    now = time.perf_counter()
    other = Member(NativeCancel(), ended_at=now if away else now - 10 * ACTIVE_S, answers=True, missed=True)
    model.scheduler._members.add(other)
    model.scheduler._times.add(1, 0.02)
    assert model.scheduler.run(request(1)) == OK
    assert patience == [pytest.approx(PATIENCE * 0.02) if away else 0.0]


@pytest.mark.parametrize(("tokens", "announced"), [(2, [1.0]), (200, [])])
def test_heavier_models_wait_while_rows_of_answers_are_collected_and_not_for_prompts(
    monkeypatch: pytest.MonkeyPatch, tokens: int, announced: list[float]
) -> None:
    model, found = Model(), []
    turns = model.scheduler._turns
    monkeypatch.setattr(model.scheduler, "_gather", lambda: found.append(list(turns._gathering)))
    model.scheduler._members.add(Member(NativeCancel()))
    assert model.scheduler.run(request(tokens)) == OK
    assert found[0] == announced
    assert turns._gathering == []


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
    gathered: list[bool] = []
    monkeypatch.setattr(model.scheduler, "_gather", lambda: gathered.append(True))
    assert model.scheduler.run(request(1, member=member)) == OK
    assert gathered == [True] * stays
    assert model.scheduler.run(request(1, member=silent)) == OK
    assert silent in model.scheduler._members, "it is in use again"
