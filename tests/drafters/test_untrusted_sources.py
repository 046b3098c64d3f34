"""A source of guesses may be wrong in any way: the text stays plain decoding's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from edgespec.bench.equality import FullTrees
from edgespec.decoding.round_base import LoopLimits
from edgespec.decoding.sampling import Chooser
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.combination import CombinationState
from edgespec.drafters.model import ModelDrafter
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import DraftRequest, DraftTree, Proposal
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import ContextCurves, Curve, DraftCost
from edgespec.planning.depth.base import FixedDepth
from edgespec.planning.depth.control import DepthControl
from tests.decoding.test_loop import PLAIN, PROMPT, TEXT_RULES, TOKENS, VOCABULARY_SIZE, Answer, start
from tests.decoding.test_pipeline import Late, pipelined
from tests.support.budgets import FixedBudget
from tests.support.fake_runtime import FakeModel
from tests.support.scripted_drafters import Scripted
from tests.support.wide_trees import Bushy

CURVE = Curve(widths=(1, 8), forward_s=(1.0, 1.01))
COSTS = Costs(
    curves=ContextCurves(contexts=(0,), curves=(CURVE,)),
    drafts={"model": DraftCost(token_s=0.01, lag_token_s=0.0001)},
)

NUMBERS = [*range(-3, VOCABULARY_SIZE + 4), 2**40, -(2**70), True, None, 1.5, "a", (1,)]
ODDS = [0.0, 0.1, 0.3, 0.5, 0.8, 0.9, 1.0, math.nan, math.inf, -math.inf, -1.0, 2.0]


class Garbage(Scripted):
    """Proposes anything."""

    kind = "garbage"

    def __init__(self, source: random.Random) -> None:
        super().__init__(lambda tokens, depth: [], free=True)
        self.source = source

    def some(self, values: Sequence[Any]) -> list[Any]:
        return [self.source.choice(values) for _ in range(self.source.randint(0, 14))]

    def propose(self, context: Context, depth: int, gate: Any = None) -> Proposal:
        tokens, sure = self.some(NUMBERS), self.some(ODDS)
        return Proposal(tokens=tuple(tokens), sources=("x",) * 3, drafted_by="garbage", confidences=tuple(sure))


class Growing(Garbage):
    """Adds nodes of any token and odds below any node, those of others included."""

    grows_trees = True

    def grow(self, context: Context, tree: DraftTree, chain: int, believes: Callable[[float], float]) -> None:
        for token in self.some(range(-5, VOCABULARY_SIZE + 5)):
            tree.add(self.source.randint(-1, len(tree) - 1), token, self.source.choice(ODDS), "garbage")


@pytest.mark.parametrize("kind", [Garbage, Growing])
@pytest.mark.parametrize("rule", TEXT_RULES)
@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_a_source_of_garbage_changes_no_token(kind: type[Garbage], rule: str, trees: bool, seed: int) -> None:
    own: Answer = start(FakeModel(can_branch=True), PROMPT)
    chooser = Chooser(TEXT_RULES[rule])
    request = DraftRequest(chooser=chooser, vocabulary_size=VOCABULARY_SIZE, context_length=100)
    policy = DepthControl(COSTS, 7).answer(prompt_tokens=len(PROMPT))
    model = ModelDrafter(lambda: FakeModel(seed=3)).start(request)
    state = CombinationState([("garbage", kind(random.Random(seed))), ("model", model)], policy)
    limits = LoopLimits(max_tokens=TOKENS, depth_cap=7, vocabulary_size=VOCABULARY_SIZE)
    loop = DecodeLoop(own.sequence, state, policy, chooser, own.history, limits, trees=trees)
    own.take(loop.steps())
    assert own.tokens == PLAIN[rule][:TOKENS]
    assert state.failures == {}
    assert all(record.width <= 8 for record in own.records)


@pytest.mark.parametrize("kind", [Garbage, Growing])
@pytest.mark.parametrize("rule", TEXT_RULES)
@pytest.mark.parametrize("seed", range(4))
def test_garbage_in_trees_of_63_nodes_changes_no_token(kind: type[Garbage], rule: str, seed: int) -> None:
    own: Answer = start(FakeModel(can_branch=True), PROMPT)
    chooser, policy = Chooser(TEXT_RULES[rule]), FullTrees(7, "model")
    request = DraftRequest(chooser=chooser, vocabulary_size=VOCABULARY_SIZE, context_length=100)
    model = ModelDrafter(lambda: FakeModel(seed=3)).start(request)
    parts = [("garbage", kind(random.Random(seed))), ("bushy", Bushy(seed).start(request)), ("model", model)]
    state = CombinationState(parts, policy)
    limits = LoopLimits(max_tokens=TOKENS, depth_cap=7, vocabulary_size=VOCABULARY_SIZE)
    own.take(DecodeLoop(own.sequence, state, policy, chooser, own.history, limits, trees=True).steps())
    assert own.tokens == PLAIN[rule][:TOKENS]
    assert state.failures == {}
    assert all(record.width <= 64 for record in own.records)
    assert max(record.proposed + record.invalid for record in own.records) == 63


class Misleading(Scripted):
    """Proposes anything, with alternatives of any token and parents of any kind."""

    def __init__(self, source: random.Random) -> None:
        super().__init__(lambda tokens, depth: [])
        self.source = source

    def _proposal(self, tokens: list[int], depth: int) -> Proposal:
        said = [self.source.choice([*range(VOCABULARY_SIZE)] * 5 + NUMBERS) for _ in range(self.source.randint(0, 9))]
        parents = [self.source.choice([index - 1, self.source.randint(-2, 9)]) for index in range(len(said))]
        return Proposal(
            tokens=tuple(said),
            parents=self.source.choice([None, None, tuple(parents)]),
            drafted_by="misleading",
            forwards=1,
            confidences=tuple(self.source.choice(ODDS) for _ in range(self.source.randint(0, 9))),
            alternatives=tuple(((self.source.choice(NUMBERS), self.source.choice(ODDS)),) for _ in said),
        )


@pytest.mark.parametrize("rule", TEXT_RULES)
def test_garbage_changes_no_token_of_the_pipelined_loop(rule: str) -> None:
    for seed in range(8):
        own: Answer = start(FakeModel(), PROMPT)
        source = random.Random(seed)
        parts = [("garbage", Garbage(random.Random(seed))), ("misleading", Misleading(source))]
        state = CombinationState(parts, FixedDepth(5))
        budget = FixedBudget(most=4, ahead=5, patience=0.0, reuse=True)
        submit = Late(lambda source=source: source.randrange(2))  # type: ignore[misc]
        own.take(pipelined(own, state, sampling=TEXT_RULES[rule], depth=4, budget=budget, submit=submit).steps())
        assert own.tokens == PLAIN[rule][:TOKENS]
        assert state.failures == {}
        assert sum(record.invalid for record in own.records) > 0


def test_a_tree_clamps_odds_and_refuses_a_missing_parent() -> None:
    tree = DraftTree()
    for token, given_odds in enumerate((math.nan, math.inf, -math.inf, -0.5, 1.5, 0.25)):
        tree.add(-1, token, given_odds, "x")
    assert tree.odds == [0.0, 1.0, 0.0, 0.0, 1.0, 0.25]
    for parent in (-2, 6, 99):
        with pytest.raises(ValueError, match=f"node {parent} is not in this tree of 6"):
            tree.add(parent, 1, 0.5, "x")
