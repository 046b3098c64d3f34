"""Plans the weight tables of an ONNX model: their formats and their places in the data file.

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

from edgespec.errors import InvalidRequestError, ModelFileError
from edgespec.export.onnx.architectures import ModelShape, Rope
from edgespec.export.onnx.weights import BLOCK, PLAIN_TYPES, can_read, exact_bits
from edgespec.files.gguf.records import GGML_TYPES, GgufHeader, TensorInfo

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A constant of the graph: its name, and its place in the data file in bytes."""

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
    """All tables by name, with their places. ``head`` may be the table ``embedding``; ``kept_ids``: int64 (kept,)."""

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


def plan_tables(header: GgufHeader, shape: ModelShape, quant: str, kept: Ids | None) -> TablePlan:
    """Plan the tables of the model of ``header`` at ``quant``; the head has the rows ``kept`` (None: all).

    Raises InvalidRequestError for an unknown quantisation or a tensor that the graph does not use, and
    ModelFileError for a missing tensor or a wrong shape.
    """
    if quant not in QUANTS:
        raise InvalidRequestError(f"unknown quantisation {quant!r}", hint=f"for ONNX one of {', '.join(QUANTS)}")
    return _Planner(header, shape, quant, kept).plan()


class _Planner:
    def __init__(self, header: GgufHeader, shape: ModelShape, quant: str, kept: Ids | None) -> None:
        self._header, self._shape, self._quant, self._kept = header, shape, quant, kept
        self._left = {tensor.name: tensor for tensor in header.tensors}
        self._tables: dict[str, Table] = {}

    def plan(self) -> TablePlan:
        shape, width = self._shape, self._shape.embedding_length
        self._embedding_and_head()
        queries, pairs = shape.head_count * shape.head_length, shape.head_count_kv * shape.head_length
        for layer in range(len(shape.blocks)):
            block = f"blk.{layer}"
            self._vector(f"{block}.attn_norm", width)
            self._attention_inputs(block, queries, pairs)
            if shape.architecture.head_norms:
                self._vector(f"{block}.attn_q_norm", shape.head_length)
                self._vector(f"{block}.attn_k_norm", shape.head_length)
            self._matrices(f"{block}.attn_output", ["attn_output"], [width], queries)
            if shape.architecture.post_norms:
                self._vector(f"{block}.post_attention_norm", width)
                self._vector(f"{block}.post_ffw_norm", width)
            self._vector(f"{block}.ffn_norm", width)
            for name in ("ffn_gate", "ffn_up"):
                self._matrices(f"{block}.{name}", [name], [shape.feed_forward_length], width)
            self._matrices(f"{block}.ffn_down", ["ffn_down"], [width], shape.feed_forward_length)
        self._vector("output_norm", width)
        self._rope_factors()
        for name in self._left:
            raise InvalidRequestError(
                f"{self._header.path.name} has a tensor {name}, which the ONNX export does not support",
                hint="export it with `--to gguf`",
            )
        return self._placed()

    # ---------------------------------------------------------------------------------------- tables

    def _embedding_and_head(self) -> None:
        shape = self._shape
        size = (shape.embedding_length, shape.vocabulary_size)
        embedding = self._take("token_embd.weight", size)
        tied = "output.weight" not in self._left
        head = embedding if tied else self._take("output.weight", size)
        head_bits = self._bits(head, is_head=True)
        # A tied table is also the head, so it gets no fewer bits than a head.
        bits = head_bits if tied else self._bits(embedding, is_head=False)
        if bits is None:  # only plain types: all other types have blocks of at least 32
            element = _PLAIN_ELEMENTS[embedding.type_name]
            values = Stored(name="embedding.weight", element=element, shape=(size[1], size[0]))
            self._add(Table(name="embedding", role="embedding", tensors=(embedding,), values=values))
            shared = tied and element == "float32"
        else:
            shared = tied and self._kept is None
            # Scales are float16 in the source; only MatMulNBits needs them as float32.
            scales: Element = "float32" if shared else "float16"
            self._add(self._packed("embedding", "embedding", (embedding,), size[1], size[0], bits, scales))
        if not (shared and self._kept is None):
            rows = size[1] if self._kept is None else len(self._kept)
            self._add(replace(self._table("head", "head", (head,), rows, size[0], head_bits), ids=self._kept))

    def _attention_inputs(self, block: str, queries: int, pairs: int) -> None:
        """q, k and v as one matrix if their formats agree: two operators fewer."""
        names, rows = ["attn_q", "attn_k", "attn_v"], [queries, pairs, pairs]
        found = [self._left.get(f"{block}.{name}.weight") for name in names]
        forms = {None if each is None else (self._bits(each, is_head=False),) for each in found}
        biases = {f"{block}.{name}.bias" in self._left for name in names}
        if not self._shape.architecture.head_norms and None not in forms and len(forms) == len(biases) == 1:
            self._matrices(f"{block}.attn_qkv", names, rows, self._shape.embedding_length)
            return
        for name, count in zip(names, rows, strict=True):
            self._matrices(f"{block}.{name}", [name], [count], self._shape.embedding_length)

    def _matrices(self, name: str, parts: list[str], rows: list[int], columns: int) -> None:
        block, _, role = name.rpartition(".")
        tensors = tuple(
            self._take(f"{block}.{part}.weight", (columns, count)) for part, count in zip(parts, rows, strict=True)
        )
        bits = self._bits(tensors[0], is_head=False)
        self._add(self._table(name, role, tensors, sum(rows), columns, bits))
        if f"{block}.{parts[0]}.bias" in self._left:
            biases = [self._take(f"{block}.{part}.bias", (n,)) for part, n in zip(parts, rows, strict=True)]
            self._add(self._plain(f"{name}.bias", "biases", tuple(biases), (sum(rows),)))

    def _vector(self, name: str, length: int) -> None:
        self._add(self._plain(name, "norms", (self._take(f"{name}.weight", (length,)),), (length,)))

    def _rope_factors(self) -> None:
        if any(block.rope.factored for block in self._shape.blocks):
            self._take("rope_freqs.weight", (self._shape.head_length // 2,))

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

    def _take(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        path = self._header.path
        tensor = self._left.pop(name, None)
        if tensor is None:
            raise ModelFileError(path, f"it has no tensor {name}")
        if tensor.shape != shape:
            raise ModelFileError(path, f"tensor {name} has the shape {tensor.shape} instead of {shape}")
        if not can_read(tensor.type_name):
            raise InvalidRequestError(
                f"{path.name} stores {name} as {tensor.type_name}, which the ONNX export cannot read",
                hint="export it with `--to gguf`",
            )
        return tensor

    def _add(self, table: Table) -> None:
        self._tables[table.name] = table

    # ---------------------------------------------------------------------------------------- places

    def _placed(self) -> TablePlan:
        end = 0

        def place(stored: Stored) -> Stored:
            nonlocal end
            placed = replace(stored, offset=end)
            end = -(-(end + placed.byte_count) // ALIGNMENT) * ALIGNMENT
            return placed

        tables = {}
        for name, table in self._tables.items():
            values = place(table.values)
            scales = None if table.scales is None else place(table.scales)
            tables[name] = replace(table, values=values, scales=scales)
        # One position more than the context: a forward of one row may run with an extra, discarded row.
        size = (self._shape.context_length + 1, self._shape.head_length // 2)
        ropes = {}
        for number, rope in enumerate(dict.fromkeys(block.rope for block in self._shape.blocks)):
            cosines = place(Stored(name=f"rope.{number}.cosines", element="float32", shape=size))
            sines = place(Stored(name=f"rope.{number}.sines", element="float32", shape=size))
            ropes[rope] = RopeTable(rope=rope, cosines=cosines, sines=sines)
        kept = self._kept
        kept_ids = None if kept is None else Stored(name="kept_ids.values", element="int64", shape=(len(kept),))
        return TablePlan(
            tables=MappingProxyType(tables),
            ropes=MappingProxyType(ropes),
            kept_ids=None if kept_ids is None else place(kept_ids),
            data_bytes=end,
        )
