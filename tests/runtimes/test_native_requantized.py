"""Requantised models: matrices of wider types as Q4_0, computed as if the file had them in Q4_0."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.trimmed_drafter import read_artefact
from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.native.layout import read_layout
from edgespec.runtimes.native.library import LEVELS
from edgespec.runtimes.native.model import NativeModel, NativeSettings, bytes_spared, describe_native
from edgespec.runtimes.native.tensors import WeightTensor, requantize
from edgespec.runtimes.native.weights import NativeWeights
from edgespec.runtimes.runtime import DraftForm
from tests.runtimes.contract import equal, logits
from tests.support.kernel_calls import TYPES, Weights, relaid, require_native
from tests.support.loading import load_native, located
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.trimmed_folder import write_tied, write_trimmed_folder

LIBRARY = require_native()
SHAPE: dict[str, Any] = {"width": 256, "heads": 8, "kv_heads": 2}

# Types of whose bytes Q4_0 needs at most 85 %, and the rest.
WIDE = ("F32", "F16", "BF16", "Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K")
COARSE = ("Q4_0", "Q4_1", "Q4_K", "Q3_K", "IQ3_S")


def written(folder: Path, kind: str, **settings: Any) -> Path:
    return write_tiny_gguf(folder / "tiny.gguf", quant=kind, **SHAPE | settings)  # type: ignore[arg-type]


def rows_of(model: NativeModel, width: int = 5) -> list[LogitsArray]:
    tokens = random.Random(4).choices(range(model.facts.vocabulary_size), k=40)
    with model.open(40) as sequence:
        found: list[LogitsArray] = []
        while sequence.length < 40:
            chunk = tokens[sequence.length : sequence.length + width]
            found += logits(sequence.forward(chunk, len(chunk)))
        return found


def kept_tiles(model: NativeModel, weight: WeightTensor) -> NDArray[np.uint8]:
    """The expected layout of a matrix: its rows of the file, converted to Q4_0."""
    assert weight.kept_as == "Q4_0"
    tensor = weight.tensor
    raw = np.fromfile(model.header.path, np.uint8, tensor.byte_count, offset=tensor.offset)
    kept = np.zeros((weight.rows, weight.columns // 32 * 18), dtype=np.uint8)
    number = weight.file_type_number
    assert coarsened_rows(number, raw, weight, kept) == -1
    return relaid(LIBRARY, Weights("Q4_0", weight.rows, weight.columns, kept))


def coarsened_rows(number: int, raw: NDArray[np.uint8], weight: WeightTensor, kept: NDArray[np.uint8]) -> int:
    return int(
        LIBRARY.api.es_coarsen(
            number, raw.ctypes.data, weight.rows, weight.columns, kept.ctypes.data, LEVELS["portable"]
        )
    )


@pytest.mark.parametrize("kind", WIDE)
def test_requantised_matrices_are_laid_out_as_q4_0(tmp_path: Path, kind: str) -> None:
    with load_native(written(tmp_path, kind), NativeSettings(threads=2), requantized=True) as model:
        layout, struct = requantize(read_layout(model.header)), model._loaded().weights.struct
        for weight, matrix in (
            (layout.layers[0].query, struct.layer[0].query),
            (layout.layers[-1].down, struct.layer[len(layout.layers) - 1].down),
            (layout.head, struct.head),
        ):
            tiles = kept_tiles(model, weight)
            assert matrix.type == TYPES["Q4_0"]
            assert np.array_equal(np.frombuffer(ctypes.string_at(matrix.tiles, tiles.size), np.uint8), tiles)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize("tied", [False, True])
def test_a_requantised_model_is_smaller_and_scores_nearly_the_same(tmp_path: Path, kind: str, tied: bool) -> None:
    path = written(tmp_path, kind, tied=tied)
    with load_native(path, NativeSettings()) as wide, load_native(path, NativeSettings(), requantized=True) as coarse:
        spared = bytes_spared(located(path))
        assert spared > 0
        assert coarse.facts.weight_bytes == wide.facts.weight_bytes - spared
        assert coarse.facts.bytes_per_forward == wide.facts.bytes_per_forward - spared
        assert coarse.facts.settings == {**wide.facts.settings, "weights": "Q4_0"}
        assert coarse.facts == describe_native(located(path), NativeSettings(), DraftForm(requantized=True))
        plain = rows_of(coarse, 1)
        for width in (2, 5, 8, 13):
            assert equal(rows_of(coarse, width), plain)
        for level in LIBRARY.levels:
            with load_native(path, NativeSettings(level=level, threads=3), requantized=True) as other:
                assert equal(rows_of(other), plain), level
        exact = rows_of(wide)
        assert not equal(plain, exact)
        assert np.corrcoef(np.ravel(plain), np.ravel(exact))[0, 1] > 0.9


@pytest.mark.parametrize("kind", COARSE)
def test_matrices_already_as_small_as_q4_0_are_not_requantised(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind)
    layout = read_layout(read_header(path))
    assert requantize(layout) is layout
    with load_native(path, NativeSettings()) as wide, load_native(path, NativeSettings(), requantized=True) as coarse:
        assert coarse.facts == wide.facts
        assert equal(rows_of(coarse), rows_of(wide))


def test_parts_of_a_requantised_model_are_requantised(tmp_path: Path) -> None:
    path = written(tmp_path, "Q8_0", layers=3)
    kept = np.array([0, 1, 2, 7, 90, 311])
    with (
        load_native(path, NativeSettings(), requantized=True) as model,
        model.with_head_rows(kept) as rows,
        model.with_settings(threads=2) as again,
    ):
        assert again.facts == model.facts_with(threads=2)
        assert again.facts.settings == model.facts.settings
        size = model.facts.vocabulary_size
        row = model.header.embedding_length // 32 * 18
        assert model.facts.bytes_per_forward - rows.facts.bytes_per_forward == row * (size - len(kept))
        form = DraftForm(head_rows=len(kept), requantized=True)
        described = describe_native(located(path), NativeSettings(), form)
        assert rows.facts == described
        for found, whole in zip(rows_of(rows), rows_of(model), strict=True):
            assert np.array_equal(found[kept], whole[kept])


def test_sidecars_of_filed_and_requantised_weights_are_not_interchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "Q8_0")
    sidecar, expected, strips = tmp_path / "of both.tiles", {}, []
    for coarse in (False, True):
        with load_native(path, NativeSettings(), requantized=coarse) as model:
            expected[coarse] = rows_of(model)
    original = NativeWeights.relay
    monkeypatch.setattr(NativeWeights, "relay", lambda *call: strips.append(call) or original(*call))
    for coarse, serves in ((False, False), (False, True), (True, False), (True, True), (True, True), (False, False)):
        strips.clear()
        with load_native(path, NativeSettings(), sha256="ab", sidecar=sidecar, requantized=coarse) as model:
            assert equal(rows_of(model), expected[coarse])
        assert (not strips) is serves


@pytest.mark.parametrize("weights", [[np.inf], [456000.0, *[132180.0] * 31]])
def test_requantising_weights_that_four_bits_cannot_hold_is_refused(tmp_path: Path, weights: list[float]) -> None:
    path = written(tmp_path, "F32")
    tensor = next(each for each in read_header(path).tensors if each.name == "blk.1.ffn_up.weight")
    with path.open("r+b") as file:
        file.seek(tensor.offset + 5 * tensor.byte_count // tensor.shape[1])
        file.write(np.array(weights, dtype=np.float32).tobytes())
    with pytest.raises(ModelFileError, match=r"row 5 of tensor blk\.1\.ffn_up\.weight has values that four bits"):
        load_native(path, NativeSettings(), requantized=True)


@pytest.mark.parametrize("tied", [False, True])
def test_a_trimmed_drafter_can_be_requantised(tmp_path: Path, tied: bool) -> None:
    kept = [0, 3, *range(20, 70)]
    file = written(tmp_path, "Q8_0")
    artefact = read_artefact(
        write_trimmed_folder(write_tied(file, tmp_path / "tied.gguf") if tied else file, tmp_path / "trimmed", kept)
    )
    with (
        load_native(artefact, NativeSettings(), requantized=True) as model,
        load_native(artefact, NativeSettings()) as exact,
    ):
        spared = bytes_spared(located(artefact))
        assert model.facts.bytes_per_forward == exact.facts.bytes_per_forward - spared < exact.facts.bytes_per_forward
        form = DraftForm(requantized=True)
        assert model.facts == describe_native(located(artefact), NativeSettings(), form)
        found, wide = (np.array(rows_of(each))[:, kept] for each in (model, exact))
        assert np.isneginf(np.delete(rows_of(model)[0], kept)).all()
        assert not np.array_equal(found, wide)
        assert np.corrcoef(found.ravel(), wide.ravel())[0, 1] > 0.9
