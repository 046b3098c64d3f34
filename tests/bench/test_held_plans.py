"""Figures of two homes, on rows made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.held_plans import compared, spread
from edgespec.bench.suite import builtin_suite


def rows(planned_s: float, ids: tuple[int, ...] = (1, 2)) -> list[dict[str, Any]]:
    """One prompt's answers, the plain one in two seconds."""
    told = {"id": "a", "mode": "serial", "tokens_per_round": 1.5, "token_ids": list(ids)}
    return [{**told, "arm": "planned", "decode_s": planned_s}, {**told, "arm": "plain", "decode_s": 2.0}]


def test_the_calibrated_homes_gains_are_compared_with_the_others() -> None:
    found = compared({"calibrated": rows(2.0), "never": rows(1.0)})
    assert (found["calibrated"]["gains"], found["never"]["gains"]) == ({"a": 1.0}, {"a": 2.0})
    assert found["calibrated"]["modes"] == {"a": "serial"}
    assert found["never"]["tokens_per_round"] == {"a": 1.5}
    assert found["ratio"] == pytest.approx(0.5)
    assert found["identical"] is True


def test_other_token_ids_in_one_home_are_not_identical() -> None:
    assert compared({"calibrated": rows(1.0), "never": rows(1.0, (1, 3))})["identical"] is False


def test_the_prompts_are_taken_from_all_of_a_suite() -> None:
    suite = builtin_suite("quick")
    few = spread(suite, 4)
    assert len({prompt.id for prompt in few}) == 4
    assert len({prompt.category for prompt in few}) > 1
    assert len(spread(suite, 10**6)) == len(suite)
