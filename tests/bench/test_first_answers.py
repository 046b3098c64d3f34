"""Gains of first answers, on rows made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import first_answers
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


def test_first_answers_are_given_in_one_new_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, tuple[str, ...]]] = []

    def answers(environment: Mapping[str, str], *arguments: str) -> list[dict[str, Any]]:
        asked.append((environment["EDGESPEC_HOME"], arguments))
        return [row("plain", 3.0), row("planned", 2.0)]

    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "own"))
    monkeypatch.setattr(first_answers, "answers", answers)
    monkeypatch.setattr("sys.argv", ["first_answers", "question.jsonl", "first", "--limit", "4"])
    first_answers.main()
    assert json.loads(capsys.readouterr().out)["second"] == pytest.approx(1.5)
    (first_home, first), (second_home, second) = asked
    assert first_home == second_home != str(tmp_path / "own")
    assert first[3:5] == ("--limit", "1")
    assert second[3:5] == ("--limit", "4")
