"""Readers of answers: server-sent events, and one JSON object. A client that leaves ends its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from edgespec.engine.events import Done
from edgespec.server.answers import Part, joined
from edgespec.server.errors import ApiError, GoneError
from edgespec.server.faces.face import Columns, Face, Head, Stretch
from edgespec.server.replies import json_pieces
from edgespec.server.schema import Request
from edgespec.server.threads import Threads

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# Proxies and clients give up on a silent connection after 15 s or more.
KEEP_ALIVE_S = 5.0

# Of a reply: made in a few milliseconds, in which no other answer is sent if there is no second part.
PART_BYTES = 65_536

_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled if the client closes the connection. Raises GoneError then."""
    return await _watched_by(work, _disconnect(receive))


async def _watched_by(work: Coroutine[Any, Any, T], watch: Coroutine[Any, Any, NoReturn]) -> T:
    """The result of ``work``, which is cancelled if ``watch`` fails first. Raises what either raises."""
    tasks = (task := asyncio.ensure_future(work)), (watching := asyncio.ensure_future(watch))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else watching.result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
        for each in tasks:  # an exception that is not taken would be logged
            _ = each.cancelled() or each.exception()


async def _disconnect(receive: Receive) -> NoReturn:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise GoneError


class _Stretches:
    """Joins the parts of one answer, in their order."""

    def __init__(self) -> None:
        self.closed: list[Stretch] = []
        self._own: list[Part] = []  # of the stretch that is not closed
        self._scored: Columns = {}

    def add(self, part: Part, columns: Columns) -> None:
        if self._own and part.kind != self._own[-1].kind:
            self.close()
        for name, items in columns.items():
            self._scored.setdefault(name, []).extend(items)
        self._own.append(replace(part, tokens=()))

    def close(self) -> None:
        if self._own:
            self.closed.append(Stretch(joined(self._own), self._scored))
        self._own, self._scored = [], {}


class Collected:
    """Joins the parts of each answer; those of several may come mixed. Tokens become JSON as they come."""

    def __init__(self, columns: Callable[[Part], Columns]) -> None:
        self._columns = columns
        self._by_index = dict[int, _Stretches]()

    @property
    def answers(self) -> list[list[Stretch]]:
        """What was said of each answer, in the order of their indices."""
        return [own.closed for _, own in sorted(self._by_index.items())]

    async def begin(self, index: int, prompt_tokens: int) -> None:
        self._by_index[index] = _Stretches()

    async def part(self, index: int, part: Part) -> None:
        self._by_index[index].add(part, self._columns(part))

    async def end(self, index: int, done: Done) -> None:
        self._by_index[index].close()


async def send_reply(send: Send, reply: dict[str, Any], threads: Threads) -> None:
    """Send a whole reply. A large one is joined on the threads and sent in parts."""
    parts = _parts_of(json_pieces(reply))
    part = next(parts)
    alone = len(part) < PART_BYTES
    length = [(b"content-length", str(len(part)).encode())] if alone else []
    headers = [(b"content-type", b"application/json"), *length]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while not alone and part:
        await send({"type": "http.response.body", "body": part, "more_body": True})
        part = await threads.run(lambda: next(parts, b""))
    await send({"type": "http.response.body", "body": part, "more_body": False})


def _parts_of(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces joined to parts of ``PART_BYTES`` or a little more, but for the last."""
    part = bytearray()
    for piece in pieces:
        part += piece
        if len(part) >= PART_BYTES:
            yield bytes(part)
            part.clear()
    if part:
        yield bytes(part)


class EventStream:
    """Sends answers as they come, as a face writes them. The response starts with the first event, or with waiting.

    Until it starts, an error can still have its own status. ``head`` is asked for when an answer begins.
    """

    def __init__(self, send: Send, face: Face, request: Request, head: Callable[[], Head]) -> None:
        self._send = send
        self._head = head
        self._events = face.events(request)
        self._headers = [(b"content-type", face.media_type.encode()), *_HEADERS]
        self._writing = asyncio.Lock()
        self._wrote = False  # since the last look of ``kept_alive``
        self.started = False

    async def begin(self, index: int, prompt_tokens: int) -> None:
        await self._write(self._events.begin(index, self._head(), prompt_tokens))

    async def part(self, index: int, part: Part) -> None:
        await self._write(self._events.part(index, part))

    async def end(self, index: int, done: Done) -> None:
        await self._write(self._events.end(index, done))

    async def finish(self, answers: list[Done]) -> None:
        """The end of the stream."""
        await self._write(self._events.finish(answers))
        await self._close()

    async def fail(self, error: ApiError) -> None:
        """End the stream with an error, also one that has not started."""
        await self._write(self._events.fail(error))
        await self._close()

    def leave(self) -> None:
        """The client hears no more: the reply ends as one that fails, without telling it."""
        self._events.fail(ApiError("the client left"))

    async def kept_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``; the client hears that it waits every ``KEEP_ALIVE_S`` without an event.

        ``work`` is cancelled if that cannot be sent.
        """
        return await _watched_by(work, self._tick())

    async def _tick(self) -> NoReturn:
        while True:
            self._wrote = False
            await asyncio.sleep(KEEP_ALIVE_S)
            if not self._wrote:
                await self._write(self._events.waiting(), waits=True)

    async def _write(self, data: bytes, *, waits: bool = False) -> None:
        """A client that waits gets the headers at least: some give up without them."""
        if not data and not waits:
            return
        async with self._writing:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            self._wrote = True
            if data:
                await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _close(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
