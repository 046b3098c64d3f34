"""Limits of a chat template (steps, bytes, time), counted before they are spent; and the methods it may call.

Jinja's sandbox keeps a template away from Python's internals, but it bounds neither CPU nor memory. Every operation
in ``sandbox.py`` and ``filters.py`` is counted here before it runs.

The methods are an allow-list: a template cannot call any other one. Those that change a list or a mapping are left
out, as in jinja's immutable sandbox, and so are those that reach bytes or attributes (``encode``, ``format_map``).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import TemplateError
from edgespec.text.chat_template import origin
from edgespec.text.chat_template.origin import Written, joined
from edgespec.text.request_budget import RequestBudget

# A str or list also costs its header: a million empty ones must not be free (sys.getsizeof("") is 49, [] is 56).
HEADER_BYTES = 64
# One container slot with a number that only this slot refers to (8-byte pointer, 32-byte int).
SLOT_BYTES = 40
# One slot of a copied container: its values exist already. Templates build lists by ``list = list + [item]``.
POINTER_BYTES = 8
# Bytes of text that C code scans in about the time of one interpreted step (measured: str.upper, 1-3 ns a character).
BYTES_PER_STEP = 64
# Deepest container that may be compared, printed or serialised. JSON schemas of real tools nest about ten deep; the
# limit keeps CPython's C recursion far from its own.
NESTING = 64
# Depth of nested macro and loop calls. Recursive macros that print a tool's type nest about ten deep.
CALL_DEPTH = 48
# No prompt needs larger numbers; 256 bits keep every conversion to text instant.
INTEGER_BITS = 256
# Python hashes integers modulo 2**61 - 1: larger ones can be chosen so that all have one hash.
HASHED_BITS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """The limits of one template. The caller's messages raise the limits that must grow with them.

    A long conversation is not the template's fault. So every byte of input allows one more step, one more byte per
    value, two more of output and sixteen more in total: a template that trims, splits and concatenates touches a
    message five to ten times.
    """

    #: The longest template in common use (gpt-oss, Command A) is about 20 kB; a hostile 64 kB compiles in well under
    #: a second.
    source_bytes: int = 64 * 1024
    #: A message costs 50 to 200 steps in real templates: enough for 2 000 messages without the input's share.
    steps: int = 400_000
    #: Four times a context of 256 k tokens of English text (about 1 MB).
    output_bytes: int = 4 * 1024 * 1024
    #: The largest single str or list: as large as a whole output.
    value_bytes: int = 4 * 1024 * 1024
    #: All values made, freed or not, which also bounds the peak: with the output and its pieces the process grows by
    #: less than 50 MB.
    total_bytes: int = 20 * 1024 * 1024
    #: Of the processor, so a machine under load refuses no template. Real ones render in 1 to 10 ms: this is fifty
    #: times as much.
    deadline_s: float = 0.5


def stored_bytes(text: str) -> int:
    """Upper bound of the bytes that Python needs to store ``text``: one byte per ASCII character, else up to four.

    An origin is a byte more.
    """
    return len(text) * ((1 if text.isascii() else 4) + isinstance(text, Written))


class Budget:
    """The remaining limits of one rendering, a part of its request's work.

    Every method raises TemplateError if a limit is exceeded, and CancelledError if the request is cancelled.
    """

    __slots__ = (
        "_deadline", "_depth", "_earliest", "_limits", "_request", "_steps", "_total", "_value_bytes", "output_bytes",
    )  # fmt: skip

    def __init__(self, limits: TemplateLimits, input_bytes: int, request: RequestBudget | None = None) -> None:
        self._request = request or RequestBudget()
        self._request.read(input_bytes)
        self._limits = limits
        self._steps = limits.steps + input_bytes
        self._total = limits.total_bytes + 16 * input_bytes
        self._value_bytes = limits.value_bytes + input_bytes
        self.output_bytes = limits.output_bytes + 2 * input_bytes
        self._earliest = time.monotonic() + limits.deadline_s
        self._deadline = time.thread_time() + limits.deadline_s
        self._depth = 0

    def step(self, count: int = 1) -> None:
        """Count work that is about to be done."""
        self._steps -= count
        if self._steps < 0:
            raise TemplateError(f"it takes more than the {self._limits.steps} steps allowed")
        # The thread's clock takes eight times as long to read, and is never ahead of the other one.
        if time.monotonic() > self._earliest and time.thread_time() > self._deadline:
            raise TemplateError(f"rendering takes longer than the {self._limits.deadline_s} s allowed")
        if self._request.cancelled:
            self._request.check()

    def scan(self, size: int) -> None:
        """Count the reading of ``size`` bytes."""
        self.step(1 + size // BYTES_PER_STEP)

    def make(self, size: int) -> None:
        """Count a value of ``size`` bytes that is about to exist."""
        if size > self._value_bytes:
            raise TemplateError(f"it makes a value of more than the {self._limits.value_bytes} bytes allowed")
        self._total -= size + HEADER_BYTES
        if self._total < 0:
            raise TemplateError(f"it makes values of more than the {self._limits.total_bytes} bytes allowed in total")
        self.step(1 + size // BYTES_PER_STEP)

    def make_slots(self, count: int) -> None:
        """Count a container of ``count`` values that is about to exist."""
        self.step(count)
        self.make(SLOT_BYTES * count)

    def slots_left(self) -> int:
        """Upper bound of the number of values that can still be made."""
        return min(self._total, self._value_bytes) // (HEADER_BYTES + SLOT_BYTES)

    def enter(self) -> None:
        """Count one more call inside the running ones."""
        self._depth += 1
        if self._depth > CALL_DEPTH:
            raise TemplateError(f"its macros and loops call each other more than {CALL_DEPTH} deep")

    def leave(self) -> None:
        """End the call that ``enter`` counted."""
        self._depth -= 1

    def measure(self, value: Any, depth: int = 0) -> int:
        """Upper bound of the bytes of ``value`` printed. Walks every path, as printing and comparing do.

        ``[x, x]`` nested thirty times is small in memory and endless to walk. The walk is counted, so that it ends
        here and not in C code that cannot be stopped.
        """
        self.step()
        if depth > NESTING:
            raise TemplateError(f"it nests a value more than {NESTING} deep")
        if isinstance(value, str):
            self.scan(len(value))
            if value.isprintable():
                return stored_bytes(value) * 2 + 2  # a quote or backslash gets a backslash
            return len(value) * (6 if value.isascii() else 12) + 2  # \x00 or \u0000, \U0010ffff or a surrogate pair
        if type(value) in (list, tuple):
            return sum(self.measure(item, depth + 1) + 2 for item in value) + 3
        if type(value) is dict:
            return sum(self.measure(k, depth + 1) + self.measure(v, depth + 1) + 4 for k, v in value.items()) + 2
        if value is None or type(value) in (bool, int, float):
            return self.integer_digits(value) if type(value) is int else 24
        raise TemplateError(f"it uses {kind(value)} where only text, numbers, lists and mappings are allowed")

    def join(self, parts: Sequence[str], separator: str = "") -> str:
        """``separator.join(parts)``, counted before it is made."""
        texts = (separator, *parts)
        width = (1 if all(map(str.isascii, texts)) else 4) + (Written in map(type, texts))
        self.make(width * (sum(map(len, parts)) + len(separator) * len(parts)))
        return joined(parts, separator)

    def integer_digits(self, value: int) -> int:
        """Upper bound of the digits of ``value``; refuses integers larger than any prompt needs."""
        if value.bit_length() > INTEGER_BITS:
            raise TemplateError(f"it makes an integer of more than {INTEGER_BITS} bits")
        return value.bit_length() // 3 + 2

    def made(self, text: str) -> str:
        """Return ``text``, counted after it was made: for results of bounded size."""
        self.make(stored_bytes(text))
        return text


def kind(value: object) -> str:
    """The kind of ``value`` in words, for a message; never its content, which may be very long."""
    names = {
        "str": "text",
        "Written": "text",
        "int": "a number",
        "float": "a number",
        "dict": "a mapping",
        "NoneType": "none",
        "BoundMethod": "a method",
        "LoopContext": "a loop",
        "Undefined": "something undefined",
    }
    name = type(value).__name__
    return names.get(name, f"a {name.lower()}")


# ------------------------------------------------------------------------------------ methods of values

_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # what str.splitlines splits at

Method = Callable[..., Any]


class BoundMethod:
    """A method of a value. Only the sandbox calls the method, through ``METHODS``."""

    __slots__ = ("name", "owner")

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name


def check_key(key: Any) -> None:
    """Refuse keys that take long to find: a tuple of tuples is walked again, integers may be chosen to collide."""
    if not isinstance(key, str | int | float | None):
        raise TemplateError(f"it uses {kind(key)} as the key of a mapping")
    if isinstance(key, int) and key.bit_length() > HASHED_BITS:
        raise TemplateError(f"it uses an integer of more than {HASHED_BITS} bits as the key of a mapping")


def _text(*values: Any) -> None:
    for value in values:
        if not isinstance(value, str):
            raise TemplateError(f"it uses {kind(value)} where text is needed")


def _bounded_index(value: Any) -> None:
    if value is not None and (type(value) is not int or value.bit_length() > INTEGER_BITS):
        raise TemplateError(
            f"it uses {kind(value)} as an index or a count, which must be an integer of at most {INTEGER_BITS} bits"
        )


def trimmed(budget: Budget, text: str, characters: str | None = None, side: str = "strip") -> str:
    """``text.strip(characters)`` or lstrip or rstrip."""
    _text(text, *(() if characters is None else (characters,)))
    # The C code searches the whole set for each character: a set of 1 MB costs 1 MB per character.
    budget.scan(len(text) * (1 if characters is None else len(characters)))
    result = text.strip(characters) if side == "strip" else _one_side(text, characters, side)
    return result if len(result) == len(text) else budget.made(result)


def _one_side(text: str, characters: str | None, side: str) -> str:
    return text.lstrip(characters) if side == "lstrip" else text.rstrip(characters)


def replaced(budget: Budget, text: str, old: str, new: str, count: int = -1) -> str:
    """``text.replace(old, new, count)``, its size counted before it is made."""
    _text(text, old, new)
    _bounded_index(count)
    budget.scan(len(text) + len(old))
    times = text.count(old)
    if 0 <= count < times:
        times = count
    length = len(text) + times * (len(new) - len(old))
    traced = Written in (type(text), type(new))
    budget.make(length * ((1 if text.isascii() and new.isascii() else 4) + traced))
    budget.step(times if traced else 0)
    return origin.replaced(text, old, new, times)


def _charged(name: str, charge: Callable[..., None]) -> Method:
    """The method ``name`` of text; ``charge`` counts its cost with the arguments first."""

    def run(budget: Budget, text: str, *arguments: Any) -> Any:
        charge(budget, text, *arguments)
        return getattr(text, name)(*arguments)

    return run


def _charge_cased(budget: Budget, text: str) -> None:
    # One character becomes up to three in another case.
    budget.make(stored_bytes(text) * (1 if text.isascii() else 3))


def _charge_asked(budget: Budget, text: str) -> None:
    budget.scan(len(text))


def _charge_searched(budget: Budget, text: str, what: str, *bounds: int | None) -> None:
    _text(what)
    for bound in bounds:
        _bounded_index(bound)
    budget.scan(len(text) + len(what))


def _charge_searched_backwards(budget: Budget, text: str, what: str, *bounds: int | None) -> None:
    _charge_searched(budget, text, what, *bounds)
    # CPython searches forwards in linear time; backwards, it may compare the whole needle at each character.
    budget.scan(len(text) * max(len(what), 1))


def _charge_padded(budget: Budget, text: str, width: int, fill: str = " ") -> None:
    _bounded_index(width)
    _text(fill)
    budget.make(max(len(text), width) * (1 if text.isascii() and fill.isascii() else 4))


def _charge_tabs(budget: Budget, text: str, tabsize: int = 8) -> None:
    _bounded_index(tabsize)
    budget.scan(len(text))
    budget.make(stored_bytes(text) + text.count("\t") * max(tabsize, 0) * (1 if text.isascii() else 4))


def _charge_removed(budget: Budget, text: str, what: str) -> None:
    _text(what)
    budget.make(stored_bytes(text))


def _charge_partition(budget: Budget, text: str, sep: str) -> None:
    _charge_searched(budget, text, sep)
    _pieces(budget, text, 3)


def _charge_rpartition(budget: Budget, text: str, sep: str) -> None:
    _charge_searched_backwards(budget, text, sep)
    _pieces(budget, text, 3)


def _ends(name: str) -> Method:
    method = getattr(str, name)

    def run(budget: Budget, text: str, what: Any, *bounds: int | None) -> Any:
        for one in what if type(what) in (tuple, list) else (what,):
            _text(one)
            budget.scan(min(len(one), len(text)))
        for bound in bounds:
            _bounded_index(bound)
        return method(text, tuple(what) if type(what) is list else what, *bounds)

    return run


def _strip(side: str) -> Method:
    def run(budget: Budget, text: str, characters: str | None = None) -> str:
        return trimmed(budget, text, characters, side)

    return run


def _pieces(budget: Budget, text: str, count: int) -> None:
    # Non-ASCII text may be cut into pieces of up to 4 bytes a character; stored_bytes allows for that.
    budget.make_slots(count)
    budget.make(stored_bytes(text) + HEADER_BYTES * count * (1 + isinstance(text, Written)))


def _split(name: str) -> Method:
    def run(budget: Budget, text: str, sep: str | None = None, maxsplit: int = -1) -> Any:
        _bounded_index(maxsplit)
        limit = budget.slots_left()
        if sep is None:
            budget.scan(len(text))
            # Only splitting shows the number of words: split no further than the budget allows.
            bound = limit if maxsplit < 0 else min(maxsplit, limit)
            parts = getattr(text, name)(None, bound)
            if bound == limit and len(parts) > limit:
                raise TemplateError("it splits a text into more pieces than allowed")
            _pieces(budget, text, len(parts))
            return parts
        _text(sep)
        budget.scan(len(text) * max(len(sep), 1) if name == "rsplit" else len(text) + len(sep))
        count = text.count(sep) if sep else 0
        _pieces(budget, text, 1 + (count if maxsplit < 0 else min(count, maxsplit)))
        return getattr(text, name)(sep, min(maxsplit, count) if maxsplit >= 0 else -1)

    return run


def _splitlines(budget: Budget, text: str, keepends: bool = False) -> list[str]:
    budget.scan(len(text) * len(_LINE_ENDS))
    _pieces(budget, text, 1 + sum(text.count(end) for end in _LINE_ENDS))
    return text.splitlines(keepends is True)


def _join(budget: Budget, text: str, parts: Any) -> str:
    if type(parts) not in (list, tuple):
        raise TemplateError(f"it joins {kind(parts)}; only a list can be joined")
    budget.step(len(parts))
    _text(*parts)
    return budget.join(parts, text)


# A field of ``%`` and of ``str.format``, or a sign that is none. Widths and precisions have at most two digits, and
# no field reaches an attribute or an item.
_PERCENT = re.compile(
    r"%(?:(?:\((?P<name>[^()]{0,64})\))?(?P<spec>[-+ #0]{0,5}[0-9]{0,2}(?:\.[0-9]{0,2})?)"
    r"(?P<type>[diouxXeEfFgGcrs%]))?"
)
_BRACES = re.compile(
    r"\{\{|\}\}|\{(?P<name>[0-9]{0,3}|[^\W\d]\w{0,63})(?:!(?P<shown>[rs]))?"
    r"(?::(?P<spec>(?:[^{}]?[<>=^])?[-+ ]?\#?[0-9]{0,2}[,_]?(?:\.[0-9]{1,2})?[bcdeEfFgGnosxX%]?))?\}|[{}]"
)


def _formatted(budget: Budget, text: str, fields: re.Pattern[str], piece: Callable[[re.Match[str]], str]) -> str:
    """``text`` with ``piece`` in place of each of the ``fields``."""
    budget.scan(len(text))
    pieces, end = [], 0
    for found in fields.finditer(text):
        budget.make_slots(2)
        pieces += [text[end : found.start()], piece(found)]
        end = found.end()
    return _join(budget, "", [*pieces, text[end:]])


def _shown(budget: Budget, value: Any, show: Callable[[Any], str] = str) -> Any:
    """``value`` for a field that prints it: text as it is, an undefined value as nothing."""
    if isinstance(value, str) and show is str:
        return value
    if type(value).__name__ == "Undefined":
        return ""
    budget.make(budget.measure(value))
    return show(value)


def percent(budget: Budget, text: str, values: Any) -> str:
    """``text % values``, the size of each field counted before it is made."""
    left = list(values) if type(values) is tuple else [values]

    def piece(found: re.Match[str]) -> str:
        how, name, spec = found["type"], found["name"], found["spec"]
        if how is None:
            raise TemplateError("it formats text with a field that is not allowed")
        if how == "%":
            return "%"
        if name is not None:
            if type(values) is not dict or name not in values:
                raise TemplateError("it formats text with a name that has no value")
            value = values[name]
        elif left:
            value = left.pop(0)
        else:
            raise TemplateError("it formats text with fewer values than fields")
        if how in "rs":
            value = _shown(budget, value, str if how == "s" else repr)
            return value if not spec else _one(budget, f"%{spec}s", value)
        return _one(budget, f"%{spec}{how}", value)

    result = _formatted(budget, text, _PERCENT, piece)
    if left and type(values) not in (dict, list):
        raise TemplateError("it formats text with more values than fields")
    return result


def _one(budget: Budget, field: str, value: Any) -> str:
    if not isinstance(value, str | int | float):
        raise TemplateError(f"it formats {kind(value)} as a number")
    # A double has at most 309 digits before its point.
    budget.make(400 + (4 * len(value) if isinstance(value, str) else 0))
    if type(value) is int:
        budget.integer_digits(value)
    try:
        return field % (value,)
    except (TypeError, ValueError, OverflowError) as error:
        raise TemplateError(f"it formats {kind(value)} in a way that is not allowed") from error


def _format(budget: Budget, text: str, *values: Any, **named: Any) -> str:
    """``text.format(*values, **named)``, the size of each field counted before it is made."""
    budget.step(len(values) + len(named))
    following = iter(range(len(values)))

    def piece(found: re.Match[str]) -> str:
        name, spec = found["name"], found["spec"]
        if name is None:
            if found[0] in "{}":
                raise TemplateError("it formats text with a field that is not allowed")
            return found[0][0]
        at: Any = next(following, len(values)) if not name else int(name) if name.isdigit() else name
        if at not in named and not (type(at) is int and at < len(values)):
            raise TemplateError("it formats text with fewer values than fields")
        value = named[at] if isinstance(at, str) else values[at]
        if found["shown"] or not spec:
            value = _shown(budget, value, repr if found["shown"] == "r" else str)
        return _in_braces(budget, value, spec) if spec else value

    return _formatted(budget, text, _BRACES, piece)


def _in_braces(budget: Budget, value: Any, spec: str) -> str:
    _one(budget, "%s", value)
    try:
        return format(value, spec)
    except (TypeError, ValueError, OverflowError) as error:
        raise TemplateError(f"it formats {kind(value)} in a way that is not allowed") from error


def _get(budget: Budget, mapping: dict[Any, Any], key: Any, default: Any = None) -> Any:
    check_key(key)
    return mapping.get(key, default)


def _items(budget: Budget, mapping: dict[Any, Any]) -> list[tuple[Any, Any]]:
    budget.make_slots(len(mapping) * 3)  # the pair is an object too
    return list(mapping.items())


def _keys(budget: Budget, mapping: dict[Any, Any]) -> list[Any]:
    budget.make(SLOT_BYTES * len(mapping))
    return list(mapping)


def _values(budget: Budget, mapping: dict[Any, Any]) -> list[Any]:
    budget.make(SLOT_BYTES * len(mapping))
    return list(mapping.values())


def _copy(budget: Budget, value: Any) -> Any:
    budget.make_slots(2 * len(value))
    return value.copy()


def _among(name: str) -> Method:
    """``list.count`` or ``list.index``, or those of a tuple."""

    def run(budget: Budget, items: Any, what: Any) -> int:
        # Each comparison walks at most the shorter of two values.
        budget.scan(min(budget.measure(items), len(items) * budget.measure(what)))
        if name == "index" and what not in items:
            raise TemplateError("it asks for the place of a value that a list does not hold")
        found: int = getattr(items, name)(what)
        return found

    return run


_CHARGES: dict[Callable[..., None], tuple[str, ...]] = {
    _charge_cased: ("upper", "lower", "title", "capitalize", "casefold", "swapcase"),
    _charge_asked: (
        "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric",
        "isprintable", "isspace", "istitle", "isupper",
    ),
    _charge_padded: ("center", "ljust", "rjust", "zfill"),
    _charge_tabs: ("expandtabs",),
    _charge_searched: ("find", "count", "index"),
    _charge_searched_backwards: ("rfind", "rindex"),
    _charge_removed: ("removeprefix", "removesuffix"),
    _charge_partition: ("partition",),
    _charge_rpartition: ("rpartition",),
}  # fmt: skip

# By type; the budget is the first argument. Views are lists here: templates only walk and measure views.
METHODS: dict[type, dict[str, Method]] = {
    str: {
        **{name: _charged(name, charge) for charge, names in _CHARGES.items() for name in names},
        **{name: _ends(name) for name in ("startswith", "endswith")},
        **{name: _strip(name) for name in ("strip", "lstrip", "rstrip")},
        **{name: _split(name) for name in ("split", "rsplit")},
        "splitlines": _splitlines,
        "replace": replaced,
        "join": _join,
        "format": _format,
    },
    dict: {"get": _get, "items": _items, "keys": _keys, "values": _values, "copy": _copy},
    list: {"copy": _copy, "count": _among("count"), "index": _among("index")},
    tuple: {"count": _among("count"), "index": _among("index")},
}
METHODS[Written] = METHODS[str]
