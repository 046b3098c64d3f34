"""Requests as data. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgespec.server.errors import ApiError, unsupported
from edgespec.server.fields import read_fields
from edgespec.server.forms import AskedForm
from edgespec.server.messages import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, checked. ``prompt`` is set for a completion, ``messages`` for a chat.

    ``sampling`` has the fields that were given: arguments of Sampling. ``seed`` None: one is drawn. ``logprobs``: how
    many of the likeliest tokens come with each log-probability; None: no log-probabilities. The session checks
    ``tools`` and ``tool_choice``, whose texts are readable.
    """

    model: str | None = None
    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int | None = None
    max_tokens: int | None = None
    form: AskedForm | None = None
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    tools: tuple[Any, ...] = ()
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    echo: bool = False

    @property
    def is_chat(self) -> bool:
        return self.prompt is None


def read_chat(body: Mapping[str, Any]) -> Request:
    """A body of /v1/chat/completions. Raises ApiError."""
    found = read_fields("chat", body)
    top = found.pop("top_logprobs", 0)
    if found.pop("logprobs", False):
        found["logprobs"] = top
    elif top:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return _request(found)


def read_completion(body: Mapping[str, Any]) -> Request:
    """A body of /v1/completions. Raises ApiError."""
    found = read_fields("completion", body)
    if found.get("echo") and "logprobs" in found:
        raise unsupported("echo", "echo together with logprobs")
    return _request(found)


def _request(found: dict[str, Any]) -> Request:
    if found.get("max_tokens") == -1:  # no limit, as in llama.cpp
        del found["max_tokens"]
    return Request(**found)


Reader = Callable[[Mapping[str, Any]], Request]
