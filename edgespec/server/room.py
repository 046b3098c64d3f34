"""The memory that the models of one server share: one is loaded at a time, and idle ones make room for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from edgespec.errors import CancelledError
from edgespec.placement.memory import MemoryLedger
from edgespec.server.errors import ApiError

# One that is loaded now, and one that waits for it. A load takes seconds; more of them would push out one another.
MOST_LOADING = 2
# After a load of an ordinary model.
_RETRY_S = 5


class GivenUpError(CancelledError):
    """A load ended because the requests for its model had left. A request that has come since loads again."""


class Occupant(Protocol):
    """What keeps one model."""

    @property
    def loading(self) -> bool:
        """Whether the model is being loaded, or waits for its turn."""

    @property
    def in_use(self) -> bool:
        """Whether the model is loaded, and a request uses it."""

    @property
    def wanted(self) -> bool:
        """Whether a request uses the model, or waits until it is loaded."""

    @property
    def idle_since(self) -> float | None:
        """The event loop's time since which no request has used the loaded model; None if there is none to free."""

    async def free(self) -> None:
        """Free the idle model."""

    def stop_measuring(self) -> None:
        """End soon what is measured or written while the model is idle."""


class Room:
    """What the keepers of a server's models agree on. All methods belong to one event loop."""

    def __init__(self, allowed_bytes: int | None = None) -> None:
        """``allowed_bytes``: what all models may take together; None for one model, whose engine decides."""
        self.ledger = None if allowed_bytes is None else MemoryLedger(allowed_bytes, self._make_room)
        self._occupants: list[Occupant] = []
        self._loading = asyncio.Lock()
        self._loader: Occupant | None = None  # what is loaded, or was loaded last
        self._measuring = asyncio.Lock()
        self._became_idle = asyncio.Event()
        self._none_waits = asyncio.Event()  # no load waits for room
        self._none_waits.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def join(self, occupant: Occupant) -> None:
        """A keeper of this server."""
        self._occupants.append(occupant)

    async def enter(self, occupant: Occupant) -> None:
        """A request is about to use a model: what others measure ends.

        Waits behind a load that waits for room, unless it is the load of this model. Raises ApiError with
        status 503 if the model is not loaded and two others are being loaded.
        """
        for other in self._others(occupant):
            other.stop_measuring()
        if not occupant.loading:
            await self._none_waits.wait()
        here = occupant.idle_since is not None or occupant.in_use or occupant.loading
        if not here and sum(other.loading for other in self._others(occupant)) >= MOST_LOADING:
            raise ApiError("other models are being loaded", status=503, code="loading", retry_s=_RETRY_S)

    def left(self) -> None:
        """The last request has left a model."""
        self._became_idle.set()

    @asynccontextmanager
    async def loading(self, occupant: Occupant) -> AsyncIterator[None]:
        """The model is loaded within the block, and no other one."""
        self._loop = asyncio.get_running_loop()
        async with self._loading:
            self._loader = occupant
            yield

    @asynccontextmanager
    async def measuring(self, occupant: Occupant) -> AsyncIterator[bool]:
        """Whether nothing else runs: then a model may be measured within the block."""
        async with self._measuring:
            yield not any(other.in_use or other.loading for other in self._others(occupant))

    def leave(self, occupant: Occupant) -> bool:
        """A keeper has closed. Returns whether it was the last one."""
        self._occupants.remove(occupant)
        return not self._occupants

    def _others(self, occupant: Occupant) -> list[Occupant]:
        return [other for other in self._occupants if other is not occupant]

    def _make_room(self, needed_bytes: int) -> None:
        """Called by the thread that loads: free models until these bytes are left, if there are others.

        Raises GivenUpError if the requests for the model have left.
        """
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._made(needed_bytes), self._loop).result()

    async def _made(self, needed_bytes: int) -> None:
        assert self.ledger is not None
        assert self._loader is not None
        try:
            while needed_bytes > self.ledger.left_bytes:
                if not self._loader.wanted:  # then no request waits behind it, and no model is freed for it
                    raise GivenUpError("the requests for this model have left")
                idle = [(since, each) for each in self._occupants if (since := each.idle_since) is not None]
                if idle:
                    await min(idle, key=lambda pair: pair[0])[1].free()
                elif any(each.in_use for each in self._occupants):
                    self._none_waits.clear()
                    self._became_idle.clear()
                    await self._became_idle.wait()
                else:
                    return
        finally:
            self._none_waits.set()
