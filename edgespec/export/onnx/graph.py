"""Builds the ONNX graph of a language model from its shape and the plan of its tables.

A forward appends S tokens to one sequence. ``files/onnx/folder.py`` checks the graph's interface:

* ``input_ids`` int64 (1, S); ``first_row`` int64 (1,): logits are computed only for the tokens first_row to S - 1.
* ``seqlens_k`` int32 (1,): the total length after this forward minus one; ``total_sequence_length`` int32 (): the
  total length.
* ``past_key_values.{i}.key`` and ``.value``, float32 (1, key-value heads, capacity, head length): the first
  total - S positions are valid; ``present.{i}.key`` and ``.value``: the same shape, bound to the same buffers.
* ``logits`` float32 (1, S - first_row, rows of the head); for a trimmed head also ``kept_ids`` int64 (rows,), the
  token of each row.

Every execution provider of ONNX Runtime has kernels for the operators: MatMulNBits, GroupQueryAttention (Ainslie et
al., 2023), SkipSimplifiedLayerNormalization (RMSNorm, Zhang and Sennrich, 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgespec.architectures.shape import Layer, Shape
from edgespec.export.onnx.tables import Stored, Table, TablePlan
from edgespec.export.onnx.weights import BLOCK
from edgespec.files.onnx.artefact import DATA_NAME
from edgespec.files.onnx.interface import KEPT_IDS

# The newest opset and IR version that ONNX Runtime 1.22, the oldest supported release, reads.
_OPSET, _IR_VERSION = 21, 10
_CONTRIB = "com.microsoft"

# int8 activations in blocks and integer products, as in llama.cpp: the most exact accuracy level that is fast.
_ACCURACY_LEVEL = 4

_ELEMENTS = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "uint8": TensorProto.UINT8,
    "int64": TensorProto.INT64,
}
TO_THE_END = np.iinfo(np.int64).max


def build_graph(shape: Shape, plan: TablePlan) -> Any:
    """The model as an ``onnx.ModelProto``; all tables are external data in ``model.onnx.data``."""
    return GraphBuilder(shape, plan).build()


class GraphBuilder:
    """Builder of the graph above. ``static_graph.py`` overrides how the graph takes and returns its cache."""

    def __init__(self, shape: Shape, plan: TablePlan) -> None:
        self._shape, self._plan = shape, plan
        self._nodes: list[Any] = []
        self._constants: dict[str, Any] = {}

    def build(self) -> Any:
        """Build the model, whose constants are declared but not read. Call once."""
        self._compute()
        inputs, outputs = self._interface()
        if self._plan.kept_ids is not None:
            self._add("Identity", [self._external(self._plan.kept_ids)], KEPT_IDS)
            outputs.append(helper.make_tensor_value_info(KEPT_IDS, TensorProto.INT64, (self._plan.head.rows,)))
        name = self._shape.architecture.name
        graph = helper.make_graph(self._nodes, name, inputs, outputs, initializer=list(self._constants.values()))
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_CONTRIB, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="edgespec")

    def _interface(self) -> tuple[list[Any], list[Any]]:
        """Inputs and outputs, without ``kept_ids`` of a trimmed head."""
        shape = self._shape
        cache = (1, shape.sizes.kv_heads, "capacity", shape.sizes.head)
        inputs = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, (1, "tokens")),
            helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, (1,)),
            helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, ()),
            helper.make_tensor_value_info("first_row", TensorProto.INT64, (1,)),
        ]
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, (1, "rows", self._plan.head.rows))]
        for layer in range(len(shape.layers)):
            for part in ("key", "value"):
                past, present = f"past_key_values.{layer}.{part}", f"present.{layer}.{part}"
                inputs.append(helper.make_tensor_value_info(past, TensorProto.FLOAT, cache))
                outputs.append(helper.make_tensor_value_info(present, TensorProto.FLOAT, cache))
        return inputs, outputs

    # ------------------------------------------------------------------------------------------ the model

    def _compute(self) -> None:
        layers = self._shape.layers
        residual = self._embedding()
        normed = self._norm(residual, "blk.0.attn_norm")
        for number, layer in enumerate(layers):
            name = f"blk.{number}"
            attended = self._ended(self._attention(number, layer, normed), layer, f"{name}.post_attention_norm")
            normed, residual = self._add_and_norm(attended, residual, f"{name}.ffn_norm")
            fed = self._ended(self._feed_forward(name, normed), layer, f"{name}.post_ffw_norm")
            if number < len(layers) - 1:
                normed, residual = self._add_and_norm(fed, residual, f"blk.{number + 1}.attn_norm")
            else:
                normed, _ = self._add_and_norm(self._last_rows(fed), self._last_rows(residual), "output_norm")
        logits, scale = self._plan.head, self._shape.scales.logit
        if scale == 1.0:
            self._matrix(normed, logits, "logits")
        else:
            self._scaled(self._matrix(normed, logits), scale, "logits")

    def _ended(self, values: str, layer: Layer, norm: str) -> str:
        """What half of a layer adds: its output, normalised if the layer has that norm, and scaled."""
        if norm.rpartition(".")[2] in layer.parts:
            values = self._norm(values, norm)
        return self._scaled(values, self._shape.scales.residual, f"{values}.scaled")

    def _scaled(self, values: str, scale: float, out: str) -> str:
        return values if scale == 1.0 else self._add("Mul", [values, self._number(scale)], out)

    def _embedding(self) -> str:
        """The tokens' embeddings as float32 (1, S, embedding length); only the needed rows of blocks are unpacked."""
        table, width = self._plan.tables["embedding"], self._shape.sizes.width
        rows = self._add("Gather", [self._external(table.values), "input_ids"], "embedding.rows", axis=0)
        if table.bits is None:
            values = self._as_float(rows, table.values)
        else:
            values = self._unpacked(rows, table)
            values = self._add("Reshape", [values, self._integers((0, 0, width))], "embedding.values")
        return self._scaled(values, self._shape.scales.embedding, "embedding.scaled")

    def _unpacked(self, rows: str, table: Table) -> str:
        assert table.bits is not None
        assert table.scales is not None
        blocks = self._shape.sizes.width // BLOCK
        if table.bits == 4:
            behind = self._integers((-1,))
            halves = [
                self._add("BitwiseAnd", [rows, self._byte(15)], "embedding.low"),
                self._add("BitShift", [rows, self._byte(4)], "embedding.high", direction="RIGHT"),
            ]
            halves = [self._add("Unsqueeze", [half, behind], f"{half}.pair") for half in halves]
            pairs = self._add("Concat", halves, "embedding.pairs", axis=-1)
            rows = self._add("Reshape", [pairs, self._integers((0, 0, blocks, BLOCK))], "embedding.integers")
        integers = self._add("Cast", [rows], "embedding.numbers", to=TensorProto.FLOAT)
        centred = self._add("Sub", [integers, self._number(1 << (table.bits - 1))], "embedding.centred")
        # The same bytes with another shape: a row of scales per token.
        by_row = self._external(table.scales, "embedding.row_scales", (table.rows, blocks, 1))
        scales = self._add("Gather", [by_row, "input_ids"], "embedding.scales_of_rows", axis=0)
        return self._add("Mul", [centred, self._as_float(scales, table.scales)], "embedding.blocks")

    def _attention(self, number: int, layer: Layer, normed: str) -> str:
        shape, name = self._shape, f"blk.{number}"
        qkv = self._projected(name, normed)
        if len(qkv) == 1:
            qkv = [*qkv, "", ""]
        rope = self._plan.ropes[shape.ropes[layer.rope]]
        inputs = [
            *qkv,
            f"past_key_values.{number}.key",
            f"past_key_values.{number}.value",
            "seqlens_k",
            "total_sequence_length",
            self._external(rope.cosines),
            self._external(rope.sines),
        ]
        outputs = [f"{name}.attended", f"present.{number}.key", f"present.{number}.value"]
        attributes: dict[str, Any] = {
            "num_heads": shape.sizes.heads,
            "kv_num_heads": shape.sizes.kv_heads,
            "scale": shape.score_scale,
            "do_rotary": 1,
            "rotary_interleaved": int(shape.architecture.neighbours),
        }
        if layer.window:
            attributes["local_window_size"] = layer.window
        self._node("GroupQueryAttention", inputs, outputs, _CONTRIB, attributes)
        return self._matrix(outputs[0], self._plan.tables[f"{name}.attn_output"])

    def _projected(self, name: str, normed: str) -> list[str]:
        """Queries, keys and values before rotation, each (1, S, heads * head length), or all in one tensor."""
        packed = self._plan.tables.get(f"{name}.attn_qkv")
        if packed is not None:
            return [self._matrix(normed, packed)]
        query, key, value = (
            self._matrix(normed, self._plan.tables[f"{name}.{part}"]) for part in ("attn_q", "attn_k", "attn_v")
        )
        if f"{name}.attn_q_norm" in self._plan.tables:
            query = self._head_norm(query, f"{name}.attn_q_norm", self._shape.sizes.heads)
            key = self._head_norm(key, f"{name}.attn_k_norm", self._shape.sizes.kv_heads)
        return [query, key, value]

    def _head_norm(self, values: str, table: str, heads: int) -> str:
        length = self._shape.sizes.head
        split = self._add("Reshape", [values, self._integers((0, 0, heads, length))], f"{table}.heads")
        normed = self._norm(split, table)
        return self._add("Reshape", [normed, self._integers((0, 0, heads * length))], f"{table}.joined")

    def _feed_forward(self, name: str, normed: str) -> str:
        gate = self._matrix(normed, self._plan.tables[f"{name}.ffn_gate"])
        up = self._matrix(normed, self._plan.tables[f"{name}.ffn_up"])
        if self._shape.architecture.gelu:
            gated = self._add("Gelu", [gate], f"{name}.gelu", approximate="tanh")
        else:
            share = self._add("Sigmoid", [gate], f"{name}.sigmoid")
            gated = self._add("Mul", [gate, share], f"{name}.silu")
        product = self._add("Mul", [gated, up], f"{name}.gated")
        return self._matrix(product, self._plan.tables[f"{name}.ffn_down"])

    def _last_rows(self, values: str) -> str:
        ends, axes = self._integers((TO_THE_END,)), self._integers((1,))
        return self._add("Slice", [values, "first_row", ends, axes], f"{values}.last")

    def _norm(self, values: str, table: str) -> str:
        weights = self._external(self._plan.tables[table].values)
        # ONNX Runtime has this operator in ONNX's default domain.
        attributes = {"axis": -1, "epsilon": self._shape.norm_epsilon, "stash_type": 1}
        return self._add("SimplifiedLayerNormalization", [values, weights], f"{table}.out", **attributes)

    def _add_and_norm(self, values: str, residual: str, table: str) -> tuple[str, str]:
        """The sum of ``values`` and ``residual``, (normalised, plain)."""
        weights = self._external(self._plan.tables[table].values)
        outputs = [f"{table}.out", "", "", f"{table}.sum"]
        attributes = {"epsilon": self._shape.norm_epsilon}
        self._node("SkipSimplifiedLayerNormalization", [values, residual, weights], outputs, _CONTRIB, attributes)
        return outputs[0], outputs[3]

    def _matrix(self, values: str, table: Table, out: str | None = None) -> str:
        """values (1, S, columns) times the table's rows, plus the table's bias, if any."""
        out = out or f"{table.name}.out"
        bias_table = self._plan.tables.get(f"{table.name}.bias")
        bias = None if bias_table is None else self._external(bias_table.values)
        weights = self._external(table.values)
        if table.bits is not None and table.scales is not None:
            inputs = [values, weights, self._external(table.scales)]
            attributes = {
                "K": table.values.shape[1] * BLOCK,
                "N": table.rows,
                "bits": table.bits,
                "block_size": BLOCK,
                "accuracy_level": _ACCURACY_LEVEL,
            }
            self._node(
                "MatMulNBits", inputs if bias is None else [*inputs, "", "", bias], [out], _CONTRIB, attributes
            )
            return out
        product = out if bias is None else f"{table.name}.product"
        self._node("FusedMatMul", [values, weights], [product], _CONTRIB, {"transB": 1})
        return out if bias is None else self._add("Add", [product, bias], out)

    # --------------------------------------------------------------------------------- nodes and constants

    def _as_float(self, values: str, stored: Stored) -> str:
        if stored.element == "float32":
            return values
        return self._add("Cast", [values], f"{values}.float", to=TensorProto.FLOAT)

    def _add(self, operator: str, inputs: Sequence[str], out: str, **attributes: Any) -> str:
        self._node(operator, inputs, [out], "", attributes)
        return out

    def _node(
        self, operator: str, inputs: Sequence[str], outputs: Sequence[str], domain: str, attributes: dict[str, Any]
    ) -> None:
        self._nodes.append(helper.make_node(operator, inputs, outputs, name=outputs[0], domain=domain, **attributes))

    def _external(self, stored: Stored, name: str | None = None, shape: tuple[int, ...] | None = None) -> str:
        """The name of a constant in the data file, which is declared at its first use."""
        name = name or stored.name
        if name not in self._constants:
            tensor = onnx.TensorProto(name=name, data_type=_ELEMENTS[stored.element])
            tensor.dims.extend(stored.shape if shape is None else shape)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in {"location": DATA_NAME, "offset": stored.offset, "length": stored.byte_count}.items():
                tensor.external_data.add(key=key, value=str(value))
            self._constants[name] = tensor
        return name

    def _integers(self, values: tuple[int, ...]) -> str:
        return self._inline("integers." + ".".join(map(str, values)), np.array(values, dtype=np.int64))

    def _number(self, value: float) -> str:
        return self._inline(f"number.{value}", np.array(value, dtype=np.float32))

    def _byte(self, value: int) -> str:
        return self._inline(f"byte.{value}", np.array(value, dtype=np.uint8))

    def _inline(self, name: str, array: np.ndarray[Any, Any]) -> str:
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(array, name)
        return name
