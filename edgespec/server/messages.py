"""A client's messages as the conversation that a session reads. Pure functions.

Clients send more shapes than templates know: contents in parts, the role ``developer``, several system messages, and
two messages of one role in a row. These are joined; whatever else a session would refuse is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from edgespec.server.errors import ApiError, unsupported
from edgespec.server.strict_json import check_text

Message = dict[str, str]

# More turns than the longest context has room for at a few tokens a turn.
MOST_MESSAGES = 10_000

_JOINED_BY = "\n\n"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def read_messages(given: object) -> tuple[Message, ...]:
    """A system message if there is one, then user and assistant alternately, the user's last. Raises ApiError."""
    if not isinstance(given, list) or not given:
        raise ApiError("messages must be a list with at least one message", param="messages")
    if len(given) > MOST_MESSAGES:
        raise ApiError(f"there are {len(given)} messages; at most {MOST_MESSAGES} are allowed", param="messages")
    messages = [_message(each, f"messages[{number}]") for number, each in enumerate(given)]
    joined = [
        {"role": role, "content": _JOINED_BY.join(each["content"] for each in same if each["content"])}
        for role, same in groupby(messages, lambda message: message["role"])
    ]
    others = joined[1:] if joined[0]["role"] == "system" else joined
    if any(each["role"] == "system" for each in others):
        raise ApiError("a system message must come before all others", param="messages")
    if not others or others[0]["role"] != "user":
        raise ApiError("the conversation must begin with a user message", param="messages")
    if others[-1]["role"] != "user":
        raise ApiError("the last message must be a user message", param="messages")
    if not others[-1]["content"].strip():
        raise ApiError("the last message is empty", param="messages")
    return tuple(each for each in joined if each["role"] != "system" or each["content"])


def _message(given: object, param: str) -> Message:
    if not isinstance(given, Mapping):
        raise ApiError(f"{param} must be an object", param=param)
    role = given.get("role")
    if not isinstance(role, str):
        raise ApiError(f"{param} has no role", param=param)
    if role in ("tool", "function") or given.get("tool_calls") or given.get("function_call"):
        raise unsupported(param, f"a message with a tool call ({param})")
    if role not in _ROLES:
        raise ApiError(f"{param} has the unknown role {role[:32]!r}", param=param)
    return {"role": _ROLES[role], "content": check_text(_content(given.get("content"), param), param)}


def _content(given: Any, param: str) -> str:
    if given is None:
        return ""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise ApiError(f"the content of {param} must be text or a list of parts", param=param)
    texts = []
    for part in given:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text"):
            raise unsupported(param, f"a part of the type {str(kind)[:32]!r} ({param})")
        if not isinstance(part.get("text"), str):
            raise ApiError(f"a text part of {param} has no text", param=param)
        texts.append(part["text"])
    return "".join(texts)
