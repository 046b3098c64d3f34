"""What clients of llama.cpp's server ask besides answers: ``/props``, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgespec import __version__
from edgespec.server.errors import ApiError
from edgespec.server.keeper import LoadedEngine
from edgespec.server.service import Endpoint, Read, Service
from edgespec.server.strict_json import check_text

T = TypeVar("T")


def routes(service: Service) -> list[Route]:
    """The three routes. All of them ask for the key if there is one."""

    async def props(request: HttpRequest) -> Response:
        owner = service.access.owner(request.headers)
        own = service.check_model(request.query_params.get("model"), any_model=True)
        async with own.keeper.use(owner) as loaded:
            return JSONResponse(_props(own, loaded))

    def about(read: Callable[[Mapping[str, Any]], T], said: Callable[[LoadedEngine, T], dict[str, Any]]) -> Endpoint:
        async def reply(found: Read[tuple[str | None, T]]) -> Response:
            name, asked = found.asked
            keeper = service.check_model(name, any_model=True).keeper
            async with keeper.use(found.owner) as loaded:
                return JSONResponse(await keeper.threads.run(lambda: said(loaded, asked)))

        return service.endpoint(lambda body: (_read_model(body), read(body)), reply)

    return [
        Route("/props", props),
        Route("/tokenize", about(_read_content, _tokens), methods=["POST"]),
        Route("/detokenize", about(_read_tokens, _content), methods=["POST"]),
    ]


def _props(service: Service, loaded: LoadedEngine) -> dict[str, Any]:
    """Without the path of the model's file: clients see its name."""
    engine = loaded.engine
    prompts = engine.pair.prompts
    return {
        "default_generation_settings": {"id": 0, "n_ctx": engine.plan.context_length, "params": {}},
        "total_slots": service.queue.most_running,
        "model_alias": service.names[0],
        "model_path": service.names[0],
        "modalities": {"vision": False, "audio": False},
        "chat_template": prompts.template_source or "",
        "bos_token": engine.tokenizer.bos_token,
        "eos_token": engine.tokenizer.eos_token,
        "build_info": f"edgespec {__version__}",
    }


def _read_model(body: Mapping[str, Any]) -> str | None:
    name = body.get("model")
    if not isinstance(name, str | None):
        raise ApiError("model must be text", param="model")
    return name


def _read_content(body: Mapping[str, Any]) -> tuple[str, bool, bool]:
    content = body.get("content", "")
    if not isinstance(content, str):
        raise ApiError("content must be text", param="content")
    flags = [body.get(name, usual) for name, usual in (("add_special", False), ("parse_special", True))]
    if not all(isinstance(flag, bool) for flag in flags):
        raise ApiError("add_special and parse_special must be true or false", param="add_special")
    return check_text(content, "content"), flags[0], flags[1]


def _tokens(loaded: LoadedEngine, asked: tuple[str, bool, bool]) -> dict[str, Any]:
    content, add_bos, special = asked
    return {"tokens": loaded.engine.tokenizer.encode(content, special=special, add_bos=add_bos)}


def _read_tokens(body: Mapping[str, Any]) -> list[int]:
    tokens = body.get("tokens", [])
    if not isinstance(tokens, list) or not all(type(each) is int and each >= 0 for each in tokens):
        raise ApiError("tokens must be a list of token ids", param="tokens")
    return tokens


def _content(loaded: LoadedEngine, tokens: list[int]) -> dict[str, Any]:
    size = loaded.engine.tokenizer.vocabulary_size
    if (highest := max(tokens, default=0)) >= size:
        raise ApiError(f"token {highest} does not exist: this model's tokens are 0 to {size - 1}", param="tokens")
    return {"content": loaded.engine.tokenizer.detokenize(tokens)}
