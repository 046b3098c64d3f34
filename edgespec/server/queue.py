"""Requests that are answered now, and those that wait."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from edgespec.server.errors import ApiError

# With four, each answer keeps three quarters of its speed alone (docs/results/server.md). Each needs a cache.
MOST_RUNNING = 4
# At a few seconds an answer, the last of these has waited for about a minute.
MOST_WAITING = 64
# Of these, for each of several keys: an agent asks for ten answers or so at the same time.
MOST_WAITING_OF_ONE = 16
# Bodies of waiting requests together, in bytes: four of the largest; parsed, text takes about as much again.
MOST_WAITING_BYTES = 64_000_000
# Clients of OpenAI's give up after ten minutes.
LONGEST_WAIT_S = 600.0
# A client that takes nothing for this long ends its answer if others wait for a slot.
LONGEST_WRITE_BEFORE_OTHERS_S = 10.0
# Retry-After is at most this.
_LONGEST_RETRY_S = 60
# Weight of the newest request in the average time of one.
_NEWEST = 0.2


@dataclass(eq=False, slots=True)
class _Asker:
    """A request in the queue. ``size``: bytes of its body. ``owner``: whose it is, where several may ask."""

    size: int
    owner: str | None
    limit: asyncio.Timeout  # of the wait
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # it has a slot


class RequestQueue:
    """First come, first served; beyond ``most_waiting``, requests are refused with 429 and Retry-After.

    Of several owners the one with the fewest running requests comes first, and each leaves a slot to the others.
    """

    def __init__(
        self,
        most_running: int = MOST_RUNNING,
        most_waiting: int = MOST_WAITING,
        longest_wait_s: float = LONGEST_WAIT_S,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
        most_waiting_of_one: int = MOST_WAITING_OF_ONE,
    ) -> None:
        self.most_running = most_running
        self._most_waiting = most_waiting
        self._longest_wait_s = longest_wait_s
        self._most_waiting_bytes = most_waiting_bytes
        self._most_waiting_of_one = most_waiting_of_one
        self._waiting = list[_Asker]()
        self._running = set[_Asker]()
        self._typical_s = 1.0
        self._writes: dict[asyncio.Timeout, float] = {}  # of the answers that are sent, and since when
        self.draining = False

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, size: int = 0, owner: str | None = None) -> AsyncIterator[None]:
        """Wait for a slot, and hold it within the block. Raises ApiError with status 429 or 503.

        ``size``: bytes of the request's body. ``owner``: whose it is, where several may ask.
        """
        if self.draining:
            raise shutting_down()
        asker = _Asker(size, owner, asyncio.timeout(self._longest_wait_s))
        if self._has_slot_for(asker):
            self._running.add(asker)
        else:
            if self._full_for(asker):
                raise self._later("too many requests are waiting")
            await self._wait(asker)
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            yield
        finally:
            self._typical_s += _NEWEST * (loop.time() - started - self._typical_s)
            self._running.remove(asker)
            self._begin_next()

    def _has_slot_for(self, asker: _Asker) -> bool:
        return self.running < self.most_running and self._may_run(asker)

    def _may_run(self, asker: _Asker) -> bool:
        """Whether a free slot would be for it: one is left to other owners."""
        return asker.owner is None or self._running_of(asker) < max(1, self.most_running - 1)

    def _running_of(self, asker: _Asker) -> int:
        """The running requests of its owner."""
        return sum(each.owner == asker.owner for each in self._running)

    def _begin_next(self) -> None:
        """Give free slots to waiting requests."""
        while able := [each for each in self._waiting if self._has_slot_for(each)]:
            chosen = min(able, key=self._running_of)  # of equal ones the first
            self._waiting.remove(chosen)
            self._running.add(chosen)
            chosen.begun.set()

    def _full_for(self, asker: _Asker) -> bool:
        of_owner = sum(each.owner == asker.owner for each in self._waiting)
        return (
            self.waiting >= self._most_waiting
            or sum(each.size for each in self._waiting) + asker.size > self._most_waiting_bytes
            or (asker.owner is not None and of_owner >= self._most_waiting_of_one)
        )

    async def _wait(self, asker: _Asker) -> None:
        """Wait for a slot."""
        self._waiting.append(asker)
        if self._may_run(asker):
            self._shorten_writes()
        try:
            async with asker.limit:
                await asker.begun.wait()
            if self.draining:
                raise shutting_down()
        except BaseException as error:
            if asker.begun.is_set():  # it got its slot in the same moment
                self._running.remove(asker)
                self._begin_next()
            else:
                self._waiting.remove(asker)
            if isinstance(error, TimeoutError):
                raise shutting_down() if self.draining else self._later("no slot became free in time") from None
            raise

    def _later(self, message: str) -> ApiError:
        return ApiError(message, status=429, code="queue_full", retry_s=self.retry_s)

    @asynccontextmanager
    async def writing(self, longest_s: float) -> AsyncIterator[None]:
        """Raise TimeoutError if the block, which sends a part of an answer, takes longer; sooner if requests wait for
        its slot.
        """
        others = any(map(self._may_run, self._waiting))
        limit = asyncio.timeout(min(longest_s, LONGEST_WRITE_BEFORE_OTHERS_S) if others else longest_s)
        async with limit:
            self._writes[limit] = asyncio.get_running_loop().time()
            try:
                yield
            finally:
                del self._writes[limit]

    def _shorten_writes(self) -> None:
        now = asyncio.get_running_loop().time()
        for limit, started in self._writes.items():
            latest, until = max(now, started + LONGEST_WRITE_BEFORE_OTHERS_S), limit.when()
            if until is not None and until > latest:
                limit.reschedule(latest)

    def refuse_waiting(self) -> None:
        """Raise ApiError with status 503 in every ``turn`` that waits, and in later ones."""
        self.draining = True
        now = asyncio.get_running_loop().time()
        for asker in self._waiting:
            with contextlib.suppress(RuntimeError):  # it has just expired
                asker.limit.reschedule(now)

    @property
    def retry_s(self) -> int:
        """Seconds until a slot is likely to be free."""
        expected = self._typical_s * (self.waiting + 1) / self.most_running
        return max(1, min(_LONGEST_RETRY_S, math.ceil(expected)))


def shutting_down() -> ApiError:
    """The error of every request that the server's end leaves without an answer."""
    return ApiError("the server is shutting down", status=503, code="shutting_down")
