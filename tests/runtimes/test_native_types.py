"""Whole models in each weight type: llama.cpp's scores, and the same bits at every width, thread count and level."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec.errors import RuntimeUnavailableError
from edgespec.files.gguf.header import read_header
from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.native.layout import read_layout
from edgespec.runtimes.native.library import load
from edgespec.runtimes.native.model import NativeSettings, describe_native
from edgespec.runtimes.native.tensors import TYPES, spared_by
from edgespec.runtimes.native.weights import tile_bytes
from tests.runtimes.contract import equal, logits
from tests.support.k_quants import quantize
from tests.support.loading import load_model, load_native, located
from tests.support.tiny_gguf import write_tiny_gguf

try:
    LEVELS = load().levels
except RuntimeUnavailableError as error:
    pytest.skip(error.message, allow_module_level=True)

START, COUNT = 40, 36

Files = Callable[[str], Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A tiny model of each type, written on first use; some types have a tied head."""
    folder = tmp_path_factory.mktemp("types")

    def write(kind: str) -> Path:
        path = folder / f"{kind}.gguf"
        if not path.exists():
            write_tiny_gguf(path, quant=kind, width=256, heads=8, kv_heads=2, tied=kind in ("Q6_K", "BF16"))  # type: ignore[arg-type]
        return path

    return write


def rows_of(path: Path, settings: NativeSettings, width: int) -> list[LogitsArray]:
    tokens = random.Random(11).choices(range(read_header(path).vocabulary_size), k=START + COUNT)
    with load_native(path, settings) as model, model.open(len(tokens)) as sequence:
        sequence.forward(tokens[:START], 0)
        found: list[LogitsArray] = []
        while sequence.length < len(tokens):
            chunk = tokens[sequence.length : sequence.length + width]
            found += logits(sequence.forward(chunk, len(chunk)))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_each_weight_type_is_bit_equal_at_every_width_thread_count_and_level(files: Files, kind: str) -> None:
    path = files(kind)
    plain = rows_of(path, NativeSettings(), 1)
    for width in (2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 36):
        assert equal(rows_of(path, NativeSettings(threads=1 + width % 3), width), plain), width
    for level in LEVELS:
        assert equal(rows_of(path, NativeSettings(level=level), 5), plain), level


@pytest.mark.parametrize("kind", TYPES)
def test_each_weight_type_agrees_with_llama_cpp(files: Files, kind: str) -> None:
    path = files(kind)
    ours = rows_of(path, NativeSettings(), 4)
    tokens = random.Random(11).choices(range(read_header(path).vocabulary_size), k=START + COUNT)
    reference = LlamaSettings(kv_type="f16", flash_attention=False, repack=False)
    with load_model(path, reference) as other, other.open(len(tokens)) as sequence:
        sequence.forward(tokens[:START], 0)
        theirs = logits(sequence.forward(tokens[START:], COUNT))
    p, q = (np.exp(np.array(each, dtype=np.float64) - np.max(each, axis=1, keepdims=True)) for each in (theirs, ours))
    p, q = p / p.sum(axis=1, keepdims=True), q / q.sum(axis=1, keepdims=True)
    # The two runtimes round activations of quantised weights to 8 bits differently; logits spread over about 3.
    assert (p * np.log(p / q)).sum(axis=1).mean() < 0.01
    assert (p.argmax(axis=1) == q.argmax(axis=1)).mean() > 0.8  # measured: 0.83 and more


@pytest.mark.parametrize("kind", TYPES)
def test_estimates_of_memory_count_what_the_tiles_take(files: Files, kind: str) -> None:
    path = files(kind)
    layout = read_layout(read_header(path))
    needed = tile_bytes(load(), layout)
    filed = sum(weight.tensor.byte_count for weight in layout.matrices)
    assert filed - spared_by(layout) == pytest.approx(needed, rel=0.02)  # Q6_K grows by 1 %, tiles have 16 rows
    facts = describe_native(located(path), NativeSettings())
    assert facts.weight_bytes == read_header(path).tensor_bytes - spared_by(layout)


@pytest.mark.parametrize(("kind", "error"), [("Q4_K", 0.1), ("Q5_K", 0.05), ("Q6_K", 0.03)])
def test_the_test_helpers_k_quants_are_read_correctly_by_gguf(kind: str, error: float) -> None:
    """The helper that writes this module's models; the error is relative to the spread of the values."""
    values = np.random.default_rng(4).standard_normal((3, 512), dtype=np.float32)
    values[1, 256:] = 0
    number = gguf.GGMLQuantizationType[kind]
    found = gguf.dequantize(quantize(values, number), number)
    assert np.sqrt(((found - values) ** 2).mean()) < error
    assert not found[1, 256:].any()
