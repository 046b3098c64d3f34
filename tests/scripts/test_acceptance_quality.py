"""The acceptance steps for what exported models compute: their verdicts, and their measurement on tiny models."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest

from edgespec.bench import quality
from edgespec.export.gguf.files import export_whole
from edgespec.export.onnx.export import export_onnx
from tests.support.fake_runtime import FakeModel
from tests.support.tiny_models import TinyModels

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

FINE = {
    "tokens": 4096,
    "kl_tokens": 512,
    "perplexity_ratio": 1.004,
    "perplexity_ratio_our_cache": 1.005,
    "kl_ratio": 1.4,
    "kl_ratio_our_cache": 1.5,
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("acceptance_quality_under_test", SCRIPTS / "acceptance_quality.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, True),
        ({"perplexity_ratio": 0.996, "kl_ratio": 0.1}, True),
        ({"perplexity_ratio": 1.0051}, False),
        ({"perplexity_ratio": 0.9949}, False),
        ({"perplexity_ratio": float("nan")}, False),
        ({"kl_ratio": 1.51}, False),
        ({"kl_ratio_our_cache": 1.51}, False),
        ({"kl_ratio": float("nan")}, False),
        ({"kl_ratio_our_cache": float("nan")}, False),
        ({"perplexity_ratio_our_cache": 1.0051}, False),
        ({"perplexity_ratio_our_cache": 0.98}, True),  # a better model than with that cache is no fault
        ({"tokens": 4095}, False),
        ({"kl_tokens": 511}, False),
    ],
)
def test_the_verdict(module: ModuleType, changed: dict[str, Any], verdict: bool) -> None:
    assert module.holds({**FINE, **changed}) is verdict


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ({}, False),
        ({"a": {"size_ratio": 1.15, "perplexity": {"tokens": 512}}}, True),
        ({"a": {"size_ratio": 1.16, "perplexity": {"tokens": 512}}}, False),
        ({"a": {"size_ratio": 1.0, "perplexity": None}}, False),
        (
            {"a": {"size_ratio": 1.0, "perplexity": {"tokens": 512}}, "b": {"size_ratio": 0, "perplexity": None}},
            False,
        ),
    ],
)
def test_the_verdict_on_4_bits(module: ModuleType, found: dict[str, Any], verdict: bool) -> None:
    assert module.q4_holds(found) is verdict


def test_there_is_a_step_for_every_model_and_quantisation(module: ModuleType) -> None:
    assert set(module.QUALITY_STEPS) == {
        "quality-smollm2-135m-q8_0",
        "quality-smollm2-135m-q4_0",
        "quality-qwen2.5-coder-0.5b-q8_0",
        "quality-qwen2.5-coder-0.5b-q4_0",
        "export-q4",
    }


def test_models_are_compared_on_the_text_and_nothing_is_counted_twice(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            parts += list(quality.teacher_forced_rows(model.open(100), fed))
        rows[name] = np.concatenate(parts)
        expected = quality.perplexity(quality.token_losses(rows[name], tokens[1:]))
        assert found["perplexity"][name] == pytest.approx(expected)
    for name in ("llama", "onnx"):
        first = [each[:130] for each in (rows["float32"], rows[name])]
        assert found["mean_kl_nats"][name] == pytest.approx(quality.kl_divergences(*first).mean())
        assert found["argmax_agreement"][name] == quality.agreements(*first).mean()


def assert_same_weights(quantised: Path, float32: Path) -> None:
    there = {tensor.name: tensor for tensor in gguf.GGUFReader(str(float32)).tensors}
    for tensor in gguf.GGUFReader(str(quantised)).tensors:
        own, other = (gguf.dequantize(each.data, each.tensor_type) for each in (tensor, there.pop(tensor.name)))
        np.testing.assert_array_equal(own, other)
    assert not there


@pytest.mark.parametrize("quant", ["q8_0", "q4_0"])
def test_twins_of_tiny_models_are_close_to_their_reference(
    module: ModuleType, tiny: TinyModels, tmp_path: Path, quant: str
) -> None:
    """As the step does it, except that no program is started for the exports."""
    llama, onnx, float32 = (tmp_path / name for name in ("gguf", "onnx", "float32"))
    more = {"name": "tiny", "sha256": None}
    export_whole(tiny.target, llama, quant=quant, **more)
    export_onnx(llama / "model.gguf", onnx, **more)
    export_whole(llama / "model.gguf", float32, quant="f32", **more)
    assert_same_weights(llama / "model.gguf", float32 / "model.gguf")
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


def test_the_text_is_long_enough_or_said_to_be_too_short(module: ModuleType, tiny: TinyModels) -> None:
    assert len(module.tokens_to_predict(tiny.target, 4096)) == 4097
    with pytest.raises(RuntimeError, match="only"):
        module.tokens_to_predict(tiny.target, 10**7)


def test_a_refused_export_is_an_error_with_its_message(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    with pytest.raises(RuntimeError, match="no such file"):
        module.export(tmp_path / "missing.gguf", "--to", "gguf", "-o", tmp_path / "out")


def test_the_script_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "acceptance_quality.py"), "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "export-q4" in done.stdout
