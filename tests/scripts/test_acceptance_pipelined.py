"""The verdicts of the acceptance steps for working at once, on reports made by hand."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


class Results:
    def __init__(self) -> None:
        self.saved: dict[str, Any] = {}

    def save(self, name: str, **values: Any) -> None:
        self.saved.setdefault(name, {}).update(values)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    path = SCRIPTS / "acceptance_pipelined.py"
    spec = importlib.util.spec_from_file_location("acceptance_pipelined_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("changed", "holds"),
    [
        ({}, True),
        ({"of_bound": 0.89}, False),
        ({"gain_of_simulated": 1.11}, False),
        ({"gain_of_simulated": 0.89}, False),
        ({"identical": False}, False),
    ],
)
def test_every_ratio_has_to_reach_its_bound(
    steps: ModuleType, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], holds: bool
) -> None:
    good = {"ratio": 2.0, "identical": True, "of_bound": 0.95, "gain_of_simulated": 0.97}
    report = {"ratios": [good, {**good, "ratio": 5.0, **changed}]}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command == [sys.executable, "benchmarks/sleeping_drafter.py"]
        return subprocess.CompletedProcess(command, 0, json.dumps(report), "")

    monkeypatch.setattr(subprocess, "run", run)
    results = Results()
    assert steps.PIPELINED_STEPS["sleeping-drafter"](results, "sleeping-drafter") is holds
    assert results.saved["sleeping-drafter"]["report"] == report


def test_a_benchmark_that_fails_says_why(steps: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", "no such model")
    )
    with pytest.raises(RuntimeError, match="no such model"):
        steps.PIPELINED_STEPS["sleeping-drafter"](Results(), "sleeping-drafter")


@pytest.mark.parametrize(
    ("mode", "reason", "fraction", "holds"),
    [
        ("serial", "in turns: the target takes 1.9 times and the drafter 2 times as long as alone", 1.0, True),
        ("plain", "the target takes 1.9 times and the drafter 2 times as long as alone", 1.0, True),
        ("pipelined", "the target takes 1.9 times and the drafter 2 times as long as alone", 1.0, False),
        ("serial", "in turns: not measured", 1.0, False),
        ("serial", "the target takes 1.9 times and the drafter 2 times as long as alone", 0.99, False),
    ],
)
def test_on_one_device_contention_is_the_reason(
    steps: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: str, reason: str, fraction: float, holds: bool
) -> None:
    report = {"plan": {"mode": mode, "reasons": [reason]}, "identical_fraction": fraction, "pairs": [], "machine": {}}
    asked: list[tuple[str, ...]] = []

    def edgespec(*arguments: str) -> dict[str, Any]:
        asked.append(arguments)
        return report

    monkeypatch.setattr(steps, "edgespec", edgespec)
    assert steps.PIPELINED_STEPS["pipelined-one-device"](Results(), "pipelined-one-device") is holds
    assert "pipelined-depth-2" in asked[0][asked[0].index("--arms") + 1]
