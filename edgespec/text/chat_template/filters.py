"""The filters and tests that a chat template may use, each counted before it runs.

Imports jinja2, so this module is imported only when a template is compiled. The filters are an allow-list and not
jinja's own: jinja's return lazy generators, format text and walk values without counting. Absent are those for web
pages and for debugging, and ``random``: the same messages must give the same prompt.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, cast

from jinja2.runtime import Undefined

from edgespec.errors import TemplateError
from edgespec.text.chat_template.budget import (
    METHODS,
    POINTER_BYTES,
    Budget,
    check_key,
    kind,
    percent,
    replaced,
    stored_bytes,
    trimmed,
)

# More than any prompt's indentation; JSON is indented by 2 to 4.
INDENT = 32
# Longest text that |int and |float convert: Python's own limit is 4 300 digits, and 64 exceed every double.
NUMBER_CHARACTERS = 64

_WORD = re.compile(r"\w+")
_TITLE_GAP = re.compile(r"([-\s({\[<]+)")  # what jinja's title begins a word after
# "&" comes first: the other texts bring new ones.
_ESCAPES = (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&#39;"), ('"', "&#34;"))
_FILTERS = (
    "abs", "attr", "batch", "center", "default", "dictsort", "escape", "first", "float", "format", "groupby",
    "indent", "int", "items", "join", "last", "length", "list", "map", "max", "min", "reject", "rejectattr",
    "replace", "reverse", "round", "select", "selectattr", "slice", "sort", "string", "sum", "title", "tojson",
    "trim", "truncate", "unique", "wordcount",
)  # fmt: skip
_OTHER_NAMES = {
    "count": "length",
    "d": "default",
    "e": "escape",
    "forceescape": "escape",
    "safe": "string",  # it turns off the escaping of web pages, which is off here
}


class Rendering(Protocol):
    """The part of the sandbox that filters use."""

    budget: Budget
    tests: dict[str, Any]

    def text(self, value: Any) -> str: ...

    def sequence(self, value: Any) -> Any: ...

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any: ...

    def getitem(self, obj: Any, argument: Any) -> Any: ...

    def getattr(self, obj: Any, attribute: str) -> Any: ...

    def added(self, left: Any, right: Any) -> Any: ...

    @property
    def undefined(self) -> Callable[..., Any]: ...


class Filters:
    """Filters bound to one rendering's sandbox and budget. ``table`` maps names to filters."""

    def __init__(self, sandbox: Rendering) -> None:
        self._sandbox = sandbox
        self._budget = sandbox.budget

    def table(self) -> dict[str, Callable[..., Any]]:
        """Every filter by its name in templates."""
        own: dict[str, Callable[..., Any]] = {name: getattr(self, f"{name}_") for name in _FILTERS}
        cased = {name: partial(self._text_method, name) for name in ("capitalize", "lower", "upper")}
        return {**own, **cased, **{other: own[name] for other, name in _OTHER_NAMES.items()}}

    # ------------------------------------------------------------------------------------------------ text

    def string_(self, value: Any) -> str:
        return self._sandbox.text(value)

    def _text_method(self, name: str, value: Any, *args: Any) -> Any:
        return METHODS[str][name](self._budget, self._sandbox.text(value), *args)

    def center_(self, value: Any, width: int = 80) -> Any:
        return self._text_method("center", value, width)

    def title_(self, value: Any) -> Any:
        text = self._sandbox.text(value)
        self._budget.scan(len(text))
        self._budget.make_slots(2 * sum(1 for _ in _TITLE_GAP.finditer(text)) + 1)
        upper, lower = METHODS[str]["upper"], METHODS[str]["lower"]
        words = [
            part
            for word in _TITLE_GAP.split(text)
            for part in (upper(self._budget, word[:1]), lower(self._budget, word[1:]))
        ]
        return METHODS[str]["join"](self._budget, "", words)

    def escape_(self, value: Any) -> str:
        """HTML's escapes. The result is ordinary text: nothing here is escaped a second time."""
        text = self._sandbox.text(value)
        for sign, escape in _ESCAPES:
            text = replaced(self._budget, text, sign, escape)
        return text

    def truncate_(
        self, value: Any, length: int = 255, killwords: bool = False, end: str = "...", leeway: int = 5
    ) -> Any:
        text, sandbox = self._sandbox.text(value), self._sandbox
        if (
            type(length) is not int
            or type(leeway) is not int
            or not isinstance(end, str)
            or not 0 <= len(end) <= length
        ):
            raise TemplateError("it truncates to a length that is not a number, or shorter than the end mark")
        if len(text) <= length + leeway:
            return text
        cut = sandbox.sliced(text, None, length - len(end), None)
        return self.join_([cut if killwords else self._text_method("rsplit", cut, " ", 1)[0], end])

    def wordcount_(self, value: Any) -> int:
        text = self._sandbox.text(value)
        self._budget.step(len(text))
        return sum(1 for _ in _WORD.finditer(text))

    def format_(self, value: Any, *args: Any, **named: Any) -> str:
        if args and named:
            raise TemplateError("it formats text with values with names and without")
        return percent(self._budget, self._sandbox.text(value), named or args)

    def attr_(self, value: Any, name: Any) -> Any:
        if not isinstance(name, str):
            raise TemplateError("it names an attribute by something that is not text")
        if type(value) is dict and name in value and name not in METHODS[dict]:
            return self._sandbox.undefined(obj=value, name=name)  # as in jinja, which looks for no items here
        return self._sandbox.getattr(value, name)

    def trim_(self, value: Any, chars: str | None = None) -> str:
        return trimmed(self._budget, self._sandbox.text(value), chars)

    def replace_(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        text = self._sandbox.text
        return replaced(self._budget, text(value), text(old), text(new), -1 if count is None else count)

    def join_(self, value: Any, d: Any = "", attribute: str | int | None = None) -> Any:
        parts = self._sandbox.sequence(value)
        if attribute is not None:
            parts = [self._attribute(part, attribute) for part in parts]
        return METHODS[str]["join"](self._budget, self._sandbox.text(d), [self._sandbox.text(part) for part in parts])

    def indent_(self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text = self._sandbox.text(value)
        prefix = width if isinstance(width, str) else " " * self._indent(width)
        lines: list[str] = METHODS[str]["splitlines"](self._budget, text + "\n")  # jinja keeps a last empty line
        self._budget.make((stored_bytes(text) + stored_bytes(prefix) * len(lines)) * 2)
        rest = [prefix + line if line or blank else line for line in lines[1:]]
        return "\n".join([prefix + lines[0] if first else lines[0], *rest])

    def _indent(self, width: Any) -> int:
        if type(width) is not int or not 0 <= width <= INDENT:
            raise TemplateError(f"it indents by something other than 0 to {INDENT}")
        return width

    def tojson_(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON without HTML escaping, with the arguments that chat templates give it."""
        size = self._budget.measure(value)
        if indent is not None:
            size += self._indent(indent) * _levels(value, 0)
        pair = None
        if separators is not None:
            pair = self._sandbox.sequence(separators)
            # measure() allows for separators of two characters, which is what the default ones have.
            if len(pair) != 2 or any(not isinstance(part, str) or len(part) > 2 for part in pair):
                raise TemplateError("it calls tojson with separators other than two short texts")
        self._budget.make(size)
        return json.dumps(
            value,
            ensure_ascii=bool(ensure_ascii),
            indent=indent,
            separators=None if pair is None else (pair[0], pair[1]),
            sort_keys=bool(sort_keys),
        )

    # --------------------------------------------------------------------------------------------- numbers

    def int_(self, value: Any, default: int = 0, base: int = 10) -> Any:
        if isinstance(value, str) and len(value) > NUMBER_CHARACTERS:
            return default
        try:
            return int(value, base) if isinstance(value, str) else int(value)
        except (ValueError, TypeError, OverflowError):
            try:
                return int(float(value))  # as in jinja: "42.5" is 42
            except (ValueError, TypeError, OverflowError):
                return default

    def float_(self, value: Any, default: float = 0.0) -> Any:
        if isinstance(value, str) and len(value) > NUMBER_CHARACTERS:
            return default
        try:
            return float(value)
        except (ValueError, TypeError, OverflowError):
            return default

    def abs_(self, value: Any) -> Any:
        return abs(self._number(value))

    def round_(self, value: Any, precision: int = 0, method: str = "common") -> Any:
        # An int rounded to -10**9 digits would compute 10**10**9; a double has at most 15 useful digits.
        if type(precision) is not int or abs(precision) > 15 or method not in ("common", "ceil", "floor"):
            raise TemplateError("it calls round with a precision or method that is not allowed")
        number = self._number(value)
        if method == "common":
            return round(number, precision)
        return (math.ceil if method == "ceil" else math.floor)(number * 10**precision) / 10**precision

    def sum_(self, value: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        if isinstance(start, str):
            raise TemplateError("it sums text; join puts texts together")
        for part in self._sandbox.sequence(value):
            start = self._sandbox.added(start, self._attribute(part, attribute))
        return start

    def _number(self, value: Any) -> Any:
        if type(value) not in (int, float, bool):
            raise TemplateError(f"it uses {kind(value)} where a number is needed")
        return value

    # ------------------------------------------------------------------------------------------ containers

    def default_(self, value: Any, default_value: Any = "", boolean: bool = False) -> Any:
        return default_value if isinstance(value, Undefined) or (boolean and not value) else value

    def length_(self, value: Any) -> int:
        if isinstance(value, Undefined):
            return 0
        if not isinstance(value, str | list | tuple | dict):
            raise TemplateError(f"it asks for the length of {kind(value)}")
        return len(value)

    def list_(self, value: Any) -> Any:
        parts = self._sandbox.sequence(value)
        self._budget.make(POINTER_BYTES * len(parts))
        return list(parts)

    def items_(self, value: Any) -> Any:
        if isinstance(value, Undefined):
            return []
        if type(value) is not dict:
            raise TemplateError(f"it asks for the items of {kind(value)}")
        return METHODS[dict]["items"](self._budget, value)

    def first_(self, value: Any) -> Any:
        parts = value if isinstance(value, str) else self._sandbox.sequence(value)
        return parts[0] if parts else self._sandbox.undefined("there is no first item", name="first")

    def last_(self, value: Any) -> Any:
        parts = value if isinstance(value, str) else self._sandbox.sequence(value)
        return parts[-1] if parts else self._sandbox.undefined("there is no last item", name="last")

    def reverse_(self, value: Any) -> Any:
        parts = value if isinstance(value, str) else self._sandbox.sequence(value)
        return self._sandbox.sliced(parts, None, None, -1)

    def batch_(self, value: Any, linecount: int, fill_with: Any = None) -> list[list[Any]]:
        parts, length = self.list_(value), self._several(linecount)
        lines = [parts[at : at + length] for at in range(0, len(parts), length)]
        self._budget.make_slots(2 * len(lines) + len(parts))
        if lines and fill_with is not None:
            missing = length - len(lines[-1])
            self._budget.make_slots(missing)
            lines[-1] += [fill_with] * missing
        return lines

    def slice_(self, value: Any, slices: int, fill_with: Any = None) -> list[list[Any]]:
        parts, count = self.list_(value), self._several(slices)
        self._budget.make_slots(3 * count + len(parts))
        each, longer = divmod(len(parts), count)
        ends = [each * number + min(number, longer) for number in range(count + 1)]
        columns = [parts[start:end] for start, end in pairwise(ends)]
        if fill_with is not None:
            for column in columns[longer:]:
                column.append(fill_with)
        return columns

    def _several(self, count: Any) -> int:
        if type(count) is not int or count < 1:
            raise TemplateError("it divides a list by something other than a positive number")
        self._budget.integer_digits(count)
        return count

    def unique_(self, value: Any, case_sensitive: bool = False, attribute: str | int | None = None) -> list[Any]:
        parts = self._parts_of(value)
        seen, chosen = set(), []
        for part, key in zip(parts, self._keys(parts, attribute, case_sensitive), strict=True):
            if not isinstance(key, Undefined):
                check_key(key)
            if key not in seen:
                seen.add(key)
                chosen.append(part)
        return chosen

    def groupby_(
        self, value: Any, attribute: str | int, default: Any = None, case_sensitive: bool = False
    ) -> list[tuple[Any, list[Any]]]:
        parts = self._parts_of(value)
        keys = self._keys(parts, attribute, case_sensitive, default)
        self._budget.make_slots(4 * len(parts))
        groups: list[tuple[Any, list[Any]]] = []
        last: Any = None
        for at in self._order(keys):
            if groups and keys[at] == last:
                groups[-1][1].append(parts[at])
            else:
                groups.append((self._attribute(parts[at], attribute, default), [parts[at]]))
                last = keys[at]
        return groups

    def dictsort_(self, value: Any, case_sensitive: bool = False, by: str = "key", reverse: bool = False) -> Any:
        if by not in ("key", "value"):
            raise TemplateError("it sorts a mapping by something other than key or value")
        return self.sort_(self.items_(value), reverse, case_sensitive, int(by == "value"))

    def sort_(
        self, value: Any, reverse: bool = False, case_sensitive: bool = False, attribute: str | int | None = None
    ) -> list[Any]:
        parts = self.list_(value)
        # "a,b" sorts by a, then by b.
        several = attribute.split(",", 16) if isinstance(attribute, str) else [attribute]
        self._budget.make_slots(len(several) * len(parts))
        keys = list(zip(*(self._keys(parts, one, case_sensitive) for one in several), strict=True))
        return [parts[at] for at in self._order(keys, reverse)]

    def min_(self, value: Any, case_sensitive: bool = False, attribute: str | int | None = None) -> Any:
        return self.first_(self.sort_(value, False, case_sensitive, attribute))

    def max_(self, value: Any, case_sensitive: bool = False, attribute: str | int | None = None) -> Any:
        return self.first_(self.sort_(value, True, case_sensitive, attribute))

    def _keys(self, parts: Any, attribute: Any, case_sensitive: bool, default: Any = None) -> list[Any]:
        """What each of ``parts`` is sorted, grouped or recognised by."""
        keys = [self._attribute(part, attribute, default) for part in parts]
        self._budget.make_slots(len(keys))
        if case_sensitive:
            return keys
        return [self._text_method("lower", key) if isinstance(key, str) else key for key in keys]

    def _order(self, keys: Any, reverse: bool = False) -> list[int]:
        """The places of ``keys``, sorted. Equal ones stay in order."""
        sizes = sum(64 + self._budget.measure(key) for key in keys)
        # Each of the n log n comparisons may read a whole key.
        self._budget.scan(len(keys).bit_length() * sizes)
        self._budget.make_slots(len(keys))
        try:
            return sorted(range(len(keys)), key=keys.__getitem__, reverse=bool(reverse))
        except TypeError as error:
            raise TemplateError("it sorts values that have no order, such as text and numbers") from error

    # ----------------------------------------------------------------------------------- map and selections

    def _attribute(self, value: Any, path: Any, default: Any = None) -> Any:
        """The attribute ``path``, or ``default`` where a part of it is undefined. Without a path it is ``value``."""
        if path is None:
            return value
        if type(path) is not int and not isinstance(path, str):
            raise TemplateError("it names an attribute by something that is not text")
        # "function.name"; deeper paths do not occur
        for part in path.split(".", 16) if isinstance(path, str) else [path]:
            value = self._sandbox.getitem(value, int(part) if isinstance(part, str) and _is_place(part) else part)
            if default is not None and isinstance(value, Undefined):
                value = default
        return value

    def map_(self, value: Any, *args: Any, **named: Any) -> list[Any]:
        parts = self._parts_of(value)
        if not args and "attribute" in named:
            attribute, default = named.pop("attribute"), named.pop("default", None)
            if named:
                raise TemplateError("it maps by an attribute with other arguments than a default")
            return [self._attribute(part, attribute, default) for part in parts]
        run = self.table().get(args[0]) if args and isinstance(args[0], str) else None
        if run is None:
            raise TemplateError("it maps by a filter that is not allowed")
        self._budget.enter()
        result = [self._counted(run, part, args[1:], named) for part in parts]
        self._budget.leave()
        return result

    def _parts_of(self, value: Any) -> Any:
        """``value`` as a sequence, with the result counted. As in jinja, none, 0 and false count as []."""
        parts = self._sandbox.sequence(value) if value else []
        self._budget.make_slots(len(parts))
        return parts

    def _counted(self, run: Callable[..., Any], value: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._budget.step()
        return run(value, *args, **named)

    def select_(self, value: Any, *test: Any, **named: Any) -> list[Any]:
        return self._selected(value, None, test, named, keep=True)

    def reject_(self, value: Any, *test: Any, **named: Any) -> list[Any]:
        return self._selected(value, None, test, named, keep=False)

    def selectattr_(self, value: Any, attribute: Any, *test: Any, **named: Any) -> list[Any]:
        return self._selected(value, attribute, test, named, keep=True)

    def rejectattr_(self, value: Any, attribute: Any, *test: Any, **named: Any) -> list[Any]:
        return self._selected(value, attribute, test, named, keep=False)

    def _selected(
        self, value: Any, attribute: Any, test: tuple[Any, ...], named: dict[str, Any], *, keep: bool
    ) -> list[Any]:
        parts = self._parts_of(value)
        run: Callable[..., Any] = bool
        if test:
            if not isinstance(test[0], str) or test[0] not in self._sandbox.tests:
                raise TemplateError("it selects by a test that is not allowed")
            run = cast(Callable[..., Any], self._sandbox.tests[test[0]])
        chosen = []
        for part in parts:
            if bool(self._counted(run, self._attribute(part, attribute), test[1:], named)) is keep:
                chosen.append(part)
        return chosen


def _is_place(part: str) -> bool:
    return part.isdigit() and len(part) < 9


def _levels(value: Any, depth: int) -> int:
    """Levels of indentation of ``value`` as JSON. Call measure() first: it bounds the walk."""
    if type(value) not in (list, tuple, dict):
        return 0
    items = value.values() if type(value) is dict else value
    return depth + sum(depth + 1 + _levels(item, depth + 1) for item in items)


def tests_table(sandbox: Rendering, compare: Callable[..., bool]) -> dict[str, Callable[..., bool]]:
    """Every test by its name in templates; ``compare(left, operator, right)`` is the sandbox's counted comparison."""

    def compared(operator: str) -> Callable[..., bool]:
        return lambda value, other: compare(value, operator, other)

    def cased(name: str) -> Callable[..., bool]:
        return lambda value: bool(METHODS[str][name](sandbox.budget, sandbox.text(value)))

    def number(value: Any) -> bool:
        return type(value) in (int, float, bool)

    operators = {
        "eq": "eq", "equalto": "eq", "==": "eq", "ne": "ne", "!=": "ne", "lt": "lt", "lessthan": "lt", "<": "lt",
        "le": "lteq", "<=": "lteq", "gt": "gt", "greaterthan": "gt", ">": "gt", "ge": "gteq", ">=": "gteq",
        "in": "in",
    }  # fmt: skip
    return {
        **{name: compared(operator) for name, operator in operators.items()},
        "defined": lambda value: not isinstance(value, Undefined),
        "undefined": lambda value: isinstance(value, Undefined),
        "none": lambda value: value is None,
        "true": lambda value: value is True,
        "false": lambda value: value is False,
        "boolean": lambda value: type(value) is bool,
        "string": lambda value: isinstance(value, str),
        "number": number,
        "integer": lambda value: type(value) is int,
        "float": lambda value: type(value) is float,
        "mapping": lambda value: type(value) is dict,
        "sequence": lambda value: isinstance(value, str | list | tuple | dict | Undefined),
        "iterable": lambda value: isinstance(value, str | list | tuple | dict | Undefined),
        "callable": lambda value: callable(value) or type(value).__name__ == "BoundMethod",
        "odd": lambda value: number(value) and value % 2 == 1,
        "even": lambda value: number(value) and value % 2 == 0,
        "divisibleby": lambda value, num: number(value) and number(num) and value % num == 0,
        "lower": cased("islower"),
        "upper": cased("isupper"),
        "sameas": lambda value, other: value is other,
    }
