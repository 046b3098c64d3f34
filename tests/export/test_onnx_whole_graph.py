"""Rewriting of graphs from Optimum: kept and replaced operators, and refused graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from edgespec.errors import InvalidRequestError
from edgespec.export.onnx.whole_graph import WholeGraph, load_graph, rewrite_graph
from tests.support.whole_onnx import DecoderGraph, write_folder

DATA = "packed.data"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("packed")
    DecoderGraph(write_folder(place / "source")).write(place)
    return place


@pytest.fixture
def model(packed: Path) -> Any:
    return load_graph(packed / "packed.onnx")


def rewritten(packed: Path, model: Any) -> WholeGraph:
    size = (packed / DATA).stat().st_size
    return rewrite_graph(model, data_name=DATA, data_bytes=size, context_length=64)


def operators(graph: WholeGraph) -> list[str]:
    return [node.op_type for node in graph.model.graph.node]


def test_a_rewritten_graph_has_the_expected_inputs_and_no_constant_nodes(packed: Path, model: Any) -> None:
    graph = rewritten(packed, model)
    found = graph.model.graph
    assert (graph.block_count, graph.head_count_kv, graph.key_length) == (2, 2, 16)
    assert [each.name for each in found.input] == [
        "input_ids",
        "first_row",
        *(f"past_key_values.{layer}.{part}" for layer in (0, 1) for part in ("key", "value")),
    ]
    assert not {"Constant", "ConstantOfShape"}.intersection(operators(graph))
    assert {each.data_type for each in found.initializer} <= {TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8}
    assert all(0 not in each.dims for each in found.initializer)
    assert len(found.initializer) < len(model.graph.node) / 4  # equal constants share an initializer
    names = {name for node in found.node for name in (*node.input, *node.output)}
    assert all(len(name) <= len("past_key_values.0.value") for name in names)
    assert {each.name for each in graph.weights} < {each.name for each in found.initializer}
    assert graph.types == dict.fromkeys(("attention", "embedding", "feed-forward", "head"), "float32")
    assert len(found.SerializeToString()) < 60_000


def test_place_sets_the_offset_and_file_of_a_weight(packed: Path, model: Any) -> None:
    graph = rewritten(packed, model)
    first, second = graph.weights[:2]
    graph.locate(second.name, 4096, "elsewhere")
    stored = numbers(graph, second.name)
    assert {each.key: each.value for each in stored.external_data} == {
        "location": "elsewhere",
        "offset": "4096",
        "length": str(second.byte_count),
    }
    assert first.byte_count == 4 * np.prod(numbers(graph, first.name).dims)


def numbers(graph: WholeGraph, name: str) -> Any:
    return next(each for each in graph.model.graph.initializer if each.name == name)


def head_input(graph: WholeGraph) -> str:
    """The operator before the product that computes the logits."""
    makers = {name: node for node in graph.model.graph.node for name in node.output}
    node = makers["logits"]
    while node.op_type in ("Mul", "Div"):
        node = makers[next(name for name in node.input if name in makers)]
    return f"{node.op_type} of {makers[node.input[0]].op_type}" if node.input[0] in makers else node.op_type


@pytest.mark.parametrize(
    ("head", "found"),
    [("plain", "MatMul of Slice"), ("scaled", "MatMul of Slice"), ("hidden", "Slice of MatMul")],
)
def test_a_recognised_head_computes_only_the_scored_rows(tmp_path: Path, head: str, found: str) -> None:
    DecoderGraph(write_folder(tmp_path / "source"), head=head).write(tmp_path)
    assert head_input(rewritten(tmp_path, load_graph(tmp_path / "packed.onnx"))) == found


def test_a_quantised_head_is_recognised(packed: Path, model: Any) -> None:
    node = next(each for each in model.graph.node if "logits" in each.output)
    rows, width = 512, 64
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(np.zeros((rows, 2, 16), np.uint8), "head_Q4"),
            numpy_helper.from_array(np.ones(rows * 2, np.float32), "head_scales"),
        ]
    )
    quantised = helper.make_node(
        "MatMulNBits", [node.input[0], "head_Q4", "head_scales"], ["logits"], domain="com.microsoft",
        K=width, N=rows, bits=4, block_size=32,
    )  # fmt: skip
    node.CopyFrom(quantised)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    graph = rewritten(packed, model)
    assert head_input(graph) == "MatMulNBits of Slice"
    assert graph.types["head"] == "4-bit"
    assert {each.domain for each in graph.model.opset_import} == {"", "com.microsoft"}


# ------------------------------------------------------------------------------------------------ refusals


def drop(values: Any, name: str) -> None:
    values.remove(next(each for each in values if each.name == name))


def add_node(model: Any, operator: str, **more: Any) -> None:
    """An operator that the logits depend on."""
    node = next(each for each in model.graph.node if "logits" in each.output)
    node.output[0] = "before"
    model.graph.node.append(helper.make_node(operator, ["before"], ["logits"], **more))


def branch(model: Any) -> None:
    add_node(model, "If")
    inner = helper.make_graph([], "inner", [], [])
    model.graph.node[-1].attribute.append(helper.make_attribute("then_branch", inner))


def weight(model: Any) -> Any:
    return next(each for each in model.graph.initializer if each.external_data)


def first_constant(model: Any) -> Any:
    return next(each for each in model.graph.node if each.op_type == "Constant").attribute[0].t


def set_entry(model: Any, key: str, value: str) -> None:
    next(each for each in weight(model).external_data if each.key == key).value = value


def constant(model: Any, array: Any) -> None:
    """A constant that the logits depend on."""
    node = next(each for each in model.graph.node if "logits" in each.output)
    node.output[0] = "before"
    model.graph.initializer.append(numpy_helper.from_array(array, "odd"))
    model.graph.node.append(helper.make_node("CastLike", ["before", "odd"], ["logits"]))


DAMAGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "another input": (
        lambda m: m.graph.input.append(helper.make_empty_tensor_value_info("pixels")),
        "has the input 'pixels'",
    ),
    "no ids": (lambda m: drop(m.graph.input, "input_ids"), "has no input input_ids"),
    "half a cache": (lambda m: drop(m.graph.input, "past_key_values.1.value"), "past_key_values.1"),
    "no logits": (lambda m: drop(m.graph.output, "logits"), "has no output logits"),
    "no present": (lambda m: drop(m.graph.output, "present.0.key"), "has no output present.0.key"),
    "rows unknown": (lambda m: m.graph.output[0].type.tensor_type.shape.dim[2].Clear(), "number of its logits"),
    "heads differ": (
        lambda m: setattr(m.graph.input[3].type.tensor_type.shape.dim[1], "dim_value", 5),
        "cache of another shape",
    ),
    "a branch": (branch, "a subgraph in an attribute"),
    "a foreign operator": (lambda m: add_node(m, "Evil", domain="elsewhere"), "elsewhere"),
    "an old opset": (lambda m: setattr(m.opset_import[0], "version", 9), "too old version"),
    "functions": (lambda m: m.functions.add(), "functions"),
    "another file": (lambda m: set_entry(m, "location", "../../secret"), "outside"),
    "beyond the end": (lambda m: set_entry(m, "offset", str(2**40)), "outside"),
    "before the start": (lambda m: set_entry(m, "offset", "-4096"), "outside"),
    "length not a number": (lambda m: set_entry(m, "length", "many"), "malformed"),
    "a dangling name": (lambda m: m.graph.node[0].input.__setitem__(0, "dangling"), "dangling"),
    "a constant with a wrong shape": (lambda m: first_constant(m).dims.append(7), "malformed"),
    "a constant elsewhere": (
        lambda m: first_constant(m).external_data.add(key="location", value="x"),
        "another file",
    ),
    "complex numbers": (lambda m: constant(m, np.zeros(2, np.complex64)), "COMPLEX64"),
    "a float64 constant": (lambda m: constant(m, np.array([0.1])), "DOUBLE"),
    "an empty constant": (lambda m: constant(m, np.zeros((2, 0), np.float32)), "[2, 0]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_graph_that_is_not_a_decoder_is_refused_with_a_reason(packed: Path, model: Any, damage: str) -> None:
    change, words = DAMAGES[damage]
    change(model)
    with pytest.raises(InvalidRequestError) as raised:
        rewritten(packed, model)
    assert words in raised.value.message
    assert raised.value.hint


def test_a_file_that_is_not_an_onnx_graph_is_not_rewritten(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"\xff" * 100)
    with pytest.raises(InvalidRequestError, match="not an ONNX graph"):
        load_graph(tmp_path / "bad.onnx")


@pytest.mark.parametrize(
    "attribute",
    [{"value_int": 3}, {"value_ints": [3]}, {"value_float": 3.0}, {"value_floats": [3.0]}],
    ids=lambda each: next(iter(each)),
)
def test_constants_given_as_numbers_become_initializers(packed: Path, model: Any, attribute: dict[str, Any]) -> None:
    node = next(each for each in model.graph.node if "logits" in each.output)
    node.output[0] = "before"
    model.graph.node.extend(
        [
            helper.make_node("Constant", [], ["three"], **attribute),
            helper.make_node("CastLike", ["three", "before"], ["as_float"]),
            helper.make_node("Mul", ["before", "as_float"], ["logits"]),
        ]
    )
    graph = rewritten(packed, model)
    values = [numpy_helper.to_array(each) for each in graph.model.graph.initializer if each.raw_data]
    assert any(value.size == 1 and float(value.reshape(())) == 3 for value in values)
    text = load_graph(packed / "packed.onnx")
    text.graph.node.insert(0, helper.make_node("Constant", [], ["text"], value_string="three"))
    with pytest.raises(InvalidRequestError, match="not a number"):
        rewritten(packed, text)


def test_operators_with_tensors_in_attributes_are_refused(packed: Path, model: Any) -> None:
    add_node(model, "Identity")
    model.graph.node[-1].attribute.append(helper.make_attribute("table", numpy_helper.from_array(np.zeros(1))))
    assert model.graph.node[-1].attribute[0].type == AttributeProto.TENSOR
    with pytest.raises(InvalidRequestError, match="'Identity' with a tensor"):
        rewritten(packed, model)


def test_a_rewritten_graph_passes_the_onnx_checker(packed: Path, model: Any, tmp_path: Path) -> None:
    graph = rewritten(packed, model)
    for each in graph.weights:
        graph.locate(each.name, each.offset, DATA)
    (tmp_path / DATA).write_bytes((packed / DATA).read_bytes())
    (tmp_path / "model.onnx").write_bytes(graph.model.SerializeToString())
    onnx.checker.check_model(str(tmp_path / "model.onnx"))
