"""GBNF in Lark, with terminals that leave what may follow them, where one terminal can hold the grammar.

llguidance reads terminals: texts, classes, and rules that hold only these. It takes the longest text that a terminal
allowed at a place has, and never goes back: a sentence of any letters eats its own full stop. One terminal alone has
nothing behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GrammarParser,
    RepetitionNode,
    RuleRefNode,
    SequenceNode,
)

from edgespec.text.grammar.gbnf import plain_gbnf

# The largest product of bounds of nested repetitions in one terminal: 40 words of up to 20 letters and a blank fail
# within the answer (too many expressions). A grammar with more keeps its terminals.
_MOST_REPEATED = 256
_ROOT = "root"

_Rules = dict[str, ASTNode]


def larks_of_gbnf(grammar: str) -> list[str]:
    """The grammar in Lark: as one terminal if it is one, as nothing is behind that, then with its own terminals.

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
    asked = [_written(others, terminals)]
    one = [_written({}, terminals)] if _ROOT in regular and _is_small(rules[_ROOT], terminals) else []
    return [*one, *asked]


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


def _is_small(node: ASTNode, terminals: _Rules) -> bool:
    """Whether repetitions of a bounded number within others are few, of which one terminal has a state for each."""
    with suppress(RecursionError):
        product, depth = _repeated(node, terminals, {})
        return depth < 2 or product <= _MOST_REPEATED
    return False


def _repeated(node: ASTNode, terminals: _Rules, known: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """The largest product of bounds of nested repetitions, and how many they are."""
    if isinstance(node, RuleRefNode):
        if node.name not in known:
            known[node.name] = _repeated(terminals[node.name], terminals, known)
        return known[node.name]
    product, depth = max((_repeated(each, terminals, known) for each in node.children()), default=(1, 0))
    if isinstance(node, RepetitionNode) and (bound := node.max_times or node.min_times) > 1:
        return product * bound, depth + 1
    return product, depth
