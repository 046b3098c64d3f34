"""Matrices that are some rows of a file's tensor compute what whole tensors with the same rows compute."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import TensorInfo
from edgespec.files.trimmed_drafter import read_artefact
from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.native.layout import read_layout
from edgespec.runtimes.native.model import NativeModel, NativeSettings, bytes_spared, kept_weights
from edgespec.runtimes.native.tensors import ModelLayout, WeightTensor
from edgespec.runtimes.native.weights import NativeWeights, SidecarFile
from tests.runtimes.contract import equal, logits
from tests.support.fused_gguf import fused_layout, write_fused
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native, located
from tests.support.native_models import reading
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.trimmed_folder import write_trimmed_folder

require_native()

SHAPE: dict[str, Any] = {"width": 256, "heads": 8, "kv_heads": 2, "layers": 3}


@dataclass(frozen=True)
class Pair:
    """A file with a tensor for each matrix, and one with the same rows in fused tensors."""

    plain: Path
    fused: Path

    @property
    def layout(self) -> ModelLayout:
        return fused_layout(read_layout(read_header(self.plain)), read_header(self.fused))


def written(folder: Path, **settings: Any) -> Pair:
    plain = write_tiny_gguf(folder / "plain.gguf", **SHAPE | settings)
    architecture = settings.get("architecture", "llama")
    return Pair(plain, write_fused(plain, folder / "fused.gguf", architecture=architecture))


def rows_of(model: NativeModel) -> list[LogitsArray]:
    tokens = random.Random(4).choices(range(model.facts.vocabulary_size), k=40)
    with model.open(40) as sequence:
        sequence.forward(tokens[:30], 0)
        return logits(sequence.forward(tokens[30:], 10))


def same_rows(pair: Pair, use: Callable[[NativeModel], NativeModel] = lambda model: model, **loading: Any) -> bool:
    """Whether both models, loaded so, have the same rows, facts and bytes, or a part of both."""
    found = []
    for path, layout in ((pair.plain, read_layout(read_header(pair.plain))), (pair.fused, pair.layout)):
        with reading(layout), load_native(path, NativeSettings(threads=2), name="m", sha256="ab", **loading) as whole:
            model = use(whole)
            found.append((rows_of(model), model.facts))
            model.close()
    return equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"])
def test_rows_of_a_fused_tensor_score_like_separate_tensors(tmp_path: Path, quant: str) -> None:
    pair = written(tmp_path, quant=quant)
    layer = pair.layout.layers[1]
    assert [weight.tensor.name for weight in (layer.query, layer.key, layer.value, layer.gate, layer.up)] == [
        "blk.1.attn_qkv.weight[0:256]",
        "blk.1.attn_qkv.weight[256:320]",
        "blk.1.attn_qkv.weight[320:384]",
        "blk.1.ffn_up.weight[0:512]",
        "blk.1.ffn_up.weight[512:1024]",
    ]
    assert same_rows(pair)


def test_biases_of_a_fused_tensor_belong_to_its_rows(tmp_path: Path) -> None:
    pair = written(tmp_path, quant="Q8_0", architecture="qwen2")
    assert pair.layout.layers[0].key.bias is not None
    assert same_rows(pair)


@pytest.mark.parametrize("quant", ["F16", "Q8_0", "Q6_K"])
def test_rows_of_a_fused_tensor_can_be_requantised(tmp_path: Path, quant: str) -> None:
    pair = written(tmp_path, quant=quant)
    assert same_rows(pair, requantized=True)
    with reading(pair.layout):
        spared = bytes_spared(located(pair.fused))
    assert spared == bytes_spared(located(pair.plain)) > 0


def test_parts_of_a_model_with_fused_tensors_equal_those_of_the_plain_one(tmp_path: Path) -> None:
    pair = written(tmp_path, quant="Q8_0")
    assert same_rows(pair, lambda model: model.with_head_rows(np.array([0, 1, 5, 90, 200])))


def test_a_trimmed_drafter_with_fused_tensors_equals_the_plain_one(tmp_path: Path) -> None:
    pair, kept, found = written(tmp_path, quant="Q8_0"), [0, 3, *range(20, 70)], []
    artefacts = [
        read_artefact(write_trimmed_folder(path, tmp_path / path.stem, kept)) for path in (pair.plain, pair.fused)
    ]
    own = read_layout(artefacts[0].model_header, artefacts[0])
    for artefact, layout in zip(artefacts, (own, fused_layout(own, artefacts[1].model_header)), strict=True):
        with (
            reading(layout),
            load_native(artefact, NativeSettings(), requantized=True) as model,
        ):
            found.append(rows_of(model))
    assert equal(*found)


@pytest.mark.parametrize("requantized", [False, True])
def test_fused_tensors_have_a_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requantized: bool) -> None:
    pair, sidecar, strips = written(tmp_path, quant="Q8_0"), tmp_path / "tiles", []
    original = NativeWeights.relay

    def relay(weights: NativeWeights, strip: Any) -> int:
        strips.append(strip)
        return original(weights, strip)

    monkeypatch.setattr(NativeWeights, "relay", relay)
    found = []
    for path, layout, relays in (
        (pair.fused, pair.layout, True),
        (pair.fused, pair.layout, False),
        (pair.plain, read_layout(read_header(pair.plain)), True),
        (pair.fused, pair.layout, True),
    ):
        strips.clear()
        with (
            reading(layout),
            load_native(path, NativeSettings(), sha256="ab", sidecar=sidecar, requantized=requantized) as model,
        ):
            found.append(rows_of(model))
            kept = SidecarFile(path=sidecar, sha256="ab")
            assert kept_weights(kept, located(path), requantized=requantized).is_there()
        assert bool(strips) is relays
    assert all(equal(rows, found[0]) for rows in found)


def test_a_row_that_is_not_finite_is_counted_in_its_range(tmp_path: Path) -> None:
    pair = written(tmp_path, quant="F32")
    tensor = next(each for each in read_header(pair.fused).tensors if each.name == "blk.1.attn_qkv.weight")
    with pair.fused.open("r+b") as file:
        file.seek(tensor.offset + (256 + 5) * tensor.byte_count // tensor.shape[1])
        file.write(np.float32(np.inf).tobytes())
    with (
        reading(pair.layout),
        pytest.raises(ModelFileError, match=r"row 5 of tensor blk\.1\.attn_qkv\.weight\[256:320\]"),
    ):
        load_native(pair.fused, NativeSettings(), requantized=True)


# ------------------------------------------------------------------------------------------------- ranges

TENSOR = TensorInfo("t", (64, 12), "Q8_0", offset=1000, byte_count=12 * 68)


def test_a_range_of_rows_is_a_tensor_in_the_same_file() -> None:
    assert TENSOR.some_rows(0, 12) == TENSOR
    part = TENSOR.some_rows(3, 5)
    assert part == TensorInfo("t[3:8]", (64, 5), "Q8_0", 1000 + 3 * 68, 5 * 68)
    assert part.some_rows(1, 2) == TensorInfo("t[3:8][1:3]", (64, 2), "Q8_0", 1000 + 4 * 68, 2 * 68)


@pytest.mark.parametrize("rows", [1, 12])
def test_all_rows_of_a_matrix_are_the_matrix(rows: int) -> None:
    weight = WeightTensor(replace(TENSOR, shape=(64, rows), byte_count=rows * 68), None, rows, 64)
    assert weight.some_rows(0, rows) == weight


def test_elements_of_a_vector_are_its_rows() -> None:
    bias = TensorInfo("b", (12,), "F32", 0, 48)
    assert bias.some_rows(4, 8) == TensorInfo("b[4:12]", (8,), "F32", 16, 32)
    assert replace(bias, shape=(12, 1, 1)).some_rows(4, 8) == bias.some_rows(4, 8)


@pytest.mark.parametrize(("first", "rows"), [(-1, 2), (0, 0), (3, -1), (0, 13), (11, 2), (12, 1)])
def test_rows_that_a_tensor_does_not_have_are_refused(first: int, rows: int) -> None:
    with pytest.raises(ValueError, match="tensor t has no rows"):
        TENSOR.some_rows(first, rows)
