"""The tokens that each session's caches may hold: counted as conversations grow, so that all of them fit together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from edgespec.placement.memory import MemoryUse, in_steps


class CacheRoom:
    """How many tokens one session's caches may hold. It counts until it is closed or forgotten."""

    def __init__(self, rooms: CacheRooms, positions: int) -> None:
        self._rooms = rooms
        self.positions = positions  # a multiple of the step
        self.closed = False

    def grow(self, tokens: int) -> None:
        """Hold that many tokens. Raises MemoryLimitError, with the numbers."""
        if tokens > self.positions:
            self._rooms.grow(self, tokens)

    def close(self) -> None:
        """The caches are freed. Idempotent."""
        self.closed = True


class CacheRooms:
    """The rooms of one engine's sessions. Thread-safe. ``use`` counts them, and everything else of the engine."""

    def __init__(self, use: Callable[[], MemoryUse]) -> None:
        self._use = use
        self._lock = threading.Lock()
        self._rooms: tuple[weakref.ref[CacheRoom], ...] = ()

    @property
    def positions(self) -> tuple[int, ...]:
        """The tokens of each open room."""
        # A room may be forgotten during this, on any thread.
        rooms = [reference() for reference in self._rooms]
        return tuple(room.positions for room in rooms if room is not None and not room.closed)

    def open(self, tokens: int, *, spare: bool = False) -> CacheRoom:
        """A room for a session whose caches hold ``tokens``. Raises MemoryLimitError, with the numbers.

        With ``spare`` memory must also hold a session that fills the context.
        """
        with self._lock:
            self._use().require_session(tokens, spare=spare)
            room = CacheRoom(self, in_steps(tokens))
            alive = [each for each in self._rooms if (own := each()) is not None and not own.closed]
            self._rooms = (*alive, weakref.ref(room))
        return room

    def grow(self, room: CacheRoom, tokens: int) -> None:
        """``CacheRoom.grow``."""
        with self._lock:
            self._use().require_growth(room.positions, tokens)
            room.positions = max(room.positions, in_steps(tokens))
