"""Perplexity and divergence of an ONNX export and a GGUF with the same weights, on tiny models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import benchmarks.export_quality as module
from benchmarks.score_distance import agreements, kl_divergences
from edgespec.decoding import scores
from edgespec.export.gguf.files import export_whole
from edgespec.export.provenance import Provenance
from tests.support.fake_runtime import FakeModel
from tests.support.tiny_models import TinyModels


def test_each_model_is_compared_on_every_token_of_the_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 100)
    random = np.random.default_rng(2)
    tokens = random.integers(0, 12, 231).tolist()
    models = {name: FakeModel(seed=seed, spread=2.0) for seed, name in enumerate(("float32", "llama", "onnx"))}
    found = module.compare(models, tokens, 130)
    assert (found["tokens"], found["kl_tokens"]) == (230, 130)
    rows = {}
    for name, model in models.items():
        parts = []
        for first in (0, 100, 200):
            fed = tokens[first : min(first + 100, 230)]
            parts += list(scores.teacher_forced_rows(model.open(100), fed))
        rows[name] = np.concatenate(parts)
        expected = scores.perplexity(scores.token_losses(rows[name], tokens[1:]))
        assert found["perplexity"][name] == pytest.approx(expected)
    for name in ("llama", "onnx"):
        first = [each[:130] for each in (rows["float32"], rows[name])]
        assert found["mean_kl_nats"][name] == pytest.approx(kl_divergences(*first).mean())
        assert found["argmax_agreement"][name] == agreements(*first).mean()


def test_a_reference_with_quantised_weights_is_refused(tiny: TinyModels, tmp_path: Path) -> None:
    export_whole(tiny.target, tmp_path / "out", Provenance(name="tiny", quant="q8_0"))
    with pytest.raises(RuntimeError, match="Q8_0"):
        module.require_float32(tmp_path / "out")
