"""Which nodes of a tree are verified: the best set is chosen. The odds of alternatives are learned."""

from __future__ import annotations

import itertools
import random

import pytest

from edgespec.interfaces.drafting import Choice, DraftTree
from edgespec.planning.cost.acceptance import Acceptance, AcceptancePrior, AlternativeOdds
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import ContextCurves, Curve, ExpertTimes
from edgespec.planning.cost.live_times import LiveTimes
from edgespec.planning.cost.margins import DRAFT_MARGIN
from edgespec.planning.depth.control import DepthControl
from edgespec.planning.depth.price import PricedGate, choose_nodes
from tests.support.planning import a_round
from tests.support.simulated_decoding import FLAT, MODEL

LINE = Curve(widths=(1, 2), forward_s=(1.0, 1.05))
STEPS = Curve(widths=(1, 4, 5, 8), forward_s=(1.0, 1.0, 1.2, 1.2))
SURE = AcceptancePrior(by_position=(0.9,) * 8, by_confidence=(0.9,) * 10)


def times(curve: Curve) -> list[float]:
    return [curve.seconds(width) for width in range(1, 14)]


def grown(*nodes: tuple[int, float]) -> DraftTree:
    """A tree of (parent, odds)."""
    tree = DraftTree()
    for token, (parent, odds) in enumerate(nodes):
        tree.add(parent, token, odds, "model")
    return tree


def gain(curve: Curve, tree: DraftTree, rate: float, nodes: tuple[int, ...]) -> float:
    price_s = curve.seconds(1 + len(nodes)) - curve.seconds(1)
    return sum(tree.reach()[node] for node in nodes) - rate * price_s


TREE = grown((-1, 0.5), (-1, 0.2), (0, 0.4), (0, 0.08))  # reached with 0.5, 0.2, 0.2 and 0.04


def test_nodes_are_chosen_if_they_bring_more_than_their_row_costs() -> None:
    assert choose_nodes(times(LINE), TREE, 9, 1.0).nodes == (0, 1, 2)
    assert choose_nodes(times(LINE), TREE, 9, 5.0).nodes == (0,)
    assert choose_nodes(times(LINE), TREE, 9, 0.5).nodes == (0, 1, 2, 3)
    assert choose_nodes(times(LINE), TREE, 9, 11.0) == Choice((), 0.0)
    assert choose_nodes(times(LINE), TREE, 9, 1.0).gain == pytest.approx(0.9 - 3 * 0.05)


def test_the_likeliest_nodes_are_chosen_if_there_is_room_for_few() -> None:
    assert [choose_nodes(times(LINE), TREE, most, 1.0).nodes for most in (-3, 0, 1, 2, 3)] == [
        (), (), (0,), (0, 1), (0, 1, 2),
    ]  # fmt: skip


def test_a_node_costs_the_experts_that_it_is_expected_to_add() -> None:
    """The further rows of a dense model would be nearly free; of a mixture each has to pay for its experts."""
    experts = ExpertTimes(widths=(1, 16), read=(100.0, 850.0), expert_s=0.004)
    curve = Curve(widths=(1, 16), forward_s=(1.0, 1.15 + 0.004 * 750))
    chosen = []
    for added in (0, 25, 50):  # by each further row of this text; 50 as calibrated
        now = LiveTimes(ContextCurves(contexts=(0,), curves=(curve,), experts=experts), 13)
        for _ in range(100):
            read = 100 + 4 * added
            now.record(5, 0, curve.seconds(5) + 0.004 * (read - 300), experts=read)
        chosen.append(choose_nodes(now.all_now(0), TREE, 9, 1.0).nodes)
    assert chosen == [(0, 1, 2, 3), (0, 1, 2), (0,)]


def test_several_nodes_share_one_step_of_the_curve() -> None:
    tree = grown((-1, 0.9), (0, 1.0), (1, 1.0), (2, 0.1), (-1, 0.08), (1, 0.05))
    assert choose_nodes(times(STEPS), tree, 9, 1.0).nodes == (0, 1, 2, 3, 4, 5), "one node alone would not pay"
    assert choose_nodes(times(STEPS), tree, 4, 1.0).nodes == (0, 1, 2)
    assert choose_nodes(times(STEPS), tree, 9, 2.0).nodes == (0, 1, 2), "three rows are free"


def test_nodes_must_bring_the_least_gain() -> None:
    tree = grown((-1, 0.06))
    assert choose_nodes(times(LINE), tree, 9, 1.0).nodes == (0,), "no least gain by default"
    assert choose_nodes(times(LINE), tree, 9, 1.0, 0.02).nodes == ()
    assert choose_nodes(times(LINE), grown((-1, 0.08), (-1, 0.06)), 9, 1.0, 0.02).nodes == (0,)


def test_impossible_nodes_are_never_chosen() -> None:
    free = Curve(widths=(1, 2), forward_s=(1.0, 1.0))
    assert choose_nodes(times(free), grown((-1, 0.5), (0, 0.0), (1, 0.9)), 9, 1.0).nodes == (0,)
    assert choose_nodes(times(free), DraftTree(), 9, 1.0) == Choice((), 0.0)


@pytest.mark.parametrize("seed", range(8))
def test_no_other_set_of_nodes_brings_more(seed: int) -> None:
    source = random.Random(seed)
    curve = Curve(widths=(1, 2, 3, 5, 8, 12), forward_s=tuple(sorted(source.uniform(1, 2) for _ in range(6))))
    tree = grown(*((source.randint(-1, node - 1), source.random()) for node in range(7)))
    rate, most = source.uniform(0.2, 3), source.randint(1, 7)
    subsets = [own for count in range(most + 1) for own in itertools.combinations(range(7), count)]
    closed = [own for own in subsets if all(tree.parents[node] in (-1, *own) for node in own)]
    best = max(gain(curve, tree, rate, own) for own in closed)
    choice = choose_nodes(times(curve), tree, most, rate)
    assert choice.nodes in closed
    assert gain(curve, tree, rate, choice.nodes) == pytest.approx(best)
    assert choice.gain == pytest.approx(best)


# ------------------------------------------------------------------------------------------------------- the tree


def test_equal_guesses_are_one_node_with_the_higher_odds() -> None:
    tree = DraftTree()
    assert [tree.add(-1, 7, 0.5, "model"), tree.add(0, 7, 0.4, "model"), tree.add(-1, 8, 0.3, "model")] == [0, 1, 2]
    assert (tree.add(-1, 7, 0.6, "lookup"), tree.add(-1, 8, 0.1, "lookup"), len(tree)) == (0, 2, 3)
    assert (tree.tokens, tree.parents, tree.sources) == ([7, 7, 8], [-1, 0, -1], ["model"] * 3)
    assert tree.odds == [0.6, 0.4, 0.3]
    assert tree.reach() == pytest.approx([0.6, 0.24, 0.3])
    assert [tree.left_over(parent) for parent in (-1, 0, 1)] == pytest.approx([0.1, 0.6, 1.0])
    tree.add(-1, 9, 0.4, "lookup")
    assert tree.left_over(-1) == 0.0, "odds of several sources may exceed one"


def test_alternative_odds_are_used_unchanged_until_results_correct_them() -> None:
    odds = AlternativeOdds()
    assert odds.worth == 1.0
    for place in range(200):
        odds.learn([0.2, 0.1], [place % 10 < 3, False])
    assert odds.worth == pytest.approx(1.0, abs=0.1)
    for _ in range(200):
        odds.learn([0.2, 0.1], [False, False])
    assert odds.worth == pytest.approx(4 / (4 + 10), abs=0.01)
    for place in range(200):
        odds.learn([0.2, 0.1], [place % 2 == 0, place % 2 == 1])
    assert odds.worth > 2


# ------------------------------------------------------------------------------------------------------- the gate


def gate(curve: Curve = FLAT, most: int = 7, token_s: float = MODEL.token_s, odds_factor: float = 1.0) -> PricedGate:
    return PricedGate(times(curve), token_s, Acceptance(SURE), most, 1.0 / curve.plain_s, odds_factor)


def test_the_gate_values_a_tree_as_the_answer_does() -> None:
    own = gate()
    assert own.believed == []
    assert own.admits(0.9, None)
    assert own.admits(0.9, None)
    assert own.believed == [pytest.approx(0.9)] * 2
    assert own.believes(0.3) == pytest.approx(0.9), "what such a confidence is worth"
    for most in (1, 2, 5):
        wanted = choose_nodes(times(FLAT), TREE, most, 1 / FLAT.plain_s, DRAFT_MARGIN - 1)
        assert wanted.nodes
        assert own.choose(TREE, most) == wanted


def test_a_tree_stays_within_what_the_answer_may_lose() -> None:
    assert gate(most=2).choose(TREE, 5).nodes == (0, 1)


def test_alternatives_that_are_never_right_are_no_longer_chosen() -> None:
    costs = Costs(curves=ContextCurves(contexts=(128,), curves=(FLAT,)), drafts={"model": MODEL})
    policy = DepthControl(costs, 7, {"model": SURE})
    answer = policy.answer(prompt_tokens=100)
    answer.began(10.0, FLAT.plain_s)
    for _ in range(40):
        answer.record(a_round(verify_s=FLAT.plain_s))

    assert answer.allow("model").depth == 1
    answer.record(a_round(verify_s=FLAT.plain_s, source="model", draft_s=MODEL.token_s, forwards=1))

    def chosen() -> tuple[int, ...]:
        own = answer.allow("model").gate
        assert isinstance(own, PricedGate)
        return own.choose(grown((-1, own.believes_alternative(0.12))), 5).nodes

    assert chosen() == (0,)
    for _ in range(100):
        answer.learn_alternatives("model", [0.4, 0.3], [False, False])
        answer.learn_alternatives("unknown", [0.4, 0.3], [True, False])
    assert chosen() == ()


def test_odds_above_one_count_as_certain() -> None:
    assert gate(odds_factor=9.0).believes_alternative(0.9) == 1.0
    assert gate(odds_factor=0.5).believes_alternative(0.9) == 0.45
