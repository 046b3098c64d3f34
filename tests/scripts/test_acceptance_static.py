"""The verdicts of the acceptance step for fixed shapes, on reports made by hand: no real model is exported here."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edgespec.export.onnx.export import LEAST_STATIC_CACHE, export_onnx
from tests.support.tiny_onnx import VOCABULARY_SIZE, write_tiny_model

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


class Results:
    def __init__(self) -> None:
        self.saved: dict[str, Any] = {}

    def save(self, name: str, **values: Any) -> None:
        self.saved.setdefault(name, {}).update(values)


class Edgespec:
    """Answers as the commands do: with ``changed``, drafting changes the text; the device is what was asked for."""

    def __init__(self, *, changed: bool = False, accepted: int = 9) -> None:
        self.changed, self.accepted = changed, accepted
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str, profile: bool = True) -> dict[str, Any]:
        self.asked.append(arguments)
        assert profile is (arguments[0] != "export")
        if arguments[0] == "export":
            return {}
        plain = "--plain" in arguments
        device = os.environ.get("EDGESPEC_DRAFT_DEVICE", "nowhere")
        stats = {"rounds_by_source": {"model": 5}, "proposed": 10, "accepted": self.accepted}
        return {
            "token_ids": [1, 2, 3 if plain or not self.changed else 4],
            "stats": stats,
            "plan": {"drafter": {"device": device}},
        }


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delenv("EDGESPEC_DRAFT_DEVICE", raising=False)
    spec = importlib.util.spec_from_file_location("acceptance_static_under_test", SCRIPTS / "acceptance_static.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def prepared(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, edgespec: Edgespec, *, device: str | None, off: float = 0.0
) -> list[str]:
    """The devices that are asked for scores, which on OpenVINO are ``off`` by so much."""
    scored: list[str] = []
    rows = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)

    def scores(_folder: Path, on: str, _tokens: Any) -> Any:
        scored.append(on)
        return rows if on == "cpu" else rows + np.random.default_rng(1).standard_normal(rows.shape) * off

    monkeypatch.setattr(module, "edgespec", edgespec)
    monkeypatch.setattr(module, "bytes_of", lambda folder: len(folder.name))
    monkeypatch.setattr(module, "tokens_to_predict", lambda _path, count: list(range(count + 1)))
    monkeypatch.setattr(module, "scores", scores)
    monkeypatch.setattr(module, "openvino", lambda: (device, "it is not installed"))
    return scored


def test_both_devices_are_run_and_held_to_the_same(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    edgespec, results = Edgespec(), Results()
    scored = prepared(module, monkeypatch, edgespec, device="OpenVINO-CPU")
    assert module.static_cache(results, "step")
    assert scored == ["cpu", "cpu", "OpenVINO-CPU"]
    saved = results.saved["step"]
    assert saved["openvino"] == "OpenVINO-CPU"
    for device in ("cpu", "OpenVINO-CPU"):
        assert saved[device]["drafts"]["device"] == device
        assert saved[device]["drafts"]["accepted"] == 9 * len(module.PROMPTS)
        assert saved[device]["scores"]["agreeing"] == 1.0
    exports = [asked for asked in edgespec.asked if asked[0] == "export"]
    assert ["--static-cache" in asked for asked in exports] == [False, True]
    assert "EDGESPEC_DRAFT_DEVICE" not in os.environ


def test_without_openvino_the_reason_is_kept(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results()
    assert prepared(module, monkeypatch, Edgespec(), device=None) == []
    assert module.static_cache(results, "step")
    assert results.saved["step"]["openvino"] == "not seen: it is not installed"


@pytest.mark.parametrize(
    ("edgespec", "off"), [(Edgespec(changed=True), 0.0), (Edgespec(accepted=0), 0.0), (Edgespec(), 3.0)]
)
def test_what_does_not_hold(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, edgespec: Edgespec, off: float
) -> None:
    prepared(module, monkeypatch, edgespec, device="OpenVINO-CPU", off=off)
    assert not module.static_cache(Results(), "step")


def test_the_device_is_put_back(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_DRAFT_DEVICE", "before")
    with module.drafting_on("now"):
        assert os.environ["EDGESPEC_DRAFT_DEVICE"] == "now"
    assert os.environ["EDGESPEC_DRAFT_DEVICE"] == "before"


@pytest.mark.slow
def test_scores_come_from_a_process_of_their_own(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", context_length=LEAST_STATIC_CACHE)
    export_onnx(source, tmp_path / "out", name="tiny", sha256=None, static_cache=LEAST_STATIC_CACHE)
    tokens = np.random.default_rng(2).integers(3, VOCABULARY_SIZE, 100).tolist()
    found = module.scores(tmp_path / "out", "cpu", tokens)
    assert found.shape == (module.SCORED_TOKENS, VOCABULARY_SIZE)
    assert module.apart(found, found) == {"mean_kl_nats": 0.0, "agreeing": 1.0, "largest_difference": 0.0}
    with pytest.raises(RuntimeError, match="npu9"):
        module.scores(tmp_path / "out", "npu9", tokens)


def test_openvino_is_found_or_its_absence_explained(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {"devices": ["cpu", "OpenVINO-NPU"], "broken": {"onnxruntime_ep_openvino": "too old"}}
    monkeypatch.setattr(module, "child", lambda what: found if what == "devices" else {})
    assert module.openvino() == (None, "onnxruntime_ep_openvino: too old")
    found["broken"] = {}
    assert module.openvino() == (None, "it is not installed")
    found["devices"] += ["OpenVINO"]
    assert module.openvino() == ("OpenVINO", "")
    found["devices"] += ["OpenVINO-CPU"]
    assert module.openvino() == ("OpenVINO-CPU", "")
