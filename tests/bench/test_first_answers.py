"""Gains of first answers, on rows made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.first_answers import first_gains


def row(
    arm: str, seconds: float, *, turn: int = 0, prompt: str = "a", ids: tuple[int, ...] = (1, 2)
) -> dict[str, Any]:
    category = "coding" if prompt == "a" else "stem"
    timed = {"ttft_s": seconds / 4, "decode_s": seconds * 3 / 4, "proposed": 5 * (arm == "planned")}
    return {"id": prompt, "category": category, "arm": arm, "turn": turn, "token_ids": list(ids), **timed}


def test_gains_are_plain_seconds_over_planned_seconds_by_category() -> None:
    first = [row("plain", 3.0), row("planned", 2.0), row("plain", 9.0, turn=1), row("planned", 1.0, turn=1)]
    second = [
        *(row("plain", seconds, turn=turn) for turn, seconds in enumerate((4.0, 1.0))),
        *(row("planned", 1.0, turn=turn) for turn in range(2)),
        row("plain", 8.0, prompt="b"),
        row("planned", 1.0, prompt="b"),
    ]
    found = first_gains(first, second)
    assert found["first"] == pytest.approx(1.5), "only the first turn"
    assert found["drafted"] is True
    assert found["by_category"] == {"coding": pytest.approx(2.0), "stem": pytest.approx(8.0)}
    assert found["second"] == pytest.approx(4.0)
    assert found["identical"] is True


def test_answers_with_other_token_ids_are_not_identical() -> None:
    first = [row("plain", 1.0), row("planned", 1.0, ids=(1, 3))]
    assert first_gains(first, [row("plain", 1.0), row("planned", 1.0)])["identical"] is False
