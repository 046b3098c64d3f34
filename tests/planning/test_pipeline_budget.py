"""How far a pipelined round goes, by the times and the acceptance it was told."""

from __future__ import annotations

import pytest

from edgespec.decoding.contracts import RoundRecord
from edgespec.planning.cost import Curve
from edgespec.planning.pipeline_budget import MeasuredBudget

STEEP = Curve(widths=(1, 2, 3, 4), forward_s=(0.010, 0.020, 0.030, 0.040))
FLAT = Curve(widths=(1, 4), forward_s=(0.010, 0.010))


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


def test_without_times_everything_is_verified_up_to_the_cap() -> None:
    budget = MeasuredBudget(2, None)
    assert [budget.window((None,) * count) for count in range(5)] == [0, 1, 2, 2, 2]
    assert budget.draft_tokens(0) == 3


def test_a_free_row_is_always_worth_it_and_a_dear_one_never() -> None:
    assert MeasuredBudget(3, FLAT).window((0.9,) * 3) == 3
    assert MeasuredBudget(3, STEEP).window((0.9,) * 3) == 0


def test_the_window_follows_what_stood_lately() -> None:
    curve = Curve(widths=(1, 2, 3, 4), forward_s=(0.010, 0.014, 0.018, 0.022))
    budget = MeasuredBudget(3, curve)
    assert budget.acceptance == pytest.approx(0.5)
    for _ in range(200):
        budget.record(record(3, 3))
    assert budget.acceptance > 0.99
    assert budget.window((None,) * 3) == 3
    for _ in range(200):
        budget.record(record(1, 0))
    assert budget.acceptance < 0.01
    assert budget.window((None,) * 3) == 0
    before = budget.acceptance
    budget.record(record(0, 0))
    assert budget.acceptance == before, "nothing was compared"


def test_reuse_is_tried_and_given_up_where_it_fails() -> None:
    budget = MeasuredBudget(3, None)
    assert budget.reuses()
    for _ in range(3):
        budget.reused(False)
    assert not budget.reuses()
    for _ in range(20):
        budget.reused(True)
    assert budget.reuses()


def test_the_patience_is_two_forwards_of_the_drafter() -> None:
    budget = MeasuredBudget(3, None)
    assert budget.patience_s() == pytest.approx(0.05)
    budget.record(record(1, 1, draft_s=0.5))
    assert budget.patience_s() == pytest.approx(0.05), "no forward was counted"
    budget.record(record(1, 1, draft_s=0.24, sync_s=0.2, forwards=4))
    assert budget.patience_s() == pytest.approx(0.02), "catching up is not part of a forward"
    for _ in range(300):
        budget.record(record(1, 1, draft_s=0.06, forwards=2))
    assert budget.patience_s() == pytest.approx(0.06, rel=0.01)
