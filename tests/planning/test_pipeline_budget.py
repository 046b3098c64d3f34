"""How many tokens a pipelined round verifies, by the recorded times and acceptance."""

from __future__ import annotations

import random
from dataclasses import replace
from threading import TIMEOUT_MAX

import pytest

from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import ContextCurves, Curve
from edgespec.planning.depth.pipeline_budget import MeasuredBudget, branch_pays

STEEP = Curve(widths=(1, 2, 3, 4), forward_s=(0.010, 0.020, 0.030, 0.040))
FLAT = Curve(widths=(1, 4), forward_s=(0.010, 0.010))


def known(curve: Curve) -> Costs:
    return Costs(curves=ContextCurves(contexts=(0,), curves=(curve,)))


def record(
    evaluated: int, accepted: int, *, draft_s: float = 0.0, sync_s: float = 0.0, forwards: int = 0
) -> RoundRecord:
    return RoundRecord(
        width=3,
        context_length=10,
        proposed=3,
        evaluated=evaluated,
        accepted=accepted,
        invalid=0,
        emitted=accepted + 1,
        source="model",
        draft_s=draft_s,
        sync_s=sync_s,
        verify_s=0.01,
        round_s=0.01,
        draft_forwards=forwards,
    )


def test_without_times_all_tokens_up_to_the_cap_are_verified() -> None:
    budget = MeasuredBudget(2, Costs())
    assert [budget.window(count) for count in range(5)] == [0, 1, 2, 2, 2]
    assert budget.draft_tokens(0) == 3


def test_a_pipelined_round_drafts_as_many_tokens_as_there_is_time_for() -> None:
    budget = MeasuredBudget(5, known(Curve(widths=(1, 6), forward_s=(0.010, 0.020))))
    assert budget.draft_tokens(0) == 6, "how long the drafter takes is not known yet"
    for _ in range(50):
        budget.record(record(3, 3, draft_s=0.012, forwards=4))
    assert [budget.draft_tokens(0), budget.draft_tokens(2), budget.draft_tokens(5)] == [4, 5, 6]
    slow = MeasuredBudget(5, known(FLAT))
    for _ in range(50):
        slow.record(record(1, 0, draft_s=0.03, forwards=1))
    assert slow.draft_tokens(0) == 1


def test_a_free_row_is_always_verified_and_an_expensive_one_never() -> None:
    assert MeasuredBudget(3, known(FLAT)).window(3) == 3
    assert MeasuredBudget(3, known(STEEP)).window(3) == 0


def test_the_window_follows_recent_acceptance() -> None:
    curve = Curve(widths=(1, 2, 3, 4), forward_s=(0.010, 0.014, 0.018, 0.022))
    budget = MeasuredBudget(3, known(curve))
    assert budget.acceptance == pytest.approx(0.5)
    for _ in range(200):
        budget.record(record(3, 3))
    assert budget.acceptance > 0.99
    assert budget.window(3) == 3
    for _ in range(200):
        budget.record(record(1, 0))
    assert budget.acceptance < 0.01
    assert budget.window(3) == 0
    before = budget.acceptance
    budget.record(record(0, 0))
    assert budget.acceptance == before, "nothing was compared"


def test_pipelined_rounds_correct_the_calibrated_times() -> None:
    curve = Curve(widths=(1, 2, 3), forward_s=(0.010, 0.020, 0.030))
    budget = MeasuredBudget(2, known(curve))
    for _ in range(60):
        budget.record(record(1, 1))
    assert budget.window(2) == 0
    flat = [replace(record(3, 3), width=width, verify_s=0.010, overlapped=True) for width in (1, 2, 3)]
    for each in flat * 40:
        budget.record(each)
    assert budget.window(2) == 2
    alone = MeasuredBudget(2, known(curve))
    for each in flat * 40:
        alone.record(replace(each, overlapped=False))
    assert alone.window(2) == 0, "a round without drafting has another time"


def test_reuse_of_proposed_tokens_is_tried_and_stops_if_it_fails() -> None:
    budget = MeasuredBudget(3, Costs())
    assert budget.reuses()
    for _ in range(3):
        budget.learn("again", False)
    assert not budget.reuses()
    for _ in range(20):
        budget.learn("again", True)
    assert budget.reuses()


def test_the_target_waits_two_forwards_of_the_drafter_at_most() -> None:
    budget = MeasuredBudget(3, Costs())
    assert budget.patience_s() == pytest.approx(0.05)
    budget.record(record(1, 1, draft_s=0.5))
    assert budget.patience_s() == pytest.approx(0.05), "no forward was counted"
    budget.record(record(1, 1, draft_s=0.24, sync_s=0.2, forwards=4))
    assert budget.patience_s() == pytest.approx(0.02), "catching up is not part of a forward"
    for _ in range(300):
        budget.record(record(1, 1, draft_s=0.06, forwards=2))
    assert budget.patience_s() == pytest.approx(0.06, rel=0.01)


def test_a_waiting_budget_waits_until_a_drafter_forward_was_timed() -> None:
    budget = MeasuredBudget(3, Costs(), waits=True)
    assert budget.patience_s() == TIMEOUT_MAX
    budget.record(record(1, 1, draft_s=0.04, forwards=4))
    assert budget.patience_s() == pytest.approx(0.02)


def test_branches_are_tried_and_stop_if_they_miss_the_corrections() -> None:
    """On a fork branches cost idle time only; without, the drafter reads its chain again."""
    for forks, most, tries in ((True, 4, range(5, 15)), (False, 1, range(1, 2))):
        budget = MeasuredBudget(3, Costs())
        misses = 0
        while budget.branches(forks) == most:
            budget.learn("correction", False)
            misses += 1
        assert misses in tries
        assert budget.branches(forks) == 0
        for _ in range(40):
            budget.learn("correction", True)
        assert budget.branches(forks) == most


def test_one_correction_in_four_justifies_a_fork_but_not_reading_again() -> None:
    budget = MeasuredBudget(3, Costs())
    for place in range(200):
        budget.learn("correction", place % 4 == 0)
    assert (budget.branches(True), budget.branches(False)) == (4, 0)


def test_branches_stop_if_their_tokens_are_rejected() -> None:
    budget = MeasuredBudget(3, Costs())
    for _ in range(100):
        budget.record(record(5, 4))
    for _ in range(30):
        budget.learn("correction", True)
    failures = 0
    while budget.branches(True):
        budget.learn("branch", False)
        failures += 1
    assert 1 < failures < 8
    for _ in range(20):
        budget.learn("branch", True)
    assert budget.branches(True) == 4


def test_a_branch_pays_even_slightly_below_the_usual_acceptance() -> None:
    for acceptance in (0.2, 0.5, 0.8, 0.95):
        for window in (1, 3, 8):
            assert branch_pays(acceptance, acceptance, window)
            assert not branch_pays(acceptance, 0.0, window)
            pays = [branch_pays(acceptance, step / 100, window) for step in range(101)]
            assert pays == sorted(pays), "a higher acceptance never hurts"
            assert 0.1 < pays.index(True) / 100 / acceptance < 0.95
    assert branch_pays(0.0, 0.1, 3)
    assert branch_pays(1.0, 1.0, 3)


def test_branch_pays_agrees_with_simulated_rounds() -> None:
    """The long run of a pipe that branches fill after every correction, and of one without branches."""
    source = random.Random(4)

    def tokens_per_round(acceptance: float, standing: float | None, window: int) -> float:
        total, rounds, full, branch = 0, 40_000, False, False
        for _ in range(rounds):
            places, odds = (window + 1, acceptance) if full else (window + 1, standing) if branch else (1, acceptance)
            assert odds is not None
            kept = next((place for place in range(places) if source.random() >= odds), places)
            total += kept if kept == places else kept + 1
            full, branch = kept == places, kept < places and standing is not None
        return total / rounds

    for acceptance, window in ((0.8, 3), (0.6, 3), (0.7, 1)):
        without = tokens_per_round(acceptance, None, window)
        for standing in (0.2, 0.35, 0.75):
            gain = tokens_per_round(acceptance, standing, window) - without
            if abs(gain) > 0.05:
                assert branch_pays(acceptance, standing, window) is (gain > 0)
