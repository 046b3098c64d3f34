"""Simulated rounds against closed forms, and the expected course against the mean of random rounds."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings, strategies as st

from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, ContextCurves, Curve, DraftCost
from edgespec.planning.cost.round_simulation import SimulatedPair, expected_pipelined, windows_by_rate
from edgespec.planning.depth.pipeline_budget import MeasuredBudget
from tests.support.drawn_rounds import WindowRule, expected_serial, simulate_pipelined
from tests.support.planning import a_round
from tests.support.simulated_decoding import FLAT as GENTLE, STEEP

ACCEPTANCE = (0.5, 0.8, 0.95)
RATIOS = (1, 2, 3, 5, 10)
ROUNDS = 100_000
TOKEN_S = 0.01


def flat(seconds: float) -> Curve:
    return Curve(widths=(1, 64), forward_s=(seconds, seconds))


def pair(
    curve: Curve,
    token_s: float = TOKEN_S,
    *acceptance: float,
    hand_over_s: float = 0.0,
    contention: Contention | None = None,
    round_s: float = 0.0,
) -> SimulatedPair:
    return SimulatedPair(
        curve=curve,
        draft=DraftCost(token_s=token_s, round_s=round_s),
        acceptance=acceptance or (0.8,),
        hand_over_s=hand_over_s,
        contention=contention or Contention(),
    )


# ------------------------------------------------------------------------------------------------ closed forms


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("alpha", ACCEPTANCE)
def test_the_pipeline_equals_a_closed_form_if_the_times_divide(alpha: float, ratio: int) -> None:
    """After a rejection one position is compared, then as many a round as are drafted in a forward."""
    ours = pair(flat(ratio * TOKEN_S), TOKEN_S, alpha)
    tokens = (1 / (1 - alpha)) / (1 + alpha / (1 - alpha**ratio))
    expected = expected_pipelined(ours, ratio)
    assert expected.tokens_per_round == pytest.approx(tokens)
    assert expected.round_s == pytest.approx(ratio * TOKEN_S)
    assert (expected.target_busy, expected.drafter_busy) == (pytest.approx(1.0), pytest.approx(1.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "one",
    [
        pair(GENTLE, 0.007, 0.8),
        pair(STEEP, 0.011, 0.7),
        pair(GENTLE, 0.040, 0.9),
        pair(GENTLE, 0.003, 0.3, 0.6, 0.9),
        pair(STEEP, 0.009, 0.9, contention=Contention(target_factor=1.6, drafter_factor=1.9), hand_over_s=0.001),
        pair(GENTLE, 0.002, 0.8, round_s=0.013),
    ],
)
def test_the_expected_course_equals_the_mean_of_random_rounds(one: SimulatedPair) -> None:
    drawn, followed = simulate_pipelined(one, 5), expected_pipelined(one, 5)
    assert drawn.rounds == ROUNDS
    for name in ("tokens_per_round", "tokens_per_s", "round_s", "target_busy", "drafter_busy"):
        assert getattr(drawn, name) == pytest.approx(getattr(followed, name), rel=0.02, abs=0.002), name


# -------------------------------------------------------------------------------------------- borders and rules


def test_a_drafter_that_is_always_right_settles_in_a_periodic_course() -> None:
    sure = expected_pipelined(pair(flat(0.05), 0.01, 1.0), 8)
    assert sure.tokens_per_round == pytest.approx(5.0), "the tokens drafted in a forward; the pipe never empties"
    capped = expected_pipelined(pair(flat(0.05), 0.01, 1.0), 3)
    assert capped.tokens_per_round == pytest.approx(4.0)
    assert capped.round_s == pytest.approx(0.05)
    assert capped.drafter_busy == pytest.approx(4 * 0.01 / 0.05)
    assert capped.target_busy == pytest.approx(1.0)


def test_a_drafter_that_is_always_wrong_gives_one_token_a_forward() -> None:
    wrong = expected_pipelined(pair(GENTLE, 0.007, 0.0), 5)
    assert (wrong.rounds, wrong.tokens) == (1.0, 1.0)
    assert wrong.seconds == pytest.approx(0.028)
    assert simulate_pipelined(pair(GENTLE, 0.007, 0.0), 5, rounds=100).tokens == 100
    late = expected_pipelined(pair(GENTLE, 0.1, 0.0), 5)
    assert late.seconds == pytest.approx(0.1), "the target waits for the current token"
    assert late.target_busy == pytest.approx(0.28)


def test_acceptance_only_in_the_first_positions_is_simulated() -> None:
    once = expected_pipelined(pair(flat(0.05), 0.01, 1.0, 0.0), 8)
    assert (once.rounds, once.tokens) == (2.0, 2.0)
    never_behind = expected_pipelined(pair(flat(0.05), 0.01, 0.0, 1.0), 8)
    assert never_behind.tokens_per_round == 1.0


def test_a_free_drafter_fills_every_window() -> None:
    free = SimulatedPair(curve=flat(0.05), draft=FREE, acceptance=(0.8,))
    found = expected_pipelined(free, 4)
    # One position, then five a round.
    assert found.tokens_per_round == pytest.approx((1 / 0.2) / (1 + 0.8 / (1 - 0.8**5)))
    assert found.drafter_busy == 0.0


@pytest.mark.parametrize("curve", [GENTLE, STEEP, flat(0.05)])
@pytest.mark.parametrize("percent", [5, 20, 50, 80, 95, 100])
def test_simulated_windows_equal_those_of_the_measured_budget(curve: Curve, percent: int) -> None:
    budget = MeasuredBudget(7, Costs(curves=ContextCurves(contexts=(0,), curves=(curve,))))
    for _ in range(600):
        budget.record(a_round(100, percent, width=3, emitted=1, source="model"))
    windows = windows_by_rate(curve, percent / 100, 7)
    assert windows == tuple(budget.window(count) for count in range(8))


def test_a_window_is_chosen_by_rate_unless_all_tokens_must_be_verified() -> None:
    steep = Curve(widths=(1,), forward_s=(0.02,))  # every row costs as much as the first
    rules: tuple[WindowRule, ...] = ("best", "all")
    by_rate, everything = (simulate_pipelined(pair(steep, 0.005, 0.8), 4, window=rule) for rule in rules)
    assert expected_pipelined(pair(steep, 0.005, 0.8), 4).tokens_per_s == pytest.approx(
        by_rate.tokens_per_s, rel=0.01
    )
    assert by_rate.tokens_per_round == pytest.approx(1.0), "a row that costs a token's time is never worth it"
    assert by_rate.tokens_per_s > everything.tokens_per_s
    drawn = simulate_pipelined(pair(steep, 0.005, 0.8), 4, rounds=100)
    assert drawn == simulate_pipelined(pair(steep, 0.005, 0.8), 4, window="best", rounds=100)


def test_the_target_continues_without_a_drafter_later_than_the_patience() -> None:
    slow = pair(GENTLE, 0.5, 0.9)
    waited, left = (simulate_pipelined(slow, 3, patience_s=s, rounds=20_000) for s in (math.inf, 0.0))
    assert waited.tokens_per_s == pytest.approx(1 / 0.5, rel=0.02), "one draft token a round, and none is a bonus"
    assert left.tokens_per_s > 0.95 / 0.028, "all but plain decoding"
    assert left.target_busy == pytest.approx(1.0)
    assert simulate_pipelined(slow, 3, rounds=50) == simulate_pipelined(slow, 3, patience_s=math.inf, rounds=50)


def test_the_seed_determines_the_random_rounds() -> None:
    one = pair(GENTLE, 0.007, 0.8)
    default, first, again, other = (
        simulate_pipelined(one, 3, rounds=500, **seed) for seed in ({}, {"seed": 0}, {"seed": 0}, {"seed": 1})
    )
    assert default == first == again != other


@pytest.mark.parametrize(
    "change",
    [
        {"acceptance": ()},
        {"acceptance": (1.1,)},
        {"acceptance": (0.5, -0.1)},
        {"hand_over_s": -1.0},
        {"hand_over_s": math.inf},
        {"draft": DraftCost(token_s=-0.1)},
        {"draft": DraftCost(round_s=math.nan)},
    ],
)
def test_an_invalid_simulated_pair_is_refused(change: dict[str, object]) -> None:
    values: dict[str, object] = {"curve": GENTLE, "draft": FREE, "acceptance": (0.5,), **change}
    with pytest.raises(ValueError, match=r"simulation needs|finite and not negative"):
        SimulatedPair(**values)  # type: ignore[arg-type]


def test_invalid_simulation_arguments_are_refused() -> None:
    one = pair(GENTLE)
    for call in (expected_serial, expected_pipelined, simulate_pipelined):
        with pytest.raises(ValueError, match="plain decoding"):
            call(one, 0)
    with pytest.raises(ValueError, match="at least one round"):
        simulate_pipelined(one, 2, rounds=0)


# -------------------------------------------------------------------------------------------------- properties

curves = st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3).map(
    lambda steps: Curve(
        widths=(1, 2, 4, 8), forward_s=tuple(itertools.accumulate([1.0, *steps], lambda total, step: total + step))
    )
)


@settings(max_examples=80, deadline=None)
@given(
    curve=curves,
    token_s=st.floats(0.0, 3.0),
    hand_over_s=st.floats(0.0, 0.5),
    rates=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4),
    factors=st.tuples(st.floats(1.0, 3.0), st.floats(1.0, 3.0)),
    cap=st.integers(1, 6),
)
def test_random_pipelines_stay_within_their_bounds(
    curve: Curve,
    token_s: float,
    hand_over_s: float,
    rates: list[float],
    factors: tuple[float, float],
    cap: int,
) -> None:
    contention = Contention(target_factor=factors[0], drafter_factor=factors[1])
    one = pair(curve, token_s, *rates, hand_over_s=hand_over_s, contention=contention)
    found = expected_pipelined(one, cap)
    assert 1.0 - 1e-9 <= found.tokens_per_round <= cap + 1 + 1e-9
    assert found.round_s >= curve.plain_s * (1 - 1e-9)
    assert found.round_s >= (token_s + hand_over_s) * (1 - 1e-9)
    assert 0.0 <= found.drafter_busy <= 1 + 1e-9
    assert 0.0 < found.target_busy <= 1 + 1e-9
