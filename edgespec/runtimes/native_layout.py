"""What the native runtime takes from a GGUF file: every number and tensor checked before a pointer is made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from edgespec.errors import ModelFileError, RuntimeUnavailableError
from edgespec.files.gguf import GgufHeader, TensorInfo

__all__ = ["LayerTensors", "ModelLayout", "WeightTensor", "read_layout", "unsupported_reason"]

# The types that kernels exist for, by the numbers GGUF and the kernels give them.
TYPES: Mapping[str, int] = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
}
SUPER_BLOCK = 256  # columns that share scales of scales in the K types
BLOCK = 32  # columns that are quantised together, weights and activations alike
LANES = 16  # elements of a head that attention takes at a time

# Architecture -> how rotary embedding pairs a head's elements: 0 neighbours, 1 halves. llama's converter reorders the
# rows of queries and keys so that neighbours belong together.
_ROPE_PAIRS: Mapping[str, int] = {"llama": 0, "qwen2": 1}

_DEFAULT_ROPE_BASE = 10000.0  # where a file does not say, as llama.cpp has it
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_NORMS = ("attn_norm", "ffn_norm")
_EMBEDDING, _HEAD, _OUTPUT_NORM, _ROPE_FACTORS = (
    "token_embd.weight",
    "output.weight",
    "output_norm.weight",
    "rope_freqs.weight",
)


class _UnsupportedError(Exception):
    """Why the native runtime does not run this model, in a few words."""


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One matrix, ``rows`` x ``columns``, and its bias."""

    tensor: TensorInfo
    bias: TensorInfo | None
    rows: int
    columns: int

    @property
    def type_number(self) -> int:
        return TYPES[self.tensor.type_name]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    attention_norm: TensorInfo
    feed_forward_norm: TensorInfo
    query: WeightTensor
    key: WeightTensor
    value: WeightTensor
    output: WeightTensor
    gate: WeightTensor
    up: WeightTensor
    down: WeightTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """A model's numbers and tensors. ``rope_base`` and ``rope_factors`` make the frequencies; see ``read_layout``."""

    embedding: int
    heads: int
    kv_heads: int
    head_length: int
    feed_forward: int
    vocabulary: int
    rope_length: int
    rope_pairs: int
    rope_base: float
    rope_scale: float
    rope_factors: TensorInfo | None
    norm_epsilon: float
    layers: tuple[LayerTensors, ...]
    output_norm: TensorInfo
    head: WeightTensor
    embedding_rows: WeightTensor


def unsupported_reason(header: GgufHeader) -> str | None:
    """Why the native runtime does not run this model, in one sentence; None if it does. Raises ModelFileError."""
    try:
        _Reader(header).layout()
    except _UnsupportedError as error:
        return str(error)
    return None


def read_layout(header: GgufHeader) -> ModelLayout:
    """The model's layout, every shape checked against every other.

    Raises RuntimeUnavailableError for a model that this runtime does not run, ModelFileError for a file that
    contradicts itself.
    """
    try:
        return _Reader(header).layout()
    except _UnsupportedError as error:
        raise RuntimeUnavailableError(
            f"the native runtime does not run {header.path.name}: {error}", hint="llama.cpp does"
        ) from None


class _Reader:
    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self._tensors = {tensor.name: tensor for tensor in header.tensors}

    def layout(self) -> ModelLayout:
        header = self._header
        if header.architecture not in _ROPE_PAIRS:
            raise _UnsupportedError(f"it knows {' and '.join(_ROPE_PAIRS)}, not {header.architecture}")
        self._refuse_variants()
        heads, kv_heads = self._one(header.head_count, "heads"), self._one(header.head_count_kv, "key-value heads")
        head_length, embedding = header.key_length, header.embedding_length
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ModelFileError(header.path, f"{heads} attention heads cannot share {kv_heads} key-value heads")
        if header.value_length != head_length:
            raise _UnsupportedError("its keys and values differ in length")
        feed_forward = self._integer("feed_forward_length", None)
        for what, count in (("embedding", embedding), ("feed-forward", feed_forward), ("heads", heads * head_length)):
            if count < BLOCK or count % BLOCK:
                raise _UnsupportedError(f"the length {count} of its {what} is no multiple of {BLOCK}")
        # What is quantised together, 32 outputs of attention, must lie within one group of heads.
        if head_length % LANES or heads // kv_heads * head_length % BLOCK:
            raise _UnsupportedError(f"{heads // kv_heads} heads of {head_length} elements share a key")
        rope_length = self._integer("rope.dimension_count", head_length)
        if not 0 < rope_length <= head_length or rope_length % 2:
            raise ModelFileError(header.path, f"{rope_length} of {head_length} elements of a head cannot be rotated")
        vocabulary = header.vocabulary_size
        rows = self._matrix(_EMBEDDING, vocabulary, embedding)
        layers = tuple(
            self._layer(f"blk.{number}", embedding, heads * head_length, kv_heads * head_length, feed_forward)
            for number in range(header.block_count)
        )
        output_norm = self._vector(_OUTPUT_NORM, embedding)
        head = self._matrix(_HEAD, vocabulary, embedding) if _HEAD in self._tensors else rows
        factors = self._vector(_ROPE_FACTORS, rope_length // 2) if _ROPE_FACTORS in self._tensors else None
        self._refuse_unknown_tensors()
        return ModelLayout(
            embedding=embedding,
            heads=heads,
            kv_heads=kv_heads,
            head_length=head_length,
            feed_forward=feed_forward,
            vocabulary=vocabulary,
            rope_length=rope_length,
            rope_pairs=_ROPE_PAIRS[header.architecture],
            rope_base=self._number("rope.freq_base", _DEFAULT_ROPE_BASE),
            rope_scale=self._rope_scale(),
            rope_factors=factors,
            norm_epsilon=self._number("attention.layer_norm_rms_epsilon", None),
            layers=layers,
            output_norm=output_norm,
            head=head,
            embedding_rows=rows,
        )

    # -------------------------------------------------------------------------------------- metadata

    def _refuse_variants(self) -> None:
        if self._integer("expert_count", 0):
            raise _UnsupportedError("it is a mixture of experts")
        if self._integer("attention.sliding_window", 0):
            raise _UnsupportedError("its attention has a sliding window")
        if self._value("attention.causal") is False:
            raise _UnsupportedError("its attention is not causal")

    def _rope_scale(self) -> float:
        kind = self._value("rope.scaling.type")
        if kind in (None, "none"):
            return 1.0
        if kind != "linear":
            raise _UnsupportedError(f"its rope scaling is {kind!r}")
        return self._number("rope.scaling.factor", None)

    def _value(self, suffix: str) -> object:
        return self._header.metadata.get(f"{self._header.architecture}.{suffix}")

    def _integer(self, suffix: str, default: int | None) -> int:
        value = self._value(suffix)
        if value is None and default is not None:
            return default
        if not isinstance(value, int):
            raise _UnsupportedError(f"its {suffix} is {'missing' if value is None else 'not one number'}")
        return value

    def _number(self, suffix: str, default: float | None) -> float:
        value = self._value(suffix)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFileError(self._header.path, f"it does not state {self._header.architecture}.{suffix}")
        if not (math.isfinite(value) and value > 0):
            raise ModelFileError(self._header.path, f"its {suffix} is {value}, which is not sane")
        return float(value)

    def _one(self, counts: int | tuple[int, ...], what: str) -> int:
        if isinstance(counts, int):
            return counts
        if len(set(counts)) != 1:
            raise _UnsupportedError(f"its layers differ in their number of {what}")
        return counts[0]

    # --------------------------------------------------------------------------------------- tensors

    def _layer(self, block: str, embedding: int, queries: int, keys: int, feed_forward: int) -> LayerTensors:
        def matrix(name: str, rows: int, columns: int) -> WeightTensor:
            return self._matrix(f"{block}.{name}.weight", rows, columns)

        return LayerTensors(
            attention_norm=self._vector(f"{block}.attn_norm.weight", embedding),
            feed_forward_norm=self._vector(f"{block}.ffn_norm.weight", embedding),
            query=matrix("attn_q", queries, embedding),
            key=matrix("attn_k", keys, embedding),
            value=matrix("attn_v", keys, embedding),
            output=matrix("attn_output", embedding, queries),
            gate=matrix("ffn_gate", feed_forward, embedding),
            up=matrix("ffn_up", feed_forward, embedding),
            down=matrix("ffn_down", embedding, feed_forward),
        )

    def _tensor(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise ModelFileError(self._header.path, f"tensor {name} is missing")
        return self._tensors[name]

    def _matrix(self, name: str, rows: int, columns: int) -> WeightTensor:
        tensor = self._tensor(name)
        self._check_shape(tensor, (columns, rows))
        if tensor.type_name not in TYPES:
            raise _UnsupportedError(f"it has no kernels for {tensor.type_name} ({name})")
        if tensor.type_name.endswith("_K") and columns % SUPER_BLOCK:
            raise ModelFileError(
                self._header.path,
                f"tensor {name} has rows of {columns}, which {tensor.type_name} does not divide into {SUPER_BLOCK}",
            )
        bias_name = f"{name.removesuffix('weight')}bias"
        bias = self._vector(bias_name, rows) if name.startswith("blk.") and bias_name in self._tensors else None
        return WeightTensor(tensor, bias, rows, columns)

    def _vector(self, name: str, length: int) -> TensorInfo:
        tensor = self._tensor(name)
        self._check_shape(tensor, (length,))
        if tensor.type_name != "F32":
            raise _UnsupportedError(f"{name} is {tensor.type_name}, not F32")
        return tensor

    def _check_shape(self, tensor: TensorInfo, shape: tuple[int, ...]) -> None:
        # Trailing ones say nothing: some writers pad shapes with them.
        found = tensor.shape[: len(shape)] if math.prod(tensor.shape[len(shape) :]) == 1 else tensor.shape
        if found != shape:
            raise ModelFileError(self._header.path, f"tensor {tensor.name} has shape {tensor.shape}, not {shape}")

    def _refuse_unknown_tensors(self) -> None:
        known = {_EMBEDDING, _HEAD, _OUTPUT_NORM, _ROPE_FACTORS}
        for number in range(self._header.block_count):
            known.update(f"blk.{number}.{name}.weight" for name in (*_MATRICES, *_NORMS))
            known.update(f"blk.{number}.{name}.bias" for name in _MATRICES)
        strange = next((name for name in self._tensors if name not in known), None)
        if strange is not None:
            raise _UnsupportedError(f"it has a tensor {strange}")
