"""The routes of the server, and what happens to every request: checks, errors, counters, one line of a log."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from edgespec.engine.events import Done
from edgespec.errors import EdgespecError
from edgespec.server.answers import Reader, decode
from edgespec.server.bodies import BodyReader
from edgespec.server.errors import ApiError, GoneError, api_error
from edgespec.server.forms import Asked
from edgespec.server.keeper import LoadedEngine, ModelKeeper
from edgespec.server.metrics import Metrics
from edgespec.server.openapi import document
from edgespec.server.queue import RequestQueue
from edgespec.server.faces.openai import Head, fingerprint, whole
from edgespec.server.schema import Reader as BodyParser, Request, read_chat, read_completion
from edgespec.server.security import Access
from edgespec.server.streaming import Collected, EventStream, Receive, Send, send_reply, while_connected
from edgespec.text.request_budget import RequestBudget

# The longest answers of thinking models on a slow machine take half an hour.
LONGEST_REQUEST_S = 3600.0
# A client that takes nothing for this long is gone: the answer waits in memory and holds a slot.
LONGEST_WRITE_S = 60.0

Scope = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """One request as a log shows it: nothing of its content. ``status`` 0: the client left before an answer.

    ``kept_in_part``: not all of its schema's keywords.
    """

    client: str
    method: str
    path: str
    status: int
    seconds: float
    answers: tuple[Done, ...] = ()
    error: str | None = None
    kept_in_part: bool = False


@dataclass(slots=True, kw_only=True)
class Service:
    """What the routes share. ``names``: the model's own name first, then others that clients may use for it."""

    keeper: ModelKeeper
    names: tuple[str, ...]
    access: Access = field(default_factory=Access)
    queue: RequestQueue = field(default_factory=RequestQueue)
    bodies: BodyReader = field(default_factory=BodyReader)
    metrics: Metrics = field(default_factory=Metrics)
    log: Callable[[RequestLine], None] = lambda line: None
    content: Callable[[Request, list[Done]], None] | None = None
    connections: Callable[[], int] = lambda: 0

    def check_model(self, name: str | None) -> None:
        """Raise ApiError with status 404 for a model that is not served. No name means the served one.

        Capital letters make no difference, and neither does Ollama's ``:latest``.
        """
        if name and name.lower().removesuffix(":latest") not in map(str.lower, self.names):
            message = f"the model {name[:64]!r} is not served here; the served model is {self.names[0]!r}"
            raise ApiError(message, status=404, param="model", code="model_not_found")


class Left(Response):
    """No response: the client has left. An exception would become one on its way out."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["edgespec.error"] = "the client left"


class Answering(Response):
    """The response to one request for answers: waits for its turn and for the model, and decodes."""

    def __init__(self, service: Service, request: Request, owner: str, size: int, budget: RequestBudget) -> None:
        """``size``: bytes of the request's body."""
        super().__init__()
        self._budget = budget
        self._size = size
        self._service = service
        self._request = request
        self._owner = owner
        self._head: Head | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = None
        if self._request.stream:
            echo = (self._request.prompt or "") if self._request.echo else ""
            stream = EventStream(send, self._known_head, include_usage=self._request.include_usage, echo=echo)
        try:
            await while_connected(receive, self._answer(scope, send, stream))
        except GoneError:
            await Left()(scope, receive, send)
        except Exception as error:
            failure = as_api_error(error, "messages" if self._request.is_chat else "prompt")
            if stream is None or not stream.started:
                raise failure from error
            scope["edgespec.error"] = failure
            await stream.fail(failure)

    def _known_head(self) -> Head:
        assert self._head is not None
        return self._head

    async def _answer(self, scope: Scope, send: Send, stream: EventStream | None) -> None:
        collected, threads = Collected(is_chat=self._request.is_chat), self._service.keeper.threads
        work = self._decode(collected if stream is None else stream)
        answers = await (work if stream is None else stream.kept_alive(work))
        scope["edgespec.answers"], scope["edgespec.warnings"] = tuple(answers), self._known_head().warnings
        if (content := self._service.content) is not None:
            await threads.run(lambda: content(self._request, answers))
        if stream is not None:
            await stream.finish(answers)
            return
        parts = collected.parts
        if self._request.echo:
            parts = [replace(part, content=(self._request.prompt or "") + part.content) for part in parts]
        await send_reply(send, whole(self._known_head(), parts, collected.scored, answers), threads)

    async def _decode(self, reader: Reader) -> list[Done]:
        service = self._service
        try:
            async with (
                asyncio.timeout(self._budget.left_s),
                service.queue.turn(self._size, self._owner if len(service.access.keys) > 1 else None),
                service.keeper.use() as loaded,
            ):
                is_chat, warnings = self._request.is_chat, await self._compiled(loaded)
                self._head = Head(
                    id=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
                    created=int(time.time()),
                    model=service.names[0],
                    fingerprint=fingerprint(loaded.engine.plan),
                    is_chat=is_chat,
                    warnings=warnings,
                )
                return await decode(self._request, self._owner, loaded, reader, self._budget)
        except TimeoutError:
            message = f"the answer took longer than {LONGEST_REQUEST_S:.0f} s"
            raise ApiError(message, status=504, code="timeout") from None

    async def _compiled(self, loaded: LoadedEngine) -> tuple[str, ...]:
        """Compile the form of the answers before a session is taken. Returns what of it is not kept."""
        request = self._request
        asked = Asked(form=request.form, tools=request.tools, tool_choice=request.tool_choice)
        return await loaded.forms.compile(loaded.engine, asked, self._owner, self._budget)


def as_api_error(error: Exception, param: str | None = None) -> ApiError:
    """The answer to any failure. An unexpected one says its type only: its text may be of another request.

    ``param`` is the request's field with the prompt.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EdgespecError):
        return api_error(error, param)
    if isinstance(error, HTTPException):
        message = f"{error.detail.lower()}: see /openapi.json"
        return ApiError(message, status=error.status_code, code="method_not_allowed")
    return ApiError(f"something unexpected went wrong: {type(error).__name__}", status=500, code="internal_error")


def _not_found(path: str) -> ApiError:
    plain = "/" + "/".join(filter(None, path.split("/")))
    near = next((each for each in (plain, f"/v1{plain}", plain.removeprefix("/v1")) if each in PATHS), None)
    advice = "see /openapi.json" if near is None else f"use {near}"
    return ApiError(f"{path[:64]!r} is not served here: {advice}", status=404, code="not_found")


async def _fail(request: HttpRequest, error: Exception) -> Response:
    not_found = isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND
    failure = _not_found(request.scope["path"]) if not_found else as_api_error(error)
    request.scope["edgespec.error"] = failure
    headers = {name.decode(): value.decode() for name, value in failure.headers()}
    if isinstance(error, HTTPException) and error.headers is not None:
        headers |= error.headers
    return Response(failure.body(), status_code=failure.status, headers=headers)


class Guard:
    """The outermost layer: Host and Origin, the log, the counters, and failures of everything below."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started, status = time.perf_counter(), 0

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-content-type-options", b"nosniff")]
            try:
                async with self._service.queue.writing(LONGEST_WRITE_S):
                    await send(message)
            except TimeoutError:
                raise GoneError from None

        try:
            self._service.access.check_browser(_values(scope, b"host"), _values(scope, b"origin"))
            await self._app(scope, receive, sending)
        except GoneError:
            scope["edgespec.error"] = "the client left"
        except Exception as error:
            scope["edgespec.error"] = failure = as_api_error(error)
            if not status:
                await sending({"type": "http.response.start", "status": failure.status, "headers": failure.headers()})
                await sending({"type": "http.response.body", "body": failure.body()})
        finally:
            self._record(scope, status, time.perf_counter() - started)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in PATHS else "other"
        answers = scope.get("edgespec.answers", ())
        self._service.metrics.count(path, status, answers)
        client, error = scope.get("client"), scope.get("edgespec.error")
        if isinstance(error, ApiError):
            error = error.logged if self._service.content is None else error.message
        self._service.log(
            RequestLine(
                client="?" if client is None else str(client[0]),
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=seconds,
                answers=answers,
                error=error,
                kept_in_part=bool(scope.get("edgespec.warnings")),
            )
        )


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/openapi.json")


def make_app(service: Service) -> Guard:
    """The ASGI application."""
    created = int(time.time())

    def answering(read: BodyParser) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def endpoint(request: HttpRequest) -> Response:
            owner = service.access.owner(request.headers)
            keeper = service.keeper
            budget = RequestBudget(keeper.context_length, LONGEST_REQUEST_S)
            try:
                parsed, size = await service.bodies.read(request, read, budget, keeper.threads)
            except GoneError:
                return Left()
            service.check_model(parsed.model)
            return Answering(service, parsed, owner, size, budget)

        return endpoint

    def described(name: str) -> dict[str, Any]:
        engine = service.keeper.engine
        meta = None if engine is None else {"n_ctx": engine.plan.context_length, "plan": engine.plan.mode}
        return {"id": name, "object": "model", "created": created, "owned_by": "edgespec", "meta": meta}

    async def models(request: HttpRequest) -> Response:
        service.access.owner(request.headers)
        return JSONResponse({"object": "list", "data": [described(service.names[0])]})

    async def model(request: HttpRequest) -> Response:
        service.access.owner(request.headers)
        service.check_model(request.path_params["name"])
        return JSONResponse(described(service.names[0]))

    async def health(request: HttpRequest) -> Response:
        state = service.keeper.state
        if service.queue.draining:
            return JSONResponse({"status": "shutting down"}, status_code=503)
        if state in ("ready", "unloaded"):  # an unloaded model is loaded by the next request
            return JSONResponse({"status": "ok", "model": state})
        error = service.keeper.error
        about: dict[str, str] = {"status": state}
        if error is not None:
            with contextlib.suppress(ApiError):  # it may name files: not for everyone
                service.access.owner(request.headers)
                about["message"] = error.message
        return JSONResponse(about, status_code=503)

    async def metrics(request: HttpRequest) -> Response:
        service.access.owner(request.headers)
        return PlainTextResponse(service.metrics.text(_gauges(service)), media_type="text/plain; version=0.0.4")

    async def openapi(request: HttpRequest) -> Response:
        return JSONResponse(document())

    failures: Mapping[Any, Any] = dict.fromkeys((ApiError, EdgespecError, HTTPException, Exception), _fail)
    app: Any = Starlette(
        routes=[
            Route("/v1/chat/completions", answering(read_chat), methods=["POST"]),
            Route("/v1/completions", answering(read_completion), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/openapi.json", openapi),
        ],
        exception_handlers=failures,
    )
    app.router.redirect_slashes = False  # a redirect would name the sender's Host
    if service.access.origins:
        app = CORSMiddleware(
            app,
            allow_origins=service.access.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,  # Chrome asks for it when a public page uses a server on this machine
        )
    return Guard(app, service)


def _gauges(service: Service) -> dict[str, int]:
    return {
        "requests_running": service.queue.running,
        "requests_waiting": service.queue.waiting,
        "sessions_kept": service.keeper.kept_sessions,
        "connections": service.connections(),
        "model_loaded": int(service.keeper.state == "ready"),
        "model_loads_total": service.keeper.loads,
    }
