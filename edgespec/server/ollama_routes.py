"""The routes of Ollama's API that say something about the model, and those of all APIs that are not served."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.server.errors import ApiError
from edgespec.server.faces import ollama_about
from edgespec.server.faces.face import LINES
from edgespec.server.faces.ollama import line
from edgespec.server.keeper import ModelKeeper
from edgespec.server.model_card import ModelCard, card_before_loading, card_of
from edgespec.server.service import Endpoint, Read, Served, Service

_STORE = "models are not changed over HTTP"
_PULL = f"{_STORE}: use `edgespec pull MODEL`, then `edgespec serve MODEL`"
_EXPORT = "edgespec export MODEL --to gguf -o DIR"
_EMBEDDINGS = "embeddings and ranking are not supported: the served model answers in text"
# Routes that are not served, with their methods, and what to do instead.
NOT_SERVED: Mapping[str, tuple[str, str]] = {
    "/api/push": ("POST", f"{_STORE}, and edgespec publishes none: `{_EXPORT}` writes the files"),
    "/api/create": ("POST", f"{_STORE}: use `{_EXPORT}` to write one in another form"),
    "/api/copy": ("POST", f"{_STORE}: `edgespec serve MODEL --alias NAME` gives it another name"),
    "/api/delete": ("DELETE", f"{_STORE}: use `edgespec models rm MODEL`"),
    "/api/blobs/{digest}": ("POST", f"{_STORE}: use `edgespec pull MODEL`"),
    "/api/embed": ("POST", _EMBEDDINGS),
    "/api/embeddings": ("POST", _EMBEDDINGS),
    "/v1/embeddings": ("POST", _EMBEDDINGS),
    "/embedding": ("POST", _EMBEDDINGS),
    "/v1/rerank": ("POST", _EMBEDDINGS),
    "/v1/reranking": ("POST", _EMBEDDINGS),
}


class _Cards:
    """The cards of the served models, also while they are not loaded."""

    def __init__(self, service: Service) -> None:
        self._cards = dict[ModelKeeper, ModelCard]()
        for each in service.models:
            each.keeper.on_load = partial(self._loaded, each.keeper)

    def _loaded(self, keeper: ModelKeeper, engine: Engine) -> None:
        self._cards[keeper] = card_of(engine)

    async def of(self, keeper: ModelKeeper) -> ModelCard:
        """The model's card. Waits for the first loading if the file is not known before. Raises what both raise."""
        if keeper not in self._cards:
            if keeper.locate is None:
                async with keeper.use():
                    pass
            else:
                card = await keeper.threads.run(partial(card_before_loading, keeper.locate, keeper.context_length))
                self._cards.setdefault(keeper, card)
        return self._cards[keeper]


def ollama_routes(service: Service) -> list[Route]:
    """All but those that answer."""
    cards = _Cards(service)

    async def version(request: HttpRequest) -> Response:
        return JSONResponse(ollama_about.version())

    async def tags(request: HttpRequest) -> Response:
        service.access.owner(request.headers)
        found = []
        for each in service.models:
            try:
                found.append(ollama_about.listed(each.names[0], await cards.of(each.keeper)))
            except EdgespecError:  # removed or damaged since: requests for it say so, and the others are listed
                if not service.others:
                    raise
        return JSONResponse({"models": found})

    async def ps(request: HttpRequest) -> Response:
        service.access.owner(request.headers)
        loaded = [(each, engine) for each in service.models if (engine := each.keeper.engine) is not None]
        return JSONResponse(
            {"models": [_running(each, engine, await cards.of(each.keeper)) for each, engine in loaded]}
        )

    async def show(read: Read[str]) -> Response:
        keeper = service.check_model(read.asked).keeper
        return JSONResponse(ollama_about.shown(read.asked, await cards.of(keeper)))

    async def pull(read: Read[tuple[str, bool]]) -> Response:
        name, stream = read.asked
        if not any(each.is_named(name) for each in service.models):
            raise ApiError(_PULL, status=501, code="not_implemented")
        done = {"status": "success"}
        return Response(line(done), media_type=LINES) if stream else JSONResponse(done)

    return [
        Route("/api/version", version),
        Route("/api/tags", tags),
        Route("/api/ps", ps),
        Route("/api/show", service.endpoint(ollama_about.read_show, show), methods=["POST"]),
        Route("/api/pull", service.endpoint(ollama_about.read_pull, pull), methods=["POST"]),
        *(Route(path, _not_served(service, why), methods=[method]) for path, (method, why) in NOT_SERVED.items()),
    ]


def _running(served: Served, engine: Engine, card: ModelCard) -> dict[str, Any]:
    memory, left_s = engine.memory, served.keeper.expires_in_s
    on_gpu = max(0, card.weight_bytes - memory["target_weights_bytes"])
    return ollama_about.running(
        served.names[0],
        card,
        memory_bytes=memory["taken_bytes"] + on_gpu,
        gpu_bytes=on_gpu,
        expires_at=None if left_s is None else time.time() + left_s,
    )


def _not_served(service: Service, why: str) -> Endpoint:
    async def endpoint(request: HttpRequest) -> Response:
        service.access.owner(request.headers)
        raise ApiError(why, status=501, code="not_implemented")

    return endpoint
