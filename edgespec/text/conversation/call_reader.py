"""Reads calls of tools in any of the formats, in a text of which more may come.

Each part is read by a generator that waits where more text must come, so no text is read again for each chunk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from edgespec.files.checked import finite, no_constant
from edgespec.text.conversation.argument_values import allowed, as_json, as_kind
from edgespec.text.conversation.call_formats import MOST_NAME, CallFormat, Mark
from edgespec.text.conversation.literals import BLANKS, TEXT_ENDS, to_json

T = TypeVar("T")

# Function name to the JSON schema of its parameters.
Known = Mapping[str, Mapping[str, Any]]
Call = tuple[str, str]
"""Name and arguments, a JSON object."""
Found = tuple[int, list[Call]]
"""Where the calls end in the text, and the calls."""
Reading = Generator[None, None, T]
"""Reads held text, and waits at each ``yield`` until there is more."""

_BLANK_RUN = re.compile(f"[{BLANKS}]*")


_DECODER = json.JSONDecoder(parse_constant=no_constant, parse_float=finite)


class NoCallError(Exception):
    """The text is not a call."""


class Held:
    """Text of an answer; ``final``: no more comes. ``read``: how far an attempt had to read to see what it is."""

    def __init__(self) -> None:
        self.text = ""
        self.final = False
        self.read = 0

    def add(self, more: str) -> None:
        text, self.text = self.text, ""
        text += more  # in place where this is the only reference: a copy for each chunk would be quadratic
        self.text = text


class CallReader:
    """Reads the calls of one format in ``held`` text."""

    def __init__(self, form: CallFormat, known: Known, held: Held) -> None:
        self._form = form
        self._known = known
        self._held = held
        self._heads = tuple(map(Mark, form.heads))
        self._value_ends = {Mark(before): Mark(behind) for before, behind in form.parameters}
        # Text ends a value only where the block ends too: values hold ends of calls.
        self._block_end = (Mark("\n".join((*form.ends, form.closing))),) if form.closing else ()
        # A value may hold its end mark: only these behind it end the value. The others are in no value then, as they
        # belong to another call, and this one has no end.
        self._behind_values = (*self._value_ends, *map(Mark, form.ends))
        self._of_others = tuple(Mark(each) for each in (*form.openings, form.closing) if each)
        syntax = form.syntax
        brackets = [each for each in syntax.punctuation if each in "([{}])"]
        self._outside = re.compile("|".join(map(re.escape, (*syntax.quotes, *brackets))))
        self._inside = {quote: re.compile(re.escape(quote) + r"|\\" * syntax.escapes) for quote in syntax.quotes}
        self._longest_quote = max(map(len, syntax.quotes))

    # -------------------------------------------------------------------------------------------------- blocks

    def block(self, at: int) -> Reading[Found]:
        """The calls of the block that begins at ``at``."""
        form = self._form
        opened = bool(form.opening) and self._held.text.startswith(form.opening, at)
        end, calls = yield from self._some(at + len(form.opening) * opened, opened=opened)
        while opened and form.closing:
            begin = yield from self._separated(end)
            if (closed := (yield from self._after(begin, form.closing))) is not None:
                return closed, calls
            try:
                end, more = yield from self._some(begin, opened=True)
            except NoCallError:
                break
            calls += more
        if not opened and form.closing:  # models that leave out the first mark may write the last
            end = (yield from self._after(end, form.closing)) or end
        return end, calls

    def _separated(self, at: int) -> Reading[int]:
        """The position behind the sign that models write between calls in Python, if there is one."""
        for sign in ",;" if self._form.syntax.is_python else "":
            if (behind := (yield from self._after(at, sign))) is not None:
                return behind
        return at

    def bare(self, at: int) -> Reading[Found]:
        """The object itself, in a fence or not, as Qwen2.5-Coder and Llama write it."""
        fenced = self._held.text[at] == "`"
        if fenced:
            while _FENCES[0].startswith(self._held.text[at : at + len(_FENCES[0]) + 1]) and not self._held.final:
                yield
            fence = next((mark for mark in _FENCES if self._held.text.startswith(mark, at)), None)
            if fence is None:
                raise NoCallError
            at += len(fence)
        at = yield from self._skip(at)
        end, call = yield from self._object(at, partial(self._check_bare, at))
        closed = yield from self._after(end, "```" if fenced else ";")
        if fenced and closed is None:
            raise NoCallError
        return closed or end, [call]

    def _check_bare(self, at: int) -> None:
        text = self._held.text
        name, key = _BARE_NAME.match(text, at), _BARE_KEY.match(text, at)
        if (name and name[1] not in self._known) or (key and key[1] not in _BARE_KEYS):
            self._held.read = at
            raise NoCallError

    def _some(self, at: int, *, opened: bool) -> Reading[Found]:
        """The call at ``at``, or the list of calls."""
        at = yield from self._skip(at)
        first = self._held.text[at]
        if opened and first == "[":
            end = yield from self._span(at)
            calls = [self._call(each) for each in _elements(to_json(self._held.text[at:end], self._form.syntax))]
            if not calls:
                raise NoCallError
            return end, calls
        if opened and first == "{":
            end, call = yield from self._object(at)
        else:
            end, call = yield from self._headed(at)
        return end, [call]

    # --------------------------------------------------------------------------------------------------- calls

    def _object(self, at: int, check: Callable[[], None] = lambda: None) -> Reading[tuple[int, Call]]:
        end = yield from self._object_end(at, check)
        return end, self._call(self._held.text[at:end])

    def _call(self, text: str) -> Call:
        """The call in an object. Raises NoCallError."""
        text = text[1:] if text.startswith("{{") else text
        found = {key: (value, raw) for key, value, raw in _members(text)}
        if len(found) == 1 and (name := next(iter(found))) in self._known:
            found = {"name": (name, ""), "arguments": found[name]}
        name, _ = found.get("name", found.get("tool_name", (None, "")))
        arguments, raw = found.get("arguments", found.get("parameters", (None, "")))
        if not isinstance(name, str) or name not in self._known:
            raise NoCallError
        if isinstance(arguments, str):  # JSON in a string
            return name, _checked(arguments or "{}")
        if not isinstance(arguments, dict | None):
            raise NoCallError
        return name, raw if arguments else "{}"

    def _headed(self, at: int) -> Reading[tuple[int, Call]]:
        """The call whose head is at ``at``."""
        _, head = yield from self._any(at, self._heads)
        name, at = head["name"], head.end()
        if name not in self._known:
            raise NoCallError
        if self._form.parameters:
            return (yield from self._parameters(name, at))
        at = yield from self._skip(at)
        if self._form.syntax.is_python:
            if self._held.text[at] != "(":
                raise NoCallError
            end = yield from self._span(at)
            return end, self._call(to_json(name + self._held.text[at:end], self._form.syntax))
        end = yield from self._object_end(at)
        arguments = _checked(to_json(self._held.text[at:end], self._form.syntax))
        for mark in self._form.ends:
            end = (yield from self._after(end, mark)) or end
        return end, (name, arguments)

    def _any(self, at: int, marks: Iterable[Mark]) -> Reading[tuple[Mark, re.Match[str]]]:
        """The first of the marks that is at ``at``, and what it says."""
        held = self._held
        for mark in marks:
            while (found := mark.match(held.text, at, final=held.final)) is None and not held.final:
                if not mark.begins(held.text, at):
                    break
                yield
            if found is not None:
                return mark, found
        raise NoCallError

    # ------------------------------------------------------------------------------------------------ arguments

    def _parameters(self, name: str, at: int) -> Reading[tuple[int, Call]]:
        """The call whose arguments, values between marks, begin at ``at``."""
        arguments, schema = dict[str, str](), self._known[name]
        (call_end,) = self._form.ends
        while (end := (yield from self._after(at, call_end))) is None:
            at = yield from self._skip(at)
            mark, said = yield from self._any(at, self._value_ends)
            key, kind = said["key"], said.groupdict().get("kind")
            value, at = yield from self._value(said.end(), self._value_ends[mark], schema, (key, *arguments))
            own = allowed(schema, key)
            arguments[key] = as_json(value, own) if kind is None else as_kind(value, kind)
        written = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
        return end, (name, f"{{{written}}}")

    def _value(
        self, begin: int, end: Mark, schema: Mapping[str, Any], given: Sequence[str]
    ) -> Reading[tuple[str, int]]:
        """The value that begins at ``begin``, and where its ``end`` ends. Models leave that mark out.

        Then it ends at the next parameter, one of the schema's which is not ``given`` yet, or where the block ends.
        A value may hold its mark too: it ends at the one behind which the call continues or ends.
        """
        held, marks = self._held, (end, *self._value_ends, *self._block_end)
        signs = re.compile("|".join({re.escape(mark.parts[0][0]) for mark in (*marks, *self._of_others)}))
        at = _first(signs, held.text, begin)
        while not (yield from self._ends(at, marks, schema, given)):
            if self._end_of(end, at) is not None:
                marks = (end, *self._value_ends, *self._block_end, *self._of_others)
            at = _first(signs, held.text, at + 1)
        padding, closed = self._form.padding, self._end_of(end, at)
        value = held.text[begin:at].removeprefix(padding).removesuffix(padding)
        return value, at if closed is None else closed

    def _ends(self, at: int, marks: Sequence[Mark], schema: Mapping[str, Any], given: Sequence[str]) -> Reading[bool]:
        """Whether a value ends at ``at``: with its own mark, the first of ``marks``, or without it."""
        held, (own, *others) = self._held, marks
        while (closed := self._end_of(own, at)) is None:
            if self._is_left_open(at, others, schema, given):
                return True
            if not any(mark.begins(held.text, at) for mark in marks):
                return False
            held.read = at
            yield from self._more()
        held.read = closed
        try:
            yield from self._any((yield from self._skip(closed)), self._behind_values)
        except NoCallError:
            return False
        return True

    def _is_left_open(self, at: int, marks: Iterable[Mark], schema: Mapping[str, Any], given: Sequence[str]) -> bool:
        """Whether a value without its own mark ends at ``at``."""
        for mark in marks:
            if found := mark.match(self._held.text, at, final=True):
                key = found["key"] if mark in self._value_ends else None
                if key is None or (key not in given and (allowed(schema, key) or not allowed(schema, given[0]))):
                    return True
        return False

    def _end_of(self, mark: Mark, at: int) -> int | None:
        """The position behind a mark at ``at``; None without one. A kept match makes each chunk copy the text."""
        found = mark.match(self._held.text, at, final=True)
        return None if found is None else found.end()

    # ----------------------------------------------------------------------------------------------------- text

    def _more(self) -> Reading[None]:
        """Wait for more text. Raises NoCallError if none comes."""
        if self._held.final:
            raise NoCallError
        yield

    def _skip(self, at: int) -> Reading[int]:
        """The position of the next character that is not blank."""
        while (at := blank_end(self._held.text, at)) == len(self._held.text):
            yield from self._more()
        return at

    def _after(self, at: int, mark: str) -> Reading[int | None]:
        """The position behind ``mark``, which is the next text but for blanks; None if it is not."""
        held = self._held
        while True:
            at = blank_end(held.text, at)
            if held.text.startswith(mark, at):
                return at + len(mark)
            if held.final or not mark.startswith(held.text[at : at + len(mark)]):
                return None
            yield

    def _object_end(self, at: int, check: Callable[[], None] = lambda: None) -> Reading[int]:
        """The position behind the object that begins at ``at``.

        Qwen2.5's template shows the format with double braces, and its models write two or one of them at the end.
        """
        held = self._held
        while held.text[at : at + 3] in ("{", "{{") and not held.final:
            yield
        if held.text[at] != "{" or held.text.startswith("{{{", at):
            raise NoCallError
        if not held.text.startswith("{{", at):
            return (yield from self._span(at, check))
        end = yield from self._span(at + 1, check)
        if end == len(held.text) and not held.final:
            yield
        return end + held.text.startswith("}", end)

    def _span(self, at: int, check: Callable[[], None] = lambda: None) -> Reading[int]:
        """The position behind the bracket that closes the one at ``at``.

        ``check`` is called whenever more text must come, and at the end.
        """
        held, depth, quote = self._held, 0, ""
        while True:
            found = (self._inside[quote] if quote else self._outside).search(held.text, at)
            ends = None if found is None else self._ends_text(found, quote)
            if found is None or ends is None:
                # A quote of several characters may have begun.
                at = found.start() if found is not None else max(at, len(held.text) - self._longest_quote + 1)
                held.read, found = at, None
                check()
                yield from self._more()
                continue
            at = found.end() + (found[0] == "\\")
            if quote:
                quote = "" if ends else quote
            elif found[0] in self._form.syntax.quotes:
                quote = found[0]
            else:
                depth += 1 if found[0] in "([{" else -1
                if not depth:
                    held.read = at
                    check()
                    return at

    def _ends_text(self, found: re.Match[str], quote: str) -> bool | None:
        """Whether what was found in a text ends it; None if the text behind it decides."""
        held = self._held
        if not quote:
            return False
        if found[0] == "\\":
            return None if found.end() == len(held.text) else False
        if not self._form.syntax.loose:
            return True
        behind = TEXT_ENDS.match(held.text, found.end())
        return None if behind and behind.end() == len(held.text) and not held.final else behind is not None


_BARE_NAME = re.compile(rf'\{{{{1,2}}\s{{0,8}}"name"\s{{0,8}}:\s{{0,8}}"([^"\\]{{0,{MOST_NAME}}})"')
_BARE_KEY = re.compile(r'\{{1,2}\s{0,8}"(\w{0,64})"')
_BARE_KEYS = ("name", "type", "arguments", "parameters")
_FENCES = ("```json", "```")


def blank_end(text: str, at: int) -> int:
    """The position of the next character that is not blank, or the text's end."""
    found = _BLANK_RUN.match(text, at)
    return at if found is None else found.end()


def _first(pattern: re.Pattern[str], text: str, at: int) -> int:
    """The position of a pattern from a position on, or the text's end."""
    found = pattern.search(text, at)
    return len(text) if found is None else found.start()


def _checked(arguments: str) -> str:
    """The arguments if they are a JSON object. Raises NoCallError."""
    value, end = _value_at(arguments, 0)
    if not isinstance(value, dict) or end != len(arguments):
        raise NoCallError
    return arguments


def _members(text: str) -> Iterator[tuple[str, Any, str]]:
    """The members of a JSON object: key, value and the value as it is written. Raises NoCallError."""
    at = blank_end(text, 1)
    while not text.startswith("}", at):
        key, at = _value_at(text, at)
        at = blank_end(text, at)
        if not isinstance(key, str) or not text.startswith(":", at):
            raise NoCallError
        at = blank_end(text, at + 1)
        value, end = _value_at(text, at)
        yield key, value, text[at:end]
        at = _next(text, end, "}")


def _elements(text: str) -> Iterator[str]:
    """The elements of a JSON list as they are written. Raises NoCallError."""
    at = blank_end(text, 1)
    while not text.startswith("]", at):
        _, end = _value_at(text, at)
        yield text[at:end]
        at = _next(text, end, "]")


def _value_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a position, and where it ends. Raises NoCallError."""
    try:
        value, end = _DECODER.raw_decode(text, at)
        text[at:end].encode()  # raises for half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise NoCallError from error
    return value, end


def _next(text: str, at: int, closing: str) -> int:
    """The position of the next value of a list or an object, or of its end. Raises NoCallError."""
    at = blank_end(text, at)
    if text.startswith(",", at):
        return blank_end(text, at + 1)
    if not text.startswith(closing, at):
        raise NoCallError
    return at
