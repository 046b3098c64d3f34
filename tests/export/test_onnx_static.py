"""The fixed-shape graph gives the logits of the dynamic graph and of llama.cpp for the same GGUF."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from edgespec.errors import InvalidRequestError
from edgespec.export.onnx.export import LEAST_STATIC_CACHE, check_static_cache, export_onnx
from edgespec.export.provenance import Provenance
from edgespec.files.gguf.header import read_header
from edgespec.files.onnx.folder import read_onnx_folder
from tests.support import tiny_onnx
from tests.support.provenance import described
from tests.support.static_graph import PlainStaticGraph
from tests.support.tiny_onnx import (
    ARCHITECTURES,
    VOCABULARY_SIZE,
    WINDOW,
    PlainGraph,
    llama_logits,
    write_tiny_model,
)

TOKENS = np.random.default_rng(9).integers(3, VOCABULARY_SIZE, 40).tolist()
assert len(TOKENS) > 4 * WINDOW
CAPACITY = LEAST_STATIC_CACHE
CONTEXT = 2 * CAPACITY
KEPT = np.arange(1, VOCABULARY_SIZE, 3, dtype=np.int32)


def exported(source: Path, folder: Path, **more: Any) -> Path:
    provenance, options = described(more, name="tiny", static_cache=CAPACITY)
    export_onnx(source, folder, provenance, **options)
    return folder / "model.onnx"


def tiny(path: Path, architecture: str = "llama", **more: Any) -> Path:
    return write_tiny_model(path, architecture, context_length=CONTEXT, **more)


def window_of(path: Path) -> int | None:
    return read_onnx_folder(path.parent).window


def last_rows(path: Path, pieces: Sequence[int], width: int, **more: Any) -> npt.NDArray[np.float32]:
    """The logits after each piece of the text: float32 (pieces, rows of the head)."""
    graph, found, start = PlainStaticGraph(path, width=width, window=window_of(path), **more), [], 0
    for size in pieces:
        found.append(graph.forward(TOKENS[start : start + size]))
        start += size
    return np.stack(found)


# ------------------------------------------------------------------------------------- the same as elsewhere


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_fixed_shape_graph_with_float_weights_gives_llama_cpps_logits(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    source = tiny(tmp_path / "source.gguf", architecture, tied=tied)
    wanted = llama_logits(source, TOKENS)
    found = last_rows(exported(source, tmp_path / "out"), [1] * 40, width=1)
    assert wanted.std() > 0.5
    # llama.cpp computes GELU with a float16 table; all other operations are float32 in both runtimes.
    np.testing.assert_allclose(found, wanted, atol=2e-2 if architecture == "gemma3" else 1e-3)
    assert (found.argmax(axis=1) == wanted.argmax(axis=1)).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("width", [1, 7, 16, 40])
def test_a_text_read_in_padded_forwards_gives_the_same_logits(architecture: str, width: int, tmp_path: Path) -> None:
    source = tiny(tmp_path / "source.gguf", architecture)
    whole = PlainGraph(exported(source, tmp_path / "shared", static_cache=None)).forward(TOKENS)
    path = exported(source, tmp_path / "out")
    pieces = [1] * 40 if width == 1 else [width, 40 % width or 3, 1, 2]
    pieces = [size for size, end in zip(pieces, np.cumsum(pieces), strict=True) if end <= 40]
    ends = np.cumsum(pieces) - 1
    np.testing.assert_allclose(last_rows(path, pieces, width), whole[ends], atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "F16"])
def test_fixed_shape_graphs_are_as_accurate_as_dynamic_graphs(architecture: str, quant: str, tmp_path: Path) -> None:
    """The reference has the same weights as float32. Both graphs round activations to 8 bits, in different sums."""
    shape: dict[str, Any] = {"quant": quant, "head_quant": "Q8_0", "tied": architecture == "gemma3"}
    source = tiny(tmp_path / "source.gguf", architecture, **shape)
    truth = llama_logits(tiny(tmp_path / "f32.gguf", architecture, **shape, dequantised=True), TOKENS)
    shared = PlainGraph(exported(source, tmp_path / "shared", static_cache=None)).forward(TOKENS)
    found = last_rows(exported(source, tmp_path / "out"), [1] * 40, width=1)
    assert np.abs(found - truth).mean() < 1.2 * np.abs(shared - truth).mean()


@pytest.mark.parametrize("quant", ["F32", "Q4_0"])
def test_fixed_shape_logits_do_not_depend_on_graph_optimisation(quant: str, tmp_path: Path) -> None:
    path = exported(tiny(tmp_path / "source.gguf", quant=quant), tmp_path / "out")
    pieces = [16, 16, 8]
    np.testing.assert_allclose(
        last_rows(path, pieces, 16, optimise=False),
        last_rows(path, pieces, 16),
        atol=1e-4 if quant == "F32" else 0.25,
    )


def test_a_fixed_shape_graph_without_grouped_heads_gives_llama_cpps_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_onnx, "_KV_HEADS", 4)
    source = tiny(tmp_path / "source.gguf")
    assert read_header(source).head_count == read_header(source).head_count_kv == 4
    found = last_rows(exported(source, tmp_path / "out"), [16, 16, 8], width=16)
    np.testing.assert_allclose(found, llama_logits(source, TOKENS)[[15, 31, 39]], atol=1e-3)


# --------------------------------------------------------------------------------------------- cache and masks


def test_cache_rows_beyond_the_length_do_not_change_logits(tmp_path: Path) -> None:
    path = exported(tiny(tmp_path / "source.gguf", "qwen2"), tmp_path / "out")
    graph, fresh = (PlainStaticGraph(path, width=8) for _ in range(2))
    for each in (graph, fresh):
        each.forward(TOKENS[:8])
    graph.forward([5, 6, 7, 8, 9])
    graph.length = 8
    assert np.array_equal(graph.forward(TOKENS[8:11]), fresh.forward(TOKENS[8:11]))


def test_layers_with_a_window_ignore_tokens_outside_the_window(tmp_path: Path) -> None:
    """A window as long as the text gives other logits, so the masks have an effect."""
    path = exported(tiny(tmp_path / "source.gguf", "gemma3"), tmp_path / "out")
    assert window_of(path) == WINDOW
    narrow, wide = (PlainStaticGraph(path, width=16, window=window) for window in (WINDOW, 100))
    found = [(each.forward(TOKENS[:16]), each.forward(TOKENS[16:32])) for each in (narrow, wide)]
    assert np.abs(found[0][1] - found[1][1]).max() > 0.01


def test_any_row_of_a_fixed_shape_forward_can_be_scored(tmp_path: Path) -> None:
    path = exported(tiny(tmp_path / "source.gguf"), tmp_path / "out")
    one_by_one = last_rows(path, [1] * 6, width=1)
    graph = PlainStaticGraph(path, width=6)
    for row in range(6):
        (logits, *_), _ = graph.run(TOKENS[:6], row)
        assert logits.shape == (1, 1, VOCABULARY_SIZE)
        np.testing.assert_allclose(logits[0, 0], one_by_one[row], atol=1e-4)


def test_a_fixed_shape_cache_can_be_filled_to_its_last_position(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source.gguf", quant="F32")
    path = exported(source, tmp_path / "out")
    text = (TOKENS * 7)[:CAPACITY]
    graph = PlainStaticGraph(path, width=64)
    for start in range(0, CAPACITY, 64):
        found = graph.forward(text[start : start + 64])
    wanted = PlainGraph(exported(source, tmp_path / "shared", static_cache=None), capacity=CAPACITY).forward(text, 1)
    np.testing.assert_allclose(found, wanted[0], atol=1e-3)


# -------------------------------------------------------------------------------------------------- the artefact


@pytest.mark.parametrize("tied", [False, True])
def test_a_trimmed_head_in_a_fixed_shape_graph_scores_the_kept_rows(tied: bool, tmp_path: Path) -> None:
    source = tiny(tmp_path / "source.gguf", tied=tied, quant="Q8_0")
    whole = last_rows(exported(source, tmp_path / "whole"), [16, 16], width=16)
    path = exported(source, tmp_path / "trimmed", kept=KEPT)
    np.testing.assert_allclose(last_rows(path, [16, 16], width=16), whole[:, KEPT], atol=1e-5)
    graph = PlainStaticGraph(path, width=1)
    assert graph.session.get_outputs()[-1].name == "kept_ids"
    artefact = read_onnx_folder(path.parent)
    assert artefact.ids is not None
    assert artefact.ids.tolist() == KEPT.tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("width", [1, 32])
def test_fixing_the_width_fixes_every_shape_in_the_graph(architecture: str, width: int, tmp_path: Path) -> None:
    path = exported(tiny(tmp_path / "source.gguf", architecture, quant="Q4_0"), tmp_path / "out")
    session = PlainStaticGraph(path, width=width).session
    for value in (*session.get_inputs(), *session.get_outputs()):
        assert all(type(length) is int for length in value.shape), (value.name, value.shape)
    named = {
        dim.dim_param
        for each in onnx.load(path, load_external_data=False).graph.input
        for dim in each.type.tensor_type.shape.dim
        if dim.dim_param
    }
    assert named == {"tokens"}


def test_fixed_shape_attention_uses_ordinary_operators(tmp_path: Path) -> None:
    path = exported(tiny(tmp_path / "source.gguf", quant="Q4_0"), tmp_path / "out")
    nodes = onnx.load(path, load_external_data=False).graph.node
    of_their_own = {node.op_type for node in nodes if node.domain == "com.microsoft"}
    assert of_their_own == {"MatMulNBits", "SkipSimplifiedLayerNormalization"}


@pytest.mark.parametrize(("architecture", "window"), [("llama", None), ("gemma3", WINDOW)])
def test_the_manifest_of_a_fixed_shape_export_states_cache_and_window(
    architecture: str, window: int | None, tmp_path: Path
) -> None:
    source = tiny(tmp_path / "source.gguf", architecture)
    said = export_onnx(source, tmp_path / "out", Provenance(name="tiny"), static_cache=CAPACITY)
    assert (said["cache"], said["static_cache"], said["window"]) == ("rows", CAPACITY, window)
    assert said["context_length"] == CONTEXT
    artefact = read_onnx_folder(tmp_path / "out")
    assert (artefact.cache, artefact.static_cache, artefact.window) == ("rows", CAPACITY, window)
    usual = export_onnx(source, tmp_path / "shared", Provenance(name="tiny"))
    assert (usual["cache"], usual["static_cache"], usual["window"]) == ("shared", None, None)


def test_fixed_shape_and_dynamic_graphs_read_equal_bytes_per_forward(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source.gguf", quant="Q8_0")
    static = read_onnx_folder(exported(source, tmp_path / "out").parent)
    shared = read_onnx_folder(exported(source, tmp_path / "shared", static_cache=None).parent)
    assert abs(static.bytes_per_forward - shared.bytes_per_forward) < 500  # constants such as shapes
    positions = (CONTEXT - CAPACITY) * 16 * 4 * 2
    assert 0 <= shared.weight_bytes - static.weight_bytes - positions + 500 < 1000


@pytest.mark.parametrize("tokens", [-1, 0, LEAST_STATIC_CACHE - 1, CONTEXT + 1])
def test_a_fixed_cache_that_is_too_small_or_too_long_is_refused(tokens: int, tmp_path: Path) -> None:
    source = tiny(tmp_path / "source.gguf")
    with pytest.raises(InvalidRequestError, match=f"{tokens} tokens") as raised:
        exported(source, tmp_path / "out", static_cache=tokens)
    assert str(CONTEXT) in (raised.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_the_smallest_and_largest_fixed_cache_are_allowed() -> None:
    for tokens in (LEAST_STATIC_CACHE, CONTEXT):
        check_static_cache(tokens, CONTEXT)
