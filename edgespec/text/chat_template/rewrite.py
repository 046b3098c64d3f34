"""A parsed chat template, rewritten so that everything it does is counted, and refused if it holds anything else.

Imports jinja2, so it is itself imported only when a template is compiled.

Counting is by basic block, as in a metered virtual machine: each list of statements starts with one step that costs
the number of syntax nodes in it. Nodes whose cost depends on their values (loops, ``~``, comparisons, slices, lists)
become calls of internal filters, whose names hold a space and so cannot be written in a template.
"""

from __future__ import annotations

import math
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from edgespec.errors import TemplateError

CHARGE = " charge"
COMPARE = " compare"
CONCAT = " concat"
DISPLAY = " display"
ITERATE = " iterate"
MAPPING = " mapping"
SLICE = " slice"

# The compiler recurses per level and CPython refuses 200 nested parentheses; real templates stay under 30.
DEPTH = 100
# Qwen2.5's template has 190 nodes in 2.5 kB, so the largest in use have about 1 500.
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
    """``{% generation %}`` marks the assistant's part for training; for a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# A node, the field that holds its statements, and the steps that entering them costs besides.
_Block = tuple[nodes.Node, str, int]


def rewrite(template: nodes.Template) -> nodes.Template:
    """``template``, counted. Raises TemplateError for what no chat template may contain."""
    _Rewriter().block(template, "body", 0)
    return template


class _Rewriter:
    def __init__(self) -> None:
        self._nodes = 0

    def block(self, parent: nodes.Node, field: str, depth: int, per_entry: int = 0) -> None:
        """Rewrite one list of statements and put its charge, with ``per_entry`` steps more, in front."""
        statements: list[nodes.Node] = getattr(parent, field)
        if not statements:
            return
        start, macros = self._nodes, 0
        blocks: list[_Block] = []
        for statement in statements:
            self._statement(statement, depth + 1, blocks)
            macros += isinstance(statement, nodes.Macro | nodes.CallBlock)
        # Only what runs with this list is its cost; the lists inside charge for themselves when they run.
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
        # Defaults of a macro's arguments are computed at each call.
        head = self._nodes - start if isinstance(node, nodes.Macro | nodes.CallBlock) else 0
        blocks += [(node, field, head) for field in own]
        if isinstance(node, nodes.Output):
            # Text repeated in a loop is output like any other: as a constant it passes through the counted output.
            node.nodes = [
                nodes.Const(part.data, lineno=part.lineno) if isinstance(part, nodes.TemplateData) else part
                for part in node.nodes
            ]
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
