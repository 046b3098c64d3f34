"""One forward and the drafting beside it (planning/cost/round_simulation.py: Flight, lap), worked out by hand."""

from __future__ import annotations

import pytest

from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.curve import FREE, DraftCost
from edgespec.planning.cost.round_simulation import Flight, lap
from tests.support.drawn_rounds import WholeFlight

ALONE = Contention()


def flight(token_s: float, most: int, *, round_s: float = 0.0, hand_over_s: float = 0.0) -> Flight:
    return Flight(DraftCost(token_s=token_s, round_s=round_s), most, hand_over_s)


def test_a_drafter_that_is_told_finishes_the_token_it_is_at() -> None:
    one = flight(0.4, 9)
    assert lap(one, 1.0, ALONE) == pytest.approx((1.2, 1.0, 1.2))
    assert (one.drafted, one.here) == (3, True)


def test_one_that_has_enough_waits_for_the_target() -> None:
    one = flight(0.2, 2)
    assert lap(one, 1.0, ALONE) == pytest.approx((1.0, 1.0, 0.4))
    assert one.drafted == 2


@pytest.mark.parametrize(("token_s", "tokens"), [(0.25, 4), (0.2, 5), (0.1, 10), (1.0, 1), (1 / 3, 3)])
def test_done_at_the_same_moment_is_done_in_time(token_s: float, tokens: int) -> None:
    one = flight(token_s, 99)
    assert lap(one, 1.0, ALONE) == pytest.approx((1.0, 1.0, 1.0))
    assert one.drafted == tokens


def test_the_first_token_waits_for_what_a_proposal_costs() -> None:
    one = flight(0.3, 9, round_s=0.5)
    assert lap(one, 1.0, ALONE) == pytest.approx((1.1, 1.0, 1.1))
    assert one.drafted == 2


def test_half_a_hand_over_lies_before_the_drafting_and_half_behind() -> None:
    one = flight(0.4, 9, hand_over_s=0.2)
    assert lap(one, 1.0, ALONE) == pytest.approx((1.4, 1.0, 1.2))
    assert one.drafted == 3
    soon = flight(0.2, 2, hand_over_s=0.2)
    assert lap(soon, 1.0, ALONE) == pytest.approx((1.0, 1.0, 0.4)), "hidden behind the forward"
    late = flight(0.2, 2, hand_over_s=3.0)
    assert lap(late, 1.0, ALONE) == pytest.approx((3.2, 1.0, 0.2)), "told before it began, it drafts one token"
    assert late.drafted == 1


def test_each_side_is_slowed_only_while_the_other_is_at_work() -> None:
    both = Contention(target_factor=2.0, drafter_factor=1.5)
    # The drafter's 0.6 s take 0.9 s; in them the target gets 0.45 s done, and the other 0.55 s at its own pace.
    assert lap(flight(0.3, 2), 1.0, both) == pytest.approx((1.45, 1.45, 0.9))
    # The target's 1 s takes 2 s; in them the drafter gets 1.333 of its 2 s done.
    assert lap(flight(2.0, 1), 1.0, both) == pytest.approx((2.0 + 2.0 - 2.0 / 1.5, 2.0, 4.0 - 2.0 / 1.5))
    # A message under way slows nobody.
    assert lap(flight(0.3, 2, hand_over_s=0.4), 1.0, both) == pytest.approx((0.2 + 0.9 + 0.35, 1.45, 0.9))


def test_what_was_measured_as_faster_is_noise() -> None:
    noise = Contention(target_factor=0.95, drafter_factor=0.95)
    assert lap(flight(0.4, 9), 1.0, noise) == lap(flight(0.4, 9), 1.0, ALONE)


def test_a_drafter_that_is_late_goes_on_in_the_next_lap() -> None:
    one = flight(3.0, 9)
    assert lap(one, 1.0, ALONE, patience_s=0.5) == pytest.approx((1.5, 1.0, 1.5))
    assert (one.here, one.told) == (False, True)
    assert lap(one, 1.0, ALONE, patience_s=0.25) == pytest.approx((1.25, 1.0, 1.25))
    assert lap(one, 1.0, ALONE) == pytest.approx((1.0, 1.0, 0.25))
    assert (one.here, one.drafted) == (True, 1)
    at_once = flight(3.0, 9)
    assert lap(at_once, 1.0, ALONE, patience_s=0.0) == pytest.approx((1.0, 1.0, 1.0))
    assert not at_once.here


def test_a_drafter_that_never_looks_drafts_all_of_it() -> None:
    one = WholeFlight(DraftCost(token_s=0.4), 5)
    assert lap(one, 1.0, ALONE) == pytest.approx((2.0, 1.0, 2.0))
    assert one.drafted == 5


def test_copies_of_the_text_take_no_time() -> None:
    one = Flight(FREE, 7)
    assert lap(one, 1.0, ALONE) == (1.0, 1.0, 0.0)
    assert one.drafted == 7


def test_a_proposal_of_nothing_is_none() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Flight(FREE, 0)
