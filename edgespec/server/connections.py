"""Limits of a connection that uvicorn does not have: time to send a request, number of connections, JSON errors."""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgespec.server.errors import ApiError

try:
    import resource
except ImportError:  # Windows, where a socket is not a descriptor
    resource = None  # type: ignore[assignment]

_UNLIMITED = () if resource is None else (resource.RLIM_INFINITY, -1)

# Time for a whole request to arrive: 16 MB at half a megabyte a second.
RECEIVE_S = 30.0
# A connection that is being closed ends if its client takes nothing for this long: it would hold a descriptor, and
# the end of the server.
CLOSING_S = 10.0
# One that answers ends if its client takes nothing for this long. Answers wait a bit less for it (app.py), so that
# their end is in the log.
WRITING_S = 70.0
# A descriptor each.
MOST_CONNECTIONS = 512
# Connections that are accepted before the first of them can be closed. asyncio logs a traceback for each one that
# it cannot accept, millions of them if it tries many in a row.
ACCEPTED_IN_A_ROW = 32
# Descriptors for model files, threads, the log, and connections that are just opened or closed.
_OTHER_DESCRIPTORS = 64 + 3 * ACCEPTED_IN_A_ROW
_WANTED_DESCRIPTORS = MOST_CONNECTIONS + _OTHER_DESCRIPTORS


def raise_descriptor_limit() -> None:
    """Let this process have the descriptors of all connections: macOS allows 256 unless a program asks for more."""
    if resource is not None:
        allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if allowed not in _UNLIMITED and allowed < _WANTED_DESCRIPTORS:
            wanted = _WANTED_DESCRIPTORS if most in _UNLIMITED else min(_WANTED_DESCRIPTORS, most)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def room_for_connections() -> int:
    """How many connections the descriptors of this process allow."""
    allowed = None if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed is None or allowed in _UNLIMITED:
        return MOST_CONNECTIONS
    return max(8, allowed - _OTHER_DESCRIPTORS)


# Of further requests that a client sends during an answer. They are kept until its end; more is not read.
MOST_EARLY_BYTES = 65_536


_LINE_ENDS = b"\r\n"


class _Connection(h11.Connection):
    """h11's, without empty lines in front of a request (RFC 9112, 2.2): some clients send one behind a body."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE:
            unread = self._receive_buffer  # h11 has no public way to drop a part of it
            unread.maybe_extract_at_most(len(unread) - len(bytes(unread).lstrip(_LINE_ENDS)))
        return super().next_event()


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with a deadline for each request, and at most ``most_connections`` connections.

    A further connection replaces the one that has been without a whole request for the longest time.
    """

    receive_s = RECEIVE_S
    closing_s = CLOSING_S
    writing_s = WRITING_S
    most_connections = MOST_CONNECTIONS

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.conn = _Connection(h11.SERVER)
        self._deadline: asyncio.TimerHandle | None = None
        self._since = self.loop.time()  # when the connection became idle
        self._looking: asyncio.TimerHandle | None = None

    @property
    def live(self) -> bool:
        return not self.transport.is_closing()

    @property
    def idle(self) -> bool:
        """Whether no request that has arrived as a whole is being answered."""
        return self.cycle is None or self.cycle.response_complete or self.conn.their_state is h11.SEND_BODY

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        live = [each for each in self.connections if isinstance(each, LimitedProtocol) and each.live]
        if len(live) > min(self.most_connections, room_for_connections()):
            idle = [each for each in live if each.idle]
            min(idle, key=lambda each: each._since, default=self).transport.abort()
        self._expect()
        self._look(0, self.loop.time())

    def _look(self, unsent: int, since: float) -> None:
        """End the connection if its client takes nothing: there are ``unsent`` bytes ``since`` that time.

        uvicorn would wait for ever to say that a request has no answer.
        """
        left, now = self.transport.get_write_buffer_size(), self.loop.time()
        since = since if left == unsent else now
        stalled = self.flow.write_paused and now - since >= self.writing_s
        if stalled or (not self.live and left == unsent):
            self.transport.abort()
        else:
            self._looking = self.loop.call_later(self.closing_s, self._look, left, since)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE and not (data.strip(_LINE_ENDS) or self.conn.trailing_data[0]):
            return  # no request begins, and no deadline
        super().data_received(data)
        self._expect()
        self._keep_watching()

    def _keep_watching(self) -> None:
        """Read on behind a whole request, where uvicorn pauses: only reading shows that a client has left."""
        early = self.conn.their_state is h11.DONE and not self.idle
        if early and len(self.conn.trailing_data[0]) <= MOST_EARLY_BYTES:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def _expect(self) -> None:
        """Start the deadline if a request is incomplete; end it if the request is complete."""
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing():
            if self._deadline is None:
                self._deadline = self.loop.call_later(self.receive_s, self._too_slow)
        else:
            self._end_deadline()

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(ApiError("the request did not arrive in time", status=408, code="timeout"))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """The answer to what is not HTTP, in OpenAI's shape."""
        self._refuse(ApiError("the request is not valid HTTP/1.1", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error.body()
            headers = [*error.headers(), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
            events = (
                h11.Response(status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()
