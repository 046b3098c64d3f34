"""The ONNX graph gives the logits that llama.cpp computes from the same GGUF."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from edgespec.architectures.shape import Rope
from edgespec.errors import InvalidRequestError, ModelFileError
from edgespec.export.onnx.export import export_onnx
from edgespec.export.onnx.model import describe_model, rope_tables
from edgespec.export.onnx.tables import ALIGNMENT, Stored, TablePlan, plan_tables
from edgespec.files.gguf.header import read_header
from tests.export.models import write_model
from tests.support.provenance import described
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_onnx import (
    ARCHITECTURES,
    VOCABULARY_SIZE,
    WINDOW,
    PlainGraph,
    llama_logits,
    write_tiny_model,
)

TOKENS = np.random.default_rng(9).integers(3, VOCABULARY_SIZE, 24).tolist()
assert len(TOKENS) > 2 * WINDOW


def exported(source: Path, folder: Path, **more: Any) -> Path:
    provenance, options = described(more, name="tiny")
    export_onnx(source, folder, provenance, **options)
    return folder / "model.onnx"


def graph_logits(path: Path, chunks: Sequence[int] = (24,), **more: Any) -> npt.NDArray[np.float32]:
    graph, found, start = PlainGraph(path, **more), [], 0
    for size in chunks:
        found.append(graph.forward(TOKENS[start : start + size]))
        start += size
    return np.concatenate(found)


def spread(logits: npt.NDArray[np.float32]) -> float:
    return float(logits.std())


# ------------------------------------------------------------------------------------- the same as llama.cpp


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_an_onnx_graph_with_float_weights_gives_llama_cpps_logits(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    source = write_tiny_model(tmp_path / "source.gguf", architecture, tied=tied)
    wanted = llama_logits(source, TOKENS)
    found = graph_logits(exported(source, tmp_path / "out"))
    assert spread(wanted) > 0.5
    # llama.cpp computes GELU with a float16 table; all other operations are float32 in both runtimes.
    np.testing.assert_allclose(found, wanted, atol=2e-2 if architecture == "gemma3" else 1e-3)
    assert (found.argmax(axis=1) == wanted.argmax(axis=1)).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0"])
def test_onnx_block_types_are_as_accurate_as_llama_cpp(architecture: str, quant: str, tmp_path: Path) -> None:
    """The reference has the same weights as float32. Both runtimes round activations to 8 bits, in different ways."""
    shape: dict[str, Any] = {"quant": quant, "head_quant": "Q8_0", "tied": architecture == "gemma3"}
    source = write_tiny_model(tmp_path / "source.gguf", architecture, **shape)
    truth = llama_logits(write_tiny_model(tmp_path / "f32.gguf", architecture, **shape, dequantised=True), TOKENS)
    theirs = np.abs(llama_logits(source, TOKENS) - truth).mean()
    ours = np.abs(graph_logits(exported(source, tmp_path / "out")) - truth).mean()
    assert 0 < ours < 1.5 * theirs
    assert ours < 0.1 * spread(truth)


@pytest.mark.parametrize("quant", ["Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16"])
def test_other_types_rounded_to_8_bits_change_logits_little(quant: str, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"quant": quant, "width": 256, "feed_forward": 256, "layers": 2, "head_length": 64}
    source = write_tiny_model(tmp_path / "source.gguf", **shape)
    truth = llama_logits(write_tiny_model(tmp_path / "f32.gguf", **shape, dequantised=True), TOKENS)
    found = graph_logits(exported(source, tmp_path / "out"))
    assert np.abs(found - truth).mean() < (2e-3 if quant in ("F16", "BF16") else 0.05) * spread(truth)


@pytest.mark.parametrize(
    "more",
    [
        {"rope_factors": 1.0},
        {"rope_scale": 4.0},
        {"extra": {"rope.scaling.type": "none"}},
        {"extra": {"rope.scaling.attn_factor": 1.25}},
    ],
)
def test_onnx_graphs_with_rope_scaling_give_llama_cpps_logits(more: dict[str, Any], tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source.gguf", **more)
    found = graph_logits(exported(source, tmp_path / "out"))
    np.testing.assert_allclose(found, llama_logits(source, TOKENS), atol=1e-3)


def test_rope_scaling_changes_the_logits(tmp_path: Path) -> None:
    """Without this difference the test of scaled logits would prove nothing."""
    plain = graph_logits(exported(write_tiny_model(tmp_path / "a.gguf"), tmp_path / "a"))
    scaled = graph_logits(exported(write_tiny_model(tmp_path / "b.gguf", rope_scale=4.0), tmp_path / "b"))
    assert np.abs(plain - scaled).max() > 0.1


def test_late_positions_are_rotated_accurately(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source.gguf", context_length=128)
    tokens = (TOKENS * 6)[:128]
    found = PlainGraph(exported(source, tmp_path / "out"), capacity=128).forward(tokens)
    np.testing.assert_allclose(found, llama_logits(source, tokens, [64, 64]), atol=1e-3)


# ------------------------------------------------------------------------------------ forwards and their rows


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return exported(write_tiny_model(folder / "source.gguf"), folder / "out")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_text_read_in_several_forwards_gives_the_same_logits(architecture: str, tmp_path: Path) -> None:
    path = exported(write_tiny_model(tmp_path / "source.gguf", architecture), tmp_path / "out")
    whole = graph_logits(path)
    for chunks in ((1,) * 24, (5, 1, 1, 7, 10), (23, 1)):
        np.testing.assert_allclose(graph_logits(path, chunks), whole, atol=1e-4)


def test_tokens_dropped_from_the_cache_do_not_change_logits(llama: Path) -> None:
    graph = PlainGraph(llama)
    graph.forward(TOKENS[:9])
    graph.forward([5, 6, 7, 8])
    graph.rewind(9)
    again = graph.forward(TOKENS[9:15])
    np.testing.assert_allclose(again, graph_logits(llama)[9:15], atol=1e-4)
    graph.rewind(0)
    np.testing.assert_allclose(graph.forward(TOKENS[:3]), graph_logits(llama)[:3], atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_only_the_last_rows_are_scored_but_all_enter_the_cache(llama: Path, rows: int) -> None:
    graph = PlainGraph(llama)
    found = graph.forward(TOKENS[:9], rows)
    assert found.shape == (rows, VOCABULARY_SIZE)
    np.testing.assert_allclose(found, graph_logits(llama)[9 - rows : 9], atol=1e-4)
    assert graph.forward(TOKENS[9:11]).shape == (2, VOCABULARY_SIZE)  # all tokens entered the cache


def test_logits_do_not_depend_on_the_cache_capacity(llama: Path) -> None:
    np.testing.assert_allclose(graph_logits(llama, capacity=24), graph_logits(llama, capacity=100), atol=1e-5)


def test_the_graph_has_one_position_more_than_the_context(llama: Path) -> None:
    graph = PlainGraph(llama, capacity=129)
    assert graph.forward((TOKENS * 6)[:129], 1).shape == (1, VOCABULARY_SIZE)


@pytest.mark.parametrize("quant", ["F32", "Q4_0", "Q8_0"])
def test_onnx_logits_do_not_depend_on_graph_optimisation(quant: str, tmp_path: Path) -> None:
    path = exported(write_tiny_model(tmp_path / "source.gguf", quant=quant), tmp_path / "out")
    np.testing.assert_allclose(graph_logits(path, optimise=False), graph_logits(path), atol=1e-4)


# ---------------------------------------------------------------------------------------------- trimmed heads


KEPT = np.arange(1, VOCABULARY_SIZE, 3, dtype=np.int32)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_0"])
def test_a_trimmed_onnx_head_scores_only_the_kept_rows(tied: bool, quant: str, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source.gguf", tied=tied, quant=quant)
    whole = graph_logits(exported(source, tmp_path / "whole"))
    path = exported(source, tmp_path / "trimmed", kept=KEPT)
    np.testing.assert_allclose(graph_logits(path), whole[:, KEPT], atol=1e-5)
    session = PlainGraph(path).session
    assert "kept_ids" in [each.name for each in session.get_outputs()]


def test_a_head_trimmed_to_all_rows_gives_bit_equal_logits(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source.gguf", quant="Q8_0")
    whole = graph_logits(exported(source, tmp_path / "whole"))
    every = np.arange(VOCABULARY_SIZE, dtype=np.int32)
    assert np.array_equal(graph_logits(exported(source, tmp_path / "all", kept=every)), whole)


def test_the_kept_ids_are_an_output_of_the_graph(tmp_path: Path) -> None:
    path = exported(write_tiny_model(tmp_path / "source.gguf"), tmp_path / "out", kept=KEPT)
    graph = PlainGraph(path)
    graph.forward(TOKENS[:2])
    (found,) = graph.session.run(
        ["kept_ids"],
        {
            "input_ids": np.array([[3]]),
            "seqlens_k": np.array([2], np.int32),
            "total_sequence_length": np.array(3, np.int32),
            "first_row": np.array([0]),
            **graph._cache,
        },
    )
    assert found.dtype == np.int64
    assert found.tolist() == KEPT.tolist()


# ------------------------------------------------------------------------------------------------- the plan


def planned(source: Path, quant: str = "keep", kept: npt.NDArray[np.int32] | None = None) -> TablePlan:
    header = read_header(source)
    return plan_tables(header, describe_model(header), quant, kept)


def stored_parts(plan: TablePlan) -> Iterator[Stored]:
    """All constants in the data file, in file order."""
    for table in plan.tables.values():
        yield table.values
        if table.scales is not None:
            yield table.scales
    for rope in plan.ropes.values():
        yield rope.cosines
        yield rope.sines
    if plan.kept_ids is not None:
        yield plan.kept_ids


def test_tables_of_an_onnx_model_do_not_overlap(tmp_path: Path) -> None:
    plan = planned(write_tiny_model(tmp_path / "source.gguf", "qwen2", quant="Q4_0"), kept=KEPT)
    end = 0
    for stored in stored_parts(plan):
        assert stored.offset % ALIGNMENT == 0
        assert stored.offset >= end
        end = stored.offset + stored.byte_count
    assert end <= plan.data_bytes < end + ALIGNMENT


def test_queries_keys_and_values_are_merged_into_one_matrix(tmp_path: Path) -> None:
    for architecture, together in (("llama", True), ("qwen2", True), ("qwen3", False)):
        plan = planned(write_tiny_model(tmp_path / f"{architecture}.gguf", architecture, quant="Q4_0"))
        assert ("blk.0.attn_qkv" in plan.tables) == together
        assert ("blk.0.attn_q" in plan.tables) == (not together)
        assert ("blk.0.attn_qkv.bias" in plan.tables) == (architecture == "qwen2")


def test_a_tied_onnx_table_is_stored_once(tmp_path: Path) -> None:
    tied = planned(write_tiny_model(tmp_path / "tied.gguf", tied=True, quant="Q8_0"))
    assert tied.head is tied.tables["embedding"]
    assert tied.head.bits == 8
    assert tied.head.scales is not None
    assert tied.head.scales.element == "float32"
    trimmed = planned(tmp_path / "tied.gguf", kept=KEPT)
    assert trimmed.head is trimmed.tables["head"]
    assert trimmed.head.rows == len(KEPT)
    assert trimmed.tables["embedding"].rows == VOCABULARY_SIZE


@pytest.mark.parametrize(
    ("quant", "head", "tied", "asked", "embedding_bits", "body_bits", "head_bits"),
    [
        ("Q4_0", "Q4_0", False, "keep", 4, 4, 4),
        ("Q4_0", "Q8_0", False, "q4", 4, 4, 8),
        ("Q4_0", "Q8_0", True, "q4", 8, 4, 8),
        ("Q4_0", "Q4_0", True, "q4", 4, 4, 4),
        ("Q8_0", "Q8_0", False, "keep", 8, 8, 8),
        ("Q8_0", "Q8_0", False, "q4", 4, 4, 8),
        ("Q5_0", "Q5_0", False, "keep", 8, 8, 8),
        ("F16", "F16", False, "keep", None, None, None),
        ("F16", "F16", True, "q4", 8, 4, 8),
        ("F32", "F32", True, "keep", None, None, None),
    ],
)
def test_the_onnx_plan_chooses_bits_by_type_and_quantisation(
    quant: str,
    head: str,
    tied: bool,
    asked: str,
    embedding_bits: int | None,
    body_bits: int | None,
    head_bits: int | None,
    tmp_path: Path,
) -> None:
    plan = planned(write_tiny_model(tmp_path / "a.gguf", quant=quant, head_quant=head, tied=tied), asked)
    found = (plan.tables["embedding"].bits, plan.tables["blk.0.ffn_up"].bits, plan.head.bits)
    assert found == (embedding_bits, body_bits, head_bits)


def test_a_4_bit_onnx_model_is_little_larger_than_a_q4_0_gguf(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", quant="Q4_0", head_quant="Q8_0", width=256, feed_forward=512)
    header, plan = read_header(source), planned(source, "q4")
    matrices = sum(tensor.byte_count for tensor in header.tensors if len(tensor.shape) == 2)
    packed = sum(
        table.values.byte_count + table.scales.byte_count
        for table in plan.tables.values()
        if table.scales is not None
    )
    assert packed < 1.12 * matrices


def test_the_plan_states_the_conversion_of_each_part(tmp_path: Path) -> None:
    source = write_tiny_model(
        tmp_path / "a.gguf", quant="Q4_0", head_quant="Q6_K", tied=True, width=256, feed_forward=256
    )
    types = planned(source).types()
    assert types["head"] == types["embedding"] == "Q6_K rounded to 8-bit"
    assert types["attn_qkv"] == types["ffn_down"] == "Q4_0 as 4-bit"
    assert types["norms"] == "F32 as float32"
    assert planned(write_tiny_model(tmp_path / "b.gguf", quant="F16")).types()["embedding"] == "F16 as float16"


# --------------------------------------------------------------------------------------------- what is refused


def test_an_unknown_architecture_is_refused_by_the_onnx_export(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidRequestError, match="is gemma, and edgespec computes llama, qwen2, qwen3, gemma3"
    ) as raised:
        describe_model(read_header(write_model(tmp_path / "a.gguf", "gemma")))
    assert "--to gguf" in (raised.value.hint or "")


@pytest.mark.parametrize(
    ("architecture", "more", "says"),
    [
        ("smollm3", {"layers": 4}, "layers without a rotation"),
        ("exaone4", {}, "layers without a norm of their input"),
        ("olmo2", {}, "layers without a norm of their input"),
        ("gemma2", {}, "caps of scores"),
        ("qwen3moe", {}, "mixtures of experts"),
        ("gpt-oss", {"window": 30}, "mixtures of experts"),
        ("qwen35", {}, "gated delta layers"),
        ("gemma4", {"layers": 6, "window": 30}, "layers that differ in shape"),
        (
            "mistral3",
            {
                "settings": {
                    "attention.temperature_scale": 0.1,
                    "rope.scaling.type": "yarn",
                    "rope.scaling.factor": 2.0,
                    "rope.scaling.original_context_length": 64,
                }
            },
            "factors of queries",
        ),
    ],
)
def test_what_the_graph_has_no_operators_for_is_refused_by_name(
    tmp_path: Path, architecture: str, more: dict[str, Any], says: str
) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", architecture=architecture, width=128, **more)
    with pytest.raises(InvalidRequestError, match=f"the ONNX graph has no {says}"):
        describe_model(read_header(path))


@pytest.mark.parametrize(
    ("more", "error", "says"),
    [
        ({"extra_tensor": "blk.0.attn_sinks.weight"}, InvalidRequestError, "attn_sinks"),
        ({"extra": {"rope.scaling.type": "spiral"}}, InvalidRequestError, "spiral"),
        ({"extra": {"final_logit_softcapping": 30.0}}, InvalidRequestError, "it has final_logit_softcapping"),
        ({"extra": {"rope.scaling.factor": float("nan")}}, ModelFileError, "factor is nan: a positive number"),
        ({"extra": {"rope.scaling.factor": -1.0}}, ModelFileError, "factor is -1.0: a positive number"),
        ({"head_length": 24}, InvalidRequestError, "its heads have 24 elements"),
    ],
)
def test_models_with_unsupported_features_are_refused_by_the_onnx_export(
    more: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        planned(write_tiny_model(tmp_path / "a.gguf", **more))


def test_a_missing_tensor_or_a_wrong_shape_is_refused_by_the_onnx_export(tmp_path: Path) -> None:
    header = read_header(write_tiny_model(tmp_path / "a.gguf"))
    without = replace(header, tensors=tuple(t for t in header.tensors if t.name != "blk.1.ffn_up.weight"))
    with pytest.raises(ModelFileError, match=r"tensor blk\.1\.ffn_up\.weight is missing"):
        describe_model(without)
    longer = replace(header, metadata={**header.metadata, "llama.feed_forward_length": 97})
    with pytest.raises(ModelFileError, match=r"ffn_gate\.weight has shape"):
        describe_model(longer)


def test_an_unknown_onnx_quantisation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="q5") as raised:
        planned(write_tiny_model(tmp_path / "a.gguf"), "q5")
    assert "keep, q4" in (raised.value.hint or "")


# ---------------------------------------------------------------------------------------------- pure functions


def test_rope_tables_hold_cosines_and_sines_of_the_angles() -> None:
    cosines, sines = rope_tables(Rope(base=100.0), np.array([0, 1, 7]), 4)
    assert cosines.dtype == sines.dtype == np.float32
    np.testing.assert_allclose(cosines, np.cos([[0, 0], [1, 0.1], [7, 0.7]]), rtol=1e-6)
    np.testing.assert_allclose(sines, np.sin([[0, 0], [1, 0.1], [7, 0.7]]), rtol=1e-6)
    halved, _ = rope_tables(Rope(base=100.0, scale=2.0), np.array([2, 14]), 4)
    np.testing.assert_allclose(halved, cosines[1:], rtol=1e-6)
    factors = np.array([1, 2], dtype=np.float32)
    divided, _ = rope_tables(Rope(base=100.0), np.array([7]), 4, factors)
    np.testing.assert_allclose(divided, np.cos([[7, 0.35]]), rtol=1e-6)
    larger = rope_tables(Rope(base=100.0, magnitude=1.5), np.array([0, 1, 7]), 4)
    np.testing.assert_allclose(larger, 1.5 * np.array([cosines, sines]), rtol=1e-6)


def test_gemma_has_a_window_in_the_layers_of_its_pattern(tmp_path: Path) -> None:
    shape = describe_model(read_header(write_tiny_model(tmp_path / "a.gguf", "gemma3", layers=6)))
    assert [layer.window for layer in shape.layers] == [WINDOW, WINDOW, 0] * 2
    assert [shape.ropes[layer.rope].base for layer in shape.layers] == [10000.0, 10000.0, 20000.0] * 2


def test_only_small_constants_are_stored_inside_the_graph(tmp_path: Path) -> None:
    path = exported(write_tiny_model(tmp_path / "source.gguf"), tmp_path / "out", kept=KEPT)
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        assert tensor.data_location == onnx.TensorProto.EXTERNAL or len(tensor.raw_data) < 1024
