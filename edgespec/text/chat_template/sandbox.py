"""The environment a chat template runs in: jinja's immutable sandbox, with allow-lists and a budget.

Imports jinja2, so it is itself imported only when a template is compiled. One environment serves one rendering: it
holds that rendering's budget, and nothing a template does outlives it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from edgespec.errors import TemplateError
from edgespec.text.chat_template import rewrite as rewritten
from edgespec.text.chat_template.budget import INTEGER_BITS, POINTER_BYTES, Budget, kind, stored_bytes
from edgespec.text.chat_template.filters import Filters, tests_table
from edgespec.text.chat_template.methods import METHODS, BoundMethod, check_key

# Namespace, its dict and its first few names (measured with tracemalloc: 340 bytes).
NAMESPACE_BYTES = 400
# The loop object with its iterator, its frame and its dict (measured with tracemalloc: about 450 bytes).
LOOP_BYTES = 500
# What a date needs; glibc pads "%999999999d" to a gigabyte, so flags and widths do not pass.
DATE_FORMAT = re.compile(r"(?:%-?[aAbBdmyYHIMSpjZz]|%%|[^%]){0,64}")
MESSAGE_CHARACTERS = 500

_LOOP_NAMES = frozenset(
    ("index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem", "depth", "depth0")
)
_SEQUENCES = (list, tuple)
_NUMBERS = (int, float, bool)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "gteq": operator.ge, "lt": operator.lt,
    "lteq": operator.le, "in": lambda a, b: a in b, "notin": lambda a, b: a not in b,
}  # fmt: skip


class TemplateRaisedError(TemplateError):
    """The template itself called ``raise_exception``: its message stands alone."""


class Sandbox(ImmutableSandboxedEnvironment):
    """One rendering's environment. Also used, with a budget nobody spends, to parse and compile."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._per_item = 1
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", rewritten.GenerationTag],
            finalize=self._output,  # takes the context, so jinja computes no output at compile time
            optimized=False,  # the optimizer would evaluate constant expressions uncounted at compile time
            autoescape=False,
            cache_size=0,
        )
        self.filters = {
            **Filters(self).table(),
            rewritten.CHARGE: self._charge,
            rewritten.COMPARE: self._compare_chain,
            rewritten.CONCAT: self._concat,
            rewritten.DISPLAY: self._display,
            rewritten.ITERATE: self._iterate,
            rewritten.MAPPING: self._mapping,
            rewritten.SLICE: self.sliced,
        }
        self.tests = {
            **tests_table(self._compare),
            "filter": lambda name: type(name) is str and name in self.filters,
            "test": lambda name: type(name) is str and name in self.tests,
        }
        self._functions: dict[Any, str] = {
            self._range: "range",
            self._namespace: "namespace",
            self._dict: "dict",
            self._raise: "raise_exception",
            self._now: "strftime_now",
        }
        self.globals = {name: function for function, name in self._functions.items()}

    # ----------------------------------------------------------------------------------------- attributes

    def getattr(self, obj: Any, attribute: str) -> Any:
        """What ``obj.attribute`` is, of what a template may see; jinja's rules otherwise."""
        if isinstance(obj, Undefined):
            obj._fail_with_undefined_error()
        if attribute in METHODS.get(type(obj), ()):
            self.budget.make(0)
            return BoundMethod(obj, attribute)
        if type(obj) is dict and attribute in obj:
            return obj[attribute]
        if type(obj) is Namespace:
            attributes: dict[str, Any] = object.__getattribute__(obj, "_Namespace__attrs")
            if attribute in attributes:
                return attributes[attribute]
        elif isinstance(obj, LoopContext):
            if attribute in _LOOP_NAMES:
                return getattr(obj, attribute)
            if attribute == "cycle":
                return BoundMethod(obj, "cycle")
        if attribute.startswith("_") or hasattr(type(obj), attribute):
            raise TemplateError(f"it may not use {attribute[:80]!r} of {kind(obj)}")
        return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """What ``obj[argument]`` is; a name that is no item is looked up as an attribute, as jinja does."""
        if isinstance(obj, Undefined):
            obj._fail_with_undefined_error()
        if isinstance(argument, Undefined):
            return self.undefined(obj=obj, name="something undefined")
        if type(obj) is dict:
            check_key(argument)
            if argument in obj:
                return obj[argument]
        elif type(obj) in (str, list, tuple) and type(argument) in (int, bool):
            try:
                return obj[argument]
            except IndexError:
                return self.undefined(obj=obj, name=argument)
        if type(argument) is str:
            return self.getattr(obj, argument)
        return self.undefined(obj=obj, name=kind(argument))

    # ---------------------------------------------------------------------------------------------- calls

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method, macro, loop or global function of the allow-list; nothing else is callable."""
        self.budget.make_slots(len(args) + len(kwargs))
        if type(__obj) is BoundMethod:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return self._method(__obj, args, kwargs)
        if isinstance(__obj, LoopContext):
            if len(args) != 1:
                raise TemplateError("it calls a recursive loop with something other than one list")
            args = (self._iterate(args[0], self._per_item),)
        elif isinstance(__obj, Undefined):
            return __obj()  # raises UndefinedError
        elif type(__obj) is not Macro and not (callable(__obj) and __obj in self._functions):
            raise TemplateError(f"it calls {kind(__obj)}, which cannot be called")
        self.budget.enter()
        try:
            return __context.call(__obj, *args, **kwargs)
        finally:
            self.budget.leave()

    def _method(self, method: BoundMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if isinstance(method.owner, LoopContext):
                return method.owner.cycle(*args, **kwargs)
            return METHODS[type(method.owner)][method.name](self.budget, method.owner, *args, **kwargs)
        except TypeError as error:  # its text would name functions of ours
            raise TemplateError(f"it calls {method.name!r} with arguments that it does not take") from error

    def _range(self, *args: int) -> list[int]:
        numbers = range(*args)
        # Checked before len(), which overflows beyond 64 bits.
        if any(type(one) is not int or abs(one) > 2**31 for one in args):
            raise TemplateError("it calls range with something other than small integers")
        self.budget.make_slots(len(numbers))
        return list(numbers)

    def _namespace(self, *args: Any, **kwargs: Any) -> Namespace:
        self.budget.make(NAMESPACE_BYTES)
        return Namespace(self._dict(*args, **kwargs))

    def _dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        if any(type(one) is not dict for one in args):
            raise TemplateError("it makes a mapping of something that is no mapping")
        self.budget.make_slots(3 * (len(kwargs) + sum(len(one) for one in args)) + 2)
        return dict(*args, **kwargs)

    def _raise(self, message: Any = "") -> None:
        raise TemplateRaisedError(self.text(message)[:MESSAGE_CHARACTERS])

    def _now(self, pattern: Any) -> str:
        if type(pattern) is not str or DATE_FORMAT.fullmatch(pattern) is None:
            raise TemplateError("it calls strftime_now with a format that is not allowed")
        return self.budget.made(datetime.now().strftime(pattern))

    # ------------------------------------------------------------------------------------------ operators

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """``left operator right``, its size checked before it is computed."""
        self.budget.step()
        kinds = type(left), type(right)
        if isinstance(left, Undefined) or isinstance(right, Undefined):
            return self.binop_table[operator](left, right)  # raises UndefinedError
        if kinds[0] in _NUMBERS and kinds[1] in _NUMBERS:
            return self._arithmetic(operator, left, right)
        if operator == "+" and kinds == (str, str):
            length = len(left) + len(right)
            self.budget.make(length if left.isascii() and right.isascii() else 4 * length)
            return left + right
        if operator == "+" and kinds[0] is kinds[1] and kinds[0] in _SEQUENCES:
            self.budget.make(POINTER_BYTES * (len(left) + len(right)))
            return left + right
        if operator == "*" and int in kinds:
            value, times = (left, right) if kinds[1] is int else (right, left)
            if type(value) is str:
                self.budget.make(stored_bytes(value) * max(times, 0))
                return value * times
            if type(value) in _SEQUENCES:
                self.budget.make(POINTER_BYTES * len(value) * max(times, 0))
                return value * times
        raise TemplateError(f"it computes {kind(left)} {operator} {kind(right)}, which is not allowed")

    def _arithmetic(self, operator: str, left: Any, right: Any) -> Any:
        if type(left) is not float and type(right) is not float:
            left, right = int(left), int(right)
            if operator == "**" and left.bit_length() * abs(right) > 2 * INTEGER_BITS:
                raise TemplateError("it raises a number to a power that is too large")
            self.budget.integer_digits(left)
            self.budget.integer_digits(right)
        result = self.binop_table[operator](left, right)
        if type(result) is int:
            self.budget.integer_digits(result)
        elif type(result) is not float:
            raise TemplateError("it computes a number that is neither integer nor real")
        return result

    def _concat(self, parts: list[Any]) -> str:
        texts = [self.text(part) for part in parts]
        length = sum(len(text) for text in texts)
        self.budget.make(length if all(text.isascii() for text in texts) else 4 * length)
        return "".join(texts)

    def _compare_chain(self, value: Any, *operands: Any) -> Any:
        result: Any = True
        for name, other in zip(operands[::2], operands[1::2], strict=True):
            result = self._compare(value, name, other)
            if not result:
                break
            value = other
        return result

    def _compare(self, left: Any, name: str, right: Any) -> Any:
        if type(right) is dict and name in ("in", "notin"):
            if isinstance(left, Undefined):
                return name == "notin"
            check_key(left)
        elif type(left) is str and type(right) is str:
            within = name in ("in", "notin")
            self.budget.scan(len(left) + len(right) if within else min(len(left), len(right)))
        else:
            for side in (left, right):
                # Comparing two mappings or lists walks them, every path anew.
                if type(side) in (list, tuple, dict):
                    self.budget.scan(self.budget.measure(side))
                    if name in ("in", "notin") and type(left) is str:
                        self.budget.scan(len(left))
        return _COMPARE[name](left, right)

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """``value[start:stop:step]``."""
        if isinstance(value, Undefined):
            value._fail_with_undefined_error()
        if type(value) not in (str, list, tuple):
            raise TemplateError(f"it slices {kind(value)}")
        cut = slice(*[None if isinstance(end, Undefined) else end for end in (start, stop, step)])
        count = len(range(*cut.indices(len(value))))
        width = POINTER_BYTES if type(value) is not str else 1 if value.isascii() else 4
        self.budget.make(width * count)
        return value[cut]

    # ----------------------------------------------------------------------------------- what blocks cost

    def _charge(self, _: None, steps: int, size: int) -> None:
        self.budget.step(steps)
        if size:
            self.budget.make(size)

    def _display(self, value: Any) -> Any:
        self.budget.make_slots(len(value))
        return value

    def _mapping(self, flat: list[Any]) -> dict[Any, Any]:
        self.budget.make_slots(2 * len(flat))
        for key in flat[::2]:
            check_key(key)
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def _iterate(self, value: Any, per_item: int = 1) -> Any:
        parts = self.sequence(value)
        # A recursive loop is called without its own cost per item, so the largest seen stands for it.
        self._per_item = max(self._per_item, per_item)
        self.budget.make(LOOP_BYTES)
        self.budget.step(per_item * len(parts))
        return parts

    def sequence(self, value: Any) -> Any:
        """``value`` as a list or tuple: what loops and filters walk."""
        if type(value) in _SEQUENCES:
            return value
        if isinstance(value, Undefined):
            return []
        if type(value) is dict:
            self.budget.make_slots(len(value))
            return list(value)
        if type(value) is str:
            # Characters beyond Latin-1 become objects of their own.
            self.budget.make_slots(len(value) * (1 if value.isascii() else 2))
            return list(value)
        raise TemplateError(f"it walks through {kind(value)}, which has no items")

    # --------------------------------------------------------------------------------------------- output

    def text(self, value: Any) -> str:
        """``value`` as text, as jinja prints it."""
        if type(value) is str:
            return value
        if isinstance(value, Undefined):
            return ""
        self.budget.make(self.budget.measure(value))
        return str(value)

    @pass_context
    def _output(self, context: Context, value: Any) -> str:
        text = self.text(value)
        # Inside a macro or a set block this is joined to a copy later; the budget counts that copy here.
        self.budget.make(stored_bytes(text))
        return text
