"""The routes of the server, and what happens to every request: checks, errors, counters, one line of a log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from edgespec.errors import EdgespecError
from edgespec.server import counting, tokens
from edgespec.server.answering import Answering, as_api_error, without_answer
from edgespec.server.errors import ApiError, GoneError
from edgespec.server.faces.face import Face
from edgespec.server.faces.messages import MESSAGES
from edgespec.server.faces.table import FACES, error_shape
from edgespec.server.ollama_routes import NOT_SERVED, ollama_routes
from edgespec.server.openapi import document
from edgespec.server.page import root_route
from edgespec.server.schema import Request
from edgespec.server.service import Endpoint, Read, RequestLine, Scope, Served, Service, client_address
from edgespec.server.streaming import Receive, Send

# A client that takes nothing for this long is gone: the answer waits in memory and holds a slot.
LONGEST_WRITE_S = 60.0


def _behind_base(served: str, plain: str) -> str:
    """What clients that ask for ``plain`` put behind their base address to reach the path ``served``.

    Anthropic's put all of it there. Threads of OpenAI's have messages too, which are others.
    """
    short = served.removeprefix("/v1")
    return served if served.startswith(MESSAGES.path) and plain != short else short


def _not_found(path: str, paths: Collection[str]) -> ApiError:
    plain = "/" + "/".join(filter(None, path.split("/")))
    whole = (each for each in paths if each != "/" and "{" not in each)
    near = max((each for each in whole if plain.endswith(_behind_base(each, plain))), key=len, default="")
    advice = f"use {near}" if near else "see /openapi.json"
    if near and near != plain:  # a client was given another base address, behind which it puts its own path
        base = near.removesuffix(_behind_base(near, plain))
        advice += f" (the base address of clients is http://HOST:PORT{base})"
    if near in NOT_SERVED:
        advice = NOT_SERVED[near][1]
    if plain == "/v1":  # the address that clients are given
        advice = "the models are at /v1/models, the page for browsers at /"
    return ApiError(f"{path[:64]!r} is not served here: {advice}", status=404, code="not_found")


def _failing(paths: Collection[str]) -> Callable[[HttpRequest, Exception], Awaitable[Response]]:
    """Makes the responses to errors. ``paths`` are those of all routes."""

    async def fail(request: HttpRequest, error: Exception) -> Response:
        path = request.scope["path"]
        not_found = isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND
        failure = _not_found(path, paths) if not_found else as_api_error(error)
        request.scope["edgespec.error"] = failure
        headers = {name.decode(): value.decode() for name, value in failure.headers()}
        if isinstance(error, HTTPException) and error.headers is not None:
            headers |= error.headers
        return Response(_body(path, failure), status_code=failure.status, headers=headers)

    return fail


def _body(path: str, error: ApiError) -> bytes:
    return json.dumps(error_shape(path)(error)).encode()


class Guard:
    """The outermost layer: Host and Origin, the log, the counters, and failures of everything below."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], service: Service, paths: Collection[str]
    ) -> None:
        """``paths`` are those of all routes."""
        self._app = app
        self._service = service
        self._paths = paths

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

        hosts = _hosts(scope)
        try:
            # Links of other sites may lead to the page, which loads nothing.
            other_site = scope["path"] != "/" and "cross-site" in _values(scope, b"sec-fetch-site")
            origins = _values(scope, b"origin")
            browser = any(agent.startswith("Mozilla/") for agent in _values(scope, b"user-agent"))
            needs_host = scope["http_version"] != "1.0"
            self._service.access.check_browser(
                hosts, origins, other_site=other_site, browser=browser, needs_host=needs_host
            )
            await self._app(scope, receive, sending)
        except GoneError:
            scope["edgespec.error"] = "the client left"
        except (Exception, asyncio.CancelledError) as error:
            scope["edgespec.error"] = failure = as_api_error(error)
            if not status:
                await sending({"type": "http.response.start", "status": failure.status, "headers": failure.headers()})
                await sending({"type": "http.response.body", "body": _body(scope["path"], failure)})
        finally:
            self._record(scope, status, time.perf_counter() - started)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"
        answers, begun = scope.get("edgespec.answers", ()), scope.get("edgespec.begun", 0)
        error = scope.get("edgespec.error")
        counted = error.status if isinstance(error, ApiError) else status  # a stream begins with 200 before it fails
        self._service.metrics.count(path, counted, answers, choices=scope.get("edgespec.choices", 1), begun=begun)
        if isinstance(error, ApiError):
            error = error.logged if self._service.content is None else error.message
        self._service.log(
            RequestLine(
                client=client_address(scope),
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=seconds,
                answers=answers,
                error=error,
                kept_in_part=scope.get("edgespec.in_part", False),
                reading=scope.get("edgespec.reading"),
                begun=begun,
            )
        )


def _hosts(scope: Scope) -> list[str]:
    """What the request has as its host: that of a whole address counts, of which the scope keeps the path alone."""
    raw: bytes = scope["raw_path"]
    if raw[:7].lower() != b"http://":
        return _values(scope, b"host")
    host, _, path = raw[7:].decode("latin-1").partition("/")
    scope["path"], scope["raw_path"] = unquote(f"/{path}"), f"/{path}".encode("latin-1")
    return [host]


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def make_app(service: Service) -> Guard:
    """The ASGI application."""
    routes = [
        *(Route(face.path, _answering(face, service), methods=["POST"]) for face in FACES),
        *counting.routes(service),
        *tokens.routes(service),
        root_route(),
        *_about(service),
        *ollama_routes(service),
    ]
    paths = frozenset(route.path for route in routes)
    failures: Mapping[Any, Any] = dict.fromkeys((ApiError, EdgespecError, HTTPException, Exception), _failing(paths))
    app: Any = Starlette(routes=routes, exception_handlers=failures)
    app.router.redirect_slashes = False  # a redirect would name the sender's Host
    if service.access.origins:
        app = CORSMiddleware(
            app,
            allow_origins=service.access.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,  # Chrome asks for it when a public page uses a server on this machine
        )
    return Guard(app, service, paths)


def _answering(face: Face, service: Service) -> Endpoint:
    async def reply(read: Read[Request]) -> Response:
        own = service.check_model(read.asked.model, any_model=face.any_model)
        if not read.asked.wants_answer:
            return await without_answer(face, own, read.asked, read.owner)
        return Answering(face, own, read)

    return service.endpoint(face.read, reply, names_items=face.names_items)


def _about(service: Service) -> list[Route]:
    """The routes that say something about the model and the server."""
    created = int(time.time())
    created_at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def described(model: Service | Served) -> dict[str, Any]:
        plan = model.keeper.plan  # before the first load it depends on the memory that will be available
        meta = None if plan is None else {"n_ctx": plan.context_length, "plan": plan.mode}
        name = model.names[0]
        openai = {"id": name, "object": "model", "created": created, "owned_by": "edgespec", "meta": meta}
        return {**openai, "type": "model", "display_name": name, "created_at": created_at}  # Anthropic's members

    async def models(request: HttpRequest) -> Response:
        service.access.owner(request.headers)
        data = [described(each) for each in service.models]
        page = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}  # Anthropic's members
        # Codex asks with its version, and prints an error without such a list (openai/codex#22205).
        codex: dict[str, Any] = {"models": []} if "client_version" in request.query_params else {}
        return JSONResponse({"object": "list", "data": data, **page, **codex})

    async def model(request: HttpRequest) -> Response:
        if not request.path_params["name"]:  # the address of the list, with a slash
            return await models(request)
        service.access.owner(request.headers)
        return JSONResponse(described(service.check_model(request.path_params["name"])))

    async def health(request: HttpRequest) -> Response:
        state = service.keeper.state
        if service.queue.draining:
            return JSONResponse({"status": "shutting down"}, status_code=503)
        if service.others:  # each is loaded by the first request for it
            found: dict[str, Any] = {"status": "ok"}
            with contextlib.suppress(ApiError):  # names are not for everyone
                service.access.owner(request.headers)
                found["models"] = {each.names[0]: each.keeper.state for each in service.models}
            return JSONResponse(found)
        # An unloaded model is loaded by the next request, which waits. Only the first load may take very long.
        if state in ("ready", "unloaded") or (state == "loading" and service.keeper.loads):
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

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
    ]


def _gauges(service: Service) -> dict[str, int]:
    return {
        "requests_running": service.queue.running,
        "requests_waiting": service.queue.waiting,
        "sessions_kept": sum(each.keeper.kept_sessions for each in service.models),
        "connections": service.connections(),
        "model_loaded": sum(each.keeper.state == "ready" for each in service.models),
        "model_loads_total": sum(each.keeper.loads for each in service.models),
    }
