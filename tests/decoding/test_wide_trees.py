"""Trees of up to 63 nodes, whatever the depth: the text is plain decoding's, and larger trees are cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from edgespec.bench.equality import FullTrees
from edgespec.decoding.round_base import LoopLimits
from edgespec.decoding.sampling import Chooser
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.combination import Combination
from edgespec.drafters.lookup import LookupDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.interfaces.counted_text import MOST_NODES, Context
from edgespec.interfaces.drafting import DraftRequest, DraftTree, Proposal
from edgespec.interfaces.policy import Allowance
from edgespec.planning.depth.base import FixedDepth
from edgespec.runtimes.sequence import MAX_SCORED_ROWS
from tests.decoding.test_grown_trees import drafting_model
from tests.decoding.test_loop import KNOWN, PLAIN, PROMPT, TEXT_RULES, TOKENS, VOCABULARY_SIZE, Answer, start
from tests.decoding.test_tree_rounds import Trees, loop_of, tree_model
from tests.support.fake_runtime import FakeModel
from tests.support.wide_trees import Bushy


def bushy(rule: str, depth: int, seed: int = 0, context_length: int = 100, **limits: Any) -> Answer:
    """An answer whose trees have a drafter's chain and alternatives, copies, and random guesses below any node."""
    own, chooser, policy = (
        start(tree_model(), PROMPT, context_length),
        Chooser(TEXT_RULES[rule]),
        FullTrees(depth, "model"),
    )
    request = DraftRequest(chooser=chooser, vocabulary_size=VOCABULARY_SIZE, context_length=100)
    drafters = [Bushy(seed), LookupDrafter(), ModelDrafter(lambda: drafting_model(4.0))]
    bounds = LoopLimits(**{"max_tokens": TOKENS, "depth_cap": depth, "vocabulary_size": VOCABULARY_SIZE, **limits})
    state = Combination(drafters, policy).start(request)
    loop = DecodeLoop(own.sequence, state, policy, chooser, own.history, bounds, trees=True)
    own.take(loop.steps())
    assert state.failures == {}
    return own


@pytest.mark.parametrize("rule", TEXT_RULES)
@pytest.mark.parametrize("depth", [3, 5, 9])
def test_trees_of_up_to_63_nodes_leave_plain_decodings_text_unchanged(rule: str, depth: int) -> None:
    for seed in range(3):
        own = bushy(rule, depth, seed)
        assert own.tokens == PLAIN[rule][:TOKENS]
        assert max(record.width for record in own.records) == MAX_SCORED_ROWS == 64
        assert len([record for record in own.records if record.proposed >= 40]) >= len(own.records) // 2
        assert max(record.depth for record in own.records) <= depth
        assert {record.invalid for record in own.records} == {0}
        assert sum(record.accepted for record in own.records) > 0


@pytest.mark.parametrize("room", range(1, 8))
def test_wide_trees_fit_the_context_the_answer_and_the_exact_length(room: int) -> None:
    for depth, max_tokens in itertools.product((2, 9), (None, 2, room + 3)):
        own = bushy("greedy", depth, context_length=len(PROMPT) + room, max_tokens=max_tokens)
        assert own.tokens == PLAIN["greedy"][: room if max_tokens is None else min(room, max_tokens)]
        assert own.finish == "length"
        assert all(record.width <= len(PROMPT) + room - record.context_length + 1 for record in own.records)
    exact = bushy("greedy", 4, exact_length=len(PROMPT) + room)
    assert exact.tokens == PLAIN["greedy"][:TOKENS]
    for record in exact.records:
        assert record.width == 1 or record.context_length + record.proposed <= len(PROMPT) + room


@pytest.mark.parametrize("count", [63, 64, 65, 200])
@pytest.mark.parametrize("rule", TEXT_RULES)
def test_a_larger_tree_is_cut_and_its_other_nodes_count_as_invalid(rule: str, count: int) -> None:
    """The right path comes last among the first 63 nodes: wrong tokens surround it."""

    def script(tokens: list[int], depth: int) -> list[list[int]]:
        right = list(KNOWN[rule][len(tokens) :][:1])
        return [*[[(right[0] + 1) % VOCABULARY_SIZE]] * 62, right, *[[right[0]]] * (count - 63)]

    own = start(tree_model(), PROMPT)
    own.take(loop_of(own, Trees(script), 3, rule).steps())
    assert own.tokens == PLAIN[rule][:TOKENS]
    wide = [record for record in own.records if record.proposed]
    assert {(record.proposed, record.invalid, record.accepted) for record in wide} == {(63, count - 63, 1)}


def test_a_path_beyond_the_depth_is_cut_and_counts_as_invalid() -> None:
    def script(tokens: list[int], depth: int) -> list[list[int]]:
        right = list(KNOWN["greedy"][len(tokens) :][:5])
        return [[(right[0] + 1) % VOCABULARY_SIZE], right]

    own = start(tree_model(), PROMPT)
    own.take(loop_of(own, Trees(script), 3).steps())
    assert own.tokens == PLAIN["greedy"][:TOKENS]
    first = own.records[0]
    assert (first.proposed, first.depth, first.invalid, first.accepted) == (4, 3, 2, 3)


def test_a_chain_is_never_longer_than_a_forwards_rows() -> None:
    known = list(itertools.islice(itertools.cycle(KNOWN["greedy"]), 300))

    class Long(Trees):
        def _proposal(self, tokens: list[int], depth: int) -> Proposal:
            self.asked.append((len(tokens), depth))
            return Proposal(tokens=tuple(known[:depth]), drafted_by="long")

    drafter = Long(lambda tokens, depth: [])
    own = start(FakeModel(), PROMPT, 300)
    own.take(loop_of(own, drafter, 200, max_tokens=250).steps())
    assert max(depth for _, depth in drafter.asked) == MOST_NODES
    assert max(record.width for record in own.records) == MAX_SCORED_ROWS


# ------------------------------------------------------------------------------------------------- the two numbers


def test_a_policy_that_names_no_nodes_allows_as_many_as_its_depth() -> None:
    assert Allowance(5).nodes is None
    assert Context([1]).most_nodes == MOST_NODES

    class Narrow(FullTrees):
        def allow(self, source: str, lag: int = 0, unread: int = 0) -> Allowance:
            return FixedDepth.allow(self, source, lag, unread)

    own, chooser, policy = start(tree_model(), PROMPT), Chooser(TEXT_RULES["greedy"]), Narrow(5, "model")
    request = DraftRequest(chooser=chooser, vocabulary_size=VOCABULARY_SIZE, context_length=100)
    state = Combination([Bushy(), ModelDrafter(lambda: drafting_model(4.0))], policy).start(request)
    limits = LoopLimits(max_tokens=TOKENS, depth_cap=5, vocabulary_size=VOCABULARY_SIZE)
    own.take(DecodeLoop(own.sequence, state, policy, chooser, own.history, limits, trees=True).steps())
    assert max(record.proposed for record in own.records) == 5


def test_nodes_below_a_trees_depth_are_never_reached() -> None:
    tree = DraftTree(most_depth=2)
    for parent in (-1, 0, 1, 2, 0):
        tree.add(parent, len(tree), 0.5, "x")
    assert tree.reach() == [0.5, 0.25, 0.0, 0.0, 0.25]
    deep = DraftTree()
    for parent in range(-1, MOST_NODES):
        deep.add(parent, 1, 1.0, "x")
    assert deep.most_nodes == MOST_NODES
    assert deep.reach() == [1.0] * MOST_NODES + [0.0]
