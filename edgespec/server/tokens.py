"""What clients of llama.cpp's server ask besides answers: ``/props``, ``/tokenize`` and ``/detokenize``.

``/tokenize`` reads vLLM's bodies too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgespec import __version__
from edgespec.server.counting import prompt_ids
from edgespec.server.errors import ApiError, unsupported
from edgespec.server.faces.openai import read_chat
from edgespec.server.keeper import LoadedEngine
from edgespec.server.schema import Request
from edgespec.server.service import Read, Service
from edgespec.server.strict_json import check_text
from edgespec.text.tokenizers.tokenizer import Tokenizer

# What /tokenize may be asked for, and what it does if it is not.
FLAGS = {"add_special": False, "parse_special": True, "with_pieces": False}


def routes(service: Service) -> list[Route]:
    """The three routes. All of them ask for the key if there is one."""

    async def props(request: HttpRequest) -> Response:
        owner = service.access.owner(request.headers)
        own = service.check_model(request.query_params.get("model"), any_model=True)
        async with own.keeper.use(owner) as loaded:
            return JSONResponse(_props(own, loaded))

    async def tokenize(read: Read[_Text]) -> Response:
        keeper = service.check_model(read.asked.model, any_model=True).keeper
        found = await service.count(read, keeper, lambda loaded: _tokens(loaded, read.asked, read.budget.left_s))
        return JSONResponse(found)

    async def detokenize(read: Read[tuple[str | None, list[int]]]) -> Response:
        name, tokens = read.asked
        keeper = service.check_model(name, any_model=True).keeper
        return JSONResponse(await service.count(read, keeper, lambda loaded: _content(loaded, tokens)))

    return [
        Route("/props", props),
        Route("/tokenize", service.endpoint(_read_text, tokenize), methods=["POST"]),
        Route("/detokenize", service.endpoint(_read_tokens, detokenize), methods=["POST"]),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """A text whose tokens are asked for, or a chat whose prompt is the text.

    ``with_number``: the reply has the number of tokens as well, and the context's length.
    """

    model: str | None
    text: str | Request
    add_bos: bool = False
    special: bool = True
    with_pieces: bool
    with_number: bool


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


def _read_text(body: Mapping[str, Any]) -> _Text:
    """A body of llama.cpp's clients, which has a ``content``, or of vLLM's: a ``prompt`` or a chat's ``messages``."""
    name = next((each for each in ("content", "prompt", "messages") if body.get(each) is not None), "content")
    model, with_pieces = _read_model(body), _flag(body, "with_pieces", FLAGS["with_pieces"])
    if body.get("return_token_strs"):
        raise unsupported("return_token_strs", "a second list, of the tokens' texts")
    if name == "messages":
        return _Text(model=model, text=read_chat(body), with_pieces=with_pieces, with_number=True)
    text = body.get(name, "")
    if not isinstance(text, str):
        raise ApiError(f"{name} must be text", param=name)
    begins, usual = ("add_special", FLAGS["add_special"]) if name == "content" else ("add_special_tokens", True)
    return _Text(
        model=model,
        text=check_text(text, name),
        add_bos=_flag(body, begins, usual),
        special=_flag(body, "parse_special", FLAGS["parse_special"]),
        with_pieces=with_pieces,
        with_number=name == "prompt",
    )


def _flag(body: Mapping[str, Any], name: str, usual: bool) -> bool:
    flag = body.get(name, usual)
    if not isinstance(flag, bool):
        raise ApiError(f"{name} must be true or false", param=name)
    return flag


def _tokens(loaded: LoadedEngine, asked: _Text, seconds: float) -> dict[str, Any]:
    tokenizer = loaded.engine.tokenizer
    if isinstance(asked.text, Request):
        found = prompt_ids(loaded, asked.text, seconds)
    else:
        found = tokenizer.encode(asked.text, special=asked.special, add_bos=asked.add_bos)
    pieces = [{"id": each, "piece": _piece(tokenizer, each)} for each in found] if asked.with_pieces else found
    number = {"count": len(found), "max_model_len": loaded.engine.plan.context_length} if asked.with_number else {}
    return {"tokens": pieces, **number}


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """A token's text; its bytes if they are a part of a character."""
    control = tokenizer.control_token(token)
    data = tokenizer.token_bytes(token) if control is None else control.text.encode()
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _read_tokens(body: Mapping[str, Any]) -> tuple[str | None, list[int]]:
    tokens = body.get("tokens", [])
    if not isinstance(tokens, list) or not all(type(each) is int and each >= 0 for each in tokens):
        raise ApiError("tokens must be a list of token ids", param="tokens")
    return _read_model(body), tokens


def _content(loaded: LoadedEngine, tokens: list[int]) -> dict[str, Any]:
    size = loaded.engine.tokenizer.vocabulary_size
    if max(tokens, default=0) >= size:
        raise ApiError(f"a token does not exist: this model's are 0 to {size - 1}", param="tokens")
    return {"content": loaded.engine.tokenizer.detokenize(tokens)}
