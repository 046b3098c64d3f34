"""Anthropic's messages as the conversation that a session reads: text, thinking, calls and results as blocks.

An assistant's blocks keep their order: what it says after its calls is a message behind them. Results that a user's
message holds become separate messages. What another server ran or encrypted is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from edgespec.server.errors import ApiError, unsupported
from edgespec.server.messages import (
    IS_ERROR,
    LEFT_OUT,
    MOST_MESSAGES,
    OF_ANOTHER_SERVER,
    Message,
    lacking,
    left_out,
    listed,
    result_texts,
)
from edgespec.server.strict_json import check_texts
from edgespec.text.conversation.messages import THINKING

_BETWEEN = "\n\n"
# Claude Code's first line of a system text. Its last part is new in every request, so no cache would fit.
_HEADER = "x-anthropic-billing-header:"
# An assistant's summary, which stands for all that came before it.
_SUMMARY = "compaction"
# What the server that wrote it encrypted, or ran.
_ELSEWHERE = (
    "redacted_thinking",
    "fallback",
    "server_tool_use",
    "advisor_tool_result",
    "bash_code_execution_tool_result",
    "code_execution_tool_result",
    "container_upload",
    "mcp_tool_listing",
    "mcp_tool_result",
    "mcp_tool_use",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "web_fetch_tool_result",
    "web_search_tool_result",
)
# What an assistant's text may have behind it in one message: other blocks come between two texts.
_BESIDE_TEXT = ("text", "tool_use", "redacted_thinking")

_NOTHING: Mapping[str, str] = MappingProxyType({})

_TEXT = {"type": "string"}
_BLOCKS = {"oneOf": [_TEXT, {"type": "array", "items": {"type": "object", "required": ["type"]}}]}
_MEMBERS = {"role": {"enum": ["user", "assistant", "system"]}, "content": _BLOCKS}
# The JSON schema of messages.
MESSAGES = {
    "type": "array",
    "items": {"type": "object", "required": list(_MEMBERS), "properties": _MEMBERS},
    "minItems": 1,
    "maxItems": MOST_MESSAGES,
}


def read_blocks(given: object) -> list[Message]:
    """The messages of the field ``messages``, without the field ``system``. Raises ApiError."""
    whole = listed(given)
    own = _summarised(whole)
    each_instead = zip(own, (LEFT_OUT if lacks else _NOTHING for lacks in lacking(own)), strict=True)
    return [
        message
        for number, (each, instead) in enumerate(each_instead, len(whole) - len(own))
        for message in _messages(each, f"messages[{max(number, 0)}]", instead)
    ]


def _summarised(given: list[Any]) -> list[Any]:
    """The last summary, if there is one, as a text of the user's, and what follows it."""
    places = [
        (at, place)
        for at, each in enumerate(given)
        if isinstance(each, Mapping) and each.get("role") == "assistant" and isinstance(each.get("content"), list)
        for place, block in enumerate(each["content"])
        if isinstance(block, Mapping) and block.get("type") == _SUMMARY and block.get("content")
    ]
    if not places:
        return given
    at, place = places[-1]
    content = given[at]["content"]
    rest = [{**given[at], "content": content[place + 1 :]}] if content[place + 1 :] else []
    return [{"role": "user", "content": content[place]["content"]}, *rest, *given[at + 1 :]]


def left_out_blocks(given: list[Any]) -> tuple[str, ...]:
    """The warning about blocks of messages that ``read_blocks`` leaves out, but what a summary stands for."""
    read = _summarised(given)  # only these were checked
    own = (each["content"] for each in read if each["role"] == "assistant" and isinstance(each["content"], list))
    kinds = (block["type"] for content in own for block in content)
    return left_out("blocks", (kind for kind in kinds if kind in _ELSEWHERE), OF_ANOTHER_SERVER)


def read_system(given: Any) -> str | None:
    """The system text, as text or as blocks; None if it is empty. Raises ApiError."""
    texts = [_without_header(text) for text in _texts(given, "system")]
    return _BETWEEN.join(filter(None, texts)) or None


def read_tools(given: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The functions among the tools. The others are run by the server or known to one family of models."""
    return tuple({"type": "function", "function": _function(tool)} for tool in given if is_function(tool))


def is_function(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") in (None, "custom", "function")


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The function of a tool, also of one in a chat's form."""
    given = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
    schema = given.get("input_schema")
    named = {"parameters": given.get("parameters") if schema is None else schema}
    named |= {name: given.get(name) for name in ("name", "description", "strict")}
    return {name: each for name, each in named.items() if each is not None}


def read_tool_choice(given: Mapping[str, Any]) -> Any:
    """Whether the model may call tools, or must, as a session knows it."""
    kind = given.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}
    return "required" if kind == "any" else kind


def _messages(given: object, param: str, instead: Mapping[str, str]) -> list[Message]:
    """The messages of one message. ``instead``: the texts of the user's other blocks, by their type."""
    if not isinstance(given, Mapping):
        raise ApiError(f"{param} must be an object", param=param)
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(f"the role of {param} must be user, assistant or system, not {role!r:.40}", param=param)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [_block(each, param) for each in _listed(content, param)]
    return _of_assistant(blocks, param) if role == "assistant" else _of_others(role, blocks, param, instead)


def _listed(content: object, param: str) -> list[Any]:
    if not isinstance(content, list):
        raise ApiError(f"the content of {param} must be text or a list of blocks", param=param)
    return content


def _block(given: object, param: str) -> tuple[str, Mapping[str, Any]]:
    """A block and its type."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(kind, str):
        raise ApiError(f"a block of {param} must be an object with a type", param=param)
    return kind, given


def _of_assistant(blocks: list[tuple[str, Mapping[str, Any]]], param: str) -> list[Message]:
    own = [_Said()]
    for kind, block in blocks:
        if kind not in ("text", "thinking", "tool_use", _SUMMARY, *_ELSEWHERE):
            raise _unknown(kind, param)
        last = own[-1]
        if (last.calls and kind != "tool_use") or (last.texts and kind not in _BESIDE_TEXT):
            own.append(last := _Said())  # texts of neighbours are joined with a line between them
        if kind == "tool_use":
            last.calls.append(_call(block, param))
        elif kind not in (_SUMMARY, *_ELSEWHERE):
            (last.texts if kind == "text" else last.thoughts).append(_member(block, kind, param))
    return [each.message() for each in own]


@dataclass(slots=True)
class _Said:
    """What one message of the assistant says: thoughts, then texts, then calls."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> Message:
        thinking = {THINKING[0]: _BETWEEN.join(self.thoughts)} if self.thoughts else {}
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": "assistant", "content": "".join(self.texts), **thinking, **calls}


def _call(block: Mapping[str, Any], param: str) -> dict[str, Any]:
    identity, name = check_texts([block.get("id"), block.get("name")], param)
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": block.get("input")}}


def _of_others(
    role: str, blocks: list[tuple[str, Mapping[str, Any]]], param: str, instead: Mapping[str, str]
) -> list[Message]:
    own, texts = list[Message](), list[str]()

    def say() -> None:
        if texts:
            own.append({"role": role, "content": _BETWEEN.join(texts)})
            texts.clear()

    is_shown = False  # by a tool: what is not text directly behind its result, as ``lacking`` has it of messages
    for kind, block in blocks:
        if kind == "tool_result" and role == "user":
            say()
            own.append(_result(block, param))
            is_shown = True
        else:
            is_shown = is_shown and kind in LEFT_OUT
            texts.append(_text(kind, block, param, LEFT_OUT if is_shown else instead if role == "user" else _NOTHING))
    say()
    return own or [{"role": role, "content": ""}]


def _result(block: Mapping[str, Any], param: str) -> Message:
    """A tool's result, whose blocks are never refused."""

    def read(part: Mapping[str, Any]) -> str | None:
        return reads(part, texts) if (reads := _READABLE.get(str(part.get("type")))) else None

    def texts(given: object) -> list[str]:
        return result_texts(given, read)

    error = IS_ERROR if block.get("is_error") else ""
    content = error + _BETWEEN.join(texts(block.get("content")))
    return {"role": "tool", "tool_call_id": check_texts(block.get("tool_use_id"), param), "content": content}


def _texts(given: object, param: str, instead: Mapping[str, str] = _NOTHING) -> list[str]:
    """The texts of a content of texts alone. ``instead``: those of other blocks, by their type."""
    if isinstance(given, str):
        return [given]
    return [_text(*_block(each, param), param, instead) for each in _listed(given, param)]


def _text(kind: str, block: Mapping[str, Any], param: str, instead: Mapping[str, str] = _NOTHING) -> str:
    reads = _READABLE.get(kind)
    text = reads(block, lambda given: _texts(given, param, instead)) if reads else None
    text = instead.get(kind) if text is None else text
    if text is None:
        raise _unknown(kind, param)
    return text


def _member(block: Mapping[str, Any], name: str, param: str) -> str:
    text = _string(block, name)
    if text is None:
        raise ApiError(f"a block of {param} has no {name}", param=param)
    return text


def _string(block: Mapping[str, Any], name: str) -> str | None:
    text = block.get(name)
    return text if isinstance(text, str) else None


_Texts = Callable[[object], list[str]]


def _search_result(block: Mapping[str, Any], texts: _Texts) -> str:
    return _lines(block, ("title", "source"), texts(block.get("content")))


def _document(block: Mapping[str, Any], texts: _Texts) -> str | None:
    """The text of a document, behind its title and context. None for a file."""
    source = block.get("source")
    if not isinstance(source, Mapping):
        return None
    if source.get("type") == "content":
        own = texts(source.get("content"))
    elif source.get("type") == "text" and (data := _string(source, "data")) is not None:
        own = [data]
    else:
        return None
    return _lines(block, ("title", "context"), own)


def _lines(block: Mapping[str, Any], names: Iterable[str], texts: Iterable[str]) -> str:
    return "\n".join([*filter(None, (_string(block, name) for name in names)), *texts])


# What a block says, None if it has no text. The function reads the content that is in it.
_READABLE: Mapping[str, Callable[[Mapping[str, Any], _Texts], str | None]] = {
    "text": lambda block, texts: _string(block, "text"),
    "document": _document,
    "search_result": _search_result,
    "tool_reference": lambda block, texts: _string(block, "tool_name"),
}


def _unknown(kind: str, param: str) -> ApiError:
    without = " without text" if kind in _READABLE else ""
    return unsupported(param, f"a block of the type {kind[:32]!r}{without} ({param})")


def _without_header(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_HEADER) else text
