"""Loading the drafter while nobody waits for an answer, where that is cheap."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from edgespec.interfaces.model import LoadsInBackground

# How long nothing is answered before a load begins. A program that opens a session asks within milliseconds, and its
# first prompt is not to be read beside a load; a person who types takes seconds. A choice between the two.
IDLE_S = 0.5


class Idle(Protocol):
    """Whose drafter is loaded ahead."""

    @property
    def answering(self) -> bool:
        """Whether an answer is under way."""

    def cheap_load(self) -> LoadsInBackground | None:
        """What had better be loaded now; None if nothing is to be, or if that would take long."""


class LoadAhead:
    """Begins a cheap load once nothing was answered for ``idle_s``. Thread-safe; keeps ``owner`` not alive."""

    def __init__(self, owner: Idle, idle_s: float = IDLE_S) -> None:
        self._owner = weakref.ref(owner)
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def when_idle(self) -> None:
        """An answer ended, or a session was opened."""
        owner = self._owner()
        if owner is not None and owner.cheap_load() is not None:
            timer = threading.Timer(self._idle_s, _begin, (self._owner,))
            timer.daemon, timer.name = True, "edgespec-load-ahead"
            self._exchange(timer)

    def put_off(self) -> None:
        """An answer or a measurement begins. What is being loaded already goes on."""
        self._exchange(None)

    def _exchange(self, timer: threading.Timer | None) -> None:
        with self._lock:
            before, self._timer = self._timer, timer
            if before is not None:
                before.cancel()
            if timer is not None:
                timer.start()


def _begin(reference: Callable[[], Idle | None]) -> None:
    owner = reference()
    if owner is not None and not owner.answering:
        model = owner.cheap_load()
        if model is not None:
            model.load()
