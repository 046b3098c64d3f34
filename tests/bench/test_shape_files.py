"""Files of real shapes with random weights: their sizes, their types, and the spread of their weights."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_mixture_of_types_has_the_size_of_the_published_file(name: str) -> None:
    assert module.bytes_of(module.SHAPES[name]) == pytest.approx(PUBLISHED[name], rel=0.01)


def test_a_shape_that_does_not_fit_has_a_third_of_its_layers() -> None:
    assert {name: module.that_fits(module.SHAPES[name]).sizes.layers for name in PUBLISHED} == {
        "Llama-3.2-3B": 28,
        "Qwen3-4B": 36,
        "Qwen3-8B": 36,
        "Qwen3-30B-A3B": 16,
        "gpt-oss-20b": 8,
    }


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
    for kind in ("Q4_K", "Q6_K", "Q8_0", "MXFP4"):
        raw = module.blocks(np.random.default_rng(1), kind, 64, 1024)
        weights = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
        assert weights.shape == (64, 1024)
        assert weights.std() * 32 == pytest.approx(1.0, rel=0.1)
        assert abs(weights.mean()) * 32 < 0.05
