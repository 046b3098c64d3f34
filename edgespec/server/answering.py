"""Answers one request: waits for its turn and for the model, decodes, and sends what the request's API says."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Hashable

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from edgespec.engine.events import Done, Reading, Text
from edgespec.errors import ClosedError, EdgespecError
from edgespec.server.answers import Reader, decode
from edgespec.server.errors import ApiError, GoneError, api_error
from edgespec.server.faces.face import Face, Head, WithoutAnswer
from edgespec.server.forms import Asked
from edgespec.server.keeper import LoadedEngine
from edgespec.server.queue import shutting_down
from edgespec.server.replies import fingerprint
from edgespec.server.schema import Request
from edgespec.server.service import LONGEST_REQUEST_S, Left, Read, Scope, Service, client_address
from edgespec.server.streaming import Collected, EventStream, Receive, Send, send_reply, while_connected


class Answering(Response):
    """The response to one request for answers: waits for its turn and for the model, and decodes."""

    def __init__(self, face: Face, service: Service, read: Read[Request]) -> None:
        super().__init__()
        self._face = face
        self._service = service
        self._request, self._owner, self._size, self._budget = read.asked, read.owner, read.size, read.budget
        self._head: Head | None = None
        self._kept_in_part = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = None
        if self._request.stream:
            stream = EventStream(send, self._face, self._request, self._known_head)
        try:
            await while_connected(receive, self._answer(scope, send, stream))
        except GoneError:
            if stream is not None:
                stream.leave()
            await Left()(scope, receive, send)
        except (Exception, asyncio.CancelledError) as error:
            failure = as_api_error(error, self._face.asks)
            if stream is None or not (stream.started or failure.code in self._face.fails_inside):
                if isinstance(error, asyncio.CancelledError):
                    raise  # a reply may be half sent
                raise failure from error
            scope["edgespec.error"] = failure
            await stream.fail(failure)

    def _known_head(self) -> Head:
        assert self._head is not None
        return self._head

    async def _answer(self, scope: Scope, send: Send, stream: EventStream | None) -> None:
        face, collected, threads = self._face, Collected(self._face.columns), self._service.keeper.threads
        work = self._decode(scope, collected if stream is None else stream)
        answers = await (work if stream is None else stream.kept_alive(work))
        scope["edgespec.answers"], scope["edgespec.choices"] = tuple(answers), self._request.choices
        scope["edgespec.in_part"] = self._kept_in_part
        if (content := self._service.content) is not None:
            await threads.run(lambda: content(self._request, answers))
        if stream is not None:
            await stream.finish(answers)
            return
        reply = face.whole(self._request, self._known_head(), collected.answers, answers)
        await send_reply(send, reply, threads)

    async def _decode(self, scope: Scope, reader: Reader) -> list[Done]:
        service, began, client = self._service, time.perf_counter(), _client(scope, self._owner)
        tell = service.reading(f"{client_address(scope)} {scope['method']} {scope['path']}")

        def heard(event: Reading | Text) -> None:
            if isinstance(event, Reading):
                scope["edgespec.reading"] = event
                tell(event)
                return
            if (read := scope.get("edgespec.reading")) is not None:
                scope["edgespec.reading"] = Reading(read.of, read.of)
            scope["edgespec.begun"] = scope.get("edgespec.begun", 0) + len(event.tokens)

        try:
            async with (
                asyncio.timeout(self._budget.left_s),
                service.keystrokes.turn(client, self._request.hole) as turn,
                service.queue.turn(self._size, service.waits_as(self._owner)),
                service.keeper.use(self._owner) as loaded,
            ):
                waited_s, warnings = time.perf_counter() - began, await self._compiled(loaded)
                self._kept_in_part = bool(warnings)
                self._head = Head(
                    id=self._face.id_prefix + uuid.uuid4().hex,
                    created=int(time.time()),
                    model=service.names[0],
                    fingerprint=fingerprint(loaded.engine.plan),
                    warnings=(*self._request.warnings, *warnings),
                    waited_s=waited_s,
                    keep=service.items[self._owner].keep,
                )
                if self._request.keep_alive_s is not None:
                    service.keeper.keep(self._request.keep_alive_s, self._owner)
                return await decode(self._request, self._owner, loaded, reader, self._budget, turn, heard)
        except ClosedError:
            if service.queue.draining:
                raise shutting_down() from None
            raise
        except TimeoutError:
            message = f"the answer took longer than {LONGEST_REQUEST_S:.0f} s"
            raise ApiError(message, status=504, code="timeout") from None

    async def _compiled(self, loaded: LoadedEngine) -> tuple[str, ...]:
        """Compile the form of the answers before a session is taken. Returns what of it is not kept."""
        request = self._request
        asked = Asked(form=request.form, tools=request.tools, tool_choice=request.tool_choice)
        return await loaded.forms.compile(loaded.engine, asked, self._owner, self._budget)


async def without_answer(face: Face, service: Service, request: Request, owner: str) -> Response:
    """The reply to a request that asks for no answer: the model is loaded, or freed if it is not to stay.

    Raises ApiError if the API has no such requests, and what loading raises.
    """
    if face.without_answer is None:
        raise ApiError("there is nothing to answer", param=face.asks)
    keeper, seconds = service.keeper, request.keep_alive_s
    if seconds == 0:
        keeper.keep(0, owner)
    else:
        async with keeper.use(owner):
            if seconds is not None:
                keeper.keep(seconds, owner)
    done: WithoutAnswer = "unload" if seconds == 0 else "load"
    return JSONResponse(face.without_answer(request, service.names[0], int(time.time()), done))


def _client(scope: Scope, owner: str) -> Hashable:
    """The program that asks: the owner of its key, its address, its name and the path."""
    name = next((value for key, value in scope["headers"] if key == b"user-agent"), b"")
    return owner, client_address(scope), name, scope["path"]


def as_api_error(error: BaseException, param: str | None = None) -> ApiError:
    """The answer to any failure. An unexpected one says its type only: its text may be of another request.

    ``param`` is the request's field with the prompt. Only the server's end cancels what answers a request.
    """
    if isinstance(error, asyncio.CancelledError):
        return shutting_down()
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EdgespecError):
        return api_error(error, param)
    if isinstance(error, HTTPException):
        message = f"{error.detail.lower()}: see /openapi.json"
        return ApiError(message, status=error.status_code, code="method_not_allowed")
    return ApiError(f"something unexpected went wrong: {type(error).__name__}", status=500, code="internal_error")
