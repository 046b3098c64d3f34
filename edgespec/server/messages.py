"""A client's messages as the conversation that a session reads. Pure functions.

Clients send more shapes than templates know: contents in parts, the role ``developer``, several system messages, and
two messages of one role in a row. These are joined; the session itself checks tool calls and their results.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from edgespec.server.errors import ApiError, unsupported
from edgespec.server.strict_json import check_text, check_texts

Message = dict[str, Any]

# More turns than the longest context has room for at a few tokens a turn.
MOST_MESSAGES = 10_000

_JOINED_BY = "\n\n"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# The kinds of a message's parts, and the names of their texts. Refusals are those of OpenAI's models.
_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def _part(text: str) -> dict[str, Any]:
    """The schema of the parts whose text has the name ``text``."""
    members = {"type": {"enum": [kind for kind, name in _PARTS.items() if name == text]}, text: {"type": "string"}}
    return {"type": "object", "required": ["type", text], "properties": members}


_LIST = {"type": "array", "items": {"oneOf": [_part("text"), _part("refusal")]}}
_MEMBERS = {"role": {"enum": list(_ROLES)}, "content": {"oneOf": [{"type": "null"}, {"type": "string"}, _LIST]}}
_MESSAGE = {"type": "object", "required": ["role"], "properties": _MEMBERS}
# The JSON schema of messages.
MESSAGES = {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MOST_MESSAGES}


def read_messages(given: object) -> tuple[Message, ...]:
    """A system message if there is one, then user and assistant alternately, the user's last, or a call's result.

    Raises ApiError.
    """
    if not isinstance(given, list) or not given:
        raise ApiError("messages must be a list with at least one message", param="messages")
    if len(given) > MOST_MESSAGES:
        raise ApiError(f"there are {len(given)} messages; at most {MOST_MESSAGES} are allowed", param="messages")
    messages = [_message(each, f"messages[{number}]") for number, each in enumerate(given)]
    joined = [_joined(list(same)) for _, same in groupby(enumerate(_only_first_system(messages)), _kind)]
    if len(joined) > 1 and joined[-1] == {"role": "assistant", "content": ""}:
        del joined[-1]  # some clients send an empty message for the answer
    if joined[-1]["role"] == "assistant":
        raise ApiError(
            "the last message is the assistant's, and an answer cannot be continued: end with a user message, or "
            "with the result of a tool call",
            param="messages",
        )
    system = joined[:1] if joined[0]["role"] == "system" and joined[0]["content"] else []
    others = joined[joined[0]["role"] == "system" :]
    if others[0]["role"] == "assistant":  # templates begin with a user's turn
        others = [{"role": "user", "content": ""}, *others]
    if others[0]["role"] != "user":
        raise ApiError("the result of a tool call must follow the call", param="messages")
    return (*system, *others)


def _only_first_system(messages: list[Message]) -> list[Message]:
    """The messages, where only those before all others are the system's: templates know no later ones.

    Later ones are the user's, where they stand: what was said before is unchanged, and is not read again. So are
    all, if there are no others.
    """
    first = next((number for number, each in enumerate(messages) if each["role"] != "system"), 0)
    return [
        {**each, "role": "user"} if number >= first and each["role"] == "system" else each
        for number, each in enumerate(messages)
    ]


def _kind(numbered: tuple[int, Message]) -> tuple[str, int]:
    """Neighbours of one kind are joined: texts of one role, but no calls and no results."""
    number, message = numbered
    alone = message["role"] == "tool" or "tool_calls" in message
    return message["role"], number if alone else -1


def _joined(same: list[tuple[int, Message]]) -> Message:
    if len(same) == 1:
        return same[0][1]
    contents = [message["content"] for _, message in same]
    return {"role": same[0][1]["role"], "content": _JOINED_BY.join(filter(None, contents))}


def _message(given: object, param: str) -> Message:
    if not isinstance(given, Mapping):
        raise ApiError(f"{param} must be an object", param=param)
    role = given.get("role")
    if not isinstance(role, str):
        raise ApiError(f"{param} has no role", param=param)
    if role == "function" or given.get("function_call"):
        raise unsupported(param, f"a function_call, which tool_calls replaced ({param})")
    if role not in _ROLES:
        raise ApiError(f"{param} has the unknown role {role[:32]!r}", param=param)
    message = {"role": _ROLES[role], "content": check_text(_content(given.get("content"), param), param)}
    for name, of_role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if given.get(name) and role == of_role:
            message[name] = check_texts(given[name], param)
    return message


def _content(given: Any, param: str) -> str:
    if given is None:
        return ""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise ApiError(f"the content of {param} must be text or a list of parts", param=param)
    texts = []
    for part in given:
        if not isinstance(part, Mapping):
            raise ApiError(f"a part of {param} must be an object with a type", param=param)
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in _PARTS:
            raise unsupported(param, f"a part of the type {str(kind)[:32]!r} ({param})")
        text = part.get(_PARTS[kind])
        if not isinstance(text, str):
            raise ApiError(f"a text part of {param} has no text", param=param)
        texts.append(text)
    return "".join(texts)
