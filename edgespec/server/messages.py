"""A client's messages as the conversation that a session reads: HTTP's shapes alone.

Contents may come in parts or be absent, or a refusal in place of the content. Everything else about a conversation
is read where all conversations are (``text/conversation/messages.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
# The kinds of an assistant's parts that are its thinking, and the names of their texts, or of parts with text.
_THOUGHTS = ("thinking", "reasoning", "reasoning_text", "redacted_thinking")
_THOUGHT_NAMES = ("thinking", "reasoning", "text")

# Those that are not text.
_OTHERS = {
    "computer_screenshot": "an image",
    **dict.fromkeys(("audio", "input_audio"), "a recording"),
    **dict.fromkeys(("video", "video_url"), "a video"),
    **dict.fromkeys(("resource", "resource_link"), "a resource"),
    **dict.fromkeys(("image", "image_url", "input_image"), "an image"),
    "document": "a document",
    **dict.fromkeys(("file", "input_file", "container_upload"), "a file"),
}
# What parts have whose types are words of other programs too: a member of the second is not a text. A program's own
# list of files has none of them.
_HELD = (
    "data",
    "file_data",
    "file_id",
    "file_url",
    "image_url",
    "video_url",
    "base64",
    "bytes",
    "image",
    "inlineData",
)
_HELD_OBJECTS = ("source", "file", "audio", "input_audio", "resource")
# The members of MCP's whole results, and of its parts without a type.
_RESULT_MEMBERS = {"content", "isError", "structuredContent", "_meta"}
_TEXT_MEMBERS = {"text", "annotations", "_meta"}


def _instead(what: str) -> str:
    return f"[{what} was left out: this model reads text]"


# The parts that are not text, with what the model reads in their place where a refusal would end the conversation of
# an agent, which sends it again and again: in results, and where ``lacking`` says so.
LEFT_OUT = {kind: _instead(what) for kind, what in _OTHERS.items()}
_WAS_LEFT_OUT = re.compile(
    r"\[((?:an? [a-z]{1,16}|a part of the type \S{1,32}) was left out: this model reads text)\]"
)
# In front of the text of a result that is an error: a chat has no other place for it.
IS_ERROR = "Error: "
# Why items and blocks are left out.
OF_ANOTHER_SERVER = "they belong to another server, or are encrypted"
_RESULT = "tool_result"  # Anthropic's
_SILENT = (*LEFT_OUT, _RESULT)
_WHERE = {"tool": "in a tool's result", "user": "in a user's message"}


def _part(text: str) -> dict[str, Any]:
    """The schema of the parts whose text has the name ``text``."""
    members = {"type": {"enum": [kind for kind, name in _PARTS.items() if name == text]}, text: {"type": "string"}}
    return {"type": "object", "required": ["type", text], "properties": members}


_THOUGHT = {"type": "object", "required": ["type"], "properties": {"type": {"enum": list(_THOUGHTS)}}}
_LIST = {"type": "array", "items": {"oneOf": [_part("text"), _part("refusal"), _THOUGHT]}}
_MEMBERS = {"role": {"enum": list(ROLES)}, "content": {"oneOf": [{"type": "null"}, {"type": "string"}, _LIST]}}
_MESSAGE = {"type": "object", "required": ["role"], "properties": _MEMBERS}
# The JSON schema of messages.
MESSAGES = {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MOST_MESSAGES}
# Of Ollama's: without messages the model is only loaded.
OLLAMA_MESSAGES = {"oneOf": [{"type": "null"}, {"type": "array", "items": _MESSAGE, "maxItems": MOST_MESSAGES}]}


def left_out(what: str, kinds: Iterable[str], why: str) -> tuple[str, ...]:
    """The warning about parts of a request that are left out, by their types; none without one."""
    named = ", ".join(dict.fromkeys(kinds))
    return (f"{what} of the type {named} are left out: {why}",) if named else ()


def left_out_parts(messages: Iterable[Message]) -> tuple[str, ...]:
    """The warnings about what is not text in results and in the user's messages."""
    texts = ((_WHERE[each["role"]], each["content"]) for each in messages if each["role"] in _WHERE)
    return tuple(dict.fromkeys(f"{where}: {said}" for where, text in texts for said in _WAS_LEFT_OUT.findall(text)))


def read_messages(given: object) -> tuple[Message, ...]:
    """The conversation in its usual form, without an empty last message for the answer. Raises ApiError."""
    own = listed(given)
    each_lacks = zip(own, lacking(own), strict=True)
    read = [_message(each, f"messages[{at}]", lacks=lacks) for at, (each, lacks) in enumerate(each_lacks)]
    return conversation_of(read, "messages")


def lacking(given: Sequence[object]) -> list[bool]:
    """From which of a client's messages, or items, what is not text is left out, if it is the user's.

    An answer has come behind it. Or it has no text and stands behind a result: a tool has given it, not the user.
    """
    own = [each if isinstance(each, Mapping) else {} for each in given]
    kinds = [_kinds(each.get("content")) for each in own]
    roles = [role_of(each.get("role")) or _role_of(str(each.get("type"))) for each in own]
    answered = max((at for at, role in enumerate(roles[:-1]) if role == "assistant"), default=-1)
    found, behind_result = list[bool](), False
    for at, (role, parts) in enumerate(zip(roles, kinds, strict=True)):
        silent = all(part in _SILENT for part in parts)
        behind_result = role == "tool" or _RESULT in parts or (silent and behind_result)
        found.append(at < answered or (silent and behind_result))
    return found


def _role_of(kind: str) -> str:
    """The role of an item of the Responses API that has none itself."""
    return "tool" if kind.endswith("_output") else "assistant"


def _kinds(content: object) -> list[object]:
    if isinstance(content, list):
        return [part.get("type") if isinstance(part, Mapping) else None for part in content]
    return ["text"] if content else []


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
    return read_messages(list(map(_as_openai, given))) if given else ()


def _as_openai(given: object) -> object:
    if not isinstance(given, Mapping):
        return given
    if images := given.get("images"):
        content = given.get("content") or []
        own = content if isinstance(content, list) else [content]
        texts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in own]
        many = len(images) if isinstance(images, list) else 1
        given = {**given, "content": [*texts, *[{"type": "image", "data": ""}] * many]}
    role, name = given.get("role"), given.get("tool_name")
    if isinstance(role, str) and role.lower() == "thinking":
        return {"role": "assistant", "thinking": given.get("content")}
    return {**given, **({} if name is None else {"name": name})}


def _message(given: object, param: str, *, lacks: bool) -> Message:
    if not isinstance(given, Mapping):
        raise ApiError(f"{param} must be an object", param=param)
    stated = given.get("role")
    if stated == "function" or given.get("function_call"):
        raise unsupported(param, f"a function_call, which tool_calls replaced ({param})")
    role = role_of(stated) or stated
    said, thought = given.get("content"), ""
    if role == "assistant":
        said, thought = without_thoughts(said, param)
    content = "\n".join(result_texts(said)) if role == "tool" else read_content(said, role, param, lacks=lacks)
    if role == "assistant" and not content:
        content = read_content(given.get("refusal"), role, param)
    message = {"role": role, "content": content}
    if (calls := given.get("tool_calls")) is not None:
        message["tool_calls"] = [_call(each, param) for each in calls] if isinstance(calls, list) else calls
    for name in (*THINKING, "tool_call_id", "name"):
        if (value := given.get(name)) is not None:  # what was said or thought may hold any character
            message[name] = thought_text(value, name, param) if name in THINKING else check_texts(value, param)
    if thought and not any(map(message.get, THINKING)):
        message[THINKING[0]] = thought
    return message


def without_thoughts(content: Any, param: str) -> tuple[Any, str]:
    """An assistant's content without its parts of thinking, and their text. Raises ApiError."""
    if not isinstance(content, list):
        return content, ""
    said, thoughts = list[Any](), list[str]()
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in _THOUGHTS:
            texts = (thought_text(part.get(name), name, param) for name in _THOUGHT_NAMES)
            thoughts.append(next(filter(None, texts), ""))
        else:
            said.append(part)
    return said, "".join(thoughts)


def thought_text(given: object, name: str, param: str) -> str:
    """The text of thinking, which may come in parts. What has none, such as Mistral's references, is left out.

    Raises ApiError for what has no parts.
    """
    if given is not None and not isinstance(given, str | list | Mapping):
        raise ApiError(f"the {name} of {param} must be text or a list of parts", param=param)
    parts = given if isinstance(given, list) else [given]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))


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


def result_texts(given: Any, read: Callable[[Mapping[str, Any]], str | None] = lambda part: None) -> list[str]:
    """The texts of a tool's result, which may be any JSON: hosts of MCP and other programs pass on what they get.

    ``read`` gives the text of a part that only one API has. A part, or MCP's whole result, may stand for its list.
    """
    if given is None:
        return []
    whole = isinstance(given, Mapping) and isinstance(given.get("content"), list) and given.keys() <= _RESULT_MEMBERS
    parts = given["content"] if whole else given if isinstance(given, list) else [given]
    beside_text = any(isinstance(each, Mapping) and str(each.get("type")) in _PARTS for each in parts)
    texts = [_result_text(each, read, beside_text=beside_text) for each in parts]
    if None not in texts and (texts or not whole):
        return [text for text in texts if text is not None]
    return [json.dumps(_without_data(given), ensure_ascii=False)]


def _result_text(part: object, read: Callable[[Mapping[str, Any]], str | None], *, beside_text: bool) -> str | None:
    """The text of a part, or what the model reads in its place; None for other JSON."""
    if not isinstance(part, Mapping):
        return part if isinstance(part, str) else None
    kind, resource = part.get("type"), part.get("resource")
    is_text = kind in _PARTS if isinstance(kind, str) else part.keys() <= _TEXT_MEMBERS
    text = part.get(_PARTS.get(str(kind), "text")) if is_text else None
    inner = resource.get("text") if kind == "resource" and isinstance(resource, Mapping) else None
    instead = LEFT_OUT.get(str(kind)) if beside_text else _instead_of(part)
    return next((each for each in (read(part), text, inner, instead) if isinstance(each, str)), None)


def _instead_of(part: Mapping[str, Any]) -> str | None:
    """What the model reads in place of a part that is not text; None for other JSON."""
    if (kind := str(part.get("type"))) not in LEFT_OUT:
        return None  # the rest takes long, and results may have thousands of objects
    held = "_" in kind or any(isinstance(part.get(name), str | Mapping) for name in _HELD)
    held = held or any(not isinstance(part.get(name, ""), str) for name in _HELD_OBJECTS)
    held = held or any(isinstance(each, str) and each.startswith("data:") for each in part.values())
    return LEFT_OUT[kind] if held else None


def _without_data(given: Any) -> Any:
    """JSON with a line in place of each part that is not text: images are long texts in it."""
    if isinstance(given, list):
        return [_without_data(each) for each in given]
    if isinstance(given, Mapping):
        return _instead_of(given) or {name: _without_data(each) for name, each in given.items()}
    return given


def read_content(given: Any, role: object, param: str, *, lacks: bool = False) -> str:
    """The text of a content, which may come in parts or be absent. Raises ApiError.

    Parts are lines, as in llama.cpp and vLLM, but an assistant's: they are pieces of one answer. If a user's message
    ``lacks`` what is not text, a line says so.
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
        if lacks and role == "user" and isinstance(kind, str) and kind in LEFT_OUT:
            texts.append(LEFT_OUT[kind])
            continue
        if not isinstance(kind, str) or kind not in _PARTS:
            what = _OTHERS.get(str(kind), f"a part of the type {str(kind)[:32]!r}")
            raise unsupported(param, f"{what} ({param})")
        text = part.get(_PARTS[kind])
        if not isinstance(text, str):
            raise ApiError(f"a text part of {param} has no text", param=param)
        texts.append(text)
    return ("" if role == "assistant" else "\n").join(texts)
