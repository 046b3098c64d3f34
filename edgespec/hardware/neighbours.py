"""What other programs take of the processors that this process may use, while it measures."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import psutil

# Share of the processors that others may take before times are not believed. What runs on an idle desktop takes 1
# to 3 in a hundred; a program that keeps one of up to ten processors busy is above it.
BUSY_SHARE = 0.1

# Systems count processor seconds in steps of 10 ms; a share of less than this is made of too few.
_LEAST_S = 0.1


@dataclass(frozen=True, slots=True)
class Used:
    """Processor seconds since some moment: of this process, of all there are, and how many could have been used."""

    own_s: float
    busy_s: float
    total_s: float


def processor_seconds() -> Used | None:
    """How the processors that this process may run on were used so far; None where the system does not tell.

    What a hypervisor gave to another machine counts as used.
    """
    try:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        every = psutil.cpu_times(percpu=True)
        times = [each for number, each in enumerate(every) if allowed is None or number in allowed]
        total = sum(sum(each) - getattr(each, "guest", 0.0) - getattr(each, "guest_nice", 0.0) for each in times)
        idle = sum(each.idle + getattr(each, "iowait", 0.0) for each in times)
        own = os.times()
    except (OSError, RuntimeError, AttributeError, NotImplementedError):
        return None
    return Used(own_s=own.user + own.system, busy_s=total - idle, total_s=total)


class Neighbours:
    """Adds up what others took while it was entered: a context manager, to be used again and again."""

    def __init__(self, look: Callable[[], Used | None] | None = None) -> None:
        self._look = look or processor_seconds
        self._begun: Used | None = None
        self._others_s = 0.0
        self._total_s = 0.0

    def __enter__(self) -> Neighbours:
        self._begun = self._look()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        begun, now = self._begun, self._look()
        if begun is not None and now is not None:
            self._others_s += (now.busy_s - begun.busy_s) - (now.own_s - begun.own_s)
            self._total_s += now.total_s - begun.total_s

    @property
    def share(self) -> float:
        """The part of the processors that others took, 0 to 1; 0 where nobody can tell."""
        if self._total_s < _LEAST_S:
            return 0.0
        return min(1.0, max(0.0, self._others_s / self._total_s))

    @property
    def busy(self) -> bool:
        """Whether they took so much that times are not to be believed."""
        return self.share > BUSY_SHARE
