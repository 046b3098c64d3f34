"""Several chains where rows are cheap and the drafter is unsure; one, or none, everywhere else."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.planning.chains import ChainChoice, choose_chains
from edgespec.planning.cost.curve import Curve, DraftCost, choose_depth


def linear(first_s: float, row_s: float) -> Curve:
    """T(w) of ``first_s`` and ``row_s`` for each further row."""
    widths = tuple(range(1, 33))
    return Curve(widths=widths, forward_s=tuple(first_s + row_s * (width - 1) for width in widths))


FLAT, STEEP = linear(0.1, 0.0), linear(0.1, 0.1)
CHEAP = linear(0.001, 0.0)
UNSURE, SURE = (0.4, 0.3, 0.15), (0.97, 0.01, 0.01)


def shape(
    target: Curve, odds: tuple[float, ...], cap: int = 8, drafter: Curve = CHEAP, **how: bool
) -> tuple[int, int]:
    choice = choose_chains(target, drafter, odds, (0.8,), cap, **how)
    return choice.chains, choice.length


@pytest.mark.parametrize("at_once", [False, True])
def test_a_flat_curve_has_room_for_several_chains_when_the_drafter_is_unsure(at_once: bool) -> None:
    assert shape(FLAT, UNSURE, at_once=at_once) == (2, 4)
    assert shape(FLAT, UNSURE, 4, at_once=at_once)[0] == 2
    assert shape(FLAT, SURE, at_once=at_once) == (1, 8)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_steep_curve_has_room_for_one_or_none(at_once: bool) -> None:
    assert shape(STEEP, UNSURE, at_once=at_once) == (0, 0)
    assert shape(STEEP, (0.99, 0.01), at_once=at_once)[0] <= 1
    assert shape(linear(0.1, 0.05), SURE, at_once=at_once)[0] == 1
    assert shape(linear(0.1, 0.05), UNSURE, at_once=at_once)[0] <= 1


def test_a_drafter_that_is_slower_for_several_chains_writes_fewer() -> None:
    assert shape(FLAT, UNSURE, drafter=linear(0.01, 0.0))[0] > 1
    assert shape(FLAT, UNSURE, drafter=linear(0.01, 0.05))[0] == 1


def test_at_once_the_drafter_has_to_be_done_when_the_target_is() -> None:
    for draft_s, longest in ((0.05, 2), (0.04, 2), (0.034, 2), (0.02, 5), (0.11, 0)):
        choice = choose_chains(FLAT, linear(draft_s, 0.0), SURE, (0.95,), 5, at_once=True)
        assert choice.length <= longest
        assert choice.length * draft_s <= FLAT.seconds(1)
    serial = choose_chains(FLAT, linear(0.04, 0.0), SURE, (0.95,), 5)
    assert serial.length > 2, "in turns it may take longer than the target"
    assert serial.round_s == pytest.approx(0.1 + 0.04 * serial.length)


def test_tokens_and_seconds_of_a_round() -> None:
    choice = choose_chains(FLAT, linear(0.01, 0.005), (0.5, 0.25), (0.8, 0.5), 6)
    assert (choice.chains, choice.length) == (2, 3)
    assert choice.tokens_per_round == pytest.approx(1 + 0.75 * (1 + 0.8 + 0.8 * 0.5))
    assert choice.round_s == pytest.approx(3 * 0.015 + 0.1)
    assert choice.tokens_per_s == pytest.approx(choice.tokens_per_round / choice.round_s)


def test_without_anything_to_say_decoding_is_plain() -> None:
    plain = ChainChoice(chains=0, length=0, tokens_per_round=1.0, round_s=0.1)
    assert choose_chains(FLAT, CHEAP, (), (0.8,), 8) == plain
    assert choose_chains(FLAT, CHEAP, (0.0,), (0.8,), 8) == plain
    assert choose_chains(FLAT, CHEAP, UNSURE, (0.8,), 0) == plain
    unknown = choose_chains(FLAT, CHEAP, SURE[:1], (), 8)
    assert (unknown.chains, unknown.length) == (1, 1), "nothing is known of a second token"


def test_of_equal_spreads_the_smaller_one() -> None:
    assert shape(FLAT, (1.0, 0.0), drafter=linear(0.05, 0.0), at_once=True) == (1, 2)
    choice = choose_chains(FLAT, linear(0.05, 0.0), (1.0, 0.0), (0.0,), 8, at_once=True)
    assert (choice.chains, choice.length) == (1, 1)


@pytest.mark.parametrize("odds", [(0.5, 0.6), (0.6, 0.6), (-0.1,), (1.1,), (0.2, 0.3), (float("nan"),)])
def test_odds_that_are_none(odds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="odds"):
        choose_chains(FLAT, CHEAP, odds, (0.8,), 4)


@given(
    st.floats(0.01, 0.99),
    st.floats(0.0, 0.99),
    st.floats(0.0, 0.2),
    st.floats(0.001, 0.1),
    st.integers(1, 10),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_no_other_spread_is_faster_and_one_chain_is_the_serial_choice(
    first: float, later: float, row_s: float, draft_s: float, cap: int, at_once: bool
) -> None:
    target, drafter = linear(0.1, row_s), linear(draft_s, draft_s / 4)
    odds = (first, min(first, (1 - first) / 2))
    best = choose_chains(target, drafter, odds, (later,), cap, at_once=at_once)
    for chains, length in itertools.product((1, 2), range(1, cap + 1)):
        draft = length * drafter.seconds(chains)
        verify = target.seconds(1 + chains * length)
        if chains * length > cap or (at_once and draft > verify):
            continue
        tokens = 1 + sum(odds[:chains]) * sum(later**place for place in range(length))
        assert best.tokens_per_s >= tokens / (verify if at_once else draft + verify) * (1 - 1e-9)
    alone = choose_chains(target, drafter, odds[:1], (later,), cap)
    serial = choose_depth(target, DraftCost(token_s=draft_s), (first, later), cap)
    assert alone.tokens_per_s == pytest.approx(serial.tokens_per_s)
