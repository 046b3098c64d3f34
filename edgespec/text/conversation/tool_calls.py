"""Calls of tools in an answer's text: the formats in which models write them, and a parser for text in chunks.

A call is given once it is complete and valid; until then its text is held back. The name must be one of the request's
tools and the arguments a JSON object. A call that is not valid is text: no character of an answer is lost, except the
blanks next to a call and the marks around it.

Each format is read by a generator that waits where more text must come, so no text is read again for each chunk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from edgespec.text.conversation.argument_values import allowed, as_json
from edgespec.text.conversation.pieces import Piece, ToolCall, joined, overlap

T = TypeVar("T")

# Function name to the JSON schema of its parameters.
Known = Mapping[str, Mapping[str, Any]]

# Calls in one answer; their ids end in the number. Text of further calls is text.
MOST_CALLS = 100
# Attempts that read more than ``_SHORT`` characters and found no call. Each may read the rest of the answer; after
# them all text is text.
_MOST_FAILED = 20

_BLANKS = " \t\r\n"
_BLANK_RUN = re.compile(r"[ \t\r\n]*")
# Text in which the beginning of a call must show what it is.
_SHORT = 200


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


class _NoCallError(Exception):
    """The text is not a call."""


class _Held:
    """Text of an answer; ``final``: no more comes. ``read``: how far an attempt had to read to see what it is."""

    def __init__(self) -> None:
        self.text = ""
        self.final = False
        self.read = 0


Reading = Generator[None, None, T]
"""Reads held text, and waits at each ``yield`` until there is more."""
_Found = tuple[int, list[tuple[str, str]]]
"""Where the calls end in the text, and the name and arguments of each."""
_ReadOne = Callable[[_Held, int], Reading[tuple[int, tuple[str, str]]]]
"""Reads one call at a position in the text: where it ends, its name and arguments."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls. ``openings`` begin a call anywhere in an answer; ``marks`` may be control tokens.

    ``bare``: an answer may also begin with the call's JSON itself, or with JSON in a fence of three backquotes.
    """

    openings: tuple[str, ...]
    marks: tuple[str, ...]
    bare: bool
    read: Callable[[_Held, int, Known], Reading[_Found]]


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

    def __init__(self, form: CallFormat, known: Known, *, ids: str, bare: bool = True) -> None:
        """``ids``: seven letters and digits with which the ids of all calls begin.

        Without ``bare`` calls have marks in every format.
        """
        self._format = form
        self._known = known
        self._ids = ids
        self._openings = re.compile("|".join(map(re.escape, form.openings)))
        self._held = _Held()
        self._at = 0  # text before it has been given
        self._attempt: Reading[_Found] | None = None
        self._calls = 0
        self._failed = 0
        self._bare = bare and form.bare  # until text is given
        self._after_call = False  # blanks are dropped until text comes

    def feed(self, text: str) -> list[Piece]:
        """The text and the calls that are certain, in order."""
        self._held.text += text
        pieces = list[Piece]()
        while self._attempt is not None or self._begin(pieces):
            if not self._go_on(pieces):
                return joined(pieces)
        self._held.text, self._at = self._held.text[self._at :], 0
        return joined(pieces)

    def flush(self) -> list[Piece]:
        """What was held back, once all text has come."""
        self._held.final = True
        return self.feed("")

    def _begin(self, pieces: list[Piece]) -> bool:
        """Give text up to where a call may begin; False without one."""
        if self._after_call and (blanks := self._blanks()):
            pieces.append(Piece(self._taken(blanks)))
        text, final = self._held.text, self._held.final
        start = self._opening()
        until = start if start is not None else len(text)
        if start is None and not final:
            until -= overlap(text[max(self._at, until - 32) :], self._format.openings)
        if not (final and start is None):
            until = self._at + len(text[self._at : until].rstrip(_BLANKS))
        self._say(pieces, until - self._at)
        if start is None:
            return False
        self._attempt = self._read(self._at + self._blanks())
        return True

    def _opening(self) -> int | None:
        """Where a call may begin; None without one."""
        text, begun = self._held.text, self._at + self._blanks()
        if self._failed > _MOST_FAILED:
            return None
        if self._bare and text[begun : begun + 1] in ("{", "`"):
            return begun
        found = self._openings.search(text, self._at)
        return None if found is None else found.start()

    def _read(self, at: int) -> Reading[_Found]:
        marked = self._openings.match(self._held.text, at) is not None
        return (self._format.read if marked else _read_bare)(self._held, at, self._known)

    def _go_on(self, pieces: list[Piece]) -> bool:
        """Read on in the attempt; False if more text must come."""
        assert self._attempt is not None
        try:
            next(self._attempt)
        except StopIteration as read:
            end, calls = read.value
        except _NoCallError:
            end, calls = 0, []
        else:
            return False
        self._attempt = None
        if not calls or self._calls + len(calls) > MOST_CALLS:
            self._failed += self._held.read - self._at > _SHORT
            self._say(pieces, self._blanks() + 1)
            return True
        raw = self._taken(end - self._at)
        for name, arguments in calls:
            call = ToolCall(self._calls, f"{self._ids}{self._calls:02d}", name, arguments)
            pieces.append(Piece(raw, call=call))
            self._calls, raw = self._calls + 1, ""
        self._after_call = True
        return True

    def _blanks(self) -> int:
        return _blank_end(self._held.text, self._at) - self._at

    def _taken(self, length: int) -> str:
        self._at += length
        return self._held.text[self._at - length : self._at]

    def _say(self, pieces: list[Piece], length: int) -> None:
        if length:
            text = self._taken(length)
            pieces.append(Piece(text, text))
            self._after_call = False
            self._bare = self._bare and not text.strip(_BLANKS)


# ---------------------------------------------------------------------------------------------------- formats


def _blank_end(text: str, at: int) -> int:
    found = _BLANK_RUN.match(text, at)
    return at if found is None else found.end()


def _more(held: _Held) -> Reading[None]:
    """Wait for more text. Raises _NoCallError if none comes."""
    if held.final:
        raise _NoCallError
    yield


def _skip(held: _Held, at: int) -> Reading[int]:
    """The position of the next character that is not blank."""
    while (at := _blank_end(held.text, at)) == len(held.text):
        yield from _more(held)
    return at


def _after(held: _Held, at: int, mark: str) -> Reading[int | None]:
    """The position behind ``mark``, which is the next text but for blanks; None if it is not."""
    while True:
        at = _blank_end(held.text, at)
        if held.text.startswith(mark, at):
            return at + len(mark)
        if held.final or not mark.startswith(held.text[at : at + len(mark)]):
            return None
        yield


_SPECIAL, _SPECIAL_IN_TEXT = re.compile(r'["{}]'), re.compile(r'["\\]')


def _object_end(held: _Held, at: int, check: Callable[[], None] = lambda: None) -> Reading[int]:
    """The position behind the JSON object that begins at ``at``. ``check`` is called whenever more text must come.

    Qwen2.5's template shows the format with double braces, and its models write two or one of them at the end.
    """
    while held.text[at : at + 3] in ("{", "{{") and not held.final:
        yield
    if held.text[at] != "{" or held.text.startswith("{{{", at):
        raise _NoCallError
    if held.text.startswith("{{", at):
        end = yield from _object_end(held, at + 1, check)
        if end == len(held.text) and not held.final:
            yield
        return end + held.text.startswith("}", end)
    depth, in_text = 0, False
    while True:
        found = (_SPECIAL_IN_TEXT if in_text else _SPECIAL).search(held.text, at)
        if found is None or (found[0] == "\\" and found.end() == len(held.text)):
            held.read = at = len(held.text) if found is None else found.start()
            check()
            yield from _more(held)
            continue
        at = found.end() + (found[0] == "\\")
        in_text ^= found[0] == '"'
        depth += (found[0] == "{") - (found[0] == "}")
        if not depth and not in_text:
            held.read = at
            check()
            return at


def _members(text: str) -> Iterator[tuple[str, Any, str]]:
    """The members of a JSON object: key, value and the value as it is written. Raises ValueError, RecursionError."""
    at = 1
    while True:
        at = _blank_end(text, at)
        if text[at] == "}":
            return
        if text[at] != '"':
            raise _NoCallError
        key, at = _DECODER.raw_decode(text, at)
        at = _blank_end(text, at)
        if text[at] != ":":
            raise _NoCallError
        at = _blank_end(text, at + 1)
        value, end = _DECODER.raw_decode(text, at)
        yield key, value, text[at:end]
        at = _blank_end(text, end)
        if text[at] not in ",}":
            raise _NoCallError
        at += text[at] == ","


def _call(text: str, known: Known) -> tuple[str, str]:
    """Name and arguments of a call as a JSON object. Raises _NoCallError."""
    text = text[1:] if text.startswith("{{") else text
    try:
        found = {key: (value, raw) for key, value, raw in _members(text)}
        name, _ = found.get("name", (None, ""))
        arguments, raw = found.get("arguments", found.get("parameters", (None, "")))
        if isinstance(arguments, str):  # JSON in a string
            arguments, raw = _DECODER.decode(arguments or "{}"), arguments or "{}"
        raw.encode()  # raises for half a surrogate pair
    except (ValueError, RecursionError, IndexError) as error:
        raise _NoCallError from error
    if not isinstance(name, str) or name not in known or not isinstance(arguments, dict | None):
        raise _NoCallError
    return name, "{}" if arguments is None else raw


def _read_hermes(held: _Held, at: int, known: Known) -> Reading[_Found]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``; the closing mark may be missing at the end.

    Models also write several calls between the marks.
    """
    at = yield from _skip(held, at + len("<tool_call>"))
    return (yield from _in_marks(held, at, partial(_read_object, known=known)))


def _read_object(
    held: _Held, at: int, known: Known, check: Callable[[], None] = lambda: None
) -> Reading[tuple[int, tuple[str, str]]]:
    end = yield from _object_end(held, at, check)
    return end, _call(held.text[at:end], known)


def _in_marks(held: _Held, at: int, read: _ReadOne) -> Reading[_Found]:
    """The calls up to ``</tool_call>``, the first of which begins at ``at``."""
    end, call = yield from read(held, at)
    calls = [call]
    while (closed := (yield from _after(held, end, "</tool_call>"))) is None:
        try:
            at = yield from _skip(held, end)
            end, call = yield from read(held, at)
        except _NoCallError:
            return end, calls
        calls.append(call)
    return closed, calls


_BARE_NAME = re.compile(r'\{{1,2}\s{0,8}"name"\s{0,8}:\s{0,8}"([^"\\]{0,64})"')
_BARE_KEY = re.compile(r'\{{1,2}\s{0,8}"(\w{0,64})"')
_FENCES = ("```json", "```")


def _read_bare(held: _Held, at: int, known: Known) -> Reading[_Found]:
    """The object itself, in a fence or not, as Qwen2.5-Coder and Llama write it."""
    fenced = held.text[at] == "`"
    if fenced:
        while _FENCES[0].startswith(held.text[at : at + len(_FENCES[0]) + 1]) and not held.final:
            yield
        fence = next((mark for mark in _FENCES if held.text.startswith(mark, at)), None)
        if fence is None:
            raise _NoCallError
        at += len(fence)
    at = yield from _skip(held, at)

    def check() -> None:
        name, key = _BARE_NAME.match(held.text, at), _BARE_KEY.match(held.text, at)
        if (name and name[1] not in known) or (key and key[1] not in ("name", "type", "arguments", "parameters")):
            held.read = at
            raise _NoCallError

    end, call = yield from _read_object(held, at, known, check)
    closed = yield from _after(held, end, "```" if fenced else ";")
    if fenced and closed is None:
        raise _NoCallError
    return closed or end, [call]


def _read_python_tag(held: _Held, at: int, known: Known) -> Reading[_Found]:
    """The object behind Llama's mark."""
    at = yield from _skip(held, at + len("<|python_tag|>"))
    return (yield from _read_bare(held, at, known))


_MISTRAL_NAME = re.compile(r"([\w-]{1,64})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])? {0,8}(?=\{)")


def _read_mistral(held: _Held, at: int, known: Known) -> Reading[_Found]:
    """``[TOOL_CALLS][{...}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}`` of the later models."""
    at = yield from _skip(held, at + len("[TOOL_CALLS]"))
    if held.text[at] != "[":
        while (named := _MISTRAL_NAME.match(held.text, at)) is None:
            begun = held.text[at : at + _SHORT + 1]
            if len(begun) > _SHORT or "{" in begun or "\n" in begun:
                raise _NoCallError
            yield from _more(held)
        end = yield from _object_end(held, named.end())
        arguments = held.text[named.end() : end]
        return end, [_call(f'{{"name": {json.dumps(named[1])}, "arguments": {arguments}}}', known)]
    calls = list[tuple[str, str]]()
    while True:
        at = yield from _skip(held, at + 1)
        at, call = yield from _read_object(held, at, known)
        calls.append(call)
        at = yield from _skip(held, at)
        if held.text[at] == "]":
            return at + 1, calls
        if held.text[at] != ",":
            raise _NoCallError


_FUNCTION, _PARAMETER = re.compile(r"<function=([\w-]{1,64})>"), re.compile(r"<parameter=([^<>\n]{1,256})>")
# The longest mark has 268 characters.
_LONGEST_MARK = 300
_CALL_END = re.compile(r"</function>\s{0,64}")


def _read_xml(held: _Held, at: int, known: Known) -> Reading[_Found]:
    """``<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`` of Qwen3-Coder."""
    read = partial(_read_function, known=known)
    if held.text.startswith("<tool_call>", at):
        at = yield from _skip(held, at + len("<tool_call>"))
        return (yield from _in_marks(held, at, read))
    end, call = yield from read(held, at)
    return end, [call]


def _named(held: _Held, at: int, mark: re.Pattern[str], begin: str) -> Reading[re.Match[str]]:
    """The mark at ``at``, which begins with ``begin`` and has a name."""
    while (found := mark.match(held.text, at)) is None:
        begun = held.text[at : at + _LONGEST_MARK]
        if not begin.startswith(begun[: len(begin)]) or ">" in begun or len(begun) == _LONGEST_MARK:
            raise _NoCallError
        yield from _more(held)
    return found


def _read_function(held: _Held, at: int, known: Known) -> Reading[tuple[int, tuple[str, str]]]:
    function = yield from _named(held, at, _FUNCTION, "<function=")
    name, at, arguments = function[1], function.end(), dict[str, str]()
    if name not in known:
        raise _NoCallError
    while (end := (yield from _after(held, at, "</function>"))) is None:
        at = yield from _skip(held, at)
        parameter = yield from _named(held, at, _PARAMETER, "<parameter=")
        key = parameter[1]
        value, at = yield from _value(held, parameter.end(), known[name], (key, *arguments))
        arguments[key] = as_json(value, allowed(known[name], key))
    written = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
    return end, (name, f"{{{written}}}")


def _value(held: _Held, begin: int, schema: Mapping[str, Any], given: Sequence[str]) -> Reading[tuple[str, int]]:
    """The value that begins at ``begin``, and where it ends. Models leave its closing mark out.

    Then it ends at the next parameter, one of the schema's which is not ``given`` yet, or at the call's end.
    """
    at = begin
    while True:
        at = held.text.find("<", at)
        rest = held.text[at : at + _LONGEST_MARK] if at >= 0 else ""
        end, other = _CALL_END.match(rest), _PARAMETER.match(rest)
        closed = rest.startswith("</parameter>")
        is_next = other and other[1] not in given and (allowed(schema, other[1]) or not allowed(schema, given[0]))
        if closed or is_next or (end and rest.startswith("</tool_call>", end.end())):
            value = held.text[begin:at].removeprefix("\n").removesuffix("\n")
            return value, at + len("</parameter>") * closed
        if len(rest) < _LONGEST_MARK and (not rest or _may_end_value(rest, end)):
            held.read = at = len(held.text) if not rest else at
            yield from _more(held)
        else:
            at += 1


def _may_end_value(rest: str, end: re.Match[str] | None) -> bool:
    """Whether the last text may become a mark that ends a value."""
    if end is not None:
        return "</tool_call>".startswith(rest[end.end() :])
    begins = "</parameter>", "</function>", "<parameter="
    return any(mark.startswith(rest[: len(mark)]) for mark in begins) and not (">" in rest or "\n" in rest)


# Hermes, Qwen2.5, Qwen3, QwQ, Granite 4, MiMo; Qwen2.5-Coder writes the bare JSON in a fence.
HERMES = CallFormat(("<tool_call>",), ("<tool_call>", "</tool_call>"), True, _read_hermes)
# Qwen3-Coder, Qwen3.5, Nemotron 3, StepFun 3.5.
QWEN_XML = CallFormat(("<tool_call>", "<function="), ("<tool_call>", "</tool_call>"), False, _read_xml)
# Llama 3.1, 3.2 and 3.3.
LLAMA = CallFormat(("<|python_tag|>",), ("<|python_tag|>",), True, _read_python_tag)
# Mistral Nemo and Small, Devstral, Ministral.
MISTRAL = CallFormat(("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), False, _read_mistral)
