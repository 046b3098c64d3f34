"""The tools of one request: what the template gets, and the calls in the answer."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import InvalidRequestError
from edgespec.text.chat_template.origin import joined, written
from edgespec.text.conversation.call_formats import FORMATS, CallFormat, call_format
from edgespec.text.conversation.literals import as_call, as_calls
from edgespec.text.conversation.tool_calls import CallText
from edgespec.text.tokenizers.tokenizer import Tokenizer, control_tokens

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

    def parser(self, *, bare: bool = True) -> CallText:
        """A parser of the answer's text; without ``bare`` calls have marks. All parsers of one answer give the same
        ids."""
        functions = [tool["function"] for tool in self.tools]
        known = {each["name"]: each["parameters"] for each in functions}
        return CallText(self.format, known, ids=self.ids, bare=bare)


def tool_use(
    name: str, template: str | None, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]], *, shows: bool
) -> ToolUse:
    """How the model ``name`` uses ``tools``; ``shows``: whether its template shows them.

    Raises InvalidRequestError if its template does not say how.
    """
    form = None if template is None else call_format(template)
    if form is None or not shows:
        raise InvalidRequestError(
            f"{name} cannot be given tools: "
            + ("edgespec does not know the format of its calls" if shows else "its chat template cannot show them"),
            hint=f"known are the formats of {', '.join(each.models for each in FORMATS)}",
        )
    ids_begin = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
    return ToolUse(tools=tuple(tools), format=form, marks=control_tokens(tokenizer, form.marks), ids=ids_begin)


def with_calls_in_text(message: Mapping[str, Any], form: CallFormat) -> dict[str, Any]:
    """The message with its calls in its text, for a template that has no place for calls; their marks are its own."""
    own = {key: value for key, value in message.items() if key != "tool_calls"}
    if "tool_calls" in message:
        functions = [call["function"] for call in message["tool_calls"]]
        calls = [(each["name"], json.loads(each["arguments"])) for each in functions]
        if form.is_list:
            blocks = [as_calls(calls, form.syntax)]
        else:
            blocks = [f"\n{as_call(form.call, *call)}\n" for call in calls]
        parts = [part for block in blocks for part in (written(form.opening), block, written(form.closing), "\n")]
        own["content"] = joined((own["content"], *parts[:-1]))
    return own
