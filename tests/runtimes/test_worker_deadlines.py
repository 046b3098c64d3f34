"""Deadlines of a worker's answers: generous at first, ten times the measured times of forwards later."""

from __future__ import annotations

import math
import queue
import time
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.errors import WorkerLostError
from edgespec.runtimes.process.deadlines import Deadlines, ForwardTimes
from edgespec.runtimes.process.frames import Frame
from edgespec.runtimes.process.link import WorkerLink

GIGABYTE = 10**9
DEADLINES = Deadlines(answer_s=30.0, timed_s=2.0)


def times(deadlines: Deadlines = DEADLINES, bytes_per_forward: int = GIGABYTE) -> ForwardTimes:
    return ForwardTimes(deadlines, bytes_per_forward)


def timed(tokens: int, *seconds: float) -> ForwardTimes:
    own = times()
    for each in seconds:
        own.record(tokens, each)
    return own


def test_the_first_deadline_of_a_prompt_is_derived_from_the_weights() -> None:
    assert times().deadline_s(1) == pytest.approx(30.2)
    assert times().deadline_s(256) == pytest.approx(30 + 256 * 0.2)
    assert times(bytes_per_forward=0).deadline_s(256) == 30.0
    told = times(Deadlines(answer_s=1.0, token_s=0.5))
    assert told.deadline_s(4) == pytest.approx(3.0)
    assert times().answer_s == 30.0


def test_the_first_forward_of_a_size_is_not_used_for_deadlines() -> None:
    assert timed(1, 9.0).deadline_s(1) == pytest.approx(30.2)
    assert timed(1, 9.0, 0.01).deadline_s(1) == pytest.approx(2.1)


def test_a_timed_forwards_deadline_is_ten_times_the_longest_recent_time() -> None:
    own = timed(1, 9.0, 0.01, 0.03, 0.01)
    assert 2.2 < own.deadline_s(1) < 2.3
    assert own.answer_s == 2.0
    for _ in range(300):
        own.record(1, 0.01)
    assert own.deadline_s(1) == pytest.approx(2.1, abs=0.001), "a slow forward is forgotten"


def test_each_size_of_forward_has_a_separate_deadline() -> None:
    own = timed(1, 0.01, 0.01)
    assert own.deadline_s(200) == pytest.approx(30 + 40.0)
    own.record(200, 1.0)
    own.record(255, 1.0)
    assert own.deadline_s(130) == pytest.approx(12.0)
    assert own.deadline_s(1) == pytest.approx(2.1)


def test_timed_forwards_never_make_a_deadline_longer() -> None:
    assert timed(1, 60.0, 60.0).deadline_s(1) == pytest.approx(30.2)
    short = times(Deadlines(answer_s=0.5))
    for _ in range(2):
        short.record(1, 0.01)
    assert short.answer_s == 0.5


class SleepingQueue:
    """An answer comes after some seconds of work, by an invented clock. The machine sleeps in between."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, comes_after_s: float) -> None:
        self.now, self.awake_s, self._comes_after_s = 0.0, 0.0, comes_after_s
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def get(self, timeout: float) -> Frame:
        if self.awake_s < 4.5 < self.awake_s + timeout:  # the time of the wait is over when the machine awakes
            self.now, self.awake_s = self.now + 9999.0, 4.5
            raise queue.Empty
        self.now, self.awake_s = self.now + timeout, self.awake_s + timeout
        if self.awake_s < self._comes_after_s:
            raise queue.Empty
        return Frame({"id": 3})


@pytest.mark.parametrize("comes_after_s", [25.0, math.inf])
def test_the_clock_of_a_deadline_stops_while_the_machine_sleeps(
    monkeypatch: pytest.MonkeyPatch, comes_after_s: float
) -> None:
    items = SleepingQueue(monkeypatch, comes_after_s)
    lost = list[str]()
    link: Any = SimpleNamespace(lose=lost.append, lost_error=lambda: WorkerLostError(lost[-1]))
    inbox: Any = SimpleNamespace(queue=items)
    if comes_after_s < math.inf:
        assert WorkerLink._wait(link, 3, inbox, 30.0, None).header == {"id": 3}
    else:
        with pytest.raises(WorkerLostError, match="does not answer"):
            WorkerLink._wait(link, 3, inbox, 30.0, None)
        assert 30.0 <= items.awake_s <= 32.0
