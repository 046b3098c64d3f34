"""What the native runtime reads from a GGUF file: every number and tensor checked before it becomes a pointer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from edgespec.errors import ModelFileError, RuntimeUnavailableError
from edgespec.files.gguf.records import GgufHeader, TensorInfo
from edgespec.files.trimmed_drafter import EmbeddingTable, TrimmedDrafter
from edgespec.runtimes.native.tensors import TYPES, LayerTensors, ModelLayout, Rope, WeightTensor

SUPER_BLOCK = 256  # columns that share scales of scales in the K types
BLOCK = 32  # columns that are quantised together, in weights and in activations
LANES = 16  # elements of a head that attention loads at a time

SWIGLU, GEGLU = 0, 1  # activation of the feed-forward gate, by the kernels' numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    """How a family of models differs from llama. ``rope_pairs``: how rotary embedding pairs a head's elements, 0
    for neighbours, 1 for halves; llama's converter reorders the rows of queries and keys into neighbours.
    """

    rope_pairs: int
    has_biases: bool = False
    has_head_norms: bool = False
    is_gemma: bool = False


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture(rope_pairs=0, has_biases=True),
    "qwen2": _Architecture(rope_pairs=1, has_biases=True),
    "qwen3": _Architecture(rope_pairs=1, has_head_norms=True),
    "gemma3": _Architecture(rope_pairs=1, has_head_norms=True, is_gemma=True),
}

_DEFAULT_ROPE_BASE = 10000.0  # if the file has none, as in llama.cpp; also for layers with a window
_WINDOW_PERIOD = 6  # gemma3: every sixth layer sees all positions, unless the file says otherwise
_LAYERS_OF_27B = 62  # gemma3's largest model scales attention by embedding / heads (its config.json)
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_NORMS = ("attn_norm", "ffn_norm")
_HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
_POST_NORMS = ("post_attention_norm", "post_ffw_norm")
_EMBEDDING, _HEAD, _OUTPUT_NORM, _ROPE_FACTORS = (
    "token_embd.weight",
    "output.weight",
    "output_norm.weight",
    "rope_freqs.weight",
)


class _UnsupportedError(Exception):
    """Why the native runtime does not run this model, in a few words."""


def unsupported_reason(header: GgufHeader, trimmed: TrimmedDrafter | None = None) -> str | None:
    """Why the native runtime does not run this model, in one sentence; None if it does. Raises ModelFileError."""
    try:
        _Reader(header, trimmed).layout()
    except _UnsupportedError as error:
        return str(error)
    return None


def read_layout(header: GgufHeader, trimmed: TrimmedDrafter | None = None) -> ModelLayout:
    """The model's layout, every shape checked against every other.

    ``header`` is the model's. In a ``trimmed`` drafter the head has fewer rows than the vocabulary, and the
    embedding's rows are in a separate file. Raises RuntimeUnavailableError for a model that this runtime does not
    run, ModelFileError for a file that contradicts itself.
    """
    try:
        return _Reader(header, trimmed).layout()
    except _UnsupportedError as error:
        raise RuntimeUnavailableError(
            f"the native runtime does not run {header.path.name}: {error}",
            hint='runtime "auto" or "llama" runs it with llama.cpp',
        ) from None


@dataclass(frozen=True, slots=True)
class _Shape:
    embedding: int
    queries: int
    keys: int
    head_length: int
    feed_forward: int


class _Reader:
    def __init__(self, header: GgufHeader, trimmed: TrimmedDrafter | None) -> None:
        self._header = header
        self._trimmed = trimmed
        self._tensors = {tensor.name: tensor for tensor in header.tensors}
        if header.architecture not in _ARCHITECTURES:
            raise _UnsupportedError(f"it runs {', '.join(_ARCHITECTURES)}, not {header.architecture}")
        self._architecture = _ARCHITECTURES[header.architecture]

    def layout(self) -> ModelLayout:
        header = self._header
        self._refuse_variants()
        heads, kv_heads = self._one(header.head_count, "heads"), self._one(header.head_count_kv, "key-value heads")
        head_length, embedding = header.key_length, header.embedding_length
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ModelFileError(header.path, f"{heads} attention heads cannot share {kv_heads} key-value heads")
        is_gemma = self._architecture.is_gemma
        share = embedding // heads if is_gemma and header.block_count == _LAYERS_OF_27B else head_length
        if share < 1:
            raise ModelFileError(header.path, f"{heads} attention heads cannot share {embedding} columns")
        if header.value_length != head_length:
            raise _UnsupportedError("its attention keys and values differ in length")
        feed_forward = self._integer("feed_forward_length", None)
        for what, count in (("embedding", embedding), ("feed-forward", feed_forward), ("heads", heads * head_length)):
            if count < BLOCK or count % BLOCK:
                raise _UnsupportedError(f"the length {count} of its {what} is not a multiple of {BLOCK}")
        # 32 outputs of attention, which are quantised together, must lie within one group of heads.
        if head_length % LANES or heads // kv_heads * head_length % BLOCK:
            raise _UnsupportedError(f"{heads // kv_heads} heads of {head_length} elements share a key")
        rope_length = self._integer("rope.dimension_count", head_length)
        if not 0 < rope_length <= head_length or rope_length % 2:
            raise ModelFileError(header.path, f"{rope_length} of {head_length} elements of a head cannot be rotated")
        vocabulary, trimmed = header.vocabulary_size, self._trimmed
        scored = vocabulary if trimmed is None else len(trimmed.ids)
        rows = self._matrix(_EMBEDDING, scored, embedding)
        shape = _Shape(embedding, heads * head_length, kv_heads * head_length, head_length, feed_forward)
        window, period = self._window()
        layers = tuple(
            self._layer(f"blk.{number}", shape, window if period and (number + 1) % period else 0)
            for number in range(header.block_count)
        )
        output_norm = self._vector(_OUTPUT_NORM, embedding)
        head = self._matrix(_HEAD, scored, embedding) if _HEAD in self._tensors else rows
        ropes = self._ropes(rope_length)
        self._refuse_unknown_tensors()
        scale = math.sqrt(embedding) if is_gemma else 1.0
        if trimmed is not None:
            rows, scale = self._table(trimmed.embedding, vocabulary, embedding), trimmed.embedding.scale
        return ModelLayout(
            embedding=embedding,
            heads=heads,
            kv_heads=kv_heads,
            head_length=head_length,
            feed_forward=feed_forward,
            vocabulary=vocabulary,
            rope_length=rope_length,
            rope_pairs=self._architecture.rope_pairs,
            ropes=ropes,
            norm_epsilon=self._number("attention.layer_norm_rms_epsilon", None),
            embedding_scale=scale,
            attention_scale=1.0 / math.sqrt(share),
            activation=GEGLU if is_gemma else SWIGLU,
            layers=layers,
            output_norm=output_norm,
            head=head,
            embedding_rows=rows,
        )

    # -------------------------------------------------------------------------------------- metadata

    def _refuse_variants(self) -> None:
        if self._integer("expert_count", 0):
            raise _UnsupportedError("it is a mixture of experts")
        window, context = self._integer("attention.sliding_window", 0), self._header.context_length
        if 0 < window < context and not self._architecture.is_gemma:
            raise _UnsupportedError(f"its attention has a sliding window of {window}, and its context is {context}")
        if self._value("attention.causal") is False:
            raise _UnsupportedError("its attention is not causal")
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            if self._value(cap):
                raise _UnsupportedError(f"it has {cap}")

    def _window(self) -> tuple[int, int]:
        """Positions that a row sees in layers with a window, and the period of layers without; (0, 0) for no windows.

        Layer i has no window if i + 1 is a multiple of the period, as in llama.cpp.
        """
        window = self._integer("attention.sliding_window", 0)
        if not self._architecture.is_gemma or window == 0:
            return 0, 0
        period = self._integer("attention.sliding_window_pattern", _WINDOW_PERIOD)
        if window < 0 or period < 1:
            raise ModelFileError(
                self._header.path,
                f"its sliding window is {window} and its window pattern {period}: the first must be at least 0, "
                "the second at least 1",
            )
        return window, period

    def _ropes(self, rope_length: int) -> tuple[Rope, ...]:
        """Rotary parameters of layers that see all positions, then for gemma of layers with a window, without
        scaling.
        """
        factors = self._vector(_ROPE_FACTORS, rope_length // 2) if _ROPE_FACTORS in self._tensors else None
        whole = Rope(
            base=self._number("rope.freq_base", _DEFAULT_ROPE_BASE), scale=self._rope_scale(), factors=factors
        )
        if not self._architecture.is_gemma:
            return (whole,)
        return whole, Rope(base=self._number("rope.freq_base_swa", _DEFAULT_ROPE_BASE), scale=1.0)

    def _rope_scale(self) -> float:
        kind = self._value("rope.scaling.type")
        if kind not in (None, "none", "linear"):
            raise _UnsupportedError(f"its rope scaling is {kind!r}")
        if self._number("rope.scaling.attn_factor", 1.0) != 1.0:
            raise _UnsupportedError("its rope scaling has an attention factor")
        # A factor without a type is linear; rope.scale_linear is its old name.
        if kind == "none" or (kind is None and self._value("rope.scaling.factor") is None):
            return 1.0 if kind == "none" else self._number("rope.scale_linear", 1.0)
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
            raise ModelFileError(self._header.path, f"its {suffix} is {value}, which is out of range")
        return float(value)

    def _one(self, counts: int | tuple[int, ...], what: str) -> int:
        if isinstance(counts, int):
            return counts
        if len(counts) != self._header.block_count:
            raise ModelFileError(
                self._header.path, f"it states {what} for {len(counts)} layers, but has another number of layers"
            )
        if len(set(counts)) != 1:
            raise _UnsupportedError(f"its layers differ in their number of {what}")
        return counts[0]

    # --------------------------------------------------------------------------------------- tensors

    def _layer(self, block: str, shape: _Shape, window: int) -> LayerTensors:
        def matrix(name: str, rows: int, columns: int) -> WeightTensor:
            return self._matrix(f"{block}.{name}.weight", rows, columns)

        def norm(name: str, length: int, exists: bool) -> TensorInfo | None:
            return self._vector(f"{block}.{name}.weight", length) if exists else None

        embedding, architecture = shape.embedding, self._architecture
        return LayerTensors(
            attention_norm=self._vector(f"{block}.attn_norm.weight", embedding),
            feed_forward_norm=self._vector(f"{block}.ffn_norm.weight", embedding),
            attention_post_norm=norm("post_attention_norm", embedding, architecture.is_gemma),
            feed_forward_post_norm=norm("post_ffw_norm", embedding, architecture.is_gemma),
            query_norm=norm("attn_q_norm", shape.head_length, architecture.has_head_norms),
            key_norm=norm("attn_k_norm", shape.head_length, architecture.has_head_norms),
            query=matrix("attn_q", shape.queries, embedding),
            key=matrix("attn_k", shape.keys, embedding),
            value=matrix("attn_v", shape.keys, embedding),
            output=matrix("attn_output", embedding, shape.queries),
            gate=matrix("ffn_gate", shape.feed_forward, embedding),
            up=matrix("ffn_up", shape.feed_forward, embedding),
            down=matrix("ffn_down", embedding, shape.feed_forward),
            window=window,
            rope_table=1 if window else 0,
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

    def _table(self, table: EmbeddingTable, vocabulary: int, embedding: int) -> WeightTensor:
        """The embedding's rows in a separate file, whose size was checked with the file's."""
        if (table.rows, table.columns) != (vocabulary, embedding):
            raise ModelFileError(table.path, f"it has {table.rows} rows for a vocabulary of {vocabulary}")
        if table.type_name not in TYPES:
            raise _UnsupportedError(f"it has no kernels for {table.type_name} ({table.path.name})")
        tensor = TensorInfo(
            name=table.path.name,
            shape=(table.columns, table.rows),
            type_name=table.type_name,
            offset=0,
            byte_count=table.rows * table.row_bytes,
        )
        return WeightTensor(tensor, None, table.rows, table.columns)

    def _vector(self, name: str, length: int) -> TensorInfo:
        tensor = self._tensor(name)
        self._check_shape(tensor, (length,))
        if tensor.type_name != "F32":
            raise _UnsupportedError(f"{name} is {tensor.type_name}, not F32")
        return tensor

    def _check_shape(self, tensor: TensorInfo, shape: tuple[int, ...]) -> None:
        # Trailing ones carry no information: some writers pad shapes with ones.
        found = tensor.shape[: len(shape)] if math.prod(tensor.shape[len(shape) :]) == 1 else tensor.shape
        if found != shape:
            raise ModelFileError(self._header.path, f"tensor {tensor.name} has shape {tensor.shape}, not {shape}")

    def _refuse_unknown_tensors(self) -> None:
        known = {_EMBEDDING, _HEAD, _OUTPUT_NORM, _ROPE_FACTORS}
        norms = [*_NORMS, *(_HEAD_NORMS if self._architecture.has_head_norms else ())]
        norms += _POST_NORMS if self._architecture.is_gemma else ()
        for number in range(self._header.block_count):
            known.update(f"blk.{number}.{name}.weight" for name in (*_MATRICES, *norms))
            if self._architecture.has_biases:
                known.update(f"blk.{number}.{name}.bias" for name in _MATRICES)
        strange = next((name for name in self._tensors if name not in known), None)
        if strange is not None:
            raise _UnsupportedError(f"it has a tensor {strange}")
