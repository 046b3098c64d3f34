"""GBNF in Lark, with terminals that never read too far.

llguidance reads terminals: texts, classes, and rules that hold only these. It takes the longest text that a terminal
allowed at a place has, and never goes back: a sentence of any letters eats its own full stop. Rules of single
letters are slower, so a grammar keeps all terminals but those that would eat what may follow one.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from copy import deepcopy

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
)

from edgespec.text.grammar.gbnf import plain_gbnf

# What is looked at in a grammar, about 0.3 s; the terminals of a larger one stay as they are.
_MOST_STEPS = 1_000_000
_MOST_POSITIONS = 5_000
# An expression takes the time of as many steps.
_OF_EXPRESSION = 20
_IN_CLASS = re.compile(r"\\x([0-9a-f]{2})|(.)", re.DOTALL)
_LAST_LETTER = 0x10FFFF
_ROOT = "root"

_Rules = dict[str, RuleNode]


def lark_of_gbnf(grammar: str) -> str:
    """The grammar in Lark. Raises ValueError, and what llguidance's parser raises."""
    rules = GrammarParser().parse(plain_gbnf(grammar))
    for rule in rules.values():
        rule.alternatives = rule.alternatives.simplify()
        for node in _nodes(rule):
            if isinstance(node, RuleRefNode) and node.name not in rules:
                raise ValueError(f"the rule {node.name!r:.80} is not defined")
            if isinstance(node, RepetitionNode) and isinstance(node.node, RepetitionNode):
                node.node = AlternativeNode([node.node])  # is written in parentheses, which Lark needs here
    if _ROOT not in rules:
        raise ValueError("it has no rule 'root'")
    regular = _regular(rules)
    whole = {name: deepcopy(rule) for name, rule in rules.items() if name in regular}
    terminals = regular - {_ROOT}
    reading = _Reading(rules, terminals, _MOST_STEPS)
    while found := reading.too_far():
        if _ROOT in regular:
            terminals = regular  # one terminal has nothing behind it
            break
        terminals -= found
        for rule in rules.values():
            rule.alternatives = _in_letters(rule.alternatives, found)
        reading = _Reading(rules, terminals, reading.left)
    return _written(rules, whole, terminals)


def _written(rules: _Rules, whole: _Rules, terminals: set[str]) -> str:
    """All rules in Lark: ``terminals``, and what these lead to, are as the ``whole`` rules have them."""
    numbers = {name: number for number, name in enumerate(rules)}  # names of GBNF may differ in what Lark's may not
    for name, rule in whole.items():
        rule.name = f"RULE{numbers[name]}"
        _lead(rule, whole)
    others = {name: rule for name, rule in rules.items() if name not in terminals}
    for name, rule in others.items():
        rule.name = f"rule{numbers[name]}"
        _lead(rule, {**whole, **others})
    first = (others.get(_ROOT) or whole[_ROOT]).name
    return "\n".join([f"start: {first}", *map(str, others.values()), *map(str, whole.values())])


def _lead(rule: RuleNode, targets: _Rules) -> None:
    rule.comment = ""
    for node in _nodes(rule):
        if isinstance(node, RuleRefNode):
            node.target = targets[node.name]


def _nodes(node: ASTNode) -> Iterator[ASTNode]:
    for each in node.children():
        yield each
        yield from _nodes(each)


def _regular(rules: _Rules) -> set[str]:
    """The rules that lead to no rule which leads to itself."""
    led, found = dict[str, set[str]](), set[str]()
    for name, rule in rules.items():
        led[name] = {each.name for each in _nodes(rule) if isinstance(each, RuleRefNode)}
    while more := {name for name, to in led.items() if name not in found and to <= found}:
        found |= more
    return found


def _in_letters(node: ASTNode, texts: set[str]) -> ASTNode:
    """The expression with each of some texts as single letters."""
    if isinstance(node, LiteralNode) and str(node) in texts:
        return SequenceNode([LiteralNode(json.dumps(letter, ensure_ascii=False)[1:-1]) for letter in _text(node)])
    if isinstance(node, RepetitionNode):
        node.node = _in_letters(node.node, texts)
    elif isinstance(node, SequenceNode):
        node.nodes = [_in_letters(each, texts) for each in node.nodes]
    elif isinstance(node, AlternativeNode):
        node.alternatives = [_in_letters(each, texts) for each in node.alternatives]
    return node


def _text(node: LiteralNode) -> str:
    text = json.loads(f'"{node.value}"', strict=False)
    assert isinstance(text, str)
    return text


def _ranges(node: RegexNode) -> tuple[tuple[int, int], ...]:
    """The letters of a class, from first to last."""
    inside = node.rx[1:-1]
    negative = inside.startswith("^")
    signs = [(chr(int(code, 16)) if code else own, own == "-") for code, own in _IN_CLASS.findall(inside[negative:])]
    found, place = list[tuple[int, int]](), 0
    while place < len(signs):
        end = place + 2 if place + 2 < len(signs) and signs[place + 1][1] else place
        found.append((ord(signs[place][0]), ord(signs[end][0])))
        place = end + 1
    if not negative:
        return tuple(found)
    others, begin = list[tuple[int, int]](), 0
    for first, last in sorted(found):
        if begin < first:
            others.append((begin, first - 1))
        begin = max(begin, last + 1)
    return (*others, (begin, _LAST_LETTER)) if begin <= _LAST_LETTER else tuple(others)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class _TooLargeError(Exception):
    """A grammar takes too long to look at."""


class _Reading:
    """What llguidance may read with some ``terminals``. All sets are bits of a number.

    A position is a letter of a terminal, as in Glushkov's automata; repeated parts count as repeated without an end.
    """

    def __init__(self, rules: _Rules, terminals: set[str], left: int) -> None:
        self._rules, self._terminals = rules, terminals
        self.left = left  # steps
        self._numbers = dict[str, int]()  # of terminals, by the name of a rule or as they are written
        self._ways = list[tuple[bool, int]]()  # of a terminal: whether it may be empty, and its first positions
        self._behind = list[int]()  # the terminals that may follow one
        self._letters = list[tuple[tuple[int, int], ...]]()  # of a position
        self._owner = list[int]()  # the terminal of a position
        self._next = list[int]()  # the positions behind a position
        self._last = 0  # the positions at which a terminal may end

    def too_far(self) -> set[str]:
        """The terminals that may read further where another one may end, and what follows that one."""
        try:
            return self._search(self._places())
        except (_TooLargeError, RecursionError):
            return set()

    def _take(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise _TooLargeError

    # ------------------------------------------------------------------------------------------------- positions

    def _number(self, node: ASTNode) -> int:
        """The number of a terminal."""
        key = node.name if isinstance(node, RuleRefNode) else str(node)
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            empty, first, last = self._positions(node)
            self._ways.append((empty, first))
            self._behind.append(0)
            self._last |= last
        return self._numbers[key]

    def _positions(self, node: ASTNode) -> tuple[bool, int, int]:
        """Whether an expression may be empty, its first positions and its last ones."""
        self._take(_OF_EXPRESSION)
        if isinstance(node, RuleRefNode):
            return self._positions(self._rules[node.name].alternatives)
        if isinstance(node, RegexNode):
            return self._one(_ranges(node))
        if isinstance(node, LiteralNode):
            empty, first, last = True, 0, 0
            for letter in _text(node):
                empty, first, last = self._joined((empty, first, last), self._one(((ord(letter), ord(letter)),)))
            return empty, first, last
        inner = [self._positions(each) for each in node.children()]
        if isinstance(node, AlternativeNode):
            firsts, lasts = 0, 0
            for _, first, last in inner:
                firsts, lasts = firsts | first, lasts | last
            return any(empty for empty, _, _ in inner), firsts, lasts
        if isinstance(node, RepetitionNode):
            ((empty, first, last),) = inner
            self._follow(last, first if node.max_times != 1 else 0)
            return empty or not node.min_times, first, last
        found = (True, 0, 0)
        for each in inner:
            found = self._joined(found, each)
        return found

    def _one(self, letters: tuple[tuple[int, int], ...]) -> tuple[bool, int, int]:
        if len(self._letters) == _MOST_POSITIONS:
            raise _TooLargeError
        self._letters.append(letters)
        self._next.append(0)
        self._owner.append(len(self._numbers) - 1)
        position = 1 << len(self._letters) - 1
        return False, position, position

    def _joined(self, one: tuple[bool, int, int], other: tuple[bool, int, int]) -> tuple[bool, int, int]:
        self._follow(one[2], other[1])
        first = one[1] | other[1] if one[0] else one[1]
        return one[0] and other[0], first, other[2] | one[2] if other[0] else other[2]

    def _follow(self, positions: int, following: int) -> None:
        self._take(positions.bit_count())
        for each in _bits(positions):
            self._next[each] |= following

    # ------------------------------------------------------------------------------------------------- terminals

    def _places(self) -> int:
        """The terminals that may begin a text; also fills in which may follow each."""
        own = {name: rule.alternatives for name, rule in self._rules.items() if name not in self._terminals}
        begins = dict.fromkeys(own, (False, 0))
        _settled(begins, lambda name: self._begin(own[name], begins))
        behind = dict.fromkeys(own, 0)
        seen: tuple[object, ...] = ()
        while seen != (seen := (dict(behind), list(self._behind))):
            for name, node in own.items():
                self._walk(node, behind[name], begins, behind)
        return begins[_ROOT][1]

    def _is_rule(self, node: ASTNode) -> bool:
        return isinstance(node, RuleRefNode) and node.name not in self._terminals

    def _begin(self, node: ASTNode, begins: dict[str, tuple[bool, int]]) -> tuple[bool, int]:
        """Whether an expression may be empty, and the terminals that may begin it."""
        self._take(_OF_EXPRESSION)
        if isinstance(node, RuleRefNode) and self._is_rule(node):
            return begins[node.name]
        if isinstance(node, LiteralNode | RegexNode | RuleRefNode):
            number = self._number(node)
            return self._ways[number][0], 1 << number
        inner = [self._begin(each, begins) for each in node.children()]
        first = 0
        if isinstance(node, SequenceNode):
            for empty, begin in inner:
                first |= begin
                if not empty:
                    return False, first
            return True, first
        for _, begin in inner:
            first |= begin
        empty = any(empty for empty, _ in inner)
        return empty or (isinstance(node, RepetitionNode) and not node.min_times), first

    def _walk(self, node: ASTNode, after: int, begins: dict[str, tuple[bool, int]], behind: dict[str, int]) -> None:
        """Note the terminals ``after`` an expression as those behind its last parts."""
        self._take(_OF_EXPRESSION)
        if isinstance(node, RuleRefNode) and self._is_rule(node):
            behind[node.name] |= after
        elif isinstance(node, LiteralNode | RegexNode | RuleRefNode):
            self._behind[self._number(node)] |= after
        elif isinstance(node, SequenceNode):
            for each in reversed(node.nodes):
                self._walk(each, after, begins, behind)
                empty, first = self._begin(each, begins)
                after = after | first if empty else first
        else:
            if isinstance(node, RepetitionNode) and node.max_times != 1:
                after |= self._begin(node.node, begins)[1]
            for each in node.children():
                self._walk(each, after, begins, behind)

    # ---------------------------------------------------------------------------------------------------- search

    def _search(self, begin: int) -> set[str]:
        """Follow all texts from the terminals that may begin one."""
        kinds, holders = self._kinds()
        first = [self._of_all(way, kinds) for _, way in self._ways]
        letters_behind = [self._of_all(each, first) for each in self._behind]
        names, found = list(self._numbers), set[str]()
        ways = [way for _, way in self._ways]
        places, waiting, seen = {begin}, [self._of_all(begin, ways)], set[int]()
        while waiting:
            following = waiting.pop()
            self._take(len(holders))
            states = {following & each for each in holders} - {0} - seen
            seen |= states
            for state in states:
                more = self._of_all(state, self._next)
                ended = 0
                for each in _bits(state & self._last):
                    ended |= 1 << self._owner[each]
                if more:
                    waiting.append(more)
                    letters = self._of_all(ended, letters_behind)
                    found |= {names[self._owner[each]] for each in _bits(more) if kinds[each] & letters}
                if ended and (place := self._of_all(ended, self._behind)) not in places:
                    places.add(place)
                    waiting.append(self._of_all(place, ways))
        return found

    def _kinds(self) -> tuple[list[int], list[int]]:
        """Of each position its kinds of letters, which no class cuts, and of each kind the positions that have it."""
        different = set(self._letters)
        cuts = sorted({cut for letters in different for first, last in letters for cut in (first, last + 1)})
        masks = dict[tuple[tuple[int, int], ...], int]()
        for letters in different:
            masks[letters] = 0
            for first, last in letters:
                masks[letters] |= (1 << bisect_left(cuts, last + 1)) - (1 << bisect_left(cuts, first))
        kinds, holders = [masks[letters] for letters in self._letters], [0] * len(cuts)
        for position, own in enumerate(kinds):
            self._take(own.bit_count())
            for kind in _bits(own):
                holders[kind] |= 1 << position
        return kinds, holders

    def _of_all(self, numbers: int, masks: list[int]) -> int:
        self._take(numbers.bit_count())
        found = 0
        for each in _bits(numbers):
            found |= masks[each]
        return found


def _settled(found: dict[str, tuple[bool, int]], of: Callable[[str], tuple[bool, int]]) -> None:
    """Repeat until nothing changes."""
    while changed := {name: new for name, old in found.items() if (new := of(name)) != old}:
        found |= changed
