"""GBNF in Lark, with terminals that leave what may follow them.

llguidance reads terminals: texts, classes, and rules that hold only these. It takes the longest text that a terminal
allowed at a place has, and never goes back: a sentence of any letters eats its own full stop. One terminal alone has
nothing behind it. Rules of single letters are slow: a grammar that needs rules keeps what terminals it can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleRefNode,
    SequenceNode,
)

from edgespec.text.grammar.gbnf import plain_gbnf

# Of looking at a grammar, about 0.3 s; the terminals of a larger one stay as they are.
_MOST_STEPS = 100_000
_IN_CLASS = re.compile(r"\\x([0-9a-f]{2})|(.)", re.DOTALL)
_LAST_LETTER = "\U0010ffff"
_ROOT = "root"

_Rules = dict[str, ASTNode]


def larks_of_gbnf(grammar: str) -> list[str]:
    """The grammar in Lark: first so that what may follow a terminal is not read as its own, last as it stands.

    Raises ValueError, and what llguidance's parser raises.
    """
    rules = {name: rule.alternatives.simplify() for name, rule in GrammarParser().parse(plain_gbnf(grammar)).items()}
    for rule in rules.values():
        for node in _nodes(rule):
            if isinstance(node, RuleRefNode) and node.name not in rules:
                raise ValueError(f"the rule {node.name!r:.80} is not defined")
            if isinstance(node, RepetitionNode) and isinstance(node.node, RepetitionNode):
                node.node = AlternativeNode([node.node])  # is written in parentheses, which Lark needs here
    if _ROOT not in rules:
        raise ValueError("it has no rule 'root'")
    regular = _regular(rules)
    terminals = {name: node for name, node in rules.items() if name in regular}
    others = {name: node for name, node in rules.items() if name not in regular or name == _ROOT}
    first = ({}, terminals) if _ROOT in regular else _Split(others, terminals).rules()
    return [_written(*first), _written(others, terminals)]


def _written(rules: _Rules, terminals: _Rules) -> str:
    """All rules in Lark. A terminal that is a rule too stands for it in other terminals."""
    numbers = {name: number for number, name in enumerate({**terminals, **rules})}  # names may differ in case alone

    def named(name: str, *, in_rule: bool) -> str:
        return f"{'rule' if in_rule and name in rules else 'RULE'}{numbers[name]}"

    def lark(node: ASTNode, *, in_rule: bool) -> ASTNode:
        if isinstance(node, RuleRefNode):
            return RuleRefNode(named(node.name, in_rule=in_rule))
        return _changed(node, lambda each: lark(each, in_rule=in_rule))

    lines = [f"start: {named(_ROOT, in_rule=True)}"]
    for own, in_rule in ((rules, True), (terminals, False)):
        lines += [f"{named(name, in_rule=in_rule)}: {lark(node, in_rule=in_rule)}" for name, node in own.items()]
    return "\n".join(lines)


def _nodes(node: ASTNode) -> Iterator[ASTNode]:
    yield node
    for each in node.children():
        yield from _nodes(each)


def _changed(node: ASTNode, change: Callable[[ASTNode], ASTNode]) -> ASTNode:
    """The expression with its parts changed."""
    if isinstance(node, RepetitionNode):
        return RepetitionNode(change(node.node), node.min_times, node.max_times)
    if isinstance(node, SequenceNode | AlternativeNode):
        return type(node)([change(each) for each in node.children()])
    return node


def _regular(rules: _Rules) -> set[str]:
    """The rules that lead to no rule which leads to itself."""
    led, found = dict[str, set[str]](), set[str]()
    for name, rule in rules.items():
        led[name] = {each.name for each in _nodes(rule) if isinstance(each, RuleRefNode)}
    while more := {name for name, to in led.items() if name not in found and to <= found}:
        found |= more
    return found


def _text(node: LiteralNode) -> str:
    return str(json.loads(f'"{node.value}"', strict=False))


class _TooLargeError(Exception):
    """A grammar takes too long to look at."""


class _Shape(NamedTuple):
    """How an expression begins and ends; sets hold letters, or on the level of rules the keys of terminals."""

    is_optional: bool
    first: frozenset[str]
    behind: frozenset[str]  # an end that need not be the last one
    ends_anywhere: bool


_NONE = frozenset[str]()
_NOTHING = _Shape(True, _NONE, _NONE, True)


def _shape(node: ASTNode, leaf: Callable[[ASTNode], _Shape]) -> _Shape:
    if not (inner := [_shape(each, leaf) for each in node.children()]):
        return _NOTHING if isinstance(node, SequenceNode) else leaf(node)
    found = inner[0]
    if isinstance(node, RepetitionNode):
        behind = found.behind if node.max_times in (1, node.min_times) else found.behind | found.first
        anywhere = found.ends_anywhere and node.min_times <= 1
        return _Shape(found.is_optional or not node.min_times, found.first, behind, anywhere)
    if isinstance(node, AlternativeNode):
        optional, first, last, anywheres = zip(*inner, strict=True)
        return _Shape(any(optional), _NONE.union(*first), _NONE.union(*last), all(anywheres))
    for each in inner[1:]:
        found = _Shape(
            found.is_optional and each.is_optional,
            found.first | each.first if found.is_optional else found.first,
            each.behind | found.behind | each.first if each.is_optional else each.behind,
            found.ends_anywhere and each.ends_anywhere and each.is_optional,
        )
    return found


class _Split:
    """Makes rules of their parts from the terminals that would read what may follow them."""

    def __init__(self, rules: _Rules, terminals: _Rules) -> None:
        self._given = rules, terminals
        self._rules, self._terminals = dict(rules), dict(terminals)
        self._left = _MOST_STEPS
        self._shapes = dict[str, _Shape]()  # of terminals, in letters
        limits = {"\0"}  # of classes; a letter stands for those up to the next limit
        for node in (each for rule in (*rules.values(), *terminals.values()) for each in _nodes(rule)):
            if isinstance(node, LiteralNode):
                limits |= {*_text(node)[:1]}
            inside = node.rx if isinstance(node, RegexNode) else ""
            named = {chr(int(code, 16)) if code else own for code, own in _IN_CLASS.findall(inside)}
            limits |= named | {chr(ord(letter) + 1) for letter in named - {_LAST_LETTER}}
        self._letters = "".join(limits)

    def rules(self) -> tuple[_Rules, _Rules]:
        """Rules and terminals."""
        try:
            while found := self._too_far():
                for name in found:
                    self._rules[name] = _changed(self._terminals[name], self._part)
        except (_TooLargeError, RecursionError):
            return self._given
        return self._rules, self._terminals

    def _part(self, node: ASTNode) -> ASTNode:
        """A part of a rule: now a terminal. A single letter stays one."""
        if not node.children():
            return node
        self._terminals[str(node)] = node
        return RuleRefNode(str(node))

    def _too_far(self) -> set[str]:
        """The terminals that may read what follows them."""
        self._follow()
        found = set[str]()
        for key in self._following.keys() & self._terminals.keys() - self._rules.keys():
            others = self._following[key] - ({key} if self._is_free(key) else set())
            if any(self._shapes[key].behind & self._shapes[each].first for each in others):
                found.add(key)
        return found

    def _is_free(self, key: str) -> bool:
        """Whether a terminal may follow itself: what the first one takes, the second one need not have."""
        node, shape = self._terminals[key], self._shapes[key]
        while isinstance(node, RuleRefNode):
            node = self._terminals[node.name]
        is_run = isinstance(node, RepetitionNode) and node.max_times is None and isinstance(node.node, RegexNode)
        return shape.ends_anywhere and (shape.is_optional or is_run)

    def _in_letters(self, node: ASTNode) -> _Shape:
        """The shape of a terminal."""
        key = _key(node)
        if key not in self._shapes:
            self._take(len(self._letters))
            if isinstance(node, RuleRefNode):
                self._shapes[key] = _shape(self._terminals[key], self._in_letters)
            elif isinstance(node, LiteralNode):
                text = _text(node)
                self._shapes[key] = _Shape(not text, frozenset(text[:1]), _NONE, len(text) <= 1)
            else:
                letters = frozenset(re.findall(key[1:-1], self._letters))
                self._shapes[key] = _Shape(False, letters, _NONE, True)
        return self._shapes[key]

    # The terminals that may follow one: those that may begin what is behind it, on the level of rules.

    def _follow(self) -> None:
        self._begins = dict.fromkeys(self._rules, _NOTHING._replace(is_optional=False))
        while new := {
            name: own for name, rule in self._rules.items() if (own := self._begin(rule)) != self._begins[name]
        }:
            self._begins |= new
        self._following = dict[str, frozenset[str]]()
        seen = None
        while seen != (seen := dict(self._following)):
            for name, rule in self._rules.items():
                self._walk(rule, self._following.get(name, _NONE))

    def _begin(self, node: ASTNode) -> _Shape:
        return _shape(node, self._in_terminals)._replace(behind=_NONE)

    def _in_terminals(self, node: ASTNode) -> _Shape:
        self._take(1)
        if (key := _key(node)) in self._begins:
            return self._begins[key]
        return self._in_letters(node)._replace(first=frozenset([key]), behind=_NONE)

    def _walk(self, node: ASTNode, after: frozenset[str]) -> None:
        """Note the terminals ``after`` an expression as those behind its last parts."""
        self._take(len(after) + 1)
        if not node.children():
            key = _key(node)
            self._following[key] = self._following.get(key, _NONE) | after
        if isinstance(node, RepetitionNode) and node.max_times != 1:
            after |= self._begin(node).first
        for each in reversed(node.children()):
            self._walk(each, after)
            if isinstance(node, SequenceNode):
                begin = self._begin(each)
                after = after | begin.first if begin.is_optional else begin.first

    def _take(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise _TooLargeError


def _key(node: ASTNode) -> str:
    return node.name if isinstance(node, RuleRefNode) else str(node)
