"""The verdicts of the acceptance steps that counts decide, on answers made by hand."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
REPORT = {"took_s": 44.0, "others_share": 0.5, "left_out": ["other runtimes"], "stored": True}


class Results:
    def __init__(self) -> None:
        self.saved: dict[str, Any] = {}

    def save(self, name: str, **values: Any) -> None:
        self.saved.setdefault(name, {}).update(values)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    path = SCRIPTS / "acceptance_sound.py"
    spec = importlib.util.spec_from_file_location("acceptance_sound_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Asked:
    """Stands in for the processes that answer and calibrate."""

    def __init__(self) -> None:
        self.calibrated: list[tuple[int, tuple[str, ...]]] = []
        self.busy = 0
        self.ids = [5, 6, 7]
        self.other: dict[str, list[int]] = {}  # ids of the answers that an option in there asks for
        self.guesses = 4
        self.drafter = "model"

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

    def calibrate(self, _environment: Any, *options: str) -> dict[str, Any]:
        self.calibrated.append((self.busy, options))
        return dict(REPORT)

    def loops(self, count: int) -> Any:
        self.busy = count
        return nullcontext()


@pytest.fixture
def asked(steps: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asked:
    asked = Asked()
    suite = tmp_path / "suite.jsonl"
    prompts = [
        {"id": f"{category}-{n}", "category": str(category), "prompt": "x"}
        for category in range(12)
        for n in range(3)
    ]
    suite.write_text("\n".join(map(json.dumps, prompts)))
    monkeypatch.setenv("UNSEEN_SUITE", str(suite))
    monkeypatch.setenv("EXPORTED_DRAFTERS", "/exported")
    for name in ("answers", "calibrate"):
        monkeypatch.setattr(steps, name, getattr(asked, name))
    monkeypatch.setattr(steps, "busy_loops", asked.loops)
    return asked


def test_one_text_asks_in_every_way_before_and_after_three_calibrations(steps: ModuleType, asked: Asked) -> None:
    results = Results()
    assert steps.SOUND_STEPS["one-text"](results, "one-text")
    assert [busy for busy, _ in asked.calibrated] == [2, 0, 0]
    rows = results.saved["one-text"]["ways"]
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


@pytest.mark.parametrize("key", ["none", "0", "/exported/trimmed", "/exported/onnx", "after", "--temperature"])
def test_one_other_text_is_found(steps: ModuleType, asked: Asked, key: str) -> None:
    asked.other = {key: [5, 6, 8]}
    results = Results()
    holds = steps.SOUND_STEPS["one-text"](results, "one-text")
    assert holds is (key == "--temperature"), "another text for a seed is none of another drafter"
    assert all(each["at"] == 2 for each in results.saved["one-text"]["different"])


def test_texts_that_no_model_drafted_prove_nothing(steps: ModuleType, asked: Asked) -> None:
    asked.drafter = "lookup"
    assert not steps.SOUND_STEPS["one-text"](Results(), "one-text")


def test_a_shorter_answer_parts_at_its_end(steps: ModuleType, asked: Asked) -> None:
    asked.other = {"none": [5, 6]}
    results = Results()
    assert not steps.SOUND_STEPS["one-text"](results, "one-text")
    assert {each["at"] for each in results.saved["one-text"]["different"]} == {2}


@pytest.mark.parametrize(("seconds", "holds"), [(59.0, True), (61.0, False)])
def test_the_slowest_busy_calibration_counts(
    steps: ModuleType, monkeypatch: pytest.MonkeyPatch, seconds: float, holds: bool
) -> None:
    took = iter([40.0, seconds, 45.0])
    monkeypatch.setattr(steps, "calibrate", lambda _environment: {**REPORT, "command_s": next(took)})
    monkeypatch.setattr(steps, "busy_loops", lambda count: nullcontext(count > 0 or pytest.fail("no busy loop")))
    results = Results()
    assert steps.SOUND_STEPS["calibrate-busy"](results, "calibrate-busy") is holds
    assert len(results.saved["calibrate-busy"]["runs"]) == 3


def test_a_calibration_that_fails_says_why(steps: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", "no such model")
    )
    with pytest.raises(RuntimeError, match="no such model"):
        steps.calibrate({})


@pytest.mark.parametrize(("slowest", "part"), [("cancel", 0), ("cancel", 1), ("Engine.close", 0)])
@pytest.mark.parametrize(("seconds", "holds"), [(0.149, True), (0.151, False)])
def test_the_longest_leaving_counts(
    steps: ModuleType, monkeypatch: pytest.MonkeyPatch, slowest: str, part: int, seconds: float, holds: bool
) -> None:
    opened: list[str] = []

    def left_after(moment: str, made: Any, way: str) -> tuple[float, ...]:
        assert moment == opened[-1]
        slow = (way, made.prompt) == (slowest, steps.LONG)
        return tuple(seconds if slow and place == part else 0.05 for place in (0, 1))

    def engine(moment: str) -> Any:
        opened.append(moment)
        return nullcontext(moment)

    monkeypatch.setattr(steps, "_engine", engine)
    monkeypatch.setattr(steps, "_left_after", left_after)
    monkeypatch.setattr(steps, "_command_left_after", lambda _moment, _s: 3.0)
    results = Results()
    assert steps.SOUND_STEPS["leaving"](results, "leaving") is holds
    saved = results.saved["leaving"]
    assert len(saved["longest_s"]) == 5
    assert saved["longest_s"][slowest] == {"load": 0.05, "prompt": seconds, "round": 0.05}
    assert saved["with_freeing_s"]["edgespec generate"] == {"load": 3.0, "prompt": 3.0, "round": 3.0}
    assert len(opened) == 5 * 3 + 3 * steps.TURNS, "an engine that is closed answers no more"


def test_how_long_freeing_the_models_takes_is_told(steps: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_engine", nullcontext)
    monkeypatch.setattr(
        steps, "_left_after", lambda _engine, _made, way: (0.05, 2.0 if way == "Engine.close" else 0.05)
    )
    monkeypatch.setattr(steps, "_command_left_after", lambda _moment, _s: 0.3)
    results = Results()
    assert steps.SOUND_STEPS["leaving"](results, "leaving")
    assert set(results.saved["leaving"]["with_freeing_s"]["Engine.close"].values()) == {2.0}
