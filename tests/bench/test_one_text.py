"""Texts with every drafter, before and after calibrations, on answers made by hand."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import benchmarks.one_text as module

REPORT = {"took_s": 44.0, "others_share": 0.5, "left_out": ["other runtimes"], "stored": True}
TRIMMED, ONNX = "/exported/trimmed", "/exported/onnx"


class Asked:
    """Stands in for the processes that answer and calibrate."""

    def __init__(self) -> None:
        self.calibrated: list[tuple[int, tuple[str, ...]]] = []
        self.busy = 0
        self.ids = [5, 6, 7]
        self.other: dict[str, list[int]] = {}  # ids of the answers that an option in there asks for
        self.guesses = 4
        self.drafter = "model"
        self.suite = ""

    def answers(self, _environment: Any, suite: str, *options: str) -> list[dict[str, Any]]:
        arms = options[options.index("--arms") + 1].split(",") if "--arms" in options else ["planned"]
        prompts = [json.loads(line)["id"] for line in Path(suite).read_text().splitlines()]
        own = {"proposed": self.guesses, "accepted": 1, "rounds_by_source": {self.drafter: 1}}
        none = {"proposed": 0, "accepted": 0, "rounds_by_source": {}}
        plain = "none" in options or "0" in options
        when = "after" if self.calibrated else "before"
        ids = next((ids for key, ids in self.other.items() if key in (*options, when)), self.ids)
        return [
            {"id": prompt, "arm": arm, "token_ids": ids, **(none if plain or arm == "plain" else own)}
            for prompt in prompts
            for arm in arms
        ]

    def calibrate(self, *options: str) -> dict[str, Any]:
        self.calibrated.append((self.busy, options))
        return dict(REPORT)

    def loops(self, count: int) -> Any:
        self.busy = count
        return nullcontext()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asked:
    asked = Asked()
    asked.suite = str(tmp_path / "suite.jsonl")
    prompts = [
        {"id": f"{category}-{n}", "category": str(category), "prompt": "x"}
        for category in range(12)
        for n in range(3)
    ]
    Path(asked.suite).write_text("\n".join(map(json.dumps, prompts)))
    for name in ("answers", "calibrate"):
        monkeypatch.setattr(module, name, getattr(asked, name))
    monkeypatch.setattr(module, "busy_loops", asked.loops)
    return asked


def test_every_way_is_asked_before_and_after_three_calibrations(asked: Asked) -> None:
    found = module.measure(asked.suite, TRIMMED, ONNX)
    assert not found["different"]
    assert [busy for busy, _ in asked.calibrated] == [2, 0, 0]
    rows = found["ways"]
    for when in ("before", "after"):
        assert {row["way"] for row in rows if row["when"] == when} == {
            "default",
            "--plain",
            "--draft none",
            "--depth 0",
            "--draft qwen2.5-coder-0.5b",
            "--draft TRIMMED",
            "--draft TRIMMED --depth 2",
            "--draft ONNX",
            "--draft ONNX --depth 2",
        }
    assert all(row["same"] == row["of"] == 40 for row in rows), "twenty prompts, greedy and seeded"
    assert {row["guesses"] for row in rows if row["way"] == "--draft ONNX"} == {160}


@pytest.mark.parametrize("key", ["none", "0", TRIMMED, ONNX, "after", "--temperature"])
def test_a_text_that_differs_in_one_way_is_reported_with_its_first_position(asked: Asked, key: str) -> None:
    asked.other = {key: [5, 6, 8]}
    different = module.measure(asked.suite, TRIMMED, ONNX)["different"]
    assert bool(different) is (key != "--temperature"), "sampled texts are compared only with sampled texts"
    assert all(each["at"] == 2 for each in different)


def test_a_shorter_answer_differs_at_its_end(asked: Asked) -> None:
    asked.other = {"none": [5, 6]}
    assert {each["at"] for each in module.measure(asked.suite, TRIMMED, ONNX)["different"]} == {2}
