"""Scores and drafts of a drafter of fixed shapes, by device; only a tiny model is run here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.static_scores as module
from edgespec.export.onnx.export import LEAST_STATIC_CACHE, export_onnx
from tests.support.tiny_onnx import VOCABULARY_SIZE, write_tiny_model


def prepare(monkeypatch: pytest.MonkeyPatch, device: str | None) -> list[str]:
    """Replace the processes; the returned list receives the devices that compute scores."""
    scored: list[str] = []
    rows = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)

    def scores(_folder: Path, on: str, _tokens: Any) -> Any:
        scored.append(on)
        return rows

    def edgespec(*arguments: str, environment: dict[str, str]) -> dict[str, Any]:
        stats = {"rounds_by_source": {"model": 5}, "proposed": 10, "accepted": 9}
        on = environment.get("EDGESPEC_DRAFT_DEVICE", "unset")
        return {"token_ids": [1, 2, "--plain" in arguments], "stats": stats, "plan": {"drafter": {"device": on}}}

    monkeypatch.delenv("EDGESPEC_DRAFT_DEVICE", raising=False)
    monkeypatch.setattr(module, "edgespec", edgespec)
    monkeypatch.setattr(module, "bytes_of", lambda folder: len(folder.name))
    monkeypatch.setattr(module, "tokens_to_predict", lambda _path, count: list(range(count + 1)))
    monkeypatch.setattr(module, "scores", scores)
    monkeypatch.setattr(module, "openvino", lambda: (device, "it is not installed"))
    return scored


def test_scores_and_drafts_are_measured_on_the_processor_and_through_openvino(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scored = prepare(monkeypatch, "OpenVINO-CPU")
    found = module.measure(Path("usual"), Path("fixed"))
    assert scored == ["cpu", "cpu", "OpenVINO-CPU"]
    assert found["openvino"] == "OpenVINO-CPU"
    for device in ("cpu", "OpenVINO-CPU"):
        drafts = found["devices"][device]["drafts"]
        assert drafts["device"] == device
        assert drafts["accepted"] == 9 * len(module.PROMPTS)
        assert drafts["identical"] == [False] * len(module.PROMPTS), "the replaced plain answers differ"
        assert found["devices"][device]["scores"]["agreeing"] == 1.0


def test_without_openvino_only_the_processor_is_measured_and_the_reason_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare(monkeypatch, None)
    found = module.measure(Path("usual"), Path("fixed"))
    assert list(found["devices"]) == ["cpu"]
    assert found["openvino"] == "not available: it is not installed"


@pytest.mark.slow
def test_scores_of_a_fixed_export_are_computed_in_a_separate_process(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", context_length=LEAST_STATIC_CACHE)
    export_onnx(source, tmp_path / "out", name="tiny", sha256=None, static_cache=LEAST_STATIC_CACHE)
    tokens = np.random.default_rng(2).integers(3, VOCABULARY_SIZE, 100).tolist()
    found = module.scores(tmp_path / "out", "cpu", tokens)
    assert found.shape == (module.SCORED_TOKENS, VOCABULARY_SIZE)
    assert module.apart(found, found) == {"mean_kl_nats": 0.0, "agreeing": 1.0, "largest_difference": 0.0}
    with pytest.raises(RuntimeError, match="npu9"):
        module.scores(tmp_path / "out", "npu9", tokens)


def test_openvino_is_found_or_its_absence_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {"devices": ["cpu", "OpenVINO-NPU"], "broken": {"onnxruntime_ep_openvino": "too old"}}
    monkeypatch.setattr(module, "child", lambda what: found if what == "devices" else {})
    assert module.openvino() == (None, "onnxruntime_ep_openvino: too old")
    found["broken"] = {}
    assert module.openvino() == (None, "it is not installed")
    found["devices"] += ["OpenVINO"]
    assert module.openvino() == ("OpenVINO", "")
    found["devices"] += ["OpenVINO-CPU"]
    assert module.openvino() == ("OpenVINO-CPU", "")
