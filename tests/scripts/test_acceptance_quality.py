"""The acceptance steps for what exported models compute: their verdicts, and their measurement on tiny models."""

from __future__ import annotations

import importlib.util
import math
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
        assert found["mean_kl_nats"][name] == pytest.approx(module.kl_divergences(*first).mean())
        assert found["argmax_agreement"][name] == module.agreements(*first).mean()


def assert_same_weights(quantised: Path, float32: Path) -> None:
    there = {tensor.name: tensor for tensor in gguf.GGUFReader(str(float32)).tensors}
    for tensor in gguf.GGUFReader(str(quantised)).tensors:
        own, other = (gguf.dequantize(each.data, each.tensor_type) for each in (tensor, there.pop(tensor.name)))
        np.testing.assert_array_equal(own, other)
    assert not there


@pytest.mark.slow
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


@pytest.mark.slow
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


# ------------------------------------------------------------------------------------------- divergence


def logits(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def probabilities(row: list[float]) -> list[float]:
    total = math.fsum(math.exp(each) for each in row)
    return [math.exp(each) / total for each in row]


@pytest.fixture
def random_rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    first = random.normal(0, 3, (5, 40)).astype(np.float32)
    return first, first + random.normal(0, 0.3, first.shape).astype(np.float32)


def test_divergence_by_hand(module: ModuleType) -> None:
    # (1/2, 1/2) against (1/4, 3/4): half log 2 plus half log 2/3; and the other way round, which is not the same.
    even, uneven = logits([0.0, 0.0]), logits([0.0, math.log(3)])
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert module.kl_divergences(even, uneven)[0] == pytest.approx(expected, rel=1e-7)
    expected = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    assert module.kl_divergences(uneven, even)[0] == pytest.approx(expected, rel=1e-7)


def test_divergence_is_that_of_a_plain_loop(module: ModuleType, random_rows: tuple[np.ndarray, np.ndarray]) -> None:
    found = module.kl_divergences(*random_rows)
    for own, left, right in zip(found, *(rows.tolist() for rows in random_rows), strict=True):
        pairs = zip(probabilities(left), probabilities(right), strict=True)
        assert own == pytest.approx(math.fsum(p * math.log(p / q) for p, q in pairs), rel=1e-9)


def test_divergence_does_not_depend_on_a_shift_and_is_never_negative(
    module: ModuleType,
    random_rows: tuple[np.ndarray, np.ndarray],
) -> None:
    rows = random_rows[0]
    np.testing.assert_allclose(module.kl_divergences(rows, rows + np.float32(16)), 0, atol=1e-11)
    assert (module.kl_divergences(rows, rows) == 0).all()
    assert (module.kl_divergences(rows, np.nextafter(rows, np.float32(np.inf))) >= 0).all()


def test_divergence_where_tokens_are_ruled_out(module: ModuleType) -> None:
    never = logits([0.0, 0.0, -math.inf])
    possible = logits([0.0, 0.0, 0.0])
    assert module.kl_divergences(never, possible)[0] == pytest.approx(math.log(3 / 2))
    assert module.kl_divergences(possible, never)[0] == math.inf
    assert module.kl_divergences(never, never)[0] == 0


def test_agreement_goes_to_the_lowest_id(module: ModuleType) -> None:
    left = logits([1.0, 2.0, 2.0], [3.0, 0.0, 0.0])
    right = logits([0.0, 5.0, 4.0], [0.0, 0.0, 1.0])
    assert module.agreements(left, right).tolist() == [True, False]


def test_unlike_shapes_are_refused(module: ModuleType) -> None:
    for compare in (module.kl_divergences, module.agreements):
        with pytest.raises(ValueError, match="compared"):
            compare(logits([0.0, 1.0]), logits([0.0, 1.0, 2.0]))


@pytest.mark.parametrize(
    ("count", "length", "predicted"), [(9, 4, [4, 4]), (10, 4, [4, 4, 1]), (4, 8, [3]), (1, 4, [])]
)
def test_windows_predict_every_token_but_the_first_once(
    module: ModuleType, count: int, length: int, predicted: list[int]
) -> None:
    found = list(module.windows(range(count), length))
    assert [len(window) - 1 for window in found] == predicted
    assert [token for window in found for token in window[1:]] == list(range(1, count))


def test_a_window_of_nothing_is_refused(module: ModuleType) -> None:
    with pytest.raises(ValueError, match="at least one"):
        list(module.windows([1, 2, 3], 0))
