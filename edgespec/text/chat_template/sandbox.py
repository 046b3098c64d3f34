"""The environment a chat template runs in: jinja's immutable sandbox, with allow-lists and a budget.

Imports jinja2, so this module is imported only when a template is compiled. One environment serves one rendering: it
holds that rendering's budget, and no change by a template outlives it.

A parsed template is rewritten so that every operation is counted; a template with other operations is refused. Basic
blocks are counted, as in a metered virtual machine: each list of statements starts with a charge for its number of
syntax nodes. Nodes whose cost depends on values (loops, ``~``, comparisons, slices, lists) become calls of internal
filters; their names contain a space, so a template cannot name them.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

from edgespec.errors import TemplateError
from edgespec.text.chat_template.budget import (
    INTEGER_BITS,
    METHODS,
    POINTER_BYTES,
    BoundMethod,
    Budget,
    check_key,
    kind,
    percent,
    stored_bytes,
)
from edgespec.text.chat_template.filters import Filters, tests_table
from edgespec.text.chat_template.origin import joined, written

CHARGE = " charge"
COMPARE = " compare"
CONCAT = " concat"
DISPLAY = " display"
ITERATE = " iterate"
MAPPING = " mapping"
OWN = " own"
SLICE = " slice"

# The compiler recurses per level, and CPython refuses 200 nested parentheses. Real templates stay under 30.
DEPTH = 100
# Qwen2.5's template has 190 nodes in 2.5 kB, so the largest templates in use have about 1 500.
NODES = 6_000
# A macro object with its closure, its function and its argument names (measured with tracemalloc).
MACRO_BYTES = 800

_BODIES = frozenset({"body", "else_", "elif_"})
_STATEMENTS: tuple[type[nodes.Node], ...] = (
    nodes.Output, nodes.For, nodes.If, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With, nodes.Assign,
    nodes.AssignBlock, nodes.Break, nodes.Continue,
)  # fmt: skip
_EXPRESSIONS: tuple[type[nodes.Node], ...] = (
    nodes.TemplateData, nodes.Const, nodes.Name, nodes.NSRef, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair,
    nodes.Keyword, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice,
    nodes.Concat, nodes.Compare, nodes.Operand, nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod,
    nodes.Pow, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Pos,
)  # fmt: skip


class GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's part for training; in a prompt the tag has no effect."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# A node, the field that holds its statements, and the extra steps for entering them.
_Block = tuple[nodes.Node, str, int]


def rewrite(template: nodes.Template) -> nodes.Template:
    """Rewrite ``template`` so that it is counted. Raises TemplateError for forbidden syntax."""
    _Rewriter().block(template, "body", 0)
    return template


class _Rewriter:
    def __init__(self) -> None:
        self._nodes = 0

    def block(self, parent: nodes.Node, field: str, depth: int, per_entry: int = 0) -> None:
        """Rewrite one list of statements and prepend its charge, plus ``per_entry`` steps."""
        statements: list[nodes.Node] = getattr(parent, field)
        if not statements:
            return
        start, macros = self._nodes, 0
        blocks: list[_Block] = []
        for statement in statements:
            self._statement(statement, depth + 1, blocks)
            macros += isinstance(statement, nodes.Macro | nodes.CallBlock)
        # The charge covers this list only; nested lists are charged when they run.
        steps = self._nodes - start + per_entry
        charge: list[nodes.Expr] = [nodes.Const(steps), nodes.Const(macros * MACRO_BYTES)]
        for inner, name, head in blocks:
            self.block(inner, name, depth + 1, head)
        line = statements[0].lineno
        statements.insert(0, nodes.ExprStmt(_counted(CHARGE, nodes.Const(None), charge, line), lineno=line))

    def _statement(self, node: nodes.Node, depth: int, blocks: list[_Block]) -> None:
        start = self._nodes
        self._count(node, depth, _STATEMENTS)
        own: list[str] = []
        for field in node.fields:
            value = getattr(node, field)
            if field == "elif_":
                for branch in value:
                    self._statement(branch, depth, blocks)
            elif field in _BODIES:
                own.append(field)
            else:
                setattr(node, field, self._field(value, depth))
        # Defaults of a macro's arguments are evaluated at each call.
        head = self._nodes - start if isinstance(node, nodes.Macro | nodes.CallBlock) else 0
        blocks += [(node, field, head) for field in own]
        if isinstance(node, nodes.For):
            per_item = 1 if node.test is None else 1 + sum(1 for _ in node.test.find_all(nodes.Node))
            node.iter = _counted(ITERATE, node.iter, [nodes.Const(per_item)], node.lineno)

    def _field(self, value: Any, depth: int) -> Any:
        if isinstance(value, nodes.Node):
            return self._expression(value, depth + 1)
        return [self._field(item, depth) for item in value] if isinstance(value, list) else value

    def _expression(self, node: nodes.Node, depth: int) -> nodes.Node:
        self._count(node, depth, _EXPRESSIONS)
        for field in node.fields:
            setattr(node, field, self._field(getattr(node, field), depth))
        line = node.lineno
        if isinstance(node, nodes.TemplateData):
            # Literal text in a loop must be counted too: as a filter's result it passes through the counted output.
            return _counted(OWN, nodes.Const(node.data, lineno=line), [], line)
        if isinstance(node, nodes.Const) and isinstance(node.value, str):
            return _counted(OWN, node, [], line)
        if isinstance(node, nodes.Concat):
            return _counted(CONCAT, nodes.List(node.nodes, lineno=line), [], line)
        if isinstance(node, nodes.Compare):
            operands = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
            return _counted(COMPARE, node.expr, operands, line)
        if isinstance(node, nodes.Dict):
            flat = [part for pair in node.items for part in (pair.key, pair.value)]
            return _counted(MAPPING, nodes.List(flat, lineno=line), [], line)
        if isinstance(node, nodes.List) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            return _counted(DISPLAY, node, [], line)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            ends = [node.arg.start, node.arg.stop, node.arg.step]
            return _counted(SLICE, node.node, [nodes.Const(None) if end is None else end for end in ends], line)
        return node

    def _count(self, node: nodes.Node, depth: int, allowed: tuple[type[nodes.Node], ...]) -> None:
        self._nodes += 1
        where = "" if node.lineno is None else f" on line {node.lineno}"
        if type(node) not in allowed or (isinstance(node, nodes.Name) and node.name == "self"):
            what = "self" if isinstance(node, nodes.Name) else type(node).__name__.lower()
            raise TemplateError(f"the chat template uses {what!r}{where}, which is not allowed")
        if isinstance(node, nodes.Const) and isinstance(node.value, float) and not math.isfinite(node.value):
            raise TemplateError(f"the chat template holds a number that is too large{where}")
        if depth > DEPTH:
            raise TemplateError(f"the chat template nests more than {DEPTH} deep{where}")
        if self._nodes > NODES:
            raise TemplateError(f"the chat template has more than {NODES} syntax nodes")


def _counted(name: str, value: nodes.Node, arguments: list[nodes.Expr], line: int) -> nodes.Filter:
    return nodes.Filter(value, name, arguments, [], None, None, lineno=line)


# Namespace, its dict and its first few names (measured with tracemalloc: 340 bytes).
NAMESPACE_BYTES = 400
# The loop object with its iterator, its frame and its dict (measured with tracemalloc: about 450 bytes).
LOOP_BYTES = 500
# Every field of a date; glibc pads "%999999999d" to a gigabyte, so widths do not pass.
DATE_FORMAT = re.compile(r"(?:%[-_0^#]?[aAbBcCdDeFfgGhHIjklmMnpPrRsStTuUVwWxXyYzZ]|%%|[^%]){0,64}")
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
    """The template itself called ``raise_exception``: its message is shown unchanged."""


class Sandbox(ImmutableSandboxedEnvironment):
    """One rendering's environment. Also used to parse and compile, with an unused budget."""

    concat = staticmethod(joined)  # what jinja joins the output of a macro or a block by
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._per_item = 1
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            finalize=self._output,  # takes the context: jinja cannot compute output at compile time
            optimized=False,  # the optimizer would evaluate constant expressions without counting
            autoescape=False,
            cache_size=0,
        )
        self.filters = {
            **Filters(self).table(),
            CHARGE: self._charge,
            COMPARE: self._compare_chain,
            CONCAT: self._concat,
            DISPLAY: self._display,
            ITERATE: self._iterate,
            MAPPING: self._mapping,
            OWN: cache(written),  # each literal is made once
            SLICE: self.sliced,
        }
        self.tests = {
            **tests_table(self, self._compare),
            "filter": lambda name: isinstance(name, str) and name in self.filters,
            "test": lambda name: isinstance(name, str) and name in self.tests,
        }
        self._functions: dict[Any, str] = {
            self._range: "range",
            self._namespace: "namespace",
            self._dict: "dict",
            self._joiner: "joiner",
            self._cycler: "cycler",
            self._raise: "raise_exception",
            self._now: "strftime_now",
        }
        self.globals = {name: function for function, name in self._functions.items()}

    # ----------------------------------------------------------------------------------------- attributes

    def getattr(self, obj: Any, attribute: str) -> Any:
        """``obj.attribute`` by jinja's rules, if a template may see it."""
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
            if attribute in ("changed", "cycle"):
                return BoundMethod(obj, attribute)
        elif type(obj) is Cycler:
            if attribute in ("next", "reset"):
                return BoundMethod(obj, attribute)
            if attribute == "current":
                return obj.current
        elif type(obj) is tuple and len(obj) == 2 and attribute in ("grouper", "list"):
            return obj[attribute == "list"]  # a group of groupby
        if attribute.startswith("_") or hasattr(type(obj), attribute):
            raise TemplateError(f"it may not use {attribute[:80]!r} of {kind(obj)}")
        return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """``obj[argument]``; as in jinja, a name without an item is looked up as an attribute."""
        if isinstance(obj, Undefined):
            obj._fail_with_undefined_error()
        if isinstance(argument, Undefined):
            return self.undefined(obj=obj, name="something undefined")
        if type(obj) is dict:
            check_key(argument)
            if argument in obj:
                return obj[argument]
        elif isinstance(obj, str | list | tuple) and type(argument) in (int, bool):
            try:
                return obj[argument]
            except IndexError:
                return self.undefined(obj=obj, name=argument)
        if isinstance(argument, str):
            return self.getattr(obj, argument)
        return self.undefined(obj=obj, name=kind(argument))

    # ---------------------------------------------------------------------------------------------- calls

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method, macro, loop or global function of the allow-list; other values are not callable."""
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
        elif type(__obj) is Joiner:
            return __obj()
        elif type(__obj) is not Macro and not (callable(__obj) and __obj in self._functions):
            raise TemplateError(f"it calls {kind(__obj)}, which cannot be called")
        self.budget.enter()
        try:
            return __context.call(__obj, *args, **kwargs)
        finally:
            self.budget.leave()

    def _method(self, method: BoundMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if isinstance(method.owner, LoopContext | Cycler):
                if method.name == "changed":
                    sizes = [self.budget.measure(value) for value in args if not isinstance(value, Undefined)]
                    self.budget.scan(sum(sizes))
                return getattr(method.owner, method.name)(*args, **kwargs)
            return METHODS[type(method.owner)][method.name](self.budget, method.owner, *args, **kwargs)
        except TypeError as error:  # its text would show internal function names
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
            raise TemplateError("it makes a mapping of something that is not a mapping")
        self.budget.make_slots(3 * (len(kwargs) + sum(len(one) for one in args)) + 2)
        return dict(*args, **kwargs)

    def _joiner(self, sep: Any = ", ") -> Joiner:
        self.budget.make(NAMESPACE_BYTES)
        return Joiner(self.text(sep))

    def _cycler(self, *items: Any) -> Cycler:
        if not items:
            raise TemplateError("it calls cycler without values")
        self.budget.make(NAMESPACE_BYTES)
        return Cycler(*items)

    def _raise(self, message: Any = "") -> None:
        raise TemplateRaisedError(self.text(message)[:MESSAGE_CHARACTERS])

    def _now(self, pattern: Any) -> str:
        if not isinstance(pattern, str) or DATE_FORMAT.fullmatch(pattern) is None:
            raise TemplateError("it calls strftime_now with a format that is not allowed")
        return self.budget.made(datetime.now().strftime(pattern))

    # ------------------------------------------------------------------------------------------ operators

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """``left operator right``, with the result's size checked first."""
        return self._computed(operator, left, right)

    def added(self, left: Any, right: Any) -> Any:
        """``left + right``, for filters."""
        return self._computed("+", left, right)

    def _computed(self, operator: str, left: Any, right: Any) -> Any:
        self.budget.step()
        if operator == "%" and isinstance(left, str):
            return percent(self.budget, left, right)
        kinds = type(left), type(right)
        if isinstance(left, Undefined) or isinstance(right, Undefined):
            return self.binop_table[operator](left, right)  # raises UndefinedError
        if kinds[0] in _NUMBERS and kinds[1] in _NUMBERS:
            return self._arithmetic(operator, left, right)
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            return self.budget.join([left, right])
        if operator == "+" and kinds[0] is kinds[1] and kinds[0] in _SEQUENCES:
            self.budget.make(POINTER_BYTES * (len(left) + len(right)))
            return left + right
        if operator == "*" and int in kinds:
            value, times = (left, right) if kinds[1] is int else (right, left)
            if isinstance(value, str):
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
            raise TemplateError("it computes a complex number")
        return result

    def _concat(self, parts: list[Any]) -> str:
        return self.budget.join([self.text(part) for part in parts])

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
        elif isinstance(left, str) and isinstance(right, str):
            within = name in ("in", "notin")
            self.budget.scan(len(left) + len(right) if within else min(len(left), len(right)))
        else:
            for side in (left, right):
                # Comparing two mappings or lists walks every path.
                if type(side) in (list, tuple, dict):
                    self.budget.scan(self.budget.measure(side))
                    if name in ("in", "notin") and isinstance(left, str):
                        self.budget.scan(len(left))
        return _COMPARE[name](left, right)

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """``value[start:stop:step]``."""
        if isinstance(value, Undefined):
            value._fail_with_undefined_error()
        if not isinstance(value, str | list | tuple):
            raise TemplateError(f"it slices {kind(value)}")
        cut = slice(*[None if isinstance(end, Undefined) else end for end in (start, stop, step)])
        count = len(range(*cut.indices(len(value))))
        width = stored_bytes(value) // max(len(value), 1) if isinstance(value, str) else POINTER_BYTES
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
        # A recursive call does not pass its cost per item: use the largest one seen.
        self._per_item = max(self._per_item, per_item)
        self.budget.make(LOOP_BYTES)
        self.budget.step(per_item * len(parts))
        return parts

    def sequence(self, value: Any) -> Any:
        """``value`` as a list or tuple, for loops and filters."""
        if type(value) in _SEQUENCES:
            return value
        if isinstance(value, Undefined):
            return []
        if type(value) is dict:
            self.budget.make_slots(len(value))
            return list(value)
        if isinstance(value, str):
            # Characters beyond Latin-1 become separate objects.
            self.budget.make_slots(len(value) * (1 if value.isascii() else 2))
            return list(value)
        raise TemplateError(f"it walks through {kind(value)}, which has no items")

    # --------------------------------------------------------------------------------------------- output

    def text(self, value: Any) -> str:
        """``value`` as text, as jinja prints it."""
        if isinstance(value, str):
            return value
        if isinstance(value, Undefined):
            return ""
        self.budget.make(self.budget.measure(value))
        return str(value)

    @pass_context
    def _output(self, context: Context, value: Any) -> str:
        text = self.text(value)
        # Inside a macro or a set block the output is joined to a copy later: count that copy here.
        self.budget.make(stored_bytes(text))
        return text
