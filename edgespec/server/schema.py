"""Requests as data: which fields the server reads, their types and bounds. Pure functions.

A field that would change the answer and is not supported is refused; fields that only the sender uses are ignored,
and so are unknown ones: clients send many, and a refusal would stop clients that work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgespec.decoding.logprobs import MOST_TOP
from edgespec.decoding.sampling import MOST_BIASED, Sampling
from edgespec.errors import InvalidRequestError
from edgespec.server.errors import ApiError, sentence, unsupported
from edgespec.server.messages import Message, read_messages
from edgespec.server.strict_json import check_text, check_texts
from edgespec.text.conversation.tools import MOST_TOOLS, check_tools, choose_tools

# OpenAI allows 4; editors' lists for some programming languages have 19.
MOST_STOPS = 32
# Answers to one request. They are decoded one after another.
MOST_CHOICES = 16
# The share of the likeliest token is larger in any vocabulary.
_LEAST_TOP_P = 1e-9
# A smaller divisor makes scores infinite.
_LEAST_REPEAT_PENALTY = 0.01
_SEEDS = 2**64

# Number fields of a request, and the names of ``Sampling`` that they set.
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repeat_penalty",  # llama.cpp's name
    "repetition_penalty": "repeat_penalty",  # vLLM's name
}


# What llama.cpp, vLLM and Ollama call an answer of a given form.
_CONSTRAINTS = (
    *("grammar", "json_schema", "format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, checked. ``prompt`` is set for a completion, ``messages`` for a chat.

    ``sampling`` has the fields that were given: arguments of Sampling. ``seed`` None: one is drawn. ``logprobs``: how
    many of the likeliest tokens come with each log-probability; None: no log-probabilities. The session checks
    ``tools`` and ``tool_choice``, whose texts are readable.
    """

    model: str | None
    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    think: bool = True
    logprobs: int | None = None
    tools: tuple[Any, ...] = ()
    tool_choice: Any = None
    echo: bool = False

    @property
    def is_chat(self) -> bool:
        return self.prompt is None


def read_chat(body: Mapping[str, Any]) -> Request:
    """A body of /v1/chat/completions. Raises ApiError."""
    _refuse_chat(body)
    return Request(
        messages=read_messages(body.get("messages")),
        max_tokens=_first(body, ("max_completion_tokens", "max_tokens", "n_predict")),
        think=_think(body),
        logprobs=_logprobs(body),
        tools=(tools := _tools(body.get("tools"))),
        tool_choice=_tool_choice(body, tools),
        **_shared(body),
    )


def read_completion(body: Mapping[str, Any]) -> Request:
    """A body of /v1/completions. Raises ApiError."""
    _refuse_shared(body)
    for name, neutral in (("best_of", (1,)), ("suffix", ("",))):
        if body.get(name) is not None and body[name] not in neutral:
            raise unsupported(name, name)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise _wrong("prompt", "one text", prompt)
    if not prompt:
        raise ApiError("the prompt is empty", param="prompt")
    echo = boolean(body, "echo")
    logprobs = None if body.get("logprobs") is False else _whole(body, "logprobs", 0, MOST_TOP)
    if echo and logprobs is not None:
        raise unsupported("echo", "echo together with logprobs")
    return Request(
        prompt=check_text(prompt, "prompt"),
        max_tokens=_first(body, ("max_tokens", "max_completion_tokens", "n_predict")),
        echo=echo,
        logprobs=logprobs,
        **_shared(body),
    )


def _shared(body: Mapping[str, Any]) -> dict[str, Any]:
    options = body.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise _wrong("stream_options", "an object", options)
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise _wrong("model", "text", model)
    sampling: dict[str, Any] = {
        own: value for name, own in _SAMPLING.items() if (value := _number(body, name)) is not None
    }
    if (top_k := _whole(body, "top_k", -1, 2**31 - 1)) is not None:
        sampling["top_k"] = max(top_k, 0)  # -1 is vLLM's number for all tokens
    if sampling.get("top_p") == 0:  # OpenAI allows it: the likeliest token
        sampling["top_p"] = _LEAST_TOP_P
    if sampling.get("repeat_penalty", 1.0) < _LEAST_REPEAT_PENALTY:
        raise ApiError(f"repeat_penalty must be at least {_LEAST_REPEAT_PENALTY}", param="repeat_penalty")
    if bias := _bias(body.get("logit_bias")):
        sampling["logit_bias"] = bias
    for name, value in sampling.items():
        try:
            Sampling(**{name: value})
        except InvalidRequestError as error:
            given = next((each for each, own in _SAMPLING.items() if own == name and each in body), name)
            raise ApiError(sentence(error).replace(name, given), param=given) from None
    return {
        "model": model,
        "sampling": sampling,
        "seed": _seed(body),
        "stop": _stops(body.get("stop")),
        "choices": _whole(body, "n", 1, MOST_CHOICES) or 1,
        "stream": boolean(body, "stream"),
        "include_usage": boolean(options or {}, "include_usage"),
    }


def _refuse_chat(body: Mapping[str, Any]) -> None:
    _refuse_shared(body)
    if body.get("functions"):
        raise unsupported("functions", "functions, which tools replaced,")
    modalities = body.get("modalities")
    if modalities is not None and modalities != ["text"]:
        raise unsupported("modalities", "an output other than text")


def _refuse_shared(body: Mapping[str, Any]) -> None:
    wanted = body.get("response_format")
    if wanted is not None:
        kind = wanted.get("type") if isinstance(wanted, Mapping) else None
        if kind != "text":
            raise unsupported("response_format", f"response_format {json.dumps(kind)[:40]}")
    for name in _CONSTRAINTS:
        if body.get(name):
            raise unsupported(name, f"{name} (constrained output)")


def _think(body: Mapping[str, Any]) -> bool:
    """Whether the model may think first: ``chat_template_kwargs.enable_thinking``, as llama.cpp and vLLM have it.

    Also Ollama's ``think`` and OpenAI's ``reasoning_effort``.
    """
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, Mapping):
        raise _wrong("chat_template_kwargs", "an object", given)
    if body.get("reasoning_effort") == "none" or body.get("think") is False:
        return False
    return boolean(given or {}, "enable_thinking", usual=True)


def _logprobs(body: Mapping[str, Any]) -> int | None:
    top = _whole(body, "top_logprobs", 0, MOST_TOP)
    if boolean(body, "logprobs"):
        return top or 0
    if top:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return None


def _tools(given: object) -> tuple[Any, ...]:
    if given is not None and not isinstance(given, list):
        raise _wrong("tools", "a list", given)
    if given and len(given) > MOST_TOOLS:
        raise ApiError(f"there are {len(given)} tools; at most {MOST_TOOLS} are allowed", param="tools")
    return tuple(check_texts(given or [], "tools"))


def _tool_choice(body: Mapping[str, Any], tools: tuple[Any, ...]) -> Any:
    choice = check_texts(body.get("tool_choice"), "tool_choice")
    try:
        own = check_tools(tools)
    except InvalidRequestError as error:
        raise ApiError(sentence(error), param="tools") from None
    try:
        choose_tools(own, choice)
    except InvalidRequestError as error:
        raise ApiError(sentence(error), param="tool_choice", code="unsupported_parameter") from None
    return choice if tools else None


def _bias(given: object) -> dict[int, float]:
    """Numbers to add to the scores of tokens, which JSON names by their ids as text."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise _wrong("logit_bias", "an object", given)
    if len(given) > MOST_BIASED:
        raise ApiError(f"logit_bias names {len(given)} tokens; at most {MOST_BIASED} are allowed", param="logit_bias")
    if not all(token.isdecimal() and token.isascii() and len(token) < 10 for token in given):
        raise ApiError("logit_bias names tokens by their ids", param="logit_bias")
    if any(isinstance(bias, bool) or not isinstance(bias, int | float) for bias in given.values()):
        raise ApiError("logit_bias gives each token a number", param="logit_bias")
    return {int(token): bias for token, bias in given.items()}


def _stops(given: object) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise _wrong("stop", "a text or a list of texts", given)
    if len(stops) > MOST_STOPS:
        raise ApiError(f"stop has {len(stops)} texts; at most {MOST_STOPS} are allowed", param="stop")
    return tuple(check_text(each, "stop") for each in stops if each)


def _seed(body: Mapping[str, Any]) -> int | None:
    """The seed; -1 means none, as in llama.cpp. Other negative ones are those of OpenAI's 64-bit integers."""
    seed = _whole(body, "seed", -_SEEDS // 2, _SEEDS - 1)
    return None if seed in (-1, None) else seed % _SEEDS


def _first(body: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of these numbers of tokens that is given; -1 means no limit, as in llama.cpp."""
    values = [(name, _whole(body, name, -1, 2**31 - 1)) for name in names]  # all are checked
    for name, value in values:
        if value == 0:
            raise ApiError(f"{name} must be at least 1, not 0", param=name)
    given = next((value for _, value in values if value is not None), None)
    return None if given == -1 else given


def boolean(body: Mapping[str, Any], name: str, *, usual: bool = False) -> bool:
    """A field that is true or false; ``usual`` if it is absent or null. Raises ApiError."""
    value = body.get(name)
    if value is None:
        return usual
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def _number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise _wrong(name, "a number", value)
    if isinstance(value, int) and abs(value) > 2**53:
        raise ApiError(f"{name} is too large", param=name)
    return value


def _whole(body: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():  # JSON has one kind of number
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, "a whole number", value)
    if not least <= value <= most:
        raise ApiError(f"{name} must be {least} to {most}", param=name)
    return value


def _wrong(name: str, wanted: str, value: object) -> ApiError:
    given = "missing" if value is None else f"not {json.dumps(value)[:40]}"
    return ApiError(f"{name} must be {wanted}{', ' if value is not None else ' and is '}{given}", param=name)


Reader = Callable[[Mapping[str, Any]], Request]
