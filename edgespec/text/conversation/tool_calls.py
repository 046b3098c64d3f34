"""Calls of tools in an answer's text: the formats in which models write them, and a parser for text in chunks.

A call is given once it is complete and valid; until then its text is held back. The name must be one of the request's
tools and the arguments a JSON object. A call that is not valid is text: no character of an answer is lost, except the
blanks next to a call and the marks around it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from edgespec.text.conversation.argument_values import allowed, as_json

# Function name to the JSON schema of its parameters.
Known = Mapping[str, Mapping[str, Any]]

# Calls in one answer; their ids end in the number. Text of further calls is text.
MOST_CALLS = 100

_BLANKS = " \t\r\n"
# Text of a call below which every chunk is tried, so that text that only begins like a call is shown soon.
_SHORT = 200
# A string whose end has not come is matched too: braces inside it end nothing.
_JSON_PART = re.compile(r'[^"{}]+|"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[{}]', re.DOTALL)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call: the ``index``-th of its answer. ``arguments`` is a JSON object, as the model wrote it.

    ``id`` is nine letters and digits, which the templates of Mistral's models require.
    """

    index: int
    id: str
    name: str
    arguments: str


class _MoreError(Exception):
    """The text may become a call."""


class _NoCallError(Exception):
    """The text is not a call."""


_Found = tuple[int, list[tuple[str, str]]]
"""Where the calls end in the text, and the name and arguments of each."""
_ReadOne = Callable[[str, int, bool], tuple[int, tuple[str, str]]]
"""Reads one call at a position in the text: where it ends, its name and arguments."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls. ``openings`` begin a call anywhere in an answer; ``marks`` may be control tokens.

    ``bare``: an answer may also begin with the call's JSON itself, or with JSON in a fence of three backquotes.
    """

    openings: tuple[str, ...]
    marks: tuple[str, ...]
    bare: bool
    read: Callable[[str, Known, bool], _Found]


def call_format(template: str) -> CallFormat | None:
    """The format in which a chat template writes calls; None if it is not one of the known ones."""
    spelled = template.replace('\\"', '"')
    if "<tool_call>" in template and "<function=" in template and "<parameter=" in template:
        return QWEN_XML
    if "<tool_call>" in template and '{"name":' in spelled and "<tool_calls>" not in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|start_header_id|>" in template and '{"name":' in spelled and '"parameters":' in spelled:
        return LLAMA
    return None


class CallText:
    """Separates calls from the text of an answer that arrives in chunks."""

    def __init__(self, form: CallFormat, known: Known, *, ids: str) -> None:
        """``ids``: seven letters and digits with which the ids of all calls begin."""
        self._format = form
        self._known = known
        self._ids = ids
        self._held = ""
        self._calls = 0
        self._spoken = False  # text was given
        self._after_call = False  # blanks are dropped until text comes

    def feed(self, text: str) -> list[str | ToolCall]:
        """The text and the calls that are certain, in order."""
        self._held += text
        ripe = len(self._held) < _SHORT or any(end in text for end in "}>]`") or self._opening() != 0
        return self._take(final=False) if ripe else []

    def flush(self) -> list[str | ToolCall]:
        """What was held back, once all text has come."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> list[str | ToolCall]:
        parts = list[str | ToolCall]()
        while True:
            if self._after_call:
                self._held = self._held.lstrip(_BLANKS)
            if not self._held:
                return _joined(parts)
            start = self._opening()
            if start is None:
                self._say(parts, len(self._held) if final else self._certain())
                return _joined(parts)
            if before := self._held[:start].rstrip(_BLANKS):
                self._say(parts, len(before))
            try:
                end, calls = self._format_read(final)
            except _MoreError:
                return _joined(parts)
            except _NoCallError:
                blanks = len(self._held) - len(self._held.lstrip(_BLANKS))
                self._say(parts, blanks + 1)
                continue
            for name, arguments in calls:
                parts.append(ToolCall(self._calls, f"{self._ids}{self._calls:02d}", name, arguments))
                self._calls += 1
            self._held, self._after_call = self._held[end:], True

    def _format_read(self, final: bool) -> _Found:
        blanks = len(self._held) - len(self._held.lstrip(_BLANKS))
        text = self._held[blanks:]
        own = self._format
        marked = any(text.startswith(opening) for opening in own.openings)
        end, calls = (own.read if marked else _read_bare)(text, self._known, final)
        if self._calls + len(calls) > MOST_CALLS:
            raise _NoCallError
        return blanks + end, calls

    def _opening(self) -> int | None:
        """Where a call may begin, the blanks before it included in the text before; None without such a position."""
        held = self._held
        if self._format.bare and not self._spoken and held.lstrip(_BLANKS)[:1] in ("{", "`"):
            return 0
        positions = [position for opening in self._format.openings if (position := held.find(opening)) >= 0]
        return min(positions, default=None)

    def _certain(self) -> int:
        """Length of the held text that is text whatever follows: neither blanks nor the beginning of an opening."""
        held = self._held
        cut = len(held) - max(_overlap(held, opening) for opening in self._format.openings)
        return len(held[:cut].rstrip(_BLANKS))

    def _say(self, parts: list[str | ToolCall], length: int) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if text:
            parts.append(text)
            self._after_call = False
            self._spoken = self._spoken or bool(text.strip(_BLANKS))


def split_calls(text: str, calls: CallText) -> tuple[str, tuple[ToolCall, ...]]:
    """The text without calls, and the calls, of a whole answer."""
    parts = calls.feed(text) + calls.flush()
    return "".join(part for part in parts if isinstance(part, str)), tuple(
        part for part in parts if isinstance(part, ToolCall)
    )


def _joined(parts: list[str | ToolCall]) -> list[str | ToolCall]:
    """Neighbouring texts as one."""
    whole = list[str | ToolCall]()
    for part in parts:
        if isinstance(part, str) and whole and isinstance(whole[-1], str):
            whole[-1] += part
        else:
            whole.append(part)
    return whole


def _overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of ``text`` that is a prefix of ``mark``."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)


# ---------------------------------------------------------------------------------------------------- formats


def _skip(text: str, at: int, final: bool) -> int:
    """Where the next character is that is not blank. Raises _MoreError without one, _NoCallError if ``final``."""
    while at < len(text) and text[at] in _BLANKS:
        at += 1
    if at == len(text):
        _incomplete(final)
    return at


def _incomplete(final: bool) -> None:
    raise _NoCallError if final else _MoreError


def _after(text: str, at: int, mark: str, final: bool) -> int | None:
    """The position behind ``mark``, which is the next text but for blanks; None if it is not."""
    begun = text[at:].lstrip(_BLANKS)
    if begun.startswith(mark):
        return len(text) - len(begun) + len(mark)
    if mark.startswith(begun) and not final:
        raise _MoreError
    return None


def _object_end(text: str, at: int, final: bool) -> int:
    """The position behind the JSON object that begins at ``at``.

    Qwen2.5's template shows the format with double braces, and its models write two or one of them at the end.
    """
    if text[at] != "{" or text.startswith("{{{", at):
        raise _NoCallError
    if text.startswith("{{", at):
        end = _object_end(text, at + 1, final)
        if end == len(text) and not final:
            raise _MoreError
        return end + text.startswith("}", end)
    depth = 0
    for part in _JSON_PART.finditer(text, at):
        found = part.group()
        depth += (found == "{") - (found == "}")
        if not depth:
            return part.end()
    _incomplete(final)
    raise AssertionError


def _members(text: str) -> Iterator[tuple[str, Any, str]]:
    """The members of a JSON object: key, value and the value as it is written. Raises ValueError, RecursionError."""
    at = 1
    while True:
        at = _skip(text, at, True)
        if text[at] == "}":
            return
        if text[at] != '"':
            raise _NoCallError
        key, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at, True)
        if text[at] != ":":
            raise _NoCallError
        at = _skip(text, at + 1, True)
        value, end = _DECODER.raw_decode(text, at)
        yield key, value, text[at:end]
        at = _skip(text, end, True)
        if text[at] not in ",}":
            raise _NoCallError
        at += text[at] == ","


def _call(text: str, known: Known) -> tuple[str, str]:
    """Name and arguments of a call as a JSON object. Raises _NoCallError."""
    if text.startswith("{{"):
        text = text[1 : _object_end(text, 1, True)]
    try:
        found = {key: (value, raw) for key, value, raw in _members(text)}
        name, _ = found.get("name", (None, ""))
        arguments, raw = found.get("arguments", found.get("parameters", (None, "")))
        if isinstance(arguments, str):  # JSON in a string
            arguments, raw = _DECODER.decode(arguments or "{}"), arguments or "{}"
        raw.encode()  # raises for half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise _NoCallError from error
    if not isinstance(name, str) or name not in known or not isinstance(arguments, dict | None):
        raise _NoCallError
    return name, "{}" if arguments is None else raw


def _read_hermes(text: str, known: Known, final: bool) -> _Found:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``; the closing mark may be missing at the end.

    Models also write several calls between the marks.
    """
    return _in_marks(text, _skip(text, len("<tool_call>"), final), partial(_read_object, known=known), final)


def _read_object(text: str, at: int, final: bool, known: Known) -> tuple[int, tuple[str, str]]:
    end = _object_end(text, at, final)
    return end, _call(text[at:end], known)


def _in_marks(text: str, at: int, read: _ReadOne, final: bool) -> _Found:
    """The calls up to ``</tool_call>``, the first of which begins at ``at``."""
    end, call = read(text, at, final)
    calls = [call]
    while (closed := _after(text, end, "</tool_call>", final)) is None:
        try:
            end, call = read(text, _skip(text, end, final), final)
        except _NoCallError:
            return end, calls
        calls.append(call)
    return closed, calls


_BARE_NAME = re.compile(r'\{{1,2}\s*"name"\s*:\s*"([^"\\]*)"')
_BARE_KEY = re.compile(r'\{{1,2}\s*"(\w*)"')


def _read_bare(text: str, known: Known, final: bool) -> _Found:
    """The object itself, in a fence or not, as Qwen2.5-Coder and Llama write it."""
    at, fenced = 0, text[0] == "`"
    if fenced:
        at = next((len(mark) for mark in ("```json", "```") if text.startswith(mark)), 0)
        if not at or (text == "```" and not final):
            if "```json".startswith(text) and not final:
                raise _MoreError
            if not at:
                raise _NoCallError
    at = _skip(text, at, final)
    if text[at] != "{":
        if fenced and "json".startswith(text[at:]) and not final:
            raise _MoreError
        raise _NoCallError
    name, key = _BARE_NAME.match(text, at), _BARE_KEY.match(text, at)
    if (name and name[1] not in known) or (key and key[1] not in ("name", "type", "arguments", "parameters")):
        raise _NoCallError
    end = _object_end(text, at, final)
    call = _call(text[at:end], known)
    if fenced:
        closed = _after(text, end, "```", final)
        if closed is None:
            raise _NoCallError
        return closed, [call]
    return _after(text, end, ";", final) or end, [call]


def _read_python_tag(text: str, known: Known, final: bool) -> _Found:
    """The object behind Llama's mark."""
    at = _skip(text, len("<|python_tag|>"), final)
    end, calls = _read_bare(text[at:], known, final)
    return at + end, calls


_MISTRAL_NAME = re.compile(r"([\w-]{1,64})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])? {0,8}(?=\{)")


def _read_mistral(text: str, known: Known, final: bool) -> _Found:
    """``[TOOL_CALLS][{...}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}`` of the later models."""
    at = _skip(text, len("[TOOL_CALLS]"), final)
    if text[at] != "[":
        named = _MISTRAL_NAME.match(text, at)
        if named is None:
            if len(text) - at > _SHORT or "{" in text or "\n" in text[at:]:
                raise _NoCallError
            _incomplete(final)
        assert named is not None
        end = _object_end(text, named.end(), final)
        return end, [_call(f'{{"name": {json.dumps(named[1])}, "arguments": {text[named.end() : end]}}}', known)]
    calls = list[tuple[str, str]]()
    while True:
        at = _skip(text, at + 1, final)
        end = _object_end(text, at, final)
        calls.append(_call(text[at:end], known))
        at = _skip(text, end, final)
        if text[at] == "]":
            return at + 1, calls
        if text[at] != ",":
            raise _NoCallError


_FUNCTION, _PARAMETER = re.compile(r"<function=([\w-]{1,64})>"), re.compile(r"<parameter=([^<>\n]{1,256})>")
_VALUE_ENDS = re.compile(rf"</parameter>|{_PARAMETER.pattern}|</function>\s*</tool_call>")


def _read_xml(text: str, known: Known, final: bool) -> _Found:
    """``<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`` of Qwen3-Coder."""
    read = partial(_read_function, known=known)
    if not text.startswith("<tool_call>"):
        end, call = read(text, 0, final)
        return end, [call]
    return _in_marks(text, _skip(text, len("<tool_call>"), final), read, final)


def _read_function(text: str, at: int, final: bool, known: Known) -> tuple[int, tuple[str, str]]:
    function = _FUNCTION.match(text, at)
    if function is None:
        if not "<function=".startswith(text[at : at + 10]) or ">" in text[at:] or len(text) - at > _SHORT:
            raise _NoCallError
        _incomplete(final)
    assert function is not None
    name, at, arguments = function[1], function.end(), dict[str, str]()
    if name not in known:
        raise _NoCallError
    while (end := _after(text, at, "</function>", final)) is None:
        at = _skip(text, at, final)
        parameter = _PARAMETER.match(text, at)
        if parameter is None:
            if not "<parameter=".startswith(text[at : at + 11]) or ">" in text[at:]:
                raise _NoCallError
            _incomplete(final)
        assert parameter is not None
        key = parameter[1]
        value, at = _value(text, parameter.end(), known[name], (key, *arguments), final)
        arguments[key] = as_json(value, allowed(known[name], key))
    written = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
    return end, (name, f"{{{written}}}")


def _value(text: str, at: int, schema: Mapping[str, Any], given: Sequence[str], final: bool) -> tuple[str, int]:
    """The value that begins at ``at``, and where it ends. Models leave its closing mark out.

    Then it ends at the next parameter, one of the schema's which is not ``given`` yet, or at the call's end.
    """
    for mark in _VALUE_ENDS.finditer(text, at):
        other = mark[1]
        if other is None or (other not in given and (allowed(schema, other) or not allowed(schema, given[0]))):
            end = mark.end() if mark[0] == "</parameter>" else mark.start()
            return text[at : mark.start()].removeprefix("\n").removesuffix("\n"), end
    _incomplete(final)
    raise AssertionError


# Hermes, Qwen2.5, Qwen3, QwQ, Granite 4, MiMo; Qwen2.5-Coder writes the bare JSON in a fence.
HERMES = CallFormat(("<tool_call>",), ("<tool_call>", "</tool_call>"), True, _read_hermes)
# Qwen3-Coder, Qwen3.5, Nemotron 3, StepFun 3.5.
QWEN_XML = CallFormat(("<tool_call>", "<function="), ("<tool_call>", "</tool_call>"), False, _read_xml)
# Llama 3.1, 3.2 and 3.3.
LLAMA = CallFormat(("<|python_tag|>",), ("<|python_tag|>",), True, _read_python_tag)
# Mistral Nemo and Small, Devstral, Ministral.
MISTRAL = CallFormat(("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), False, _read_mistral)
