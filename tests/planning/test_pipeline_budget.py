"""How many tokens a pipelined round verifies, by the recorded times and acceptance."""

from __future__ import annotations

from dataclasses import replace
from threading import TIMEOUT_MAX
from typing import Any

import pytest

from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import ContextCurves, Curve
from edgespec.planning.depth.pipeline_budget import MeasuredBudget
from tests.support.planning import a_round

STEEP = Curve(widths=(1, 2, 3, 4), forward_s=(0.010, 0.020, 0.030, 0.040))
FLAT = Curve(widths=(1, 4), forward_s=(0.010, 0.010))


def known(curve: Curve) -> Costs:
    return Costs(curves=ContextCurves(contexts=(0,), curves=(curve,)))


def record(
    evaluated: int, accepted: int, *, draft_s: float = 0.0, sync_s: float = 0.0, forwards: int = 0
) -> RoundRecord:
    drafted: dict[str, Any] = {"source": "model", "draft_s": draft_s, "sync_s": sync_s, "forwards": forwards}
    return a_round(3, accepted, width=3, evaluated=evaluated, round_s=0.01, **drafted)


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
        budget.learn_reuse(False)
    assert not budget.reuses()
    for _ in range(20):
        budget.learn_reuse(True)
    assert budget.reuses()


def test_the_target_waits_two_forwards_of_the_drafter_at_most() -> None:
    budget = MeasuredBudget(3, Costs())
    assert budget.patience_s() == pytest.approx(0.05)
    budget.record(record(1, 1, draft_s=0.5))
    assert budget.patience_s() == pytest.approx(0.05), "no forward was counted"
    budget.record(record(1, 1, draft_s=0.2003, sync_s=0.2, forwards=1))
    assert budget.patience_s() == pytest.approx(0.05), "the one forward was catching up"
    budget.record(record(1, 1, draft_s=0.24, sync_s=0.2, forwards=5))
    assert budget.patience_s() == pytest.approx(0.02), "catching up includes the first of five forwards"
    for _ in range(300):
        budget.record(record(1, 1, draft_s=0.06, forwards=2))
    assert budget.patience_s() == pytest.approx(0.06, rel=0.01)


def test_a_waiting_budget_waits_until_a_drafter_forward_was_timed() -> None:
    budget = MeasuredBudget(3, Costs(), waits=True)
    assert budget.patience_s() == TIMEOUT_MAX
    budget.record(record(1, 1, draft_s=0.04, forwards=4))
    assert budget.patience_s() == pytest.approx(0.02)
