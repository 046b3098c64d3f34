"""What the native runtime reads from a GGUF file: every number and tensor checked before it becomes a pointer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from edgespec.architectures.drafting import HIDDEN_NORM, PROJECTION, TOKEN_NORM, read_drafting_layer
from edgespec.architectures.shape import (
    EMBEDDING,
    FEATURE_OUT,
    HEAD,
    INPUT_NORM,
    INPUT_PROJECTION,
    INPUT_ROWS,
    OUTPUT_NORM,
    PAIR,
    ROUTER,
    Facts,
    Layer,
    Part,
    Shape,
    UnsupportedError,
    read_shape,
)
from edgespec.architectures.table import READERS, find
from edgespec.errors import ModelFileError, RuntimeUnavailableError
from edgespec.files.gguf.records import GGML_TYPES, GgufHeader, TensorInfo
from edgespec.files.trimmed_drafter import EmbeddingTable, TrimmedDrafter
from edgespec.runtimes.native.tensors import (
    MATRICES,
    TYPES,
    DeltaTensors,
    LayerInputs,
    LayerTensors,
    ModelLayout,
    PairTensors,
    Rope,
    SharedTensors,
    WeightTensor,
)

MOST_EXPERTS, MOST_EXPERTS_USED = 1024, 64  # of a layer and of a row, for the kernels' lists
BLOCK = 32  # columns that are quantised together, in weights and in activations
LANES = 16  # elements of a head that attention loads at a time

SWIGLU, GEGLU, CLIPPED_SWIGLU = range(3)  # activation of the feed-forward gate, by the kernels' numbers
_NEIGHBOURS, _HALVES = 0, 1  # how rotary embedding pairs a head's elements, by the kernels' numbers

# The kernels' names of a layer's parts.
_MATRICES = {
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "router": ROUTER,
    "input_gate": "inp_gate",
    "input_down": "proj",
}
_VECTORS = {
    "attention_norm": "attn_norm",
    "feed_forward_norm": "ffn_norm",
    "attention_post_norm": "post_attention_norm",
    "feed_forward_post_norm": "post_ffw_norm",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
    "sinks": "attn_sinks",
    "input_post_norm": "post_norm",
    "dense_post_norm": "post_ffw_norm_1",
    "experts_norm": "pre_ffw_norm_2",
    "experts_post_norm": "post_ffw_norm_2",
    "output_scale": "layer_output_scale",
}


def unsupported_reason(header: GgufHeader, trimmed: TrimmedDrafter | None = None) -> str | None:
    """Why the native runtime does not run this model, in one sentence; None if it does. Raises ModelFileError."""
    try:
        _layout(header, trimmed)
    except UnsupportedError as error:
        return str(error)
    return None


def read_layout(header: GgufHeader, trimmed: TrimmedDrafter | None = None) -> ModelLayout:
    """The model's layout, every shape checked against every other.

    ``header`` is the model's. In a ``trimmed`` drafter the head has fewer rows than the vocabulary, and the
    embedding's rows are in a separate file. Raises RuntimeUnavailableError for a model that this runtime does not
    run, ModelFileError for a file that contradicts itself.
    """
    try:
        return _layout(header, trimmed)
    except UnsupportedError as error:
        raise RuntimeUnavailableError(
            f"the native runtime does not run {header.path.name}: {error}",
            hint=elsewhere(header),
        ) from None


def elsewhere(header: GgufHeader) -> str:
    """The hint for a model that this runtime does not run. llama.cpp takes none of Ollama's own files."""
    if header.completed:
        return "fetch the same model from the hub"
    return 'runtime "auto" or "llama" runs it with llama.cpp'


def _layout(header: GgufHeader, trimmed: TrimmedDrafter | None) -> ModelLayout:
    what = "layout" if trimmed is None else "trimmed layout"
    return header.once(what, lambda: _Reader(header).layout(trimmed))


class _Reader:
    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self._tensors = {tensor.name: tensor for tensor in header.tensors}

    def layout(self, trimmed: TrimmedDrafter | None) -> ModelLayout:
        header = self._header
        rows = header.vocabulary_size if trimmed is None else len(trimmed.ids)
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        facts = Facts(header.path, header.architecture, header.metadata, shapes)
        shape = read_shape(READERS.get(header.architecture) or find(header.architecture), facts, rows)
        if shape.sizes.read and trimmed is not None:
            raise UnsupportedError("it drafts by its target's rows, and a trimmed drafter by its own")
        _check_limits(shape)
        sizes, architecture = shape.sizes, shape.architecture
        embedding_rows = self._weights(EMBEDDING, rows, sizes.width)
        head = embedding_rows if shape.tied else self._weights(HEAD, rows, sizes.width)
        scales, embedding_scale = shape.scales, shape.scales.embedding
        if trimmed is not None:
            embedding_rows = self._table(trimmed.embedding, header.vocabulary_size, sizes.width)
            tokens_only = architecture.scales_tokens_only  # then the manifest has the architecture's scale as well
            embedding_scale = trimmed.embedding.scale * (1.0 if tokens_only else embedding_scale)
        layout = ModelLayout(
            embedding=sizes.width,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_length=sizes.head,
            feed_forward=sizes.inner,
            vocabulary=header.vocabulary_size,
            rope_length=shape.rope_length,
            rope_pairs=_NEIGHBOURS if architecture.neighbours else _HALVES,
            ropes=tuple(
                Rope(
                    form=rope,
                    factors=self._optional(rope.factors),
                    long_factors=self._optional(rope.long_factors),
                )
                for rope in shape.ropes
            ),
            norm_epsilon=shape.norm_epsilon,
            embedding_scale=embedding_scale,
            residual_scale=scales.residual,
            score_scale=shape.score_scale,
            logit_scale=scales.logit,
            score_cap=scales.score_cap,
            logit_cap=scales.logit_cap,
            query_factors=shape.query_factors(),
            query_span=scales.span,
            joins_heads=shape.joins_heads,
            norms_values=architecture.norms_values,
            inputs=self._inputs(shape, trimmed) if sizes.inputs else None,
            original_context=shape.original_context,
            experts=shape.experts,
            gates_heads=architecture.gates_heads,
            deltas=sizes.deltas,
            activation=GEGLU if architecture.gelu else CLIPPED_SWIGLU if architecture.clips else SWIGLU,
            layers=tuple(self._layer(layer, shape) for layer in shape.layers),
            output_norm=self._floats(OUTPUT_NORM),
            head=head,
            embedding_rows=embedding_rows,
        )
        if trimmed is not None:
            return layout
        if sizes.read:
            projection = self._weights(PAIR, sizes.width, 2 * sizes.read)
            passed_on = self._weights(FEATURE_OUT, sizes.read, sizes.width)
            return replace(layout, pair=PairTensors(projection=projection, passed_on=passed_on))
        try:
            return replace(layout, drafting=self._drafting(layout, shape, facts))
        except (UnsupportedError, ModelFileError) as error:
            return replace(layout, no_drafting=error.reason if isinstance(error, ModelFileError) else str(error))

    def _drafting(self, layout: ModelLayout, shape: Shape, facts: Facts) -> ModelLayout | None:
        """The layer that drafts, as a model of one layer. Raises UnsupportedError, ModelFileError."""
        found = read_drafting_layer(shape, facts)
        if found is None:
            return None
        width, parts = shape.sizes.width, found.layer.parts
        pair = PairTensors(
            projection=self._matrix(parts[PROJECTION], 0),
            token_norm=self._floats(parts[TOKEN_NORM].tensor),
            hidden_norm=self._floats(parts[HIDDEN_NORM].tensor),
        )
        return replace(
            layout,
            pair=pair,
            deltas=None,
            layers=(self._layer(found.layer, shape),),
            output_norm=self._floats(found.output_norm),
            head=self._weights(found.head, shape.rows, width),
            embedding_rows=self._weights(found.embedding, shape.rows, width),
        )

    def _layer(self, layer: Layer, shape: Shape) -> LayerTensors:
        parts, used = layer.parts, 0 if shape.experts is None else shape.experts.used
        roles = {name: _MATRICES.get(name, name) for name in MATRICES}
        found: dict[str, Any] = {
            name: self._matrix(parts[role], used) if role in parts else None for name, role in roles.items()
        }
        if "attn_qkv" in parts and "attn_gate" in parts:
            found["delta"] = self._delta(parts)
        if "ffn_gate_shexp" in parts:
            found["shared"] = SharedTensors(
                gate=self._matrix(parts["ffn_gate_shexp"], used),
                up=self._matrix(parts["ffn_up_shexp"], used),
                down=self._matrix(parts["ffn_down_shexp"], used),
                router=self._weights(parts["ffn_gate_inp_shexp"].tensor, 1, shape.sizes.width),
            )
        for name in (*_VECTORS, "router_norm", "expert_scales"):
            role = _VECTORS.get(name, name)
            found[name] = self._floats(parts[role].tensor) if role in parts else None
        return LayerTensors(
            **found,
            kv_heads=layer.sizes.kv_heads,
            head_length=layer.sizes.head,
            rope_length=shape.ropes[layer.rope].length or shape.rope_length,
            cache=layer.cache,
            window=layer.window,
            rope_table=layer.rope if layer.turns else None,
        )

    def _inputs(self, shape: Shape, trimmed: TrimmedDrafter | None) -> LayerInputs:
        if trimmed is not None:
            raise UnsupportedError("its layers have inputs, which a trimmed drafter lacks")
        length, all_layers = shape.sizes.inputs, shape.sizes.inputs * shape.sizes.layers
        rows = self._weights(INPUT_ROWS, shape.rows, all_layers)
        _, block, _ = GGML_TYPES[rows.type_number]
        if length % block or length % BLOCK:
            raise UnsupportedError(f"a layer's part of {INPUT_ROWS}, {length}, is not a multiple of its blocks")
        return LayerInputs(
            length=length,
            rows=rows,
            projection=self._weights(INPUT_PROJECTION, all_layers, shape.sizes.width),
            norm=self._floats(INPUT_NORM),
        )

    def _delta(self, parts: Mapping[str, Part]) -> DeltaTensors:
        decay = self._matrix(parts["ssm_alpha"], 0)
        return DeltaTensors(
            mixed=self._matrix(parts["attn_qkv"], 0),
            gate=self._matrix(parts["attn_gate"], 0),
            decay=replace(decay, bias=self._floats(parts["ssm_dt"].tensor)),
            beta=self._matrix(parts["ssm_beta"], 0),
            kernel=self._floats(parts["ssm_conv1d"].tensor),
            rates=self._floats(parts["ssm_a"].tensor),
            norm=self._floats(parts["ssm_norm"].tensor),
        )

    def _matrix(self, part: Part, used: int) -> WeightTensor:
        assert part.columns is not None
        whole = self._weights(part.tensor, part.height, part.columns, self._optional(part.bias))
        if part.experts:
            return replace(whole, read=Fraction(used, part.experts))
        return whole.some_rows(part.first, part.rows)

    def _weights(self, name: str, rows: int, columns: int, bias: TensorInfo | None = None) -> WeightTensor:
        tensor = self._tensors[name]
        if tensor.type_name not in TYPES:
            raise UnsupportedError(f"it has no kernels for {tensor.type_name} ({name})")
        if tensor.elements != rows * columns:
            raise ModelFileError(self._header.path, f"tensor {name} is not {rows} rows of {columns}")
        _, block, _ = GGML_TYPES[TYPES[tensor.type_name]]
        if columns % block:
            raise ModelFileError(
                self._header.path,
                f"tensor {name} has rows of {columns}, which {tensor.type_name} does not divide into {block}",
            )
        return WeightTensor(tensor, bias, rows, columns)

    def _table(self, table: EmbeddingTable, vocabulary: int, embedding: int) -> WeightTensor:
        """The embedding's rows in a separate file, whose size was checked with the file's."""
        if (table.rows, table.columns) != (vocabulary, embedding):
            raise ModelFileError(table.path, f"it has {table.rows} rows for a vocabulary of {vocabulary}")
        if table.type_name not in TYPES:
            raise UnsupportedError(f"it has no kernels for {table.type_name} ({table.path.name})")
        tensor = TensorInfo(
            name=table.path.name,
            shape=(table.columns, table.rows),
            type_name=table.type_name,
            offset=0,
            byte_count=table.rows * table.row_bytes,
        )
        return WeightTensor(tensor, None, table.rows, table.columns)

    def _optional(self, name: str | None) -> TensorInfo | None:
        return None if name is None else self._floats(name)

    def _floats(self, name: str) -> TensorInfo:
        tensor = self._tensors[name]
        if tensor.type_name != "F32":
            raise UnsupportedError(f"{name} is {tensor.type_name}, not F32")
        return tensor


def _check_limits(shape: Shape) -> None:
    """Raise UnsupportedError for lengths that the kernels' blocks do not divide."""
    for sizes in dict.fromkeys((shape.sizes, *(layer.sizes for layer in shape.layers))):
        lengths = {"embedding": sizes.width, "feed-forward": sizes.inner, "heads": sizes.queries}
        further = {"dense feed-forward": sizes.dense, "shared expert": sizes.shared, "target's rows": sizes.read}
        for what, count in (lengths | {name: length for name, length in further.items() if length}).items():
            if count < BLOCK or count % BLOCK:
                raise UnsupportedError(f"the length {count} of its {what} is not a multiple of {BLOCK}")
        # 32 outputs of attention, which are quantised together, must lie within one group of heads.
        sharing = sizes.heads // sizes.kv_heads
        if sizes.head % LANES or sharing * sizes.head % BLOCK:
            raise UnsupportedError(f"{sharing} heads of {sizes.head} elements share a key")
    experts = shape.experts
    if experts is not None and (experts.count > MOST_EXPERTS or experts.used > MOST_EXPERTS_USED):
        raise UnsupportedError(
            f"a row uses {experts.used} of its {experts.count} experts, and the kernels take at most "
            f"{MOST_EXPERTS_USED} of {MOST_EXPERTS}"
        )
