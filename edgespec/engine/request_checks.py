"""Checks of a session's arguments that do not depend on the model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from edgespec.decoding.logprobs import MOST_TOP
from edgespec.decoding.sampling import Sampling
from edgespec.engine.answer import StopStrings
from edgespec.engine.tool_checks import Message, check_message
from edgespec.errors import InvalidRequestError


def check_request(
    prompt: str | None,
    *,
    max_tokens: int | None = None,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    depth: int | None = None,
    raw: bool = False,
    logprobs: int | None = None,
) -> str:
    """The prompt. Raises InvalidRequestError for arguments of ``Session.generate`` that no model accepts."""
    if not isinstance(prompt, str):
        raise InvalidRequestError(
            f"the prompt must be text, not {_kind(prompt)}", hint="a whole conversation is given as messages="
        )
    if not raw and not prompt.strip():
        raise InvalidRequestError("the prompt is empty", hint="give at least one character")
    for name, value, least in (("max_tokens", max_tokens, 1), ("depth", depth, 0), ("logprobs", logprobs, 0)):
        if value is not None and (not isinstance(value, Integral) or isinstance(value, bool)):
            raise InvalidRequestError(f"{name} must be a whole number, not {_kind(value)}")
        if value is not None and value < least:
            raise InvalidRequestError(f"{name} must be {f'at least {least}' if least else '0 or more'}, not {value}")
    if logprobs is not None and logprobs > MOST_TOP:
        raise InvalidRequestError(f"logprobs can be at most {MOST_TOP}, not {logprobs}")
    if sampling is not None and not isinstance(sampling, Sampling):
        raise InvalidRequestError(
            f"sampling must be a Sampling, not {_kind(sampling)}", hint="for example Sampling(temperature=0.7)"
        )
    if not isinstance(stop, Sequence) or not all(isinstance(each, str) for each in stop):
        raise InvalidRequestError(f"stop strings must be a list of texts, not {_kind(stop)}")
    StopStrings(stop)
    return prompt


def check_bias(sampling: Sampling, vocabulary_size: int) -> None:
    """Raise InvalidRequestError if the sampling's bias names a token that the model does not have."""
    highest = max(dict(sampling.logit_bias), default=0)
    if highest >= vocabulary_size:
        raise InvalidRequestError(
            f"logit_bias names token {highest}, and this model's tokens are 0 to {vocabulary_size - 1}"
        )


def check_conversation(
    prompt: str | None, messages: Sequence[Mapping[str, Any]], *, raw: bool
) -> tuple[str, list[Message], list[Message]]:
    """The last user message's text, the messages before it and those after it: calls and their results.

    Raises InvalidRequestError for any other conversation.
    """
    if prompt is not None or raw:
        raise InvalidRequestError(
            "messages were given together with a prompt" if prompt is not None else "messages cannot be raw",
            hint="the last of the messages is the prompt",
        )
    if not (messages := _listed(messages)):
        raise InvalidRequestError(
            "the conversation has no message", hint="give a list with at least one user message"
        )
    messages = list(messages)  # another thread may change the caller's list
    first = messages[0]
    system = isinstance(first, Mapping) and first.get("role") == "system"
    if system and not isinstance(first.get("content"), str):
        raise InvalidRequestError("the system message must be text")
    head = [{"role": "system", "content": first["content"]}] if system else []
    turns = _checked(messages[system:], int(system), "user and assistant messages alternate, the user's first")
    if not turns or turns[-1]["role"] == "assistant":
        raise InvalidRequestError(
            "the conversation does not end with a user message", hint="or with the result of a call, in the role tool"
        )
    last = max(place for place, message in enumerate(turns) if message["role"] == "user")
    return turns[last]["content"], head + turns[:last], turns[last + 1 :]


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages in their usual form. Raises InvalidRequestError unless prompts and their answers alternate."""
    hint = "user and assistant messages alternate, the user's first; pass a system message as system="
    own = _checked(_listed(messages), 0, hint)
    if own and own[-1]["role"] != "assistant":
        raise InvalidRequestError("the conversation ends with a prompt", hint="pass that prompt to generate")
    return own


def check_path(path: object) -> Path:
    """The path of a file, behind a link: what is saved replaces the file. Raises InvalidRequestError."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise InvalidRequestError(f"a file's path must be text or a Path, not {_kind(path)}")
    file = Path(path)
    return file.resolve() if file.is_symlink() else file


def _listed(messages: object) -> Sequence[Mapping[str, Any]]:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages must be a list, not {type(messages).__name__}", hint="give a list of mappings, such as dicts"
        )
    return messages


# The roles that may follow a role. Results follow calls; the user may also ask without them.
_NEXT = {"": ("user",), "user": ("assistant",), "assistant": ("user",), "tool": ("tool", "assistant", "user")}


def _checked(messages: Sequence[Mapping[str, Any]], first: int, hint: str) -> list[Message]:
    """The messages in their usual form; ``first`` is the number of the first of them."""
    own, open_calls, role = list[Message](), list[Message](), ""
    for number, message in enumerate(messages, first):
        allowed = ("tool", "user") if open_calls and role == "assistant" else _NEXT[role]
        given = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        calls = given == "assistant" and content is None and message.get("tool_calls")
        where = f"message {number} of the conversation"
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"{where} is not a mapping with a role and a content, but {_kind(message)}")
        if given not in allowed:
            wanted = " or ".join(allowed)
            raise InvalidRequestError(f"{where} has the role {given!r:.40} where {wanted} is expected", hint=hint)
        if not (isinstance(content, str) or calls):
            raise InvalidRequestError(f"the content of {where} must be text, not {_kind(content)}")
        role = str(given)
        own.append(check_message(number, message, open_calls))
        if role == "tool":
            open_calls = [call for call in open_calls if call["id"] != own[-1]["tool_call_id"]]
        else:
            open_calls = own[-1].get("tool_calls", [])
    return own


def check_system(text: object) -> None:
    """Raise InvalidRequestError unless the system message is text or None."""
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"the system message must be text, not {type(text).__name__}")


def _kind(value: object) -> str:
    """The given value as Python shows it, for a message."""
    return "None" if value is None else f"{type(value).__name__} {value!r:.40}"


def busy() -> InvalidRequestError:
    """The error for a request during an answer."""
    return InvalidRequestError(
        "this session is already generating an answer", hint="wait for its end, or open another session"
    )
