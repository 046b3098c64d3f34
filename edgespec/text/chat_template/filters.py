"""The filters and tests that a chat template may use, each counted before it runs.

Imports jinja2, so this module is imported only when a template is compiled. The filters are an allow-list and not
jinja's own: jinja's return lazy generators, format text and walk values without counting. Filters that hardly any
chat template uses (``urlize``, ``wordwrap``, ``center``, ``groupby``, ``unique``, ...) are absent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

from jinja2.runtime import Undefined

from edgespec.errors import TemplateError
from edgespec.text.chat_template.budget import METHODS, POINTER_BYTES, Budget, kind, replaced, stored_bytes, trimmed

# More than any prompt's indentation; JSON is indented by 2 to 4.
INDENT = 32
# Longest text that |int and |float convert: Python's own limit is 4 300 digits, and 64 exceed every double.
NUMBER_CHARACTERS = 64


class Rendering(Protocol):
    """The part of the sandbox that filters use."""

    budget: Budget
    tests: dict[str, Any]

    def text(self, value: Any) -> str: ...

    def sequence(self, value: Any) -> Any: ...

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any: ...

    def getitem(self, obj: Any, argument: Any) -> Any: ...

    @property
    def undefined(self) -> Callable[..., Any]: ...


class Filters:
    """Filters bound to one rendering's sandbox and budget. ``table`` maps names to filters."""

    def __init__(self, sandbox: Rendering) -> None:
        self._sandbox = sandbox
        self._budget = sandbox.budget

    def table(self) -> dict[str, Callable[..., Any]]:
        """Every filter by its name in templates."""
        by_name = {
            name: getattr(self, f"{name}_")
            for name in (
                *("abs", "default", "dictsort", "first", "float", "indent", "int", "items", "join", "last", "length"),
                *(
                    "list",
                    "map",
                    "min",
                    "reject",
                    "rejectattr",
                    "replace",
                    "reverse",
                    "round",
                    "select",
                    "selectattr",
                ),
                *("sort", "string", "tojson", "trim"),
            )
        }
        cased = {name: partial(self._text_method, name) for name in ("capitalize", "lower", "title", "upper")}
        # "safe" turns off escaping, which is off here.
        return {**by_name, **cased, "count": self.length_, "d": self.default_, "safe": self.string_}

    # ------------------------------------------------------------------------------------------------ text

    def string_(self, value: Any) -> str:
        return self._sandbox.text(value)

    def _text_method(self, name: str, value: Any) -> Any:
        return METHODS[str][name](self._budget, self._sandbox.text(value))

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

    def round_(self, value: Any, precision: int = 0, method: str = "common") -> float:
        # An int rounded to -10**9 digits would compute 10**10**9; a double has at most 15 useful digits.
        if type(precision) is not int or not 0 <= precision <= 15 or method not in ("common", "ceil", "floor"):
            raise TemplateError("it calls round with a precision or method that is not allowed")
        number = float(self._number(value))
        if method == "common":
            return round(number, precision)
        return float((math.ceil if method == "ceil" else math.floor)(number * 10**precision) / 10**precision)

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

    def dictsort_(self, value: Any, case_sensitive: bool = False, by: str = "key", reverse: bool = False) -> Any:
        if by not in ("key", "value"):
            raise TemplateError("it sorts a mapping by something other than key or value")
        return self._sorted(self.items_(value), lambda pair: pair[by == "value"], case_sensitive, reverse)

    def sort_(
        self, value: Any, reverse: bool = False, case_sensitive: bool = False, attribute: str | int | None = None
    ) -> Any:
        def key(item: Any) -> Any:
            return item if attribute is None else self._attribute(item, attribute)

        return self._sorted(self.list_(value), key, case_sensitive, reverse)

    def min_(self, value: Any, case_sensitive: bool = False, attribute: str | int | None = None) -> Any:
        return self.first_(self.sort_(value, False, case_sensitive, attribute))

    def _sorted(self, values: list[Any], key: Callable[[Any], Any], case_sensitive: bool, reverse: bool) -> list[Any]:
        keys = [key(value) for value in values]
        if any(not isinstance(one, str | int | float) for one in keys):
            raise TemplateError("it sorts by something other than text and numbers")
        # Each of the n log n comparisons may read a whole key.
        self._budget.scan(len(keys).bit_length() * sum(64 + (len(k) if isinstance(k, str) else 0) for k in keys))
        if not case_sensitive:
            keys = [self._text_method("lower", one) if isinstance(one, str) else one for one in keys]
        self._budget.make_slots(2 * len(keys))
        return [values[at] for at in sorted(range(len(keys)), key=keys.__getitem__, reverse=bool(reverse))]

    # ----------------------------------------------------------------------------------- map and selections

    def _attribute(self, value: Any, path: str | int) -> Any:
        if type(path) is int:
            return self._sandbox.getitem(value, path)
        if not isinstance(path, str):
            raise TemplateError("it names an attribute by something that is not text")
        for part in path.split(".", 16):  # "function.name"; deeper paths do not occur
            value = self._sandbox.getitem(value, int(part) if part.isdigit() and len(part) < 9 else part)
        return value

    def map_(self, value: Any, name: Any = None, *args: Any, attribute: Any = None, default: Any = None) -> list[Any]:
        parts = self._parts_of(value)
        if attribute is not None:
            found = (self._attribute(part, attribute) for part in parts)
            return [default if default is not None and isinstance(one, Undefined) else one for one in found]
        run = self.table().get(name) if isinstance(name, str) else None
        if run is None:
            raise TemplateError("it maps by a filter that is not allowed")
        self._budget.enter()
        result = [self._counted(run, part, args) for part in parts]
        self._budget.leave()
        return result

    def _parts_of(self, value: Any) -> Any:
        """``value`` as a sequence, with the result counted. As in jinja, none, 0 and false count as []."""
        parts = self._sandbox.sequence(value) if value else []
        self._budget.make_slots(len(parts))
        return parts

    def _counted(self, run: Callable[..., Any], value: Any, args: tuple[Any, ...]) -> Any:
        self._budget.step()
        return run(value, *args)

    def select_(self, value: Any, *test: Any) -> list[Any]:
        return self._selected(value, None, test, keep=True)

    def reject_(self, value: Any, *test: Any) -> list[Any]:
        return self._selected(value, None, test, keep=False)

    def selectattr_(self, value: Any, attribute: Any, *test: Any) -> list[Any]:
        return self._selected(value, attribute, test, keep=True)

    def rejectattr_(self, value: Any, attribute: Any, *test: Any) -> list[Any]:
        return self._selected(value, attribute, test, keep=False)

    def _selected(self, value: Any, attribute: Any, test: tuple[Any, ...], *, keep: bool) -> list[Any]:
        parts = self._parts_of(value)
        run: Callable[..., Any] = bool
        if test:
            if not isinstance(test[0], str) or test[0] not in self._sandbox.tests:
                raise TemplateError("it selects by a test that is not allowed")
            run = cast(Callable[..., Any], self._sandbox.tests[test[0]])
        chosen = []
        for part in parts:
            one = part if attribute is None else self._attribute(part, attribute)
            if bool(self._counted(run, one, test[1:])) is keep:
                chosen.append(part)
        return chosen


def _levels(value: Any, depth: int) -> int:
    """Levels of indentation of ``value`` as JSON. Call measure() first: it bounds the walk."""
    if type(value) not in (list, tuple, dict):
        return 0
    items = value.values() if type(value) is dict else value
    return depth + sum(depth + 1 + _levels(item, depth + 1) for item in items)


def tests_table(compare: Callable[..., bool]) -> dict[str, Callable[..., bool]]:
    """Every test by its name in templates; ``compare(left, operator, right)`` is the sandbox's counted comparison."""

    def compared(operator: str) -> Callable[..., bool]:
        return lambda value, other: compare(value, operator, other)

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
        "divisibleby": lambda value, by: number(value) and number(by) and value % by == 0,
        "sameas": lambda value, other: value is other,
    }
