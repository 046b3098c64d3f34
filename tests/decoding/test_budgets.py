"""The budget that never changes says what it was told to."""

from __future__ import annotations

from tests.support.budgets import FixedBudget


def test_unless_told_otherwise_it_waits_and_tries_nothing() -> None:
    budget = FixedBudget(most=3, ahead=4)
    assert budget.window((None,) * 9) == 3
    assert budget.draft_tokens(2, 2) == 4
    assert budget.patience_s() > 1e6
    assert not budget.reuses()
    assert not budget.drafts_during_prefill()
    assert budget.branches(forks=True) == budget.branches(forks=False) == 0


def test_what_it_was_told() -> None:
    budget = FixedBudget(most=1, ahead=2, patience=0.5, reuse=True, overlaps_prefill=True, branching=2)
    budget.reused(False)
    budget.branched(False)
    budget.branch_stood(False)
    assert (budget.patience_s(), budget.reuses(), budget.drafts_during_prefill()) == (0.5, True, True)
    assert budget.branches(forks=True) == budget.branches(forks=False) == 2
