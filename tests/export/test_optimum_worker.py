"""The parts of the worker that need no PyTorch: packing, checking a graph against logits, and its protocol."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from edgespec.export.optimum import worker as optimum_worker
from edgespec.export.optimum.worker import CHECKED_CHUNKS, PACKED, PACKED_DATA, RAW, Refused
from tests.support.tiny_onnx import llama_logits
from tests.support.whole_onnx import DecoderGraph, write_folder

WORKER = Path(optimum_worker.__file__)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a graph as Optimum writes it, with embedded weights."""
    source = write_folder(tmp_path / "source")
    (tmp_path / "work").mkdir()
    onnx.save_model(DecoderGraph(source).model(), tmp_path / "work" / RAW)
    return tmp_path / "work"


def run(*arguments: str | Path) -> tuple[int, list[Any], str]:
    command = [sys.executable, "-I", WORKER, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_packed_weights_are_in_one_separate_file(work: Path) -> None:
    (work / f"{RAW}_data").write_bytes(b"what Optimum leaves for large models")
    code, said, _ = run("pack", work, "keep")
    assert (code, said[0]) == (0, {"stage": "packing the weights"})
    assert said[-1]["result"]["versions"]["onnx"] == onnx.__version__
    assert sorted(path.name for path in work.iterdir()) == sorted([PACKED, PACKED_DATA])
    graph = onnx.load(work / PACKED, load_external_data=False).graph
    places = {entry.value for each in graph.initializer for entry in each.external_data if entry.key == "location"}
    assert places == {PACKED_DATA}


def test_a_worker_failure_is_a_json_answer_and_tool_output_goes_to_stderr(tmp_path: Path) -> None:
    code, said, err = run("pack", tmp_path / "missing", "keep")
    assert code == 1
    assert said[-1]["error"]["kind"] == "failed"
    assert "FileNotFoundError" in said[-1]["error"]["message"]
    assert "Traceback" in err


def test_the_worker_says_what_it_does_before_it_imports_pytorch(tmp_path: Path) -> None:
    _, said, _ = run("convert", tmp_path, tmp_path, "as stated")
    assert said[0] == {"stage": "reading the model"}, "PyTorch may be absent here"


def test_a_worker_call_without_arguments_fails() -> None:
    code, said, _ = run()
    assert code == 1
    assert said[-1]["error"]["kind"] == "failed"


def expected(work: Path, tokens: list[int]) -> Any:
    return llama_logits(work.parent / "source.gguf", tokens)


def test_the_check_runs_the_graph_in_several_forwards(work: Path) -> None:
    tokens = list(range(40, 40 + sum(CHECKED_CHUNKS)))
    assert optimum_worker._check(work / RAW, tokens, expected(work, tokens)) < 1e-3


def test_a_graph_with_wrong_logits_is_refused(work: Path) -> None:
    tokens = list(range(40, 40 + sum(CHECKED_CHUNKS)))
    wrong = expected(work, tokens)
    wrong[-1] += 1  # only the last forward, after two forwards with a cache
    with pytest.raises(Refused, match="gives wrong logits") as raised:
        optimum_worker._check(work / RAW, tokens, wrong)
    assert raised.value.kind == "check"
    wrong[-1] = np.nan
    with pytest.raises(Refused):
        optimum_worker._check(work / RAW, tokens, wrong)


@pytest.mark.parametrize(
    ("attributes", "bias", "operators"),
    [
        ({}, True, ["MatMul", "Add"]),
        ({"transB": 1}, True, ["MatMul", "Add"]),
        ({"transB": 1}, False, ["MatMul"]),
        ({"alpha": 0.5}, True, ["Gemm"]),
        ({"beta": 2.0}, True, ["Gemm"]),
        ({"transA": 1}, True, ["Gemm"]),
    ],
)
def test_a_gemm_becomes_a_quantisable_matmul(attributes: dict[str, Any], bias: bool, operators: list[str]) -> None:
    random = np.random.default_rng(1)
    shape = (6, 4) if attributes.get("transB") else (4, 6)
    tensors = {"w": random.standard_normal(shape), "b": random.standard_normal(6)}
    inputs = ["x", "w", "b"] if bias else ["x", "w"]
    graph = helper.make_graph(
        [helper.make_node("Gemm", inputs, ["y"], **attributes)],
        "gemm",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4, 4])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [4, 6])],
        [numpy_helper.from_array(tensors[name].astype(np.float32), name) for name in inputs[1:]],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    given = {"x": random.standard_normal((4, 4)).astype(np.float32)}
    expected = ReferenceEvaluator(model).run(None, given)[0]
    changed = optimum_worker._without_gemm(model)
    assert [node.op_type for node in changed.graph.node] == operators
    assert np.allclose(ReferenceEvaluator(changed).run(None, given)[0], expected, atol=1e-5)


NUMBERS = np.array([[1.5, -2.0], [0.25, 3.0]])


@pytest.mark.parametrize(
    ("table", "rounding", "kind"),
    [
        (NUMBERS, False, "FLOAT16"),
        (NUMBERS * 2.0**60, False, "BFLOAT16"),
        (NUMBERS + 2.0**-20, False, "FLOAT"),
        (NUMBERS + 2.0**-20, True, "FLOAT16"),
        (NUMBERS * 2.0**60 + 2.0**45, True, "FLOAT"),
        (NUMBERS[0], False, "FLOAT"),
    ],
)
def test_a_lookup_table_gets_16_bits_if_lossless_or_rounding(table: Any, rounding: bool, kind: str) -> None:
    graph = helper.make_graph(
        [helper.make_node("Gather", ["t", "i"], ["y"]), helper.make_node("Neg", ["y"], ["z"])],
        "table",
        [helper.make_tensor_value_info("i", onnx.TensorProto.INT64, [2])],
        [helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(table.astype(np.float32), "t")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    given = {"i": np.array([1, 0])}
    expected = run_graph(model, given)
    optimum_worker._halve_tables(model, rounding=rounding)
    assert onnx.TensorProto.DataType.Name(model.graph.initializer[0].data_type) == kind
    assert np.allclose(run_graph(model, given), expected, rtol=1e-3)
    assert rounding or np.array_equal(run_graph(model, given), expected)


def run_graph(model: Any, given: dict[str, Any]) -> Any:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, given)[0]


def test_a_tied_table_keeps_32_bits(work: Path) -> None:
    model = onnx.load(work / RAW)
    before = model.SerializeToString()
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[0] == "model.embed_tokens.weight":
            model.graph.node.add(op_type="MatMul", input=[node.output[0], node.input[0]], output=["other"])
    optimum_worker._halve_tables(model, rounding=True)
    del model.graph.node[-1]
    assert model.SerializeToString() == before


def test_worker_file_names_match_the_exporter() -> None:
    from edgespec.export.onnx import from_folder as onnx_from_folder

    assert (onnx_from_folder._PACKED, onnx_from_folder._PACKED_DATA) == (PACKED, PACKED_DATA)


# ------------------------------------------------------------------------------------- rotary positions

DEFAULT = {"rope_type": "default", "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}
LONG = {"rope_type": "longrope", "rope_theta": 5e5, "original_max_position_embeddings": 32}
KNOWN = ("default", "yarn", "longrope")


@pytest.mark.parametrize(
    ("before", "stated", "after"),
    [
        ({"rope_theta": 1e4, "rope_scaling": YARN}, DEFAULT, {"rope_theta": 5e5, "rope_scaling": None}),
        ({"rope_theta": 1e4, "rope_scaling": None}, YARN, {"rope_theta": 5e5, "rope_scaling": YARN}),
        ({"rope_theta": 1e4}, {**DEFAULT, "partial_rotary_factor": 1.0}, {"rope_theta": 5e5}),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rotary_pct": 0.25},
            {**DEFAULT, "partial_rotary_factor": 0.5},
            {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rotary_pct": 0.5},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": None, "rope_local_base_freq": 1e4},
            {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}},
            {"rope_theta": 5e5, "rope_scaling": YARN, "rope_local_base_freq": 2e4},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": None},
            LONG,
            {"rope_theta": 5e5, "rope_scaling": LONG, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rotary_positions_that_transformers_5_saved_are_set(
    before: dict[str, Any], stated: dict[str, Any], after: dict[str, Any]
) -> None:
    config = SimpleNamespace(**before)
    optimum_worker._set_rotary(config, stated, KNOWN)
    assert vars(config) == after


@pytest.mark.parametrize(
    ("before", "stated", "words"),
    [
        ({}, DEFAULT, "rope_theta"),
        ({"rope_theta": 1e4}, YARN, "rope_scaling"),
        ({"rope_theta": 1e4}, {**DEFAULT, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": 1e4, "rope_scaling": None}, {**YARN, "rope_type": "proportional"}, "rope_type"),
        ({"rope_theta": 1e4}, {"full_attention": DEFAULT, "sliding_attention": DEFAULT}, "rope_local_base_freq"),
        (
            {"rope_theta": 1e4, "rope_scaling": None, "rope_local_base_freq": 1e4},
            {"full_attention": DEFAULT, "sliding_attention": YARN},
            "rope_type",
        ),
        ({"rope_theta": 1e4}, {"full_attention": DEFAULT, "compressed": DEFAULT}, "compressed"),
    ],
)
def test_rotary_positions_that_transformers_4_cannot_compute_are_refused(
    before: dict[str, Any], stated: dict[str, Any], words: str
) -> None:
    config = SimpleNamespace(**before)
    with pytest.raises(Refused, match=words):
        optimum_worker._set_rotary(config, stated, KNOWN)
    assert vars(config) == before
