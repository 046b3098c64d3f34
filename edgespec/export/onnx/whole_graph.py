"""Rewrites a decoder's graph from Optimum for edgespec's reader and ONNX runtime.

The rewritten graph computes positions and mask from the lengths of tokens and past, the output head sees only the
scored rows, constants are initializers, names are short, and unused operators are removed. Weights stay in their
file; only their offsets are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from edgespec.errors import InvalidRequestError
from edgespec.export.onnx.traced import (
    PAST,
    PRESENT,
    array_of,
    cache_shape,
    constant_value,
    fits_float32,
    fixed_length,
    part_of,
    refuse,
)

# Element types of constants that edgespec's reader accepts.
_ADMITTED = frozenset(
    {
        TensorProto.FLOAT,
        TensorProto.UINT8,
        TensorProto.INT8,
        TensorProto.INT32,
        TensorProto.INT64,
        TensorProto.FLOAT16,
        TensorProto.BFLOAT16,
    }
)
_CONTRIB = "com.microsoft"

# Operators between the head's product and the logits: scales, caps, biases and casts, all independent per row.
_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Tanh", "Cast", "Identity"})

_LEAST_OPSET = 13  # since opset 13 axes of Squeeze and Unsqueeze are inputs, as in the operators written here


@dataclass(frozen=True, slots=True)
class Weight:
    """A constant in an external file: ``byte_count`` bytes at ``offset`` of the file that Optimum wrote."""

    name: str
    offset: int
    byte_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeGraph:
    """The rewritten graph. ``weights`` are in order of first use; ``locate`` sets where each weight is in a file.

    ``rows`` of the head, ``head_count_kv`` and ``key_length`` come from the graph's shapes. ``types`` describes the
    weights of each part of the model as text.
    """

    model: Any
    weights: tuple[Weight, ...]
    block_count: int
    head_count_kv: int
    key_length: int
    rows: int
    types: Mapping[str, str]
    _tensors: Mapping[str, Any]

    def locate(self, name: str, offset: int, location: str) -> None:
        """Record in the graph that the weight ``name`` is at byte ``offset`` of the file ``location``."""
        tensor = self._tensors[name]
        del tensor.external_data[:]
        size = next(each.byte_count for each in self.weights if each.name == name)
        for key, value in (("location", location), ("offset", str(offset)), ("length", str(size))):
            tensor.external_data.add(key=key, value=value)


def load_graph(path: Path) -> Any:
    """Load a graph without its external weights. Raises InvalidRequestError if the file is not an ONNX graph."""
    try:
        return onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's exception classes differ between its builds
        raise InvalidRequestError(
            f"Optimum's output is not an ONNX graph: {str(error)[:200]}", hint="report this with the model's name"
        ) from error


def rewrite_graph(model: Any, *, data_name: str, data_bytes: int, context_length: int) -> WholeGraph:
    """Rewrite ``model``, whose weights are in the file ``data_name`` of ``data_bytes``.

    ``context_length`` is in tokens. Raises InvalidRequestError for a graph without the inputs and outputs of a
    decoder with a cache, or with unsupported content.
    """
    try:
        return _Rewriter(model, data_name, data_bytes, context_length).rewritten()
    except (ValueError, TypeError, IndexError, KeyError) as error:  # inconsistent shapes or indices
        raise refuse(f"is malformed: {str(error)[:200]}") from error


class _Rewriter:
    def __init__(self, model: Any, data_name: str, data_bytes: int, context_length: int) -> None:
        self._graph = model.graph
        self._data_name, self._data_bytes = data_name, data_bytes
        self._context_length = context_length
        self._opsets = {each.domain or "": each.version for each in model.opset_import}
        if self._opsets.get("", 0) < _LEAST_OPSET:
            raise refuse("has a too old version of ONNX")
        if model.functions:
            raise refuse("has functions")
        self._tensors: dict[str, Any] = {each.name: each for each in self._graph.initializer}
        self._same: dict[tuple[int, tuple[int, ...], bytes], str] = {}
        self._aliases: dict[str, str] = {}
        self._nodes: list[Any] = []
        self._fresh = 0

    def rewritten(self) -> WholeGraph:
        outputs = {each.name: each for each in self._graph.output}
        inputs = {each.name: each for each in self._graph.input if each.name not in self._tensors}
        layers = sum(name.startswith(PAST) for name in inputs) // 2
        parts = [f"{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
        self._check_names(inputs, outputs, parts)
        heads, width = cache_shape(inputs, parts)
        rows = fixed_length(outputs["logits"], -1)
        if rows is None:
            raise refuse("does not state the number of its logits")
        self._feed(inputs)
        for node in self._graph.node:
            self._take(node)
        head = self._score_last_rows()
        self._admit_constants(self._used(["logits", *(f"{PRESENT}{part}" for part in parts)]))
        types = self._types(head)
        tensors, weights = self._renamed(parts)
        cache = [1, heads, "past", width]
        graph = helper.make_graph(
            self._nodes,
            "decoder",
            [
                helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "tokens"]),
                helper.make_tensor_value_info("first_row", TensorProto.INT64, [1]),
                *(helper.make_tensor_value_info(f"{PAST}{part}", TensorProto.FLOAT, cache) for part in parts),
            ],
            [
                helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "rows", rows]),
                *(
                    helper.make_tensor_value_info(f"{PRESENT}{part}", TensorProto.FLOAT, [1, heads, "total", width])
                    for part in parts
                ),
            ],
            initializer=list(tensors.values()),
        )
        domains = {node.domain for node in self._nodes} | {""}
        opsets = [helper.make_opsetid(domain, self._opsets.get(domain, 1)) for domain in sorted(domains)]
        model = helper.make_model(graph, producer_name="edgespec", opset_imports=opsets, ir_version=8)
        return WholeGraph(
            model=model,
            weights=weights,
            block_count=layers,
            head_count_kv=heads,
            key_length=width,
            rows=rows,
            types=types,
            _tensors={each.name: each for each in model.graph.initializer},  # make_graph copies tensors
        )

    # --------------------------------------------------------------------------------- inputs and outputs

    def _check_names(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], parts: Sequence[str]) -> None:
        wanted = {"input_ids", *(f"{PAST}{part}" for part in parts)}
        known = wanted | {"attention_mask", "position_ids"}
        for name in [*sorted(wanted - inputs.keys()), *sorted(inputs.keys() - known)]:
            raise refuse(f"has the input {name[:64]!a}" if name in inputs else f"has no input {name}")
        for name in ("logits", *(f"{PRESENT}{part}" for part in parts)):
            if name not in outputs:
                raise refuse(f"has no output {name}")
        if not parts:
            raise refuse("has no cache")

    def _feed(self, inputs: Mapping[str, Any]) -> None:
        """Compute positions and mask in the graph: one sequence without gaps, which continues the past."""
        tokens = self._length_of("input_ids", 1)
        past = self._length_of(f"{PAST}0.key", 2)
        total = self._add("Add", [past, tokens])
        if "attention_mask" in inputs:
            shape = self._add("Concat", [self._integers([1]), total], axis=0)
            self._add("Expand", [self._integers(1), shape], "attention_mask")
        if "position_ids" in inputs:
            axis = self._integers([0])
            first, behind = (self._add("Squeeze", [each, axis]) for each in (past, total))
            positions = self._add("Range", [first, behind, self._integers(1)])
            # An extra token whose result is discarded may be at the position after the last.
            positions = self._add("Min", [positions, self._integers(self._context_length - 1)])
            self._add("Unsqueeze", [positions, axis], "position_ids")

    def _length_of(self, value: str, axis: int) -> str:
        return self._add("Gather", [self._add("Shape", [value]), self._integers([axis])], axis=0)

    def _score_last_rows(self) -> str | None:
        """Restrict the head to the rows from ``first_row`` on; returns the name of its weights, None if not found.

        A head that is not recognised computes all rows, and the graph returns the last ones.
        """
        makers = {name: node for node in self._nodes for name in node.output}
        end, axis = self._integers([np.iinfo(np.int64).max]), self._integers([1])
        node = makers.get("logits")
        while node is not None and node.op_type in _ELEMENTWISE:
            changing = [name for name in node.input if name not in self._tensors]
            node = makers.get(changing[0]) if len(changing) == 1 else None
        if node is not None and node.op_type in ("MatMul", "MatMulNBits") and node.input[1] in self._tensors:
            rows = self._add("Slice", [node.input[0], "first_row", end, axis], before=node)
            node.input[0] = rows
            return str(node.input[1])
        for each in self._nodes:
            for names in (each.output, each.input):
                for index, name in enumerate(names):
                    if name == "logits":
                        names[index] = "all_logits"
        self._add("Slice", ["all_logits", "first_row", end, axis], "logits")
        return None

    # ----------------------------------------------------------------------------------------- operators

    def _take(self, node: Any) -> None:
        """Keep an operator, without tensors in its attributes."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        if domain not in ("", _CONTRIB):
            raise refuse(f"uses operators of {domain[:64]!a}")
        if node.op_type == "Constant" and domain == "":
            self._aliases[node.output[0]] = self._constant(constant_value(node))
        elif node.op_type == "ConstantOfShape" and domain == "":
            value = next((array_of(each.t) for each in node.attribute), np.zeros(1, np.float32))
            lengths = self._aliases.get(node.input[0], node.input[0])
            shape = self._tensors.get(lengths)
            scalar = self._constant(np.asarray(value).reshape(()))
            if shape is not None and list(shape.dims) == [0]:
                self._add("Identity", [scalar], node.output[0])
            else:
                self._add("Expand", [scalar, lengths], node.output[0])
        else:
            for each in node.attribute:
                if each.type not in (
                    AttributeProto.FLOAT,
                    AttributeProto.INT,
                    AttributeProto.STRING,
                    AttributeProto.FLOATS,
                    AttributeProto.INTS,
                    AttributeProto.STRINGS,
                ):
                    raise refuse(f"has a {node.op_type[:64]!a} with a tensor or a subgraph in an attribute")
            kept = onnx.NodeProto()
            kept.CopyFrom(node)
            kept.domain, kept.doc_string = domain, ""
            del kept.metadata_props[:]
            for index, name in enumerate(kept.input):
                kept.input[index] = self._aliases.get(name, name)
            self._nodes.append(kept)

    def _add(self, operator: str, inputs: Sequence[str], output: str = "", before: Any = None, **values: Any) -> str:
        if not output:
            self._fresh += 1
            output = f"edgespec.{self._fresh}"
        node = helper.make_node(operator, inputs, [output], **values)
        at = len(self._nodes) if before is None else next(i for i, e in enumerate(self._nodes) if e is before)
        self._nodes.insert(at, node)
        return output

    # ----------------------------------------------------------------------------------------- constants

    def _integers(self, values: Any) -> str:
        return self._constant(np.array(values, dtype=np.int64))

    def _constant(self, value: npt.NDArray[Any]) -> str:
        """The name of an initializer; equal constants share an initializer."""
        key = (helper.np_dtype_to_tensor_dtype(value.dtype), value.shape, value.tobytes())
        if key not in self._same:
            self._fresh += 1
            self._same[key] = f"edgespec.{self._fresh}"
            self._tensors[self._same[key]] = numpy_helper.from_array(value, self._same[key])
        return self._same[key]

    def _admit_constants(self, used: Collection[str]) -> None:
        """Replace constants of types or shapes that the reader refuses."""
        behind = self._nodes
        self._nodes = []
        for name, tensor in list(self._tensors.items()):
            empty = 0 in tensor.dims
            if name not in used or (tensor.data_type in _ADMITTED and not empty):
                continue
            del self._tensors[name]
            if empty and tensor.data_type == TensorProto.INT64 and list(tensor.dims) == [0]:
                self._add("Shape", [self._integers(0)], name)  # the shape of a scalar is empty
                continue
            value = None if empty else array_of(tensor)
            if value is not None and tensor.data_type == TensorProto.BOOL:
                self._add("Cast", [self._constant(value.astype(np.uint8))], name, to=TensorProto.BOOL)
            elif value is not None and tensor.data_type == TensorProto.DOUBLE and fits_float32(value):
                self._add("Cast", [self._constant(value.astype(np.float32))], name, to=TensorProto.DOUBLE)
            else:
                kind = TensorProto.DataType.Name(tensor.data_type)
                raise refuse(f"holds a constant of the type {kind} and the shape {list(tensor.dims)}")
        self._nodes += behind

    # ----------------------------------------------------------------------------------- what is used

    def _used(self, wanted: Iterable[str]) -> set[str]:
        """Drop unused operators; returns all remaining names."""
        names, kept = set(wanted), []
        for node in reversed(self._nodes):
            if names.intersection(node.output):
                kept.append(node)
                names.update(name for name in node.input if name)
        self._nodes = kept[::-1]
        return names

    def _types(self, head: str | None) -> dict[str, str]:
        found: dict[str, Counter[str]] = {}
        for node in self._nodes:
            # MatMulNBits has scales after the weights: scales count as part of the weights.
            indices = {"Gather": 0, "MatMul": 1, "MatMulNBits": 1, "Gemm": 1}
            index = indices.get(node.op_type)
            tensor = None if index is None else self._tensors.get(node.input[index])
            if tensor is None or len(tensor.dims) < 2:
                continue
            kind = (
                "4-bit" if node.op_type == "MatMulNBits" else str(helper.tensor_dtype_to_np_dtype(tensor.data_type))
            )
            part = "head" if node.input[1] == head else part_of(node)
            found.setdefault(part, Counter())[kind] += 1
        return {part: ", ".join(sorted(kinds)) for part, kinds in sorted(found.items())}

    def _renamed(self, parts: Sequence[str]) -> tuple[dict[str, Any], tuple[Weight, ...]]:
        """Give values short names; returns the used initializers, and the weights among them in external files."""
        fixed = {"input_ids", "first_row", "logits", ""}
        fixed.update(f"{prefix}{part}" for prefix in (PAST, PRESENT) for part in parts)
        names: dict[str, str] = {name: name for name in fixed}
        tensors: dict[str, Any] = {}
        weights: list[Weight] = []
        for node in self._nodes:
            for index, name in enumerate(node.input):
                tensor = self._tensors.get(name)
                if tensor is not None and name not in names:
                    names[name] = f"w{len(tensors)}"
                    tensors[names[name]] = self._stored(tensor, names[name], weights)
                elif name not in names:
                    raise refuse(f"uses {name[:64]!a}, which no operator computes")
                node.input[index] = names[name]
            for index, name in enumerate(node.output):
                if name not in names:
                    names[name] = f"v{len(names)}"
                node.output[index] = names[name]
            node.name = ""
        return tensors, tuple(weights)

    def _stored(self, tensor: Any, name: str, weights: list[Weight]) -> Any:
        stored = onnx.TensorProto(name=name, data_type=tensor.data_type, dims=tensor.dims)
        if tensor.data_location != TensorProto.EXTERNAL:
            stored.raw_data = numpy_helper.from_array(array_of(tensor)).raw_data
            return stored
        where = {entry.key: entry.value for entry in tensor.external_data}
        offset, length = (int(where.get(key, "0")) for key in ("offset", "length"))
        if where.get("location") != self._data_name or not 0 <= offset <= offset + length <= self._data_bytes:
            raise refuse(f"has weights outside of {self._data_name}")
        stored.data_location = TensorProto.EXTERNAL
        weights.append(Weight(name, offset, length))
        return stored
