"""Which of the models on the same processors computes next, and what the threads that need them do."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# After two Sequences of a model wanted to compute simultaneously, one model computes at a time for this long: a round
# takes 30 to 150 ms.
CROWDED_S = 0.25
# A step that waits for more requests looks this soon whether its own is cancelled, as in runtimes/thread.py.
_LOOKS_S = 0.02


@dataclass(eq=False, slots=True)
class Caller:
    """A thread that makes forwards: an answer's loop asks its drafter and its target one after the other.

    ``weight``: of the model that computes for it, or that it waits for; infinite while a text is read, None between
    two forwards. ``left_at``: when its last forward ended, on the clock of the turns.
    """

    weight: float | None = None
    left_at: float = -math.inf


@dataclass(eq=False, slots=True)
class _Step:
    """A step that waits to begin. ``ready``: it waits for other models alone; first, it did so until ``free_at``."""

    ready: bool = False
    free_at: float = -math.inf


class Turns:
    """While several Sequences of one model are in use, one model computes at a time, in the order of the steps.

    With one Sequence of each model nothing waits: a pipelined loop uses two models simultaneously. For any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begin()
        if hasattr(os, "register_at_fork"):  # a forked process has none of the threads that compute or wait
            os.register_at_fork(after_in_child=_begin_of(weakref.ref(self)))

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._running = False
        self._steps: list[_Step] = []  # that wait, in order
        self._crowded_until = -math.inf
        self._callers = threading.local()

    @property
    def caller(self) -> Caller:
        """The thread that asks."""
        own: Caller | None = getattr(self._callers, "own", None)
        if own is None:
            own = self._callers.own = Caller()
        return own

    def acting(self, job: Callable[[], T]) -> Callable[[], T]:
        """The job, for a thread that runs it while this one waits: its forwards are this one's."""
        caller = self.caller

        def act() -> T:
            own, self._callers.own = self.caller, caller
            try:
                return job()
            finally:
                self._callers.own = own

        return act

    def came(self, caller: Caller, weight: float) -> None:
        """A model of this weight has a request of the caller; infinite if it reads a text."""
        caller.weight = weight
        self._look_again()

    def went(self, caller: Caller) -> None:
        """The caller's request has ended."""
        caller.weight, caller.left_at = None, self._clock()
        self._look_again()

    def _look_again(self) -> None:
        if self._steps:
            with self._changed:
                self._changed.notify_all()

    def crowd(self) -> None:
        """Two Sequences of one model want to compute."""
        self._crowded_until = self._clock() + CROWDED_S

    @property
    def is_crowded(self) -> bool:
        """Whether one model computes at a time."""
        return self._clock() < self._crowded_until

    def enter(self, wait_s: Callable[[float, float], float]) -> bool:
        """Wait until a step may begin. Returns whether ``leave`` is to follow.

        ``wait_s(now, free_at)`` is how long it still waits for more requests; 0.0 once it is complete. ``free_at`` is
        when it had waited for other models for the first time.
        """
        own = _Step()
        with self._changed:
            self._steps.append(own)
            try:
                while True:
                    now = self._clock()
                    if own.ready and math.isinf(own.free_at) and not self._is_taken(own):
                        own.free_at = now  # once, so that no step waits for ever
                    left_s = wait_s(now, own.free_at)
                    if own.ready and left_s > 0.0:
                        self._changed.notify_all()  # those behind it need not wait for it
                    own.ready = left_s <= 0.0
                    crowded = self.is_crowded
                    if own.ready and not (crowded and self._is_taken(own)):
                        break
                    self._changed.wait(None if own.ready else min(left_s, _LOOKS_S))
                self._running |= crowded
            finally:
                self._steps.remove(own)
                self._changed.notify_all()
        return crowded

    def _is_taken(self, own: _Step) -> bool:
        return self._running or next(step for step in self._steps if step.ready) is not own

    def leave(self) -> None:
        with self._changed:
            self._running = False
            self._changed.notify_all()


def _begin_of(turns: weakref.ref[Turns]) -> Callable[[], None]:
    """What gives the turns a new state, if they are still used."""

    def begin() -> None:
        if (found := turns()) is not None:
            found._begin()

    return begin
