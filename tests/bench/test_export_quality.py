"""Perplexity and divergence of an ONNX export and a GGUF with the same weights, on tiny models."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

import benchmarks.export_quality as module
from benchmarks.score_distance import agreements, kl_divergences
from edgespec.decoding import scores
from edgespec.export.gguf.files import export_whole
from edgespec.export.onnx.export import export_onnx
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


def assert_same_weights(quantised: Path, float32: Path) -> None:
    there = {tensor.name: tensor for tensor in gguf.GGUFReader(str(float32)).tensors}
    for tensor in gguf.GGUFReader(str(quantised)).tensors:
        own, other = (gguf.dequantize(each.data, each.tensor_type) for each in (tensor, there.pop(tensor.name)))
        np.testing.assert_array_equal(own, other)
    assert not there


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["q8_0", "q4_0"])
def test_a_tiny_gguf_and_its_onnx_twin_are_close_to_the_float32_reference(
    tiny: TinyModels, tmp_path: Path, quant: str
) -> None:
    llama, onnx, float32 = (tmp_path / name for name in ("gguf", "onnx", "float32"))
    more = {"name": "tiny", "sha256": None}
    export_whole(tiny.target, llama, quant=quant, **more)
    export_onnx(llama / "model.gguf", onnx, **more)
    export_whole(llama / "model.gguf", float32, quant="f32", **more)
    assert_same_weights(llama / "model.gguf", float32 / "model.gguf")
    module.require_float32(float32)
    found = module.measure({"llama": llama, "onnx": onnx, "float32": float32}, tokens=300, kl_tokens=100)
    assert (found["tokens"], found["kl_tokens"]) == (300, 100)
    assert set(found["perplexity"]) == {"float32", "llama", "llama_our_cache", "onnx"}
    # Eight-bit activations cost a thousandth of a nat or so, in both runtimes; other weights would cost far more.
    assert all(0 < each < 0.02 for each in found["mean_kl_nats"].values())
    assert found["perplexity_ratio"] == pytest.approx(1, abs=0.02)
    assert found["settings"]["float32"]["kv_type"] == "f32"
    assert found["settings"]["float32"]["flash_attention"] is False
    assert found["settings"]["llama"]["kv_type"] == "f16"
    assert found["settings"]["llama_our_cache"]["kv_type"] == "q8_0+f16"
    assert found["bytes"]["llama"] > (llama / "model.gguf").stat().st_size


def test_a_reference_with_quantised_weights_is_refused(tiny: TinyModels, tmp_path: Path) -> None:
    export_whole(tiny.target, tmp_path / "out", quant="q8_0", name="tiny", sha256=None)
    with pytest.raises(RuntimeError, match="Q8_0"):
        module.require_float32(tmp_path / "out")
