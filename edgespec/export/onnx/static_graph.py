"""Builds the ONNX graph of a language model with fixed shapes, for devices that compile operators per shape.

The cache holds N tokens. The only open length is W, the width of a forward: a named free dimension, ``tokens``, which
the runtime fixes when it loads the graph. ``files/onnx/interface.py`` checks the interface:

* ``input_ids`` and ``position_ids`` int64 (1, W); ``scored_row`` int64 (1,): which of the W tokens is scored.
* ``past_mask`` float32 (1, 1, W, N) and ``new_mask`` float32 (1, 1, W, W) are added to the attention scores of the
  cache and of the new tokens: 0 for a visible token, a large negative number otherwise. Layers with a sliding window
  use ``past_window_mask`` and ``new_window_mask``.
* ``past_key_values.{i}.key`` and ``.value`` float32 (1, key-value heads, N, head length): the cache. ``new.{i}.key``
  and ``.value`` float32 (1, key-value heads, W, head length): the rows of the new tokens, which the caller writes
  into the cache. So dropping tokens only lowers a length, and the graph copies no cache.
* ``logits`` float32 (1, 1, rows of the head); for a trimmed head also ``kept_ids`` int64 (rows,).

Attention consists of ordinary operators. If a model pairs neighbours, queries and keys are rotated in another order
of elements: scores are sums over pairs and do not depend on the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import TensorProto, helper

from edgespec.architectures.shape import Layer, Rope, Shape
from edgespec.export.onnx.graph import TO_THE_END, GraphBuilder
from edgespec.export.onnx.tables import TablePlan


def build_static_graph(shape: Shape, plan: TablePlan, *, capacity: int) -> Any:
    """The model with a cache of ``capacity`` tokens as an ``onnx.ModelProto``; all tables are external data."""
    return _StaticBuilder(shape, plan, capacity).build()


class _StaticBuilder(GraphBuilder):
    def __init__(self, shape: Shape, plan: TablePlan, capacity: int) -> None:
        super().__init__(shape, plan)
        self._capacity = capacity
        self._rotations: dict[Rope, tuple[str, str]] = {}
        self._masks: dict[str, str] = {}

    def _interface(self) -> tuple[list[Any], list[Any]]:
        shape, rows = self._shape, self._plan.head.rows
        cache = (1, shape.sizes.kv_heads, self._capacity, shape.sizes.head)
        new = (1, shape.sizes.kv_heads, "tokens", shape.sizes.head)
        inputs = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, (1, "tokens")),
            helper.make_tensor_value_info("position_ids", TensorProto.INT64, (1, "tokens")),
            helper.make_tensor_value_info("scored_row", TensorProto.INT64, (1,)),
        ]
        for kind in _mask_kinds(shape.layers):
            for part, count in zip(("past", "new"), (self._capacity, "tokens"), strict=True):
                length = (1, 1, "tokens", count)
                inputs.append(helper.make_tensor_value_info(f"{part}_{kind}", TensorProto.FLOAT, length))
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, (1, 1, rows))]
        for layer in range(len(shape.layers)):
            for part in ("key", "value"):
                past = f"past_key_values.{layer}.{part}"
                inputs.append(helper.make_tensor_value_info(past, TensorProto.FLOAT, cache))
                outputs.append(helper.make_tensor_value_info(f"new.{layer}.{part}", TensorProto.FLOAT, new))
        return inputs, outputs

    def _attention(self, number: int, layer: Layer, normed: str) -> str:
        shape, sizes, name = self._shape, self._shape.sizes, f"blk.{number}"
        rope = shape.ropes[layer.rope]
        query, key, value = self._split_heads(name, self._projected(name, normed))
        query = self._rotated(query, rope, f"{name}.query")
        key = self._rotated(key, rope, f"{name}.key")
        new_key = self._add("Transpose", [key], f"new.{number}.key", perm=(0, 2, 1, 3))
        new_value = self._add("Transpose", [value], f"new.{number}.value", perm=(0, 2, 1, 3))
        # Stack the queries that share a key-value head: (1, key-value heads, queries per head * W, ...).
        query = self._add("Mul", [query, self._number(shape.score_scale)], f"{name}.scaled")
        query = self._add("Transpose", [query], f"{name}.by_head", perm=(0, 2, 1, 3))
        together = self._integers((1, sizes.kv_heads, -1, sizes.head))
        query = self._add("Reshape", [query, together], f"{name}.queries")
        kind = _mask_kind(layer)
        scores = [
            self._scores(query, keys, f"{part}_{kind}", f"{name}.{part}")
            for part, keys in (("past", f"past_key_values.{number}.key"), ("new", new_key))
        ]
        both = self._add("Concat", scores, f"{name}.scores", axis=3)
        shares = self._add("Softmax", [both], f"{name}.shares", axis=-1)
        past_shares = self._columns(shares, 0, self._capacity, f"{name}.past_shares")
        new_shares = self._columns(shares, self._capacity, TO_THE_END, f"{name}.new_shares")
        past = self._add("MatMul", [past_shares, f"past_key_values.{number}.value"], f"{name}.past_seen")
        new = self._add("MatMul", [new_shares, new_value], f"{name}.new_seen")
        attended = self._add("Add", [past, new], f"{name}.seen")
        apart = self._integers((1, sizes.heads, -1, sizes.head))
        attended = self._add("Reshape", [attended, apart], f"{name}.heads")
        attended = self._add("Transpose", [attended], f"{name}.by_token", perm=(0, 2, 1, 3))
        joined = self._integers((0, 0, sizes.queries))
        attended = self._add("Reshape", [attended, joined], f"{name}.attended")
        return self._matrix(attended, self._plan.tables[f"{name}.attn_output"])

    def _split_heads(self, name: str, projected: Sequence[str]) -> list[str]:
        """Queries, keys and values, each (1, W, heads, head length)."""
        sizes = self._shape.sizes
        counts = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        if len(projected) == 1:
            lengths = self._integers((sizes.queries, sizes.keys, sizes.keys))
            outputs = [f"{name}.{part}.flat" for part in ("query", "key", "value")]
            self._node("Split", [projected[0], lengths], outputs, "", {"axis": 2})
            projected = outputs
        return [
            self._add("Reshape", [values, self._integers((0, 0, count, sizes.head))], f"{values}.heads")
            for values, count in zip(projected, counts, strict=True)
        ]

    def _rotated(self, values: str, rope: Rope, name: str) -> str:
        """values (1, W, heads, head length), rotated by the positions; all left elements of pairs come first."""
        cosines, sines = self._rotation(rope)
        if self._shape.architecture.neighbours:
            left, right = (self._columns(values, start, TO_THE_END, f"{name}.{start}", 2) for start in (0, 1))
        else:
            half = self._shape.sizes.head // 2
            left = self._columns(values, 0, half, f"{name}.0")
            right = self._columns(values, half, TO_THE_END, f"{name}.1")
        products = {
            (side, by): self._add("Mul", [side, by], f"{side}.by.{by}")
            for side in (left, right)
            for by in (cosines, sines)
        }
        turned = [
            self._add("Sub", [products[left, cosines], products[right, sines]], f"{name}.left"),
            self._add("Add", [products[right, cosines], products[left, sines]], f"{name}.right"),
        ]
        return self._add("Concat", turned, f"{name}.rotated", axis=3)

    def _rotation(self, rope: Rope) -> tuple[str, str]:
        """Cosines and sines of the new positions, each (1, W, 1, head length / 2); computed once per kind of rope."""
        if rope not in self._rotations:
            table = self._plan.ropes[rope]
            rows = [
                self._add("Gather", [self._external(stored), "position_ids"], f"{stored.name}.rows", axis=0)
                for stored in (table.cosines, table.sines)
            ]
            every_head = self._integers((2,))
            cosines, sines = (self._add("Unsqueeze", [each, every_head], f"{each}.heads") for each in rows)
            self._rotations[rope] = cosines, sines
        return self._rotations[rope]

    def _scores(self, query: str, keys: str, mask: str, name: str) -> str:
        turned = self._add("Transpose", [keys], f"{name}_keys", perm=(0, 1, 3, 2))
        product = self._add("MatMul", [query, turned], f"{name}_products")
        return self._add("Add", [product, self._mask(mask)], f"{name}_scores")

    def _mask(self, name: str) -> str:
        """The mask, repeated for all queries that share a head: (1, 1, queries per head * W, ...)."""
        sharing = self._shape.sizes.heads // self._shape.sizes.kv_heads
        if sharing == 1:
            return name
        if name not in self._masks:
            self._masks[name] = self._add("Concat", [name] * sharing, f"{name}.repeated", axis=2)
        return self._masks[name]

    def _columns(self, values: str, start: int, end: int, out: str, step: int = 1) -> str:
        """A slice of the last of four axes."""
        numbers = [self._integers((number,)) for number in (start, end, 3, step)]
        return self._add("Slice", [values, *numbers], out)

    def _last_rows(self, values: str) -> str:
        return self._add("Gather", [values, "scored_row"], f"{values}.scored", axis=1)


def _mask_kind(layer: Layer) -> str:
    return "window_mask" if layer.window else "mask"


def _mask_kinds(layers: Sequence[Layer]) -> list[str]:
    return ["mask", "window_mask"] if any(layer.window for layer in layers) else ["mask"]
