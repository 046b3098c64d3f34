"""Plans the weight tables of an ONNX model: their formats and their offsets in the data file.

Pure functions from a GGUF header and a shape to a plan. ``graph.py`` uses the tables in nodes, ``export.py`` writes
them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from edgespec.architectures.shape import EMBEDDING, HEAD, OUTPUT_NORM, Layer, Part, Rope, Shape
from edgespec.errors import InvalidRequestError
from edgespec.export.onnx.weights import BLOCK, can_read, exact_bits
from edgespec.files.gguf.records import GGML_TYPES, PLAIN_TYPES, GgufHeader, TensorInfo

QUANTS = ("keep", "q4")

ALIGNMENT = 4096  # bytes: the smallest page size of known machines, so that every table can be mapped separately

# Bits per weight of Q4_0. llama.cpp keeps the head of 4-bit models at 6 or 8 bits, where rounding harms most.
_MOST_HEAD_BITS = 4.5

_BITS = {name: 8 * size / elements for name, elements, size in GGML_TYPES.values()}

Element: TypeAlias = Literal["float32", "float16", "bfloat16", "uint8", "int64"]
_ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "int64": 8}
)
_PLAIN_ELEMENTS: Mapping[str, Element] = MappingProxyType({"F32": "float32", "F16": "float16", "BF16": "bfloat16"})

Ids: TypeAlias = npt.NDArray[np.int32]

_INPUTS = ("attn_q", "attn_k", "attn_v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A constant of the graph: its name, and its offset in the data file in bytes."""

    name: str
    element: Element
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) * _ELEMENT_BYTES[self.element]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The stacked rows of one or more tensors of the source.

    With ``bits`` (4 or 8) the rows are packed ``values`` and ``scales`` as in ``weights.py``; without, ``values`` are
    numbers. ``ids`` are the kept rows, None for all. ``role`` is the table's part of the model.
    """

    name: str
    role: str
    tensors: tuple[TensorInfo, ...]
    values: Stored
    bits: int | None = None
    scales: Stored | None = None
    ids: Ids | None = None

    @property
    def rows(self) -> int:
        return self.values.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTable:
    """Cosines and sines of one rope, each float32 (positions, head length / 2)."""

    rope: Rope
    cosines: Stored
    sines: Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """All tables by name, with offsets. ``head`` may be the table ``embedding``; ``kept_ids``: int64 (kept,)."""

    tables: Mapping[str, Table]
    ropes: Mapping[Rope, RopeTable]
    kept_ids: Stored | None
    data_bytes: int

    @property
    def head(self) -> Table:
        return self.tables.get("head", self.tables["embedding"])

    def types(self) -> dict[str, str]:
        """The conversion of each role's weights as text: "Q4_0 as 4-bit", "Q6_K rounded to 8-bit"."""
        found: dict[str, Counter[str]] = {}
        tables = dict(self.tables) if "head" in self.tables else {**self.tables, "head": self.head}
        for name, table in tables.items():
            role = "head" if name == "head" else table.role
            for tensor in table.tensors:
                found.setdefault(role, Counter())[_text(tensor, table)] += 1
        return {role: ", ".join(sorted(texts)) for role, texts in sorted(found.items())}


def _text(tensor: TensorInfo, table: Table) -> str:
    if table.bits is None:
        element = table.values.element
        return f"{tensor.type_name} as {element}"
    how = "as" if exact_bits(tensor.type_name) == table.bits else "rounded to"
    return f"{tensor.type_name} {how} {table.bits}-bit"


def plan_tables(header: GgufHeader, shape: Shape, quant: str, kept: Ids | None) -> TablePlan:
    """Plan the tables of the model of ``header`` at ``quant``; the head has the rows ``kept`` (None: all).

    ``shape`` was read from the same header. Raises InvalidRequestError for an unknown quantisation or a tensor of a
    type that cannot be read.
    """
    if quant not in QUANTS:
        raise InvalidRequestError(f"unknown quantisation {quant!r}", hint=f"for ONNX one of {', '.join(QUANTS)}")
    return _Planner(header, shape, quant, kept).plan()


class _Planner:
    def __init__(self, header: GgufHeader, shape: Shape, quant: str, kept: Ids | None) -> None:
        self._header, self._shape, self._quant, self._kept = header, shape, quant, kept
        self._tensors = {tensor.name: tensor for tensor in header.tensors}
        self._tables: dict[str, Table] = {}

    def plan(self) -> TablePlan:
        self._embedding_and_head()
        for number, layer in enumerate(self._shape.layers):
            self._layer(f"blk.{number}", layer)
        self._vector("output_norm", OUTPUT_NORM, self._shape.sizes.width)
        for rope in self._shape.ropes:
            if rope.factors is not None:
                self._take(rope.factors)
        return self._placed()

    # ---------------------------------------------------------------------------------------- tables

    def _embedding_and_head(self) -> None:
        tied, width, count = self._shape.tied, self._shape.sizes.width, self._shape.rows
        embedding = self._take(EMBEDDING)
        head = embedding if tied else self._take(HEAD)
        head_bits = self._bits(head, is_head=True)
        # A tied table is also the head, so it gets no fewer bits than a head.
        bits = head_bits if tied else self._bits(embedding, is_head=False)
        if bits is None:  # only plain types: all other types have blocks of at least 32
            element = _PLAIN_ELEMENTS[embedding.type_name]
            values = Stored(name="embedding.weight", element=element, shape=(count, width))
            self._add(Table(name="embedding", role="embedding", tensors=(embedding,), values=values))
            shared = tied and element == "float32"
        else:
            shared = tied and self._kept is None
            # Scales are float16 in the source; only MatMulNBits needs them as float32.
            scales: Element = "float32" if shared else "float16"
            self._add(self._packed("embedding", "embedding", (embedding,), count, width, bits, scales))
        if not (shared and self._kept is None):
            rows = count if self._kept is None else len(self._kept)
            self._add(replace(self._table("head", "head", (head,), rows, width, head_bits), ids=self._kept))

    def _layer(self, block: str, layer: Layer) -> None:
        joined = {} if self._inputs_differ(layer) else dict.fromkeys(_INPUTS, "attn_qkv")
        together: dict[str, list[Part]] = {}
        for role, part in layer.parts.items():
            together.setdefault(joined.get(role, role), []).append(part)
        for name, parts in together.items():
            if parts[0].columns is None:
                self._vector(f"{block}.{name}", parts[0].tensor, parts[0].rows)
            else:
                self._matrices(f"{block}.{name}", name, parts)

    def _inputs_differ(self, layer: Layer) -> bool:
        """Whether q, k and v cannot be one matrix, which would save two operators."""
        parts = [layer.parts[role] for role in _INPUTS]
        forms = {(self._bits(self._tensors[part.tensor], is_head=False), part.bias is None) for part in parts}
        return len(forms) != 1 or "attn_q_norm" in layer.parts

    def _matrices(self, name: str, role: str, parts: list[Part]) -> None:
        """One table of several parts with the same columns, one below the other."""
        tensors = tuple(self._rows_of(part.tensor, part) for part in parts)
        rows, columns = sum(part.rows for part in parts), tensors[0].shape[0]
        self._add(self._table(name, role, tensors, rows, columns, self._bits(tensors[0], is_head=False)))
        biases = tuple(self._rows_of(part.bias, part) for part in parts if part.bias is not None)
        if biases:
            self._add(self._plain(f"{name}.bias", "biases", biases, (rows,)))

    def _rows_of(self, tensor: str, part: Part) -> TensorInfo:
        return self._take(tensor).some_rows(part.first, part.rows)

    def _vector(self, name: str, tensor: str, length: int) -> None:
        self._add(self._plain(name, "norms", (self._take(tensor),), (length,)))

    def _table(
        self, name: str, role: str, tensors: tuple[TensorInfo, ...], rows: int, columns: int, bits: int | None
    ) -> Table:
        if bits is None:
            return self._plain(name, role, tensors, (rows, columns))
        return self._packed(name, role, tensors, rows, columns, bits, "float32")

    @staticmethod
    def _plain(name: str, role: str, tensors: tuple[TensorInfo, ...], shape: tuple[int, ...]) -> Table:
        values = Stored(name=f"{name}.weight", element="float32", shape=shape)
        return Table(name=name, role=role, tensors=tensors, values=values)

    @staticmethod
    def _packed(
        name: str,
        role: str,
        tensors: tuple[TensorInfo, ...],
        rows: int,
        columns: int,
        bits: int,
        scales: Element,
    ) -> Table:
        blocks = columns // BLOCK
        return Table(
            name=name,
            role=role,
            tensors=tensors,
            values=Stored(name=f"{name}.weight", element="uint8", shape=(rows, blocks, BLOCK * bits // 8)),
            bits=bits,
            # Every release of the operator accepts one dimension.
            scales=Stored(name=f"{name}.scales", element=scales, shape=(rows * blocks,)),
        )

    def _bits(self, tensor: TensorInfo, *, is_head: bool) -> int | None:
        """The bits per weight of a matrix in the graph; None for plain numbers."""
        if tensor.shape[0] % BLOCK:
            return None
        if self._quant == "q4":
            return 8 if is_head and _BITS[tensor.type_name] > _MOST_HEAD_BITS else 4
        if tensor.type_name in PLAIN_TYPES:
            return None
        return exact_bits(tensor.type_name) or 8

    # --------------------------------------------------------------------------------------- tensors

    def _take(self, name: str) -> TensorInfo:
        tensor = self._tensors[name]
        if not can_read(tensor.type_name):
            raise InvalidRequestError(
                f"{self._header.path.name} stores {name} as {tensor.type_name}, which the ONNX export cannot read",
                hint="export it with `--to gguf`",
            )
        return tensor

    def _add(self, table: Table) -> None:
        self._tables[table.name] = table

    # ---------------------------------------------------------------------------------------- offsets

    def _placed(self) -> TablePlan:
        end = 0

        def put(stored: Stored) -> Stored:
            nonlocal end
            located = replace(stored, offset=end)
            end = -(-(end + located.byte_count) // ALIGNMENT) * ALIGNMENT
            return located

        tables = {}
        for name, table in self._tables.items():
            values = put(table.values)
            scales = None if table.scales is None else put(table.scales)
            tables[name] = replace(table, values=values, scales=scales)
        # One position more than the context: a forward of one row may run with an extra, discarded row.
        size = (self._shape.sizes.context + 1, self._shape.rope_length // 2)
        ropes = {}
        for number, rope in enumerate(dict.fromkeys(self._shape.ropes[layer.rope] for layer in self._shape.layers)):
            cosines = put(Stored(name=f"rope.{number}.cosines", element="float32", shape=size))
            sines = put(Stored(name=f"rope.{number}.sines", element="float32", shape=size))
            ropes[rope] = RopeTable(rope=rope, cosines=cosines, sines=sines)
        kept = self._kept
        kept_ids = None if kept is None else Stored(name="kept_ids.values", element="int64", shape=(len(kept),))
        return TablePlan(
            tables=MappingProxyType(tables),
            ropes=MappingProxyType(ropes),
            kept_ids=None if kept_ids is None else put(kept_ids),
            data_bytes=end,
        )
