"""A client's messages as the conversation that a session reads: HTTP's shapes alone.

Contents may come in parts or be absent, or a refusal in place of the content. Everything else about a conversation
is read where all conversations are (``text/conversation/messages.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.errors import InvalidRequestError
from edgespec.server.errors import ApiError, sentence, unsupported
from edgespec.server.strict_json import check_texts
from edgespec.text.conversation.messages import ROLES, THINKING, check_conversation, role_of

Message = dict[str, Any]

# More turns than the longest context has room for at a few tokens a turn.
MOST_MESSAGES = 10_000

# The kinds of a message's parts, and the names of their texts. Refusals are those of OpenAI's models.
_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

# In a tool's result the parts that are not text, and what the model reads in their place: a refusal would end the
# conversation of an agent, which sends its results again and again.
LEFT_OUT = {
    kind: f"[{what} was left out: this model reads text]"
    for what, kinds in (
        ("an image", ("image", "image_url", "input_image")),
        ("a document", ("document",)),
        ("a file", ("file", "input_file")),
    )
    for kind in kinds
}


def _part(text: str) -> dict[str, Any]:
    """The schema of the parts whose text has the name ``text``."""
    members = {"type": {"enum": [kind for kind, name in _PARTS.items() if name == text]}, text: {"type": "string"}}
    return {"type": "object", "required": ["type", text], "properties": members}


_LIST = {"type": "array", "items": {"oneOf": [_part("text"), _part("refusal")]}}
_MEMBERS = {"role": {"enum": list(ROLES)}, "content": {"oneOf": [{"type": "null"}, {"type": "string"}, _LIST]}}
_MESSAGE = {"type": "object", "required": ["role"], "properties": _MEMBERS}
# The JSON schema of messages.
MESSAGES = {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MOST_MESSAGES}
# Of Ollama's: without messages the model is only loaded.
OLLAMA_MESSAGES = {"oneOf": [{"type": "null"}, {"type": "array", "items": _MESSAGE, "maxItems": MOST_MESSAGES}]}


def read_messages(given: object) -> tuple[Message, ...]:
    """The conversation in its usual form, without an empty last message for the answer. Raises ApiError."""
    return conversation_of([_message(each, f"messages[{at}]") for at, each in enumerate(listed(given))], "messages")


def listed(given: object) -> list[Any]:
    """The messages of a conversation, unread. Raises ApiError for none, and for too many."""
    if not isinstance(given, list) or not given:
        raise ApiError("messages must be a list with at least one message", param="messages")
    if len(given) > MOST_MESSAGES:
        raise ApiError(f"there are {len(given)} messages; at most {MOST_MESSAGES} are allowed", param="messages")
    return given


def conversation_of(messages: Sequence[Message], param: str) -> tuple[Message, ...]:
    """The messages in their usual form, without an empty last one for the answer. Raises ApiError."""
    try:
        prompt, earlier, after = check_conversation(None, messages, raw=False)
    except InvalidRequestError as error:
        raise ApiError(sentence(error), param=param) from None
    return (*earlier, {"role": "user", "content": prompt}, *after)


def read_ollama_messages(given: object) -> tuple[Message, ...]:
    """The conversation of a client of Ollama's, maybe without a message. Raises ApiError.

    A result has the ``tool_name`` of the function. Continue sends thinking as a separate message, in the role
    ``thinking``, before the answer.
    """
    if not isinstance(given, list):
        raise ApiError("messages must be a list", param="messages")
    return (
        read_messages([_as_openai(each, f"messages[{number}]") for number, each in enumerate(given)]) if given else ()
    )


def _as_openai(given: object, param: str) -> object:
    if not isinstance(given, Mapping):
        return given
    if given.get("images"):
        raise unsupported(param, f"an image ({param})")
    role, name = given.get("role"), given.get("tool_name")
    if isinstance(role, str) and role.lower() == "thinking":
        return {"role": "assistant", "thinking": given.get("content")}
    return {**given, **({} if name is None else {"name": name})}


def _message(given: object, param: str) -> Message:
    if not isinstance(given, Mapping):
        raise ApiError(f"{param} must be an object", param=param)
    stated = given.get("role")
    if stated == "function" or given.get("function_call"):
        raise unsupported(param, f"a function_call, which tool_calls replaced ({param})")
    role = role_of(stated) or stated
    content = read_content(given.get("content"), role, param)
    if role == "assistant" and not content:
        content = read_content(given.get("refusal"), role, param)
    message = {"role": role, "content": content}
    if (calls := given.get("tool_calls")) is not None:
        message["tool_calls"] = [_call(each, param) for each in calls] if isinstance(calls, list) else calls
    for name in (*THINKING, "tool_call_id", "name"):
        if (value := given.get(name)) is not None:  # what was said or thought may hold any character
            message[name] = value if name in THINKING else check_texts(value, param)
    return message


def _call(given: object, param: str) -> object:
    """A call, of which the id and the name are checked: its arguments may hold any character, as what was said.

    Anything else stays, and is refused where all conversations are read.
    """
    if not isinstance(given, Mapping):
        return given
    custom = given.get("custom")
    if given.get("type") == "custom" and isinstance(custom, Mapping):
        own = {"name": custom.get("name"), "arguments": text_arguments(custom.get("input"))}
        given = {"id": given.get("id"), "type": "function", "function": own}
    function = given.get("function")
    check_texts([given.get("id"), function.get("name") if isinstance(function, Mapping) else None], param)
    return given


def text_arguments(text: object) -> str:
    """The arguments of a call whose tool takes text: an earlier model's, as no tool of this kind is offered here."""
    return json.dumps({"input": text}, ensure_ascii=False)


def read_content(given: Any, role: object, param: str) -> str:
    """The text of a content, which may come in parts or be absent. Raises ApiError.

    Parts are lines, as in llama.cpp and vLLM, but an assistant's: they are pieces of one answer.
    """
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
        if role == "tool" and isinstance(kind, str) and kind in LEFT_OUT:
            texts.append(LEFT_OUT[kind])
            continue
        if not isinstance(kind, str) or kind not in _PARTS:
            raise unsupported(param, f"a part of the type {str(kind)[:32]!r} ({param})")
        text = part.get(_PARTS[kind])
        if not isinstance(text, str):
            raise ApiError(f"a text part of {param} has no text", param=param)
        texts.append(text)
    return ("" if role == "assistant" else "\n").join(texts)
