"""A model in the native runtime: its numbers, and its tensors with the types they are laid out in.

A drafter's matrices may be laid out in four bits: fewer bytes draft faster, and rounding costs no exactness. The file
stays unchanged. Each matrix that shrinks enough is laid out as Q4_0 and computed like Q4_0 in a file: by the same
kernels, bit-equal at every width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from edgespec.architectures.deltas import Deltas
from edgespec.architectures.shape import OTHERS_CACHE, Experts, Rope as RopeForm, UnsupportedError
from edgespec.files.gguf.records import GGML_TYPES, TensorInfo

# The types with kernels, by their numbers in GGUF and in the kernels.
TYPES: Mapping[str, int] = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ3_XXS": 18,
    "IQ4_NL": 20,
    "IQ3_S": 21,
    "IQ4_XS": 23,
    "BF16": 30,
    "MXFP4": 39,
}

# Bytes of 256 columns where a type takes more in memory than in the file (kernels/layout.h): three bits become codes
# of four, packed scales bytes. Q6_K's one percent is left out.
_LAID_OUT_BYTES: Mapping[str, int] = {"Q3_K": 116, "IQ4_XS": 140, "IQ3_S": 140, "IQ3_XXS": 140}

REQUANTIZED_TYPE = "Q4_0"

# A matrix is requantised only if it shrinks to this part of its bytes. Q4_K is as small as Q4_0; Q4_1, a ninth
# larger, is not worth a second rounding. A choice: the next common type, Q5_0, is at 0.82.
_WORTH_IT = 0.85


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One matrix, ``rows`` x ``columns``, and its bias. ``kept_as``: the type of its layout, if not the file's.
    ``read``: the part of its rows that a forward of one row reads, which chooses some of a layer's experts."""

    tensor: TensorInfo
    bias: TensorInfo | None
    rows: int
    columns: int
    kept_as: str | None = None
    read: Fraction = Fraction(1)

    def some_rows(self, first: int, rows: int) -> WeightTensor:
        """These rows as a matrix, such as the queries' of a tensor of queries, keys and values. Raises ValueError."""
        if (first, rows) == (0, self.rows):  # also of a matrix with one row, whose shape is a padded vector's
            return self
        tensor = self.tensor.some_rows(first, rows)
        bias = None if self.bias is None else self.bias.some_rows(first, rows)
        return replace(self, tensor=tensor, bias=bias, rows=rows)

    @property
    def file_type_number(self) -> int:
        return TYPES[self.tensor.type_name]

    @property
    def type_number(self) -> int:
        return self.file_type_number if self.kept_as is None else TYPES[self.kept_as]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the file."""
        return self.tensor.byte_count // self.rows

    @property
    def kept_row_bytes(self) -> int:
        """Bytes of a row in memory, in the type that it is laid out in."""
        if self.kept_as is None:
            larger = _LAID_OUT_BYTES.get(self.tensor.type_name)
            return self.row_bytes if larger is None else self.columns // 256 * larger
        _, block, block_bytes = GGML_TYPES[self.type_number]
        return self.columns // block * block_bytes

    @property
    def spared_bytes(self) -> int:
        """How many bytes the layout saves compared with the file, below 0 if it takes more."""
        return self.rows * (self.row_bytes - self.kept_row_bytes)

    @property
    def spared_of_forward(self) -> int:
        """How many bytes less a forward of one row reads."""
        return int(self.read * self.spared_bytes)


# A layer's matrices in memory order; those of a mixture, of a layer's inputs and beside experts may be missing.
MATRICES = (
    *("query", "key", "value", "output", "gate", "up", "down", "router"),
    *("input_gate", "input_down", "dense_gate", "dense_up", "dense_down"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaTensors:
    """A gated delta layer's part in place of attention (struct es_delta). ``bias`` is added to the decays."""

    mixed: WeightTensor
    gate: WeightTensor
    decay: WeightTensor
    beta: WeightTensor
    kernel: TensorInfo
    rates: TensorInfo
    norm: TensorInfo

    @property
    def matrices(self) -> Mapping[str, WeightTensor]:
        return {"mixed": self.mixed, "gate": self.gate, "decay": self.decay, "beta": self.beta}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensors:
    """The expert that every row uses (struct es_shared)."""

    gate: WeightTensor
    up: WeightTensor
    down: WeightTensor
    router: WeightTensor

    @property
    def matrices(self) -> Mapping[str, WeightTensor]:
        return {"gate": self.gate, "up": self.up, "down": self.down, "router": self.router}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """A layer has ``query``, ``key`` and ``value``, or ``delta``. ``cache``: the number of the layer whose keys and
    values it reads. Without ``value``, keys are values as well; without ``up``, each expert's gate is above its up.
    ``router_norm`` is still to be divided by the root of the embedding's length.
    """

    attention_norm: TensorInfo | None
    feed_forward_norm: TensorInfo | None
    attention_post_norm: TensorInfo | None
    feed_forward_post_norm: TensorInfo | None
    query_norm: TensorInfo | None
    key_norm: TensorInfo | None
    sinks: TensorInfo | None
    query: WeightTensor | None = None
    key: WeightTensor | None = None
    value: WeightTensor | None = None
    output: WeightTensor
    gate: WeightTensor
    up: WeightTensor | None
    down: WeightTensor
    kv_heads: int
    head_length: int
    rope_length: int
    cache: int
    window: int
    rope_table: int | None
    router: WeightTensor | None = None
    delta: DeltaTensors | None = None
    shared: SharedTensors | None = None
    input_gate: WeightTensor | None = None
    input_down: WeightTensor | None = None
    dense_gate: WeightTensor | None = None
    dense_up: WeightTensor | None = None
    dense_down: WeightTensor | None = None
    input_post_norm: TensorInfo | None = None
    experts_norm: TensorInfo | None = None
    dense_post_norm: TensorInfo | None = None
    experts_post_norm: TensorInfo | None = None
    router_norm: TensorInfo | None = None
    expert_scales: TensorInfo | None = None
    output_scale: TensorInfo | None = None

    @property
    def matrices(self) -> Mapping[str, WeightTensor]:
        """Matrices by their names here, in memory order, but for those of ``delta`` and ``shared``."""
        found = {name: getattr(self, name) for name in MATRICES}
        return {name: matrix for name, matrix in found.items() if matrix is not None}

    @property
    def all_matrices(self) -> Iterator[WeightTensor]:
        """Every matrix, in memory order."""
        yield from self.matrices.values()
        for part in (self.delta, self.shared):
            if part is not None:
                yield from part.matrices.values()

    @property
    def cache_elements(self) -> int:
        """Elements of a position's keys and values."""
        return 2 * self.kv_heads * self.head_length if self.delta is None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A rotary embedding, with the tensors of its divisors.

    ``long_factors`` replace ``factors`` in contexts longer than the model's original one.
    """

    form: RopeForm
    factors: TensorInfo | None = None
    long_factors: TensorInfo | None = None

    @property
    def at_length(self) -> Rope:
        """The parameters in those contexts."""
        return self if self.long_factors is None else replace(self, factors=self.long_factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """What each token gives to each layer: ``length`` elements of its row in ``rows``, and of a product with its
    embedding, which has the norm ``norm``."""

    length: int
    rows: WeightTensor
    projection: WeightTensor
    norm: TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTensors:
    """What joins a token's row and its hidden row (struct es_model), for what drafts by a target's hidden rows.

    ``passed_on`` makes such a row of the output; without it, the output is one.
    """

    projection: WeightTensor
    token_norm: TensorInfo | None = None
    hidden_norm: TensorInfo | None = None
    passed_on: WeightTensor | None = None

    @property
    def length(self) -> int:
        """Elements of either row."""
        return self.projection.columns // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """A model's numbers and tensors. A layer's ``rope_table`` is an index into ``ropes``, None where nothing is
    rotated, its ``window`` the number of positions that a row sees, 0 for all. ``joins_heads``: the norms of queries
    and keys are those of a row's heads as one vector. ``norms_values``: each head's values are normalised, without
    weights. Layers may have fewer ``kv_heads``, and shorter heads.

    Factors: ``embedding_scale`` of what enters the first layer, ``score_scale`` of a query's product with a key,
    ``residual_scale`` of what each half of a layer adds, ``logit_scale`` of the scores, ``query_factors[i]`` of
    queries at positions from i * ``query_span`` on. ``score_cap`` and ``logit_cap``: c, where a score x becomes
    c tanh(x / c), 0 for none. Of a head the first ``rope_length`` elements are rotated; in a context of more than
    ``original_context`` tokens by the ropes' long factors, if there are any.

    ``drafting`` is the layer that drafts for the model, as a model that needs a ``pair``; ``no_drafting`` is why the
    file's is not used.
    """

    embedding: int
    heads: int
    kv_heads: int
    head_length: int
    feed_forward: int
    vocabulary: int
    rope_length: int
    rope_pairs: int
    ropes: tuple[Rope, ...]
    norm_epsilon: float
    embedding_scale: float
    residual_scale: float = 1.0
    score_scale: float
    logit_scale: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    query_factors: tuple[float, ...] = ()
    query_span: int = 1
    joins_heads: bool = False
    norms_values: bool = False
    inputs: LayerInputs | None = None
    original_context: int = 0
    experts: Experts | None = None
    gates_heads: bool = False
    deltas: Deltas | None = None
    activation: int
    layers: tuple[LayerTensors, ...]
    output_norm: TensorInfo
    head: WeightTensor
    embedding_rows: WeightTensor
    pair: PairTensors | None = None
    drafting: ModelLayout | None = None
    no_drafting: str | None = None

    @property
    def borrows(self) -> bool:
        """Whether its layers read another model's keys and values, and its embedding is that model's."""
        return any(layer.cache == OTHERS_CACHE for layer in self.layers)

    @property
    def matrices(self) -> Iterator[WeightTensor]:
        """The matrices that are laid out, in memory order."""
        yield from self.own_matrices
        if self.drafting is not None:
            yield from (each for each in self.drafting.own_matrices if each.tensor.name != self.head.tensor.name)

    @property
    def own_matrices(self) -> Iterator[WeightTensor]:
        """Those that a forward reads."""
        for layer in self.layers:
            yield from layer.all_matrices
        if self.inputs is not None:
            yield self.inputs.projection
        if self.pair is not None:
            yield self.pair.projection
            if self.pair.passed_on is not None:
                yield self.pair.passed_on
        yield self.head


def requantize(layout: ModelLayout) -> ModelLayout:
    """The same model with its matrices as Q4_0 where they shrink enough; the layout itself if none does.

    It only drafts, so the layer that drafts for it is left out.
    """
    if layout.drafting is not None:
        layout = replace(layout, drafting=None)
    smaller = replace(layout, layers=tuple(map(_requantize_layer, layout.layers)), head=_requantize(layout.head))
    return smaller if any(weight.kept_as is not None for weight in smaller.matrices) else layout


def spared_by(layout: ModelLayout) -> int:
    """How many bytes this layout's matrices save compared with the file's, below 0 if they take more."""
    return sum(weight.spared_bytes for weight in layout.matrices)


def spared_of_forward(layout: ModelLayout) -> int:
    """How many bytes less a forward of one row reads."""
    return sum(weight.spared_of_forward for weight in layout.own_matrices)


def _requantize_layer(layer: LayerTensors) -> LayerTensors:
    # A rounded router would choose other experts, and it is a thousandth of a layer. A state would add up what its
    # projections are rounded by.
    requantized: Any = {name: _requantize(weight) for name, weight in layer.matrices.items() if name != "router"}
    return replace(layer, **requantized)


def _requantize(weight: WeightTensor) -> WeightTensor:
    smaller = replace(weight, kept_as=REQUANTIZED_TYPE)
    return smaller if smaller.kept_row_bytes <= _WORTH_IT * weight.kept_row_bytes else weight


def layers_read(drafter: ModelLayout, target: ModelLayout) -> tuple[int, ...]:
    """For each layer of the drafter the target's layer whose keys and values it sees: the last one with a window for
    those with a window, for others the last one without. Raises UnsupportedError if it cannot read this target.
    """
    length = 0 if drafter.pair is None else drafter.pair.length
    if length != target.embedding:
        raise UnsupportedError(
            f"it reads rows of {length} elements, and those of this target have {target.embedding}"
        )
    if drafter.vocabulary != target.vocabulary:
        raise UnsupportedError(f"it drafts {drafter.vocabulary} tokens, and this target has {target.vocabulary}")
    return tuple(_read(number, layer, target.layers) for number, layer in enumerate(drafter.layers))


def _read(number: int, layer: LayerTensors, target: Sequence[LayerTensors]) -> int:
    kind = "with a window" if layer.window else "without a window"
    kinds = [None if each.delta is not None else bool(each.window) for each in target]
    last = max((other for other, each in enumerate(kinds) if each is bool(layer.window)), default=None)
    if last is None:
        raise UnsupportedError(f"its layer {number} reads a layer {kind}, and this target has none")
    found = target[last]
    for what, own, others in (
        ("key-value heads", layer.kv_heads, found.kv_heads),
        ("elements a head", layer.head_length, found.head_length),
        ("positions", layer.window, found.window),
    ):
        if own != others:
            raise UnsupportedError(
                f"its layer {number} needs {own} {what} in a layer {kind}, and this target's has {others}"
            )
    return last


def unread_reason(drafter: ModelLayout, target: ModelLayout) -> str | None:
    """Why the drafter cannot read this target's cache; None if it can."""
    try:
        layers_read(drafter, target)
    except UnsupportedError as error:
        return str(error)
    return None
