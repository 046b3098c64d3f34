"""Checks of a conversation's messages, which may come from anywhere. What they return is a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.errors import InvalidRequestError
from edgespec.text.conversation.tools import Message, check_message


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
    last = max(index for index, message in enumerate(turns) if message["role"] == "user")
    return turns[last]["content"], head + turns[:last], turns[last + 1 :]


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages in their usual form. Raises InvalidRequestError unless prompts and their answers alternate."""
    hint = "user and assistant messages alternate, the user's first; pass a system message as system="
    own = _checked(_listed(messages), 0, hint)
    if own and own[-1]["role"] != "assistant":
        raise InvalidRequestError("the conversation ends with a prompt", hint="pass that prompt to generate")
    return own


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
            raise InvalidRequestError(f"{where} is not a mapping with a role and a content, but {described(message)}")
        if given not in allowed:
            wanted = " or ".join(allowed)
            raise InvalidRequestError(f"{where} has the role {given!r:.40} where {wanted} is expected", hint=hint)
        if not (isinstance(content, str) or calls):
            raise InvalidRequestError(f"the content of {where} must be text, not {described(content)}")
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


def described(value: object) -> str:
    """The given value as Python shows it, for a message."""
    return "None" if value is None else f"{type(value).__name__} {value!r:.40}"
