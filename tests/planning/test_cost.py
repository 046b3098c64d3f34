"""Expected tokens and seconds: closed forms, brute force, and simulated rounds."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, strategies as st

from edgespec.planning.cost.curve import (
    FREE,
    Curve,
    DraftCost,
    best_possible,
    choose_depth,
    choose_window,
    drafting_speedup,
    expected_tokens,
    overlapped_tokens,
    round_seconds,
)
from edgespec.planning.cost.round_simulation import SimulatedPair, expected_pipelined

FLAT = Curve(widths=(1, 16), forward_s=(0.1, 0.1))
# llama.cpp, Q4_K_M: the measured cost of verification.
STEEP = Curve(
    widths=(1, 2, 3, 4, 5, 8, 16), forward_s=tuple(0.0347 * r for r in (1, 1.64, 2.18, 2.63, 3.25, 6.1, 7.09))
)

probabilities = st.floats(0.0, 1.0)
curves = st.lists(st.floats(0.001, 1.0), min_size=2, max_size=8).map(
    lambda times: Curve(widths=tuple(range(1, len(times) + 1)), forward_s=tuple(times))
)


# ------------------------------------------------------------------------------------------------ the curve


def test_a_curve_is_exact_at_measured_widths_and_linear_between() -> None:
    curve = Curve(widths=(1, 3, 7), forward_s=(1.0, 2.0, 4.0))
    assert [curve.seconds(width) for width in (1, 3, 7)] == [1.0, 2.0, 4.0]
    assert curve.seconds(2) == pytest.approx(1.5)
    assert curve.seconds(4) == pytest.approx(2.5)
    assert (curve.plain_s, curve.ratio(7)) == (1.0, 4.0)


def test_beyond_the_widest_width_a_curve_continues_its_slope_and_never_falls() -> None:
    assert Curve(widths=(1, 3, 7), forward_s=(1.0, 2.0, 4.0)).seconds(9) == pytest.approx(5.0)
    assert Curve(widths=(1, 2, 4), forward_s=(1.0, 3.0, 2.0)).seconds(20) == 2.0


def test_with_one_measured_width_every_row_costs_as_much_as_the_first() -> None:
    assert Curve(widths=(1,), forward_s=(0.25,)).seconds(4) == 1.0


def test_a_scaled_curve_keeps_its_shape() -> None:
    slower = STEEP.scaled(1.5)
    assert slower.plain_s == pytest.approx(1.5 * STEEP.plain_s)
    assert slower.ratio(6) == pytest.approx(STEEP.ratio(6))


@pytest.mark.parametrize(
    ("widths", "forward_s"),
    [
        ((), ()),
        ((2, 3), (1.0, 1.0)),
        ((1, 2), (1.0,)),
        ((1, 2, 2), (1.0, 1.0, 1.0)),
        ((1, 3, 2), (1.0, 1.0, 1.0)),
        ((1, 2), (1.0, 0.0)),
        ((1, 2), (1.0, -1.0)),
        ((1, 2), (1.0, math.nan)),
        ((1, 2), (math.inf, 1.0)),
    ],
)
def test_an_invalid_curve_is_refused(widths: tuple[int, ...], forward_s: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"curve|forward"):
        Curve(widths=widths, forward_s=forward_s)


@pytest.mark.parametrize("width", [0, -1])
def test_a_forward_of_width_zero_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match=f"width {width}"):
        FLAT.seconds(width)


def test_the_draft_cost_is_the_sum_of_its_parts_and_zero_at_depth_0() -> None:
    cost = DraftCost(token_s=0.01, round_s=0.002, lag_token_s=0.003)
    assert cost.seconds(4) == pytest.approx(0.042)
    assert cost.seconds(4, lag=2) == pytest.approx(0.048)
    assert cost.seconds(0, lag=9) == 0.0
    assert FREE.seconds(16, lag=100) == 0.0
    assert round_seconds(FLAT, cost, 4) == pytest.approx(0.142)
    assert round_seconds(FLAT, cost, 0) == FLAT.plain_s


def test_a_scaled_drafter_is_slower_in_all_its_parts() -> None:
    cost = DraftCost(token_s=0.01, round_s=0.002, lag_token_s=0.003)
    slower = cost.scaled(1.5)
    assert (slower.token_s, slower.round_s, slower.lag_token_s) == pytest.approx((0.015, 0.003, 0.0045))
    assert cost.scaled(1.0) == cost
    assert FREE.scaled(7.0) == FREE


# ------------------------------------------------------------------------------------------------ serial rounds


@given(probability=st.floats(0.0, 0.999), depth=st.integers(0, 16))
def test_expected_tokens_at_constant_acceptance_are_a_geometric_series(probability: float, depth: int) -> None:
    expected = (1 - probability ** (depth + 1)) / (1 - probability)
    assert expected_tokens((probability,) * depth) == pytest.approx(expected)


def test_expected_tokens_at_full_acceptance_are_depth_plus_bonus() -> None:
    assert expected_tokens((1.0,) * 7) == 8.0
    assert expected_tokens(()) == 1.0


def test_expected_tokens_are_the_sum_over_all_outcomes() -> None:
    acceptance = (0.9, 0.3, 0.7)
    total = 0.0
    for outcome in itertools.product((True, False), repeat=3):
        chance = math.prod(a if ok else 1 - a for a, ok in zip(acceptance, outcome, strict=True))
        accepted = next((i for i, ok in enumerate(outcome) if not ok), 3)
        total += chance * (accepted + 1)
    assert expected_tokens(acceptance) == pytest.approx(total)


def test_simulated_serial_rounds_run_at_the_predicted_rate() -> None:
    chance = random.Random(3)
    acceptance, cost = (0.9, 0.8, 0.6, 0.5), DraftCost(token_s=0.004, round_s=0.001)
    choice = choose_depth(STEEP, cost, acceptance, 4)
    for depth in range(1, 5):
        tokens, rounds = 0, 40_000
        for _ in range(rounds):
            accepted = next((i for i in range(depth) if chance.random() >= acceptance[i]), depth)
            tokens += accepted + 1
        simulated = tokens / (rounds * (depth * 0.004 + 0.001 + STEEP.seconds(depth + 1)))
        predicted = expected_tokens(acceptance[:depth]) / round_seconds(STEEP, cost, depth)
        assert simulated == pytest.approx(predicted, rel=0.01)
        assert choice.tokens_per_s >= predicted


@given(curve=curves, token_s=st.floats(0, 0.5), acceptance=st.lists(probabilities, min_size=1, max_size=6))
def test_the_chosen_depth_has_the_highest_rate_of_all_depths(
    curve: Curve, token_s: float, acceptance: list[float]
) -> None:
    cost = DraftCost(token_s=token_s)
    choice = choose_depth(curve, cost, acceptance, 6)
    stretched = acceptance + [acceptance[-1]] * (6 - len(acceptance))
    rates = [expected_tokens(stretched[:depth]) / round_seconds(curve, cost, depth) for depth in range(7)]
    assert choice.tokens_per_s == pytest.approx(max(rates))
    assert rates[choice.depth] == pytest.approx(max(rates))
    assert choice.speedup == pytest.approx(choice.tokens_per_s * curve.plain_s)
    assert choice.tokens_per_round == pytest.approx(expected_tokens(stretched[: choice.depth]))
    assert choice.speedup >= 1.0


def test_of_two_equal_depths_the_shallower_is_chosen() -> None:
    # Every token costs what it brings: all depths run at plain speed.
    linear = Curve(widths=(1, 2), forward_s=(1.0, 2.0))
    assert choose_depth(linear, FREE, (1.0,), 8).depth == 0


def test_without_acceptance_or_depth_cap_the_chosen_depth_is_0() -> None:
    assert choose_depth(FLAT, FREE, (), 8).depth == 0
    assert choose_depth(FLAT, FREE, (1.0,), 0).depth == 0
    assert choose_depth(FLAT, FREE, (0.0,), 8).depth == 0


def test_a_constant_cost_ratio_gives_the_published_formula() -> None:
    ratio, probability = 0.1, 0.8
    for depth in range(1, 9):
        only = choose_depth(FLAT, DraftCost(token_s=0.01), (probability,) * depth, depth)
        formula = max(
            (1 - probability ** (d + 1)) / ((1 - probability) * (d * ratio + 1)) for d in range(1, depth + 1)
        )
        assert only.speedup == pytest.approx(formula)


def test_a_steep_llama_cpp_curve_never_gains_from_drafting() -> None:
    # The 0.5B drafts at 19.3 ms a token for a 1.5B of 34.7 ms: one token would have to cost 1.44 steps at most.
    assert best_possible(STEEP, DraftCost(token_s=0.0193), 8).depth == 0
    assert best_possible(STEEP, FREE, 3).speedup == pytest.approx(4 / 2.63)


@given(
    curve=curves,
    token_s=st.floats(0, 0.5),
    acceptance=st.lists(probabilities, min_size=4, max_size=4),
    more=st.lists(probabilities, min_size=4, max_size=4),
    cap=st.integers(0, 8),
)
def test_more_acceptance_cheaper_drafts_or_a_higher_cap_never_hurt(
    curve: Curve, token_s: float, acceptance: list[float], more: list[float], cap: int
) -> None:
    before = choose_depth(curve, DraftCost(token_s=token_s), acceptance, cap).tokens_per_s
    raised = [max(a, b) for a, b in zip(acceptance, more, strict=True)]
    slack = 1 - 1e-12
    assert choose_depth(curve, DraftCost(token_s=token_s), raised, cap).tokens_per_s >= before * slack
    assert choose_depth(curve, DraftCost(token_s=token_s / 2), acceptance, cap).tokens_per_s >= before * slack
    assert choose_depth(curve, DraftCost(token_s=token_s), acceptance, cap + 1).tokens_per_s >= before
    assert best_possible(curve, DraftCost(token_s=token_s), cap).tokens_per_s >= before * slack


# --------------------------------------------------------------------------------- speed-up of drafting


@given(curve=curves, token_s=st.floats(0, 0.5), acceptance=st.lists(probabilities, min_size=1, max_size=6))
def test_drafting_speedup_is_that_of_the_best_depth_above_0(
    curve: Curve, token_s: float, acceptance: list[float]
) -> None:
    cost = DraftCost(token_s=token_s, round_s=0.001)
    speedup = drafting_speedup(curve, cost, acceptance)
    rates = [expected_tokens(acceptance[:d]) / round_seconds(curve, cost, d) for d in range(1, len(acceptance) + 1)]
    assert speedup == pytest.approx(max(rates) * curve.plain_s)
    assert max(1.0, speedup) == pytest.approx(choose_depth(curve, cost, acceptance, len(acceptance)).speedup)


def test_drafting_speedup_below_1_is_reported() -> None:
    assert drafting_speedup(STEEP, DraftCost(token_s=0.0193), (1.0,)) == pytest.approx(2 / (1.64 + 0.0193 / 0.0347))
    assert drafting_speedup(FLAT, DraftCost(token_s=0.1), (0.0, 0.9)) == pytest.approx(0.5)


def test_without_acceptance_the_drafting_speedup_is_0() -> None:
    assert drafting_speedup(FLAT, FREE, ()) == 0.0


# ------------------------------------------------------------------------------------------- windows of a pipeline


def windowed(curve: Curve, token_s: float, acceptance: float, window: int, rounds: int, seed: int) -> float:
    """Tokens a second of a pipe that always has ``window`` tokens to verify, or none after a rejection."""
    chance, empty, tokens, seconds = random.Random(seed), True, 0, 0.0
    for _ in range(rounds):
        compared = 1 if empty else window + 1
        target_s = curve.seconds(compared)
        drafted = overlapped_tokens(target_s, DraftCost(token_s=token_s), acceptance, 9)
        seconds += max(target_s, drafted * token_s)
        kept = next((place for place in range(compared) if chance.random() >= acceptance), compared)
        tokens += min(compared, kept + 1)
        empty = kept < compared
    return tokens / seconds


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("token_s", [0.01, 0.03, 0.25])
def test_a_window_has_the_rate_of_a_pipe_with_that_window(acceptance: float, token_s: float) -> None:
    curve = Curve(widths=(1, 8), forward_s=(0.1, 0.17))
    best = choose_window(curve, DraftCost(token_s=token_s), (acceptance,), 8)
    assert best.tokens_per_s == pytest.approx(
        windowed(curve, token_s, acceptance, best.window, 40_000, seed=3), rel=0.02
    )
    for window in range(9):
        cost = DraftCost(token_s=token_s)
        fills = overlapped_tokens(curve.seconds(window + 1), cost, acceptance, 9) >= window + 1
        if fills:
            assert best.tokens_per_s >= 0.98 * windowed(curve, token_s, acceptance, window, 10_000, seed=4)


@pytest.mark.parametrize(
    ("token_s", "acceptance", "most", "count"),
    [
        (0.02, 0.5, 9, 5),  # all are ready
        (0.02, 0.5, 3, 3),
        (0.04, 0.0, 9, 2),  # no further token is worth waiting for
        (0.04, 0.95, 9, 3),  # a third token, ready a fifth later, is worth the wait
        (0.06, 0.95, 9, 2),
        (0.06, 0.1, 9, 1),
        (0.5, 0.9, 9, 1),  # the target waits once for a slow drafter
        (0.5, 0.9, 1, 1),
        (0.0, 0.5, 7, 7),
    ],
)
def test_overlapped_tokens_are_those_ready_in_time_or_worth_the_wait(
    token_s: float, acceptance: float, most: int, count: int
) -> None:
    assert overlapped_tokens(0.1, DraftCost(token_s=token_s), acceptance, most) == count


def test_windows_at_extreme_costs_and_acceptances() -> None:
    flat = Curve(widths=(1, 8), forward_s=(0.1, 0.1))
    always = choose_window(flat, DraftCost(token_s=0.02), (1.0,), 4)
    assert (always.window, always.tokens_per_s) == (4, pytest.approx(50))
    never = choose_window(flat, DraftCost(token_s=0.02), (0.0,), 4)
    assert (never.tokens_per_round, never.tokens_per_s) == (1.0, pytest.approx(10))
    free = choose_window(flat, FREE, (1.0,), 4)
    assert (free.window, free.tokens_per_s) == (4, pytest.approx(50))
    slow = choose_window(flat, DraftCost(token_s=0.4), (1.0,), 4)
    assert (slow.window, slow.tokens_per_s) == (0, pytest.approx(2.5))
    assert choose_window(flat, DraftCost(token_s=0.02), (0.8,), 0).window == 0
    steep = Curve(widths=(1, 2, 3), forward_s=(0.1, 0.3, 0.9))
    assert choose_window(steep, DraftCost(token_s=0.02), (0.9,), 2).window == 0
    # A proposal's cost and two tokens take a little longer than the target.
    fixed = choose_window(flat, DraftCost(token_s=0.025, round_s=0.06), (1.0,), 4)
    assert (fixed.window, fixed.tokens_per_s) == (1, pytest.approx(2 / 0.11))
    with pytest.raises(ValueError, match="at least one acceptance"):
        choose_window(flat, FREE, (), 4)


def test_unknown_positions_of_a_window_repeat_the_last_acceptance() -> None:
    flat, cost = Curve(widths=(1, 8), forward_s=(0.1, 0.1)), DraftCost(token_s=0.02)
    assert choose_window(flat, cost, (0.9, 0.5), 4) == choose_window(flat, cost, (0.9, 0.5, 0.5, 0.5), 4)
    assert choose_window(flat, cost, (0.7, 0.7, 0.1), 2) == choose_window(flat, cost, (0.7,), 2)


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("ratio", [1.5, 3, 8])
def test_the_closed_form_of_a_window_is_near_the_simulation(acceptance: float, ratio: float) -> None:
    """Rounds use the closed form, plans the simulation."""
    for slope in (0.0, 0.05, 0.3):
        curve = Curve(widths=(1, 2), forward_s=(0.1, 0.1 * (1 + slope)))
        cost = DraftCost(token_s=0.1 / ratio)
        pair = SimulatedPair(curve=curve, draft=cost, acceptance=(acceptance,))
        quick = choose_window(curve, cost, (acceptance,), 5).tokens_per_s
        assert quick == pytest.approx(expected_pipelined(pair, 5).tokens_per_s, rel=0.15)
