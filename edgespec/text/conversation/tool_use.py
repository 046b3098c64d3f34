"""The tools of one request: what the template gets, and the calls in the answer."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import InvalidRequestError
from edgespec.text.conversation.thinking import ThinkingText
from edgespec.text.conversation.tool_calls import CallFormat, CallText, ToolCall, call_format
from edgespec.text.tokenizers.tokenizer import Tokenizer

_ID_CHARACTERS = string.ascii_letters + string.digits
# With the call's number of two digits, nine characters.
_ID_LENGTH = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that an answer may call. ``marks``: the names of control tokens that belong to calls, by token."""

    tools: tuple[dict[str, Any], ...]
    format: CallFormat
    marks: Mapping[int, bytes]
    ids: str

    def parser(self) -> CallText:
        """A parser of the answer's text. All parsers of one answer give the same ids."""
        functions = [tool["function"] for tool in self.tools]
        return CallText(self.format, {each["name"]: each["parameters"] for each in functions}, ids=self.ids)

    def split(self, text: str, thinking: ThinkingText | None) -> tuple[str, tuple[ToolCall, ...]]:
        """The text without its calls, and the calls, of a whole answer."""
        events = CallParts(self, thinking)
        parts = [*events.parts(text), *events.rest()]
        said = "".join(part for part in parts if isinstance(part, str))
        return said, tuple(part for part in parts if isinstance(part, ToolCall))


def tool_use(name: str, template: str | None, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]]) -> ToolUse:
    """How the model ``name`` uses ``tools``. Raises InvalidRequestError if its template does not say how."""
    form = None if template is None else call_format(template)
    if form is None:
        takes = template is not None and "tools" in template
        raise InvalidRequestError(
            f"{name} cannot be given tools: "
            + ("edgespec does not know the format of its calls" if takes else "its chat template cannot show them"),
            hint="known formats: those of Hermes, Qwen2.5, Qwen3, Qwen3-Coder, Llama 3 and Mistral",
        )
    marks = dict[int, bytes]()
    for mark in form.marks:
        ids = tokenizer.encode(mark, special=True)
        if len(ids) == 1 and tokenizer.control_token(ids[0]) is not None:
            marks[ids[0]] = mark.encode()
    ids_begin = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
    return ToolUse(tools=tuple(tools), format=form, marks=marks, ids=ids_begin)


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates want it: the arguments of calls as mappings.

    Of llama.cpp's test templates with a known format all render mappings, and most would quote JSON text again.
    """
    if "tool_calls" not in message:
        return dict(message)
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


class CallParts:
    """Splits an answer's text into text and calls as it comes. Thinking holds no calls."""

    def __init__(self, use: ToolUse, thinking: ThinkingText | None) -> None:
        self._calls = use.parser()
        self._thinking = thinking

    def parts(self, text: str) -> list[str | ToolCall]:
        """The text and the calls that are certain after more ``text``."""
        if self._thinking is None:
            return self._calls.feed(text)
        return self._without_thinking(self._thinking.feed(text))

    def rest(self) -> list[str | ToolCall]:
        """What was held back, once all text has come."""
        held = [] if self._thinking is None else self._without_thinking(self._thinking.flush())
        return held + self._calls.flush()

    def _without_thinking(self, pieces: list[tuple[str, bool]]) -> list[str | ToolCall]:
        found = list[str | ToolCall]()
        for piece, thought in pieces:
            found += [piece] if thought else self._calls.feed(piece)
        return found
