"""Which of the models on the same processors computes next."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# After two Sequences of a model wanted to compute simultaneously, one model computes at a time for this long: a round
# takes 30 to 150 ms.
CROWDED_S = 0.25
# A drafter's next step follows this soon: between two of its steps Python takes 0.1 to 0.5 ms.
NEXT_S = 0.001
# A drafter's first step follows a step of its target this soon: each answer compares and draws before, one after
# another.
FIRST_S = 0.004


class Turns:
    """While several Sequences of one model are in use, one model computes at a time.

    A lighter model goes first: while one answer still drafts, the others' rows wait for its rows, so that one step of
    the heavier model verifies all. A heavier step waits no longer than its patience. With one Sequence of each model
    nothing waits: a pipelined loop uses two models simultaneously.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begin()
        if hasattr(os, "register_at_fork"):  # a forked process has none of the threads that compute or wait
            os.register_at_fork(after_in_child=_begin_of(weakref.ref(self)))

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._running = False
        self._waiting: list[tuple[float, bool]] = []  # weight, and whether it has waited long enough
        self._gathering: list[float] = []  # weights of models whose next step is collected
        self._left: dict[float, float] = {}  # when the last step of each weight ended
        self._crowded_until = -math.inf

    def crowd(self) -> None:
        """Two Sequences of one model want to compute."""
        self._crowded_until = self._clock() + CROWDED_S

    @property
    def is_crowded(self) -> bool:
        """Whether one model computes at a time."""
        return self._clock() < self._crowded_until

    @contextmanager
    def gathering(self, weight: float) -> Iterator[None]:
        """A model's step is collected: heavier models wait for it."""
        self._gathering.append(weight)
        try:
            yield
        finally:
            with self._changed:
                self._gathering.remove(weight)
                self._changed.notify_all()

    def enter(self, weight: float, patience_s: float) -> bool:
        """Wait for a turn, at most about ``patience_s`` for lighter models. False if models need not wait for each
        other; else call ``leave``.
        """
        if not self.is_crowded:
            return False
        with self._changed:
            begun = self._clock()
            own = (weight, False)
            self._waiting.append(own)
            try:
                while True:
                    now = self._clock()
                    if now - begun >= patience_s and not own[1]:
                        self._waiting.remove(own)
                        own = (weight, True)
                        self._waiting.append(own)
                    wait_s = self._wait_s(own, now)
                    if wait_s <= 0.0:
                        break
                    if not own[1]:
                        wait_s = min(wait_s, max(patience_s - (now - begun), 0.0))
                    self._changed.wait(None if math.isinf(wait_s) else wait_s)
            finally:
                self._waiting.remove(own)
            self._running = True
        return True

    def _wait_s(self, own: tuple[float, bool], now: float) -> float:
        if self._running:
            return math.inf
        weight, waited = own
        if waited:
            return 0.0
        if any(other[1] or other[0] < weight for other in self._waiting if other is not own):
            return math.inf
        if any(other < weight for other in self._gathering):
            return math.inf
        lighter = [at for other, at in self._left.items() if other < weight]
        begun = self._left.get(weight, -math.inf) if any(now - at < CROWDED_S for at in lighter) else -math.inf
        return max(begun + FIRST_S - now, *(at + NEXT_S - now for at in lighter), 0.0)

    def leave(self, weight: float) -> None:
        with self._changed:
            self._running = False
            self._left[weight] = self._clock()
            self._changed.notify_all()


def _begin_of(turns: weakref.ref[Turns]) -> Callable[[], None]:
    """What gives the turns a new state, if they are still used."""

    def begin() -> None:
        if (found := turns()) is not None:
            found._begin()

    return begin
