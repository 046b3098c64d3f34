"""Files of real shapes with random weights: their sizes, their types, and the spread of their weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import benchmarks.shape_files as module
from edgespec.files.gguf.header import read_header
from edgespec.runtimes.native.layout import unsupported_reason
from tests.support.kernel_calls import require_native

require_native()

# Bytes of the published Q4_K_M files, and of the MXFP4 one of gpt-oss, whose headers are a few megabytes.
PUBLISHED = {
    "Llama-3.2-3B": 2_019_377_696,
    "Qwen3-4B": 2_497_280_256,
    "Qwen3-8B": 5_027_783_488,
    "Qwen3-30B-A3B": 18_556_686_912,
    "gpt-oss-20b": 12_109_566_560,
}

# Billions of parameters that llama.cpp prints of the published files, without the layer that drafts.
PARAMETERS = {
    "Qwen3.5-4B": 4.21,
    "Qwen3.5-9B": 8.95,
    "Qwen3.5-35B-A3B": 34.66,
    "Gemma-4-E4B": 7.52,
    "Gemma-4-12B": 11.91,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_mixture_of_types_has_the_size_of_the_published_file(name: str) -> None:
    assert module.bytes_of(module.SHAPES[name]) == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_has_as_many_parameters_as_the_published_model(name: str) -> None:
    shape = replace(module.SHAPES[name], drafting=False)
    count = sum(math.prod(tensor.lengths) for tensor in module.tensors_of(shape))
    assert round(count / 1e9, 2) == PARAMETERS[name]


def test_an_assistant_has_the_published_tensors_but_for_the_clusters_of_its_head() -> None:
    tensors = list(module.tensors_of(module.SHAPES["Gemma-4-E4B-assistant"]))
    clusters = 2048 * 256  # of 78.518 million parameters
    assert len(tensors) == 49
    assert sum(math.prod(tensor.lengths) for tensor in tensors) + clusters == pytest.approx(78.518e6, rel=1e-3)


def test_gemma_4s_tensors_have_the_published_types() -> None:
    types = Counter(tensor.kind for tensor in module.tensors_of(module.SHAPES["Gemma-4-12B"]))
    assert types == {"F32": 338, "Q4_K": 284, "Q6_K": 45}


def test_three_bit_files_have_more_bits_in_values_and_second_matrices() -> None:
    shape = module.with_layers(module.SHAPES["Qwen3.5-35B-A3B"], 8)
    kinds = {each.name.split(".", 2)[-1]: each.kind for each in module.tensors_of(shape) if ".5." in each.name}
    assert kinds["ffn_gate_exps.weight"] == kinds["attn_gate.weight"] == "Q3_K"
    assert kinds["ffn_down_exps.weight"] == kinds["attn_qkv.weight"] == "Q4_K"
    assert kinds["ffn_gate_inp.weight"] == kinds["ssm_conv1d.weight"] == "F32"


def test_a_shape_that_does_not_fit_has_a_third_of_its_layers() -> None:
    assert {name: module.that_fits(module.SHAPES[name]).sizes.layers for name in (*PUBLISHED, *PARAMETERS)} == {
        "Llama-3.2-3B": 28,
        "Qwen3-4B": 36,
        "Qwen3-8B": 36,
        "Qwen3-30B-A3B": 16,
        "gpt-oss-20b": 8,
        "Qwen3.5-4B": 32,
        "Qwen3.5-9B": 32,
        "Qwen3.5-35B-A3B": 13,
        "Gemma-4-E4B": 42,
        "Gemma-4-12B": 48,
    }


def test_with_fewer_layers_than_have_caches_none_shares_one() -> None:
    shape = module.SHAPES["Gemma-4-E4B"]
    key = "attention.shared_kv_layers"
    assert [module.keys_of(module.with_layers(shape, layers)).get(key) for layers in (42, 25, 24)] == [18, 1, None]


def test_a_file_of_a_mixture_with_biases_runs_on_the_kernels(tmp_path: Path) -> None:
    shape = module.SHAPES["gpt-oss-20b"]
    small = replace(module.SHAPES["small"].sizes, width=96, inner=96, head=32)
    module.write_shape(replace(shape, sizes=small, vocabulary=1000), tmp_path / "small.gguf")
    header = read_header(tmp_path / "small.gguf")
    assert unsupported_reason(header) is None
    types = Counter(tensor.type_name for tensor in header.tensors if tensor.name.endswith(".weight"))
    assert types == {"F32": 2 * 4 + 1, "Q8_0": 2 * 4 + 2, "MXFP4": 2 * 3}


def test_random_blocks_have_the_spread_of_real_weights() -> None:
    gguf = pytest.importorskip("gguf")
    for kind in ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "MXFP4"):
        raw = module.blocks(np.random.default_rng(1), kind, 64, 1024)
        weights = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
        assert weights.shape == (64, 1024)
        assert weights.std() * 32 == pytest.approx(1.0, rel=0.1), kind
        assert abs(weights.mean()) * 32 < 0.05, kind


def test_unquantised_matrices_have_twice_that_spread() -> None:
    gguf = pytest.importorskip("gguf")
    exact = module.blocks(np.random.default_rng(1), "F32", 64, 1024)
    raw = module.blocks(np.random.default_rng(1), "BF16", 64, 1024)
    assert exact.std() * 32 == pytest.approx(2.0, rel=0.1)
    assert np.allclose(gguf.dequantize(raw, gguf.GGMLQuantizationType.BF16), exact, rtol=0.01)
