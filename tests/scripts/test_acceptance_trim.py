"""The verdicts of the acceptance steps for trimmed drafters, on reports made by hand: nothing is exported here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
STEPS = {"trim-gguf": "gguf", "trim-onnx": "onnx", "trim-gemma": "gguf"}


class Results:
    def __init__(self) -> None:
        self.saved: dict[str, Any] = {}

    def save(self, name: str, **values: Any) -> None:
        self.saved.setdefault(name, {}).update(values)


class Edgespec:
    """Answers as the commands do; ``accepted`` for the whole and for the trimmed drafter."""

    def __init__(self, *, t1_ratio: float, accepted: tuple[float, float], identical: float) -> None:
        self.t1_ratio, self.accepted, self.identical = t1_ratio, accepted, identical
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str, profile: bool = True) -> dict[str, Any]:
        self.asked.append(arguments)
        assert profile is (arguments[0] != "export")
        if arguments[0] == "export":
            return {"bytes_per_token": {}, "quantisation": {}, "trim": None, "folder": "x"}
        if "--compare" in arguments:
            first = {"forward_s": [0.010], "bytes_per_forward": 100}
            second = {"forward_s": [0.008], "bytes_per_forward": 60, "t1_ratio": self.t1_ratio}
            return {"runtimes": [first, second]}
        trimmed = Path(arguments[arguments.index("--draft") + 1]).name == "trimmed"
        speedup = {"geomean": 0.9, "by_category": {"chat": {"geomean": 0.9}}}
        arm = {"accepted_per_proposed": self.accepted[trimmed], "speedup": speedup}
        return {"identical_fraction": self.identical, "arms": {"model-depth-2": arm}}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("acceptance_trim_under_test", SCRIPTS / "acceptance_trim.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("t1_ratio", "accepted", "identical", "holds"),
    [
        (0.80, (0.8, 0.75001), 1.0, True),
        (0.70, (0.7, 0.72), 1.0, True),
        (0.81, (0.8, 0.8), 1.0, False),
        (0.70, (0.8, 0.74), 1.0, False),
        (0.70, (0.8, 0.8), 0.99, False),
    ],
)
def test_the_verdict(
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    t1_ratio: float,
    accepted: tuple[float, float],
    identical: float,
    holds: bool,
) -> None:
    edgespec = Edgespec(t1_ratio=t1_ratio, accepted=accepted, identical=identical)
    monkeypatch.setattr(module, "edgespec", edgespec)
    results = Results()
    if step == "trim-gemma":  # its acceptance is told only
        holds = t1_ratio <= 0.8 and identical == 1.0
    assert module.TRIM_STEPS[step](results, step) is holds
    found = results.saved[step]
    assert found["times_faster"] == pytest.approx(1 / t1_ratio)
    assert found["times_faster_of_each_run"] == [found["times_faster"]] * 3
    assert found["bytes_trimmed_over_whole"] == pytest.approx(0.6)
    exports = [arguments for arguments in edgespec.asked if arguments[0] == "export"]
    assert [("--trim-vocab" in arguments) for arguments in exports] == [False, True]
    assert all(STEPS[step] in arguments for arguments in exports)


def test_gemma_is_its_own_target(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    edgespec = Edgespec(t1_ratio=0.5, accepted=(0.9, 0.9), identical=1.0)
    monkeypatch.setattr(module, "edgespec", edgespec)
    module.trim_gemma(Results(), "trim-gemma")
    targets = [arguments[arguments.index("--target") + 1] for arguments in edgespec.asked if "--draft" in arguments]
    assert targets[-2:] == ["gemma3-270m", "gemma3-270m"]
