"""Siblings of a chain: the best set is chosen, and odds are corrected by their results."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.cost.acceptance import Acceptance, AcceptancePrior, SiblingOdds, choose_siblings
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import ContextCurves, Curve
from edgespec.planning.cost.margins import DRAFT_MARGIN
from edgespec.planning.depth.control import DepthControl
from edgespec.planning.depth.price import PricedGate
from tests.support.simulated_decoding import FLAT, MODEL

LINE = Curve(widths=(1, 2), forward_s=(1.0, 1.05))
STEPS = Curve(widths=(1, 4, 5, 8), forward_s=(1.0, 1.0, 1.2, 1.2))


def times(curve: Curve) -> list[float]:
    return [curve.seconds(width) for width in range(1, 14)]


SURE = AcceptancePrior(by_position=(0.9,) * 8, by_confidence=(0.9,) * 10)


def gain(
    curve: Curve, reach: list[float], odds: list[list[float]], rate: float, chosen: list[tuple[int, int]]
) -> float:
    width = len(reach) + 1
    price_s = curve.seconds(width + len(chosen)) - curve.seconds(width)
    return sum(reach[place] * odds[place][rank] for place, rank in chosen) - rate * price_s


def test_siblings_are_chosen_if_they_bring_more_than_their_row_costs() -> None:
    reach, odds = [1.0, 0.5], [[0.2, 0.04], [0.2, 0.08]]
    assert choose_siblings(times(LINE), reach, odds, 9, 1.0) == [(0, 0), (1, 0)]
    assert choose_siblings(times(LINE), reach, odds, 9, 3.0) == [(0, 0)]
    assert choose_siblings(times(LINE), reach, odds, 9, 0.5) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert choose_siblings(times(LINE), reach, odds, 9, 5.0) == []


def test_the_likeliest_siblings_are_chosen_if_there_is_room_for_few() -> None:
    reach, odds = [1.0, 0.9], [[0.2, 0.1], [0.3]]
    assert choose_siblings(times(LINE), reach, odds, 1, 1.0) == [(1, 0)]
    assert choose_siblings(times(LINE), reach, odds, 2, 1.0) == [(0, 0), (1, 0)]
    for most in (0, -3):
        assert choose_siblings(times(LINE), reach, odds, most, 1.0) == []


def test_several_siblings_share_one_step_of_the_curve() -> None:
    reach, odds = [1.0, 1.0, 1.0], [[0.1], [0.08], [0.07]]
    assert choose_siblings(times(STEPS), reach, odds, 9, 1.0) == [(0, 0), (1, 0), (2, 0)], (
        "one sibling alone would not pay"
    )
    assert choose_siblings(times(STEPS), reach[:2], odds[:2], 9, 1.0) == [(0, 0)], "the row before the step is free"
    assert choose_siblings(times(STEPS), reach, odds, 2, 1.0) == []


def test_each_step_of_siblings_needs_the_least_gain() -> None:
    assert choose_siblings(times(LINE), [1.0], [[0.06]], 9, 1.0) == [(0, 0)], "no least gain by default"
    assert choose_siblings(times(LINE), [1.0], [[0.06]], 9, 1.0, 0.02) == []
    assert choose_siblings(times(LINE), [1.0], [[0.08, 0.06]], 9, 1.0, 0.02) == [(0, 0)]


def test_siblings_with_zero_odds_are_never_chosen() -> None:
    free = Curve(widths=(1, 9), forward_s=(1.0, 1.0))
    assert choose_siblings(times(free), [1.0, 0.0], [[0.5, 0.0], [0.9]], 9, 1.0) == [(0, 0)]
    assert choose_siblings(times(free), [], [], 9, 1.0) == []
    assert choose_siblings(times(free), [1.0], [[0.5], [0.5]], 9, 1.0) == [(0, 0)], (
        "a position that the gate did not admit"
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_other_set_of_siblings_brings_more(seed: int) -> None:
    source = random.Random(seed)
    rises = sorted(source.uniform(1, 2) for _ in range(6))
    curve = Curve(widths=(1, 2, 3, 5, 8, 12), forward_s=tuple(rises))
    reach = sorted((source.random() for _ in range(2)), reverse=True)
    odds = [sorted((source.uniform(0, 0.3) for _ in range(3)), reverse=True) for _ in reach]
    rate = source.uniform(0.2, 3)
    every = [(place, rank) for place in range(2) for rank in range(3)]
    sets = [list(own) for count in range(7) for own in itertools.combinations(every, count)]
    best = max(gain(curve, reach, odds, rate, own) for own in sets)
    assert gain(curve, reach, odds, rate, choose_siblings(times(curve), reach, odds, 9, rate)) == pytest.approx(best)


def test_sibling_odds_are_used_unchanged_until_results_correct_them() -> None:
    odds = SiblingOdds()
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


def test_the_gate_weights_siblings_by_the_admitted_chain() -> None:
    own = gate()
    assert own.siblings([], 5) == []
    assert own.admits(0.9, None)
    assert own.admits(0.9, None)
    reach = [1.0, 0.9]
    for odds in ([[0.5, 0.1], [0.5]], [[0.02], [0.3, 0.2]]):
        wanted = choose_siblings(times(FLAT), reach, odds, 5, 1 / FLAT.plain_s, DRAFT_MARGIN - 1)
        assert own.siblings(odds, 5) == wanted
        assert wanted
        one = choose_siblings(times(FLAT), reach, odds, 1, 1 / FLAT.plain_s, DRAFT_MARGIN - 1)
        assert own.siblings(odds, 1) == one


def test_siblings_stay_within_what_the_answer_may_lose() -> None:
    own = gate(most=2)
    assert own.admits(0.9, None)
    assert own.siblings([[0.5, 0.4, 0.3]], 5) == [(0, 0)]


def test_siblings_that_are_never_right_are_no_longer_proposed() -> None:
    costs = Costs(curves=ContextCurves(contexts=(128,), curves=(FLAT,)), drafts={"model": MODEL})
    policy = DepthControl(costs, 7, {"model": SURE})
    answer = policy.answer(prompt_tokens=100)
    answer.began(10.0, FLAT.plain_s)
    for _ in range(40):
        answer.record(plain(FLAT.plain_s))

    assert answer.allow("model").depth == 1
    answer.record(replace(plain(FLAT.plain_s), source="model", draft_s=MODEL.token_s, draft_forwards=1))

    def chosen() -> list[tuple[int, int]]:
        own = answer.allow("model").gate
        assert isinstance(own, PricedGate)
        assert own.admits(0.9, None)
        return own.siblings([[0.12]], 5)

    assert chosen() == [(0, 0)]
    for _ in range(100):
        answer.learn_siblings("model", [0.4, 0.3], [False, False])
        answer.learn_siblings("unknown", [0.4, 0.3], [True, False])
    assert chosen() == []


def plain(seconds: float) -> RoundRecord:
    return RoundRecord(
        width=1,
        context_length=100,
        proposed=0,
        evaluated=0,
        accepted=0,
        invalid=0,
        emitted=1,
        source=None,
        draft_s=0.0,
        sync_s=0.0,
        verify_s=seconds,
        round_s=seconds,
    )


def test_odds_above_one_count_as_certain() -> None:
    own = gate(LINE, odds_factor=9.0)
    assert own.admits(0.9, None)
    assert own.siblings([[0.9]], 3) == [(0, 0)]
    dear = Curve(widths=(1, 2, 3), forward_s=(1.0, 1.1, 2.2))
    own = PricedGate(times(dear), 0.01, Acceptance(SURE), 2, 1.0, 9.0)
    assert own.admits(0.9, None)
    assert own.siblings([[0.9]], 3) == [], "one token is not worth 1.1"


def test_a_free_drafter_has_a_gate_too() -> None:
    assert gate(token_s=0.0).siblings([], 3) == []
