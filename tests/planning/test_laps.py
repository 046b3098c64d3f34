"""One forward and the drafting in parallel with it (planning/cost/round_simulation.py: Flight, lap), by hand."""

from __future__ import annotations

import pytest

from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.curve import FREE, DraftCost
from edgespec.planning.cost.round_simulation import Flight, lap

ALONE = Contention()


def flight(token_s: float, most: int, *, round_s: float = 0.0, hand_over_s: float = 0.0) -> Flight:
    return Flight(DraftCost(token_s=token_s, round_s=round_s), most, hand_over_s)


def test_a_drafter_that_is_stopped_finishes_its_current_token() -> None:
    one = flight(0.4, 9)
    assert lap(one, 1.0, ALONE) == pytest.approx((1.2, 1.0, 1.2))
    assert (one.drafted, one.here) == (3, True)


def test_a_drafter_with_all_its_tokens_waits_for_the_target() -> None:
    one = flight(0.2, 2)
    assert lap(one, 1.0, ALONE) == pytest.approx((1.0, 1.0, 0.4))
    assert one.drafted == 2


@pytest.mark.parametrize(("token_s", "tokens"), [(0.25, 4), (0.2, 5), (0.1, 10), (1.0, 1), (1 / 3, 3)])
def test_a_token_finished_together_with_the_target_is_in_time(token_s: float, tokens: int) -> None:
    one = flight(token_s, 99)
    assert lap(one, 1.0, ALONE) == pytest.approx((1.0, 1.0, 1.0))
    assert one.drafted == tokens


def test_the_first_token_waits_for_the_proposals_fixed_cost() -> None:
    one = flight(0.3, 9, round_s=0.5)
    assert lap(one, 1.0, ALONE) == pytest.approx((1.1, 1.0, 1.1))
    assert one.drafted == 2


def test_half_of_a_hand_over_precedes_the_drafting_and_half_follows() -> None:
    one = flight(0.4, 9, hand_over_s=0.2)
    assert lap(one, 1.0, ALONE) == pytest.approx((1.4, 1.0, 1.2))
    assert one.drafted == 3
    soon = flight(0.2, 2, hand_over_s=0.2)
    assert lap(soon, 1.0, ALONE) == pytest.approx((1.0, 1.0, 0.4)), "hidden behind the forward"
    late = flight(0.2, 2, hand_over_s=3.0)
    assert lap(late, 1.0, ALONE) == pytest.approx((3.2, 1.0, 0.2)), (
        "stopped before its first token, it drafts one token"
    )
    assert late.drafted == 1


def test_each_side_is_slower_only_while_the_other_computes() -> None:
    both = Contention(target_factor=2.0, drafter_factor=1.5)
    # The drafter's 0.6 s take 0.9 s, in which the target does 0.45 s of work; the other 0.55 s run at full pace.
    assert lap(flight(0.3, 2), 1.0, both) == pytest.approx((1.45, 1.45, 0.9))
    # The target's 1 s takes 2 s, in which the drafter does 1.333 of its 2 s.
    assert lap(flight(2.0, 1), 1.0, both) == pytest.approx((2.0 + 2.0 - 2.0 / 1.5, 2.0, 4.0 - 2.0 / 1.5))
    # A message under way slows neither side.
    assert lap(flight(0.3, 2, hand_over_s=0.4), 1.0, both) == pytest.approx((0.2 + 0.9 + 0.35, 1.45, 0.9))


def test_contention_factors_below_one_are_ignored_as_noise() -> None:
    noise = Contention(target_factor=0.95, drafter_factor=0.95)
    assert lap(flight(0.4, 9), 1.0, noise) == lap(flight(0.4, 9), 1.0, ALONE)


def test_a_late_drafter_continues_in_the_next_lap() -> None:
    one = flight(3.0, 9)
    assert lap(one, 1.0, ALONE, patience_s=0.5) == pytest.approx((1.5, 1.0, 1.5))
    assert (one.here, one.told) == (False, True)
    assert lap(one, 1.0, ALONE, patience_s=0.25) == pytest.approx((1.25, 1.0, 1.25))
    assert lap(one, 1.0, ALONE) == pytest.approx((1.0, 1.0, 0.25))
    assert (one.here, one.drafted) == (True, 1)
    at_once = flight(3.0, 9)
    assert lap(at_once, 1.0, ALONE, patience_s=0.0) == pytest.approx((1.0, 1.0, 1.0))
    assert not at_once.here


def test_copies_of_the_text_take_no_time() -> None:
    one = Flight(FREE, 7)
    assert lap(one, 1.0, ALONE) == (1.0, 1.0, 0.0)
    assert one.drafted == 7


def test_a_proposal_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Flight(FREE, 0)
