"""How much processor time other programs use while this process measures."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from edgespec.hardware.machine import PSUTIL_FAILURES, allowed_processors, online_processors

# Share of the processors that other programs may use before times are rejected. An idle desktop uses 1 to 3 in a
# hundred; a program that keeps one of up to ten processors busy exceeds it.
BUSY_SHARE = 0.1

# Systems count processor time in steps of 10 ms; shares of less time than this are too coarse.
_LEAST_S = 0.1


@dataclass(frozen=True, slots=True)
class Used:
    """Processor seconds since some moment: used by this process, used in all, and available in all."""

    own_s: float
    busy_s: float
    total_s: float


def processor_seconds() -> Used | None:
    """How the processors that this process may run on were used so far; None if the system does not report it.

    Time that a hypervisor gave to another machine counts as used.
    """
    try:
        times = _of(allowed_processors(), psutil.cpu_times(percpu=True))
        total = sum(sum(each) - getattr(each, "guest", 0.0) - getattr(each, "guest_nice", 0.0) for each in times)
        idle = sum(each.idle + getattr(each, "iowait", 0.0) for each in times)
        own = os.times()
    except PSUTIL_FAILURES:
        return None
    return Used(own_s=own.user + own.system, busy_s=total - idle, total_s=total)


def worker_seconds() -> float:
    """Processor seconds of the processes that this one has started and that still run, such as a drafter's."""
    total = 0.0
    with suppress(*PSUTIL_FAILURES):
        for child in psutil.Process().children(recursive=True):
            with suppress(*PSUTIL_FAILURES):  # it has just ended
                times = child.cpu_times()
                total += times.user + times.system
    return total


def _of(allowed: frozenset[int], every: Sequence[Any]) -> Sequence[Any]:
    """The times of the ``allowed`` processors. The system lists those that are online, without their numbers."""
    online = online_processors()
    numbers = online if len(online) == len(every) else range(len(every))
    # In some containers the list has only our processors, under other numbers.
    return [each for number, each in zip(numbers, every, strict=True) if number in allowed] or every


class Neighbours:
    """Adds up what other programs used while entered: a reusable context manager.

    ``workers``: the processor seconds of processes that do not count as others, where there are some.
    """

    def __init__(
        self, look: Callable[[], Used | None] | None = None, workers: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._look, self._workers, self._worked_s = look or processor_seconds, workers, 0.0
        self._begun: Used | None = None
        self._others_s = 0.0
        self._total_s = 0.0

    def __enter__(self) -> Neighbours:
        self._begun, self._worked_s = self._look(), self._workers()
        return self

    def __exit__(self, *_exception: object) -> None:
        begun, now = self._begun, self._look()
        if begun is not None and now is not None:
            own_s = now.own_s - begun.own_s + max(0.0, self._workers() - self._worked_s)
            self._others_s += now.busy_s - begun.busy_s - own_s
            self._total_s += now.total_s - begun.total_s

    @property
    def share(self) -> float:
        """The share of the processors that other programs used, 0 to 1; 0 if unknown."""
        if self._total_s < _LEAST_S:
            return 0.0
        return min(1.0, max(0.0, self._others_s / self._total_s))

    @property
    def busy(self) -> bool:
        """Whether other programs used so much that times are not reliable."""
        return self.share > BUSY_SHARE
