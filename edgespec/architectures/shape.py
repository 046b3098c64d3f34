"""What a decoder is: its sizes, the tensors of its layers, norms, windows, ropes and scales, read and checked.

The facts come from a Mapping with llama.cpp's keys: a GGUF header's metadata, or what a config.json became. Every
reader of a model (kernels, ONNX graph, conversion) asks here, so that all of them see the same model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

from edgespec.architectures.deltas import Deltas
from edgespec.architectures.facts import Facts as Facts, UnsupportedError as UnsupportedError
from edgespec.architectures.ropes import (
    DEFAULT_ROPE_BASE as DEFAULT_ROPE_BASE,
    LONG_FACTORS as LONG_FACTORS,
    ROPE_FACTORS as ROPE_FACTORS,
    SHORT_FACTORS as SHORT_FACTORS,
    Rope as Rope,
    Yarn as Yarn,
    one_rope as one_rope,
)

EMBEDDING, HEAD, OUTPUT_NORM = "token_embd.weight", "output.weight", "output_norm.weight"
INPUT_ROWS, INPUT_PROJECTION = "per_layer_token_embd.weight", "per_layer_model_proj.weight"
INPUT_NORM = "per_layer_proj_norm.weight"
PAIR, FEATURE_OUT = "nextn.pre_projection.weight", "nextn.post_projection.weight"

OTHERS_CACHE = -1
"""In place of a layer's number: it reads the keys and values of another model."""

Length: TypeAlias = Literal[
    "width", "queries", "asked", "keys", "heads", "head", "inner", "both", "experts", "dense", "inputs", "one",
    "mixed", "scanned", "delta_heads", "delta_length", "delta_kernel", "shared", "pair",
]  # fmt: skip
"""A length by its name in ``Sizes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Counts and lengths. ``width`` is the embedding's, ``inner`` the feed-forward's or an expert's, ``head`` that of
    one head, all in elements; ``context`` is in tokens; ``experts`` are those of a layer, 0 for none, and ``shared``
    is the length of one that every row uses. ``asked`` are queries with as many gates. ``dense`` is the length of a
    feed-forward next to experts, ``inputs`` that of a layer's part of a token's inputs, ``read`` that of its target's
    rows that a drafter reads, 0 for other models."""

    layers: int
    context: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    experts: int = 0
    shared: int = 0
    deltas: Deltas | None = None
    dense: int = 0
    inputs: int = 0
    read: int = 0
    one = 1

    @property
    def both(self) -> int:
        """Rows of an expert's gate and input in one matrix."""
        return 2 * self.inner

    @property
    def queries(self) -> int:
        return self.heads * self.head

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head

    @property
    def asked(self) -> int:
        return 2 * self.queries

    @property
    def pair(self) -> int:
        """A token's embedding and a hidden row."""
        return 2 * self.width

    def __getitem__(self, length: Length) -> int:
        of_deltas = length in ("mixed", "scanned") or length.startswith("delta_")
        found: int = getattr(self.deltas if of_deltas else self, length.removeprefix("delta_"))
        return found


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor that every layer has: its name, the rows of its parts from top to bottom, and its columns (None: a
    vector). ``each_expert``: it holds such a matrix for each expert. ``ends``: what its name in a file ends with.
    """

    name: str
    parts: Mapping[str, Length]
    columns: Length | None = None
    each_expert: bool = False
    ends: str = ".weight"


def vector(name: str, length: Length) -> TensorForm:
    return TensorForm(name, {name: length})


def matrix(name: str, rows: Length, columns: Length) -> TensorForm:
    return TensorForm(name, {name: rows}, columns)


_QKV = (matrix("attn_q", "queries", "width"), matrix("attn_k", "keys", "width"), matrix("attn_v", "keys", "width"))
GATED = (matrix("ffn_gate", "inner", "width"), matrix("ffn_up", "inner", "width"))
DOWN = matrix("ffn_down", "width", "inner")
_HEAD_NORMS = (vector("attn_q_norm", "head"), vector("attn_k_norm", "head"))
_JOINED_NORMS = (vector("attn_q_norm", "queries"), vector("attn_k_norm", "keys"))


ROUTER = "ffn_gate_inp"
EXPERTS = (
    matrix(ROUTER, "experts", "width"),
    TensorForm("ffn_gate_exps", {"ffn_gate": "inner"}, "width", each_expert=True),
    TensorForm("ffn_up_exps", {"ffn_up": "inner"}, "width", each_expert=True),
)
EXPERTS_TOGETHER = TensorForm("ffn_gate_up_exps", {"ffn_gate": "both"}, "width", each_expert=True)
"""In place of the last two, in files that hold each expert's gate and input in one matrix."""

EXPERTS_DOWN = TensorForm("ffn_down_exps", {"ffn_down": "width"}, "inner", each_expert=True)
"""The tensors of a feed-forward of experts, but for its norm."""


def decoder_layer(
    *,
    qkv: tuple[TensorForm, ...] = _QKV,
    gated: tuple[TensorForm, ...] = GATED,
    down: TensorForm = DOWN,
    head_norms: bool = False,
    joined_norms: bool = False,
    pre_norms: bool = True,
    post_norms: bool = False,
    feed_forward_norm: str = "ffn_norm",
    sinks: bool = False,
) -> tuple[TensorForm, ...]:
    """The tensors of a layer in the order of computation.

    ``head_norms``: each head's query and key are normalised, with ``joined_norms`` all of a row's as one vector.
    ``pre_norms``: so is what each half of the layer reads, ``post_norms``: what it adds. ``feed_forward_norm``: the
    tensor of the second half's norm. ``sinks``: each head's softmax has one more score, without a value.
    """
    return (
        *([vector("attn_norm", "width")] if pre_norms else ()),
        *(*qkv, *(_HEAD_NORMS if head_norms else _JOINED_NORMS if joined_norms else ())),
        *([vector("attn_sinks", "heads")] if sinks else ()),
        matrix("attn_output", "width", "queries"),
        *([vector("post_attention_norm", "width")] if post_norms else ()),
        *([TensorForm(feed_forward_norm, {"ffn_norm": "width"})] if pre_norms else ()),
        *(*gated, down),
        *([vector("post_ffw_norm", "width")] if post_norms else ()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """What the embedding, the outputs of both halves of a layer, attention scores and logits are multiplied by.

    ``score`` None: by one over the root of a head's length. ``score_cap`` and ``logit_cap``: c, where a score x
    becomes c tanh(x / c); 0 for none. ``temperature``: t, where queries are multiplied by 1 + t ln(1 + n) once
    ``span`` tokens came n times before them; 0 for none.
    """

    embedding: float = 1.0
    residual: float = 1.0
    score: float | None = None
    logit: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    temperature: float = 0.0
    span: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts (Shazeer et al., 2017): of a layer's ``count`` feed-forwards a row uses the ``used`` that
    the softmax of its router's scores weighs most. ``inner``: an expert's length. ``normed``: the weights of the used
    ones add up to 1 before they are multiplied by ``scale``. ``shared``: the length of a further expert that every
    row uses, by a weight for itself; 0 for none."""

    count: int
    used: int
    inner: int
    normed: bool = True
    scale: float = 1.0
    shared: int = 0


def softmax_experts(facts: Facts, *, known: Collection[str] = ()) -> Experts:
    """Experts whose weights are normed and not scaled. What ``known`` keys state is computed by the caller. Raises
    UnsupportedError, ModelFileError."""
    count, used = facts.integer("expert_count", least=1), facts.integer("expert_used_count", least=1)
    if used > count:
        raise facts.wrong(f"a row cannot use {used} of {count} experts")
    for key, plain in _PLAIN_EXPERTS.items():
        if key not in known and (value := facts.value(key)) is not None and value not in plain:
            raise UnsupportedError(f"its {key} is {value!r:.40}")
    # llama.cpp's default for a file that states no length.
    inner = facts.integer(_EXPERT_LENGTH, 0) or facts.integer("feed_forward_length") // used
    return Experts(count=count, used=used, inner=inner)


_EXPERT_LENGTH = "expert_feed_forward_length"
# What a file may state of experts that are chosen and weighted in the simplest way; 1 is llama.cpp's softmax.
_PLAIN_EXPERTS: Mapping[str, tuple[float, ...]] = {
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "moe_every_n_layers": (0, 1),
    "leading_dense_block_count": (0,),
}


def no_windows(facts: Facts, sizes: Sizes) -> tuple[int, ...]:
    """Attention sees all positions. Raises UnsupportedError if the file says otherwise."""
    window = facts.integer("attention.sliding_window", 0)
    if 0 < window < sizes.context:
        raise UnsupportedError(f"its attention has a sliding window of {window}, and its context is {sizes.context}")
    return (0,) * sizes.layers


def windows_by_pattern(facts: Facts, sizes: Sizes, *, period: int, default: int = 0) -> tuple[int, ...]:
    """The window of each layer. The pattern is a period, or one bool for each layer: whether it has a window.

    With a period, layer i has no window if i + 1 is a multiple of it, as in llama.cpp. ``period`` and ``default``, a
    window in positions, are for a file that states none.
    """
    window = facts.integer("attention.sliding_window", default)
    pattern = facts.value("attention.sliding_window_pattern")
    if not isinstance(pattern, tuple):
        pattern = every_but(facts.integer("attention.sliding_window_pattern", period, least=1), sizes.layers)
    if len(pattern) != sizes.layers:
        raise facts.wrong(f"its sliding_window_pattern lists {len(pattern)} of {sizes.layers} layers")
    return tuple(window if narrow else 0 for narrow in pattern)


def every_but(period: int, layers: int) -> tuple[bool, ...]:
    """False for every layer whose number, counted from 1, is a multiple of ``period``."""
    return tuple((layer + 1) % period != 0 for layer in range(layers))


def all_turn(_facts: Facts, sizes: Sizes) -> tuple[bool, ...]:
    """Every layer rotates its queries and keys."""
    return (True,) * sizes.layers


def no_scales(_facts: Facts, _sizes: Sizes) -> Scales:
    return Scales()


class Completion(Protocol):
    """Returns keys that llama.cpp needs and another converter named otherwise or left out; None if all are there.

    ``facts`` is the whole metadata as in the file. ``is_multimodal``: the file holds more than the text model.
    """

    def __call__(self, facts: Mapping[str, object], *, is_multimodal: bool) -> Mapping[str, object] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaNames:
    """Names in files of Ollama's converter, where llama.cpp has others.

    ``architecture`` is the whole file's; "" if it is llama.cpp's. ``tensors`` are a layer's, each with llama.cpp's
    name, or "" for a tensor that holds several of llama.cpp's in one, which no kernel reads. Tensors whose names
    begin with one of ``aside`` are left out.
    """

    architecture: str = ""
    tensors: Mapping[str, str] = field(default_factory=dict)
    aside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedForm:
    """How transformers saves models of an architecture.

    ``classes``: transformers' classes, with the model type of each; without any, folders are not converted. Of the
    classes in ``multimodal`` the text model is only a part of the folder. ``activation`` is the member of config.json
    that may have one of ``activations``, ``defaults`` what a config.json may leave out, ``keys`` the GGUF's keys that
    hold members of the same value, ``rope_keys`` those that may hold members of the rope scaling. ``norm_offset`` is
    what llama.cpp expects added to the weights of every norm. ``needs_biases``: every matrix that may have a bias has
    one. ``keeps_windows``: llama.cpp computes its sliding windows. ``rotates_part``: the leading elements of a head
    alone may be rotated. ``neighbours``: the rows of a saved head are in the GGUF's order already.
    """

    classes: Mapping[str, str] = field(default_factory=dict)
    multimodal: frozenset[str] = frozenset()
    activation: str = "hidden_act"
    activations: frozenset[str] = frozenset({"silu", "swish"})
    defaults: Mapping[str, float] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    rope_keys: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    needs_biases: bool = False
    keeps_windows: bool = False
    rotates_part: bool = False
    neighbours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Variations:
    """Layers that differ. ``sizes`` are those of each, ``largest`` the model's. ``forms`` are the tensors of each, in
    place of the architecture's ``layer``. ``caches``: the number of the layer whose keys and values it reads, or
    OTHERS_CACHE. ``tensors`` are more of the whole model, by name with their shapes.
    """

    largest: Sizes
    sizes: tuple[Sizes, ...]
    forms: tuple[tuple[TensorForm, ...], ...]
    caches: tuple[int, ...]
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How a family of models is computed, by llama.cpp's name.

    ``saved``: what transformers saves. ``layer`` lists the tensors of a layer in the order of computation.
    ``biases``: the matrices that may have one, or must with ``requires_biases``. ``neighbours``: rotary embedding
    pairs neighbouring elements of a head instead of halves. ``rope_tensors``: divisors of the rotary angles that the
    file may hold. ``gelu``: the gate is GELU (tanh form) instead of SiLU. ``clips``: gate and input are clipped as in
    gpt-oss. ``windows`` returns the positions that a row of each layer sees, 0 for all; ``ropes`` the rope of layers
    that see all, then that of the others if it differs, ``turns`` the layers that rotate at all, ``experts`` the
    mixture that each layer is, ``varied`` how the layers differ. ``deltas`` says which of that many layers are gated
    delta layers, with the tensors ``delta_layer``. ``drafting_layer``: the tensors of a layer that only drafts
    (drafting.py). ``gates_heads``: each head's query is followed by a gate of the head's output. ``norms_values``:
    the values of each head have a norm without weights. ``caps``: its scores are capped, and ``scales`` says how.
    ``scales_tokens_only``: llama.cpp scales no embedding that it is given as a vector. ``completed`` returns keys
    that another converter left out or named otherwise; ``ollama`` are the names in files of Ollama's converter.
    """

    name: str
    saved: SavedForm
    layer: tuple[TensorForm, ...] = decoder_layer()
    biases: frozenset[str] = frozenset()
    requires_biases: bool = False
    neighbours: bool = False
    rope_tensors: frozenset[str] = frozenset()
    gelu: bool = False
    clips: bool = False
    windows: Callable[[Facts, Sizes], tuple[int, ...]] = no_windows
    ropes: Callable[[Facts], tuple[Rope, ...]] = one_rope
    turns: Callable[[Facts, Sizes], tuple[bool, ...]] = all_turn
    scales: Callable[[Facts, Sizes], Scales] = no_scales
    experts: Callable[[Facts], Experts | None] | None = None
    varied: Callable[[Facts], Variations] | None = None
    deltas: Callable[[Facts, int], Deltas] | None = None
    delta_layer: tuple[TensorForm, ...] = ()
    drafting_layer: tuple[TensorForm, ...] = ()
    gates_heads: bool = False
    norms_values: bool = False
    caps: bool = False
    scales_tokens_only: bool = False
    completed: Completion | None = None
    ollama: OllamaNames | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a layer computes with: rows ``first`` to ``first`` + ``rows`` of a tensor with ``height`` rows.

    ``columns`` is None for a vector. ``bias`` is the tensor with the matrix's bias, of the same ``height``. The rows
    of ``experts``, if not 0, lie one below another.
    """

    tensor: str
    height: int
    first: int
    rows: int
    columns: int | None
    bias: str | None = None
    experts: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, fastest dimension first."""
        if self.columns is None:
            return (self.height,)
        if self.experts:
            return (self.columns, self.height // self.experts, self.experts)
        return (self.columns, self.height)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The parts of a layer by role, as llama.cpp names them where each is a tensor.

    ``window``: the positions that a row sees, its own counted, 0 for all. ``rope`` is an index into the ropes. Where
    nothing ``turns`` it has no meaning. ``cache``: the number of the layer whose keys and values it reads, or
    OTHERS_CACHE.
    """

    parts: Mapping[str, Part]
    sizes: Sizes
    window: int
    rope: int
    cache: int
    turns: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Everything about a model except its weights. ``rows``: of the embedding and of the head. The embedding is also
    the head if ``tied``. ``rope_length``: the leading elements of a head that are rotated. Contexts of more than
    ``original_context`` tokens use the long factors. ``more`` are tensors that belong to no layer.
    """

    architecture: Architecture
    sizes: Sizes
    rows: int
    tied: bool
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    rope_length: int
    original_context: int
    norm_epsilon: float
    scales: Scales
    experts: Experts | None = None
    more: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def score_scale(self) -> float:
        """What a query's product with a key is multiplied by."""
        return 1.0 / math.sqrt(self.sizes.head) if self.scales.score is None else self.scales.score

    def query_factors(self) -> tuple[float, ...]:
        """What queries are multiplied by, by the number of spans before them; none if by nothing."""
        if not self.scales.temperature:
            return ()
        spans = (self.sizes.context - 1) // self.scales.span + 1
        return tuple(1.0 + self.scales.temperature * math.log1p(number) for number in range(spans))

    @property
    def joins_heads(self) -> bool:
        """Whether the norms of queries and keys are those of a row's heads as one vector."""
        return any(form.parts.get("attn_q_norm") == "queries" for form in self.architecture.layer)

    def in_context(self, tokens: int) -> Shape:
        """The same model with a context of ``tokens``, and with only the rope factors that apply to it."""
        is_long = tokens > self.original_context
        ropes = (
            replace(rope, factors=(rope.long_factors if is_long else None) or rope.factors, long_factors=None)
            for rope in self.ropes
        )
        return replace(self, sizes=replace(self.sizes, context=tokens), ropes=tuple(ropes))

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model with its shape, fastest dimension first, in the order of computation."""
        sizes = self.sizes
        found: dict[str, tuple[int, ...]] = {EMBEDDING: (sizes.width, self.rows)}
        factors = {each for rope in self.ropes for each in (rope.factors, rope.long_factors) if each is not None}
        found |= dict.fromkeys(sorted(factors & self.architecture.rope_tensors), (self.rope_length // 2,))
        for layer in self.layers:
            for part in layer.parts.values():
                found[part.tensor] = part.shape
                if part.bias is not None:
                    found[part.bias] = part.shape[1:]
        found |= {OUTPUT_NORM: (sizes.width,), **self.more}
        if not self.tied:
            found[HEAD] = (sizes.width, self.rows)
        return found


def read_shape(architecture: Architecture, facts: Facts, rows: int) -> Shape:
    """The model's shape, with every tensor's shape checked. ``rows``: of the embedding and the head in the file.

    Raises UnsupportedError for a property that is not computed here, ModelFileError for a file that contradicts
    itself.
    """
    _refuse_variants(architecture, facts)
    varied = None if architecture.varied is None else architecture.varied(facts)
    sizes = read_sizes(facts) if varied is None else varied.largest
    deltas = None if architecture.deltas is None else architecture.deltas(facts, sizes.layers)
    if deltas is not None and any(deltas.layers):  # else no tensor bears out what the file states of them
        sizes = replace(sizes, deltas=deltas)
    experts = None if architecture.experts is None else architecture.experts(facts)
    if experts is not None:
        sizes = replace(sizes, inner=experts.inner, experts=experts.count, shared=experts.shared)
    rope_length = facts.integer("rope.dimension_count", sizes.head)
    if not 0 < rope_length <= sizes.head or rope_length % 2:
        raise facts.wrong(f"{rope_length} of {sizes.head} elements of a head cannot be rotated")
    ropes = architecture.ropes(facts)
    shape = Shape(
        architecture=architecture,
        sizes=sizes,
        rows=rows,
        tied=HEAD not in facts.tensors,
        layers=_layers(architecture, sizes, facts, len(ropes), varied or _alike(architecture, sizes)),
        ropes=ropes,
        rope_length=rope_length,
        original_context=facts.integer("rope.scaling.original_context_length", sizes.context),
        norm_epsilon=facts.number("attention.layer_norm_rms_epsilon"),
        scales=architecture.scales(facts, sizes),
        experts=experts,
        more={} if varied is None else varied.tensors,
    )
    if (key := facts.never_asked(_CHANGES)) is not None:
        raise UnsupportedError(f"it has {key}")
    _check_tensors(shape, facts)
    return shape


def read_sizes(facts: Facts) -> Sizes:
    """Counts and lengths that fit each other. Raises UnsupportedError, ModelFileError."""
    width, heads = facts.integer("embedding_length"), facts.integer("attention.head_count")
    kv_heads = facts.integer("attention.head_count_kv", heads)
    if not 0 < heads <= width:
        raise facts.wrong(f"{heads} attention heads cannot share {width} columns")
    if kv_heads < 1 or heads % kv_heads:
        raise facts.wrong(f"{heads} attention heads cannot share {kv_heads} key-value heads")
    head = facts.integer("attention.key_length", width // heads)
    if head != facts.integer("attention.value_length", width // heads):
        raise UnsupportedError("its attention keys and values differ in length")
    layers, drafting = facts.integer("block_count"), facts.integer("nextn_predict_layers", 0)
    if drafting and drafting >= layers:
        raise facts.wrong(f"{drafting} of its {layers} layers draft, so that none is left")
    return Sizes(
        layers=layers - drafting,
        context=facts.integer("context_length"),
        width=width,
        inner=facts.integer("feed_forward_length", None if facts.value(_EXPERT_LENGTH) is None else 0),
        heads=heads,
        kv_heads=kv_heads,
        head=head,
    )


# llama.cpp's keys (src/llama-arch.cpp) that change what some families compute, without a tensor that would tell. A
# family whose file states one without reading it would compute something else.
_CHANGES = (
    *("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"),
    *("embedding_scale", "residual_scale", "logit_scale", "use_parallel_residual", "swiglu_clamp_exp"),
    *("attention.scale", "attention.output_scale", "attention.value_scale", "attention.clamp_kqv"),
    *("attention.max_alibi_bias", "attention.temperature_scale"),
    *("attention.shared_kv_layers", "expert_group_scale", "num_loops"),
)


def _refuse_variants(architecture: Architecture, facts: Facts) -> None:
    if architecture.experts is None and facts.integer("expert_count", 0):
        raise UnsupportedError("it is a mixture of experts")
    if facts.value("attention.causal") not in (None, True):
        raise UnsupportedError("its attention is not causal")


def _alike(architecture: Architecture, sizes: Sizes) -> Variations:
    every = range(sizes.layers)
    forms = tuple(_forms(architecture, sizes, number) for number in every)
    return Variations(largest=sizes, sizes=(sizes,) * sizes.layers, forms=forms, caches=tuple(every))


def _forms(architecture: Architecture, sizes: Sizes, number: int) -> tuple[TensorForm, ...]:
    is_delta = sizes.deltas is not None and sizes.deltas.layers[number]
    return architecture.delta_layer if is_delta else architecture.layer


def _layers(
    architecture: Architecture, sizes: Sizes, facts: Facts, ropes: int, varied: Variations
) -> tuple[Layer, ...]:
    found = zip(architecture.windows(facts, sizes), architecture.turns(facts, sizes), strict=True)
    return tuple(
        Layer(
            parts=MappingProxyType(
                dict(
                    layer_parts(
                        architecture,
                        varied.sizes[number],
                        facts.tensors,
                        number,
                        forms=varied.forms[number],
                        all_biases=architecture.requires_biases,
                    )
                )
            ),
            sizes=varied.sizes[number],
            window=window,
            rope=1 if window and ropes > 1 else 0,
            cache=varied.caches[number],
            turns=turns,
        )
        for number, (window, turns) in enumerate(found)
    )


def layer_parts(
    architecture: Architecture,
    sizes: Sizes,
    tensors: Collection[str],
    number: int,
    *,
    forms: tuple[TensorForm, ...] | None = None,
    all_biases: bool = False,
) -> Iterator[tuple[str, Part]]:
    """The parts of a layer by role, those of ``forms`` if its layers differ. Biases are those among ``tensors``, or
    all that the architecture may have. ``tensors`` say as well whether experts' gates and inputs are together."""
    block = f"blk.{number}"
    forms = _forms(architecture, sizes, number) if forms is None else forms
    gate, up = EXPERTS[1:]
    if f"{block}.{EXPERTS_TOGETHER.name}.weight" in tensors and gate.name not in architecture.biases:
        forms = tuple(EXPERTS_TOGETHER if form == gate else form for form in forms if form != up)
    for form in forms:
        bias = f"{block}.{form.name}.bias" if form.name in architecture.biases else None
        copies = sizes.experts if form.each_expert else 1
        first, height = 0, copies * sum(sizes[length] for length in form.parts.values())
        for role, length in form.parts.items():
            yield (
                role,
                Part(
                    tensor=f"{block}.{form.name}{form.ends}",
                    height=height,
                    first=first,
                    rows=copies * sizes[length],
                    columns=None if form.columns is None else sizes[form.columns],
                    bias=bias if all_biases or bias in tensors else None,
                    experts=copies if form.each_expert else 0,
                ),
            )
            first += sizes[length]


def check_shapes(wanted: Mapping[str, tuple[int, ...]], facts: Facts) -> None:
    """Raise ModelFileError for a tensor that is missing or has another shape."""
    for name, lengths in wanted.items():
        if name not in facts.tensors:
            raise facts.wrong(f"tensor {name} is missing")
        found = facts.tensors[name]
        # Trailing ones carry no information: some writers pad shapes with ones.
        if found[: len(lengths)] != lengths or math.prod(found[len(lengths) :]) != 1:
            raise facts.wrong(f"tensor {name} has shape {found}, not {lengths}")


def _check_tensors(shape: Shape, facts: Facts) -> None:
    """Whether the file has exactly the tensors of the shape."""
    wanted = shape.tensors()
    check_shapes(wanted, facts)
    # Layers that draft stand behind the others, and are checked for themselves.
    drafting = tuple(f"blk.{number}." for number in range(shape.sizes.layers, facts.integer("block_count")))
    strange = next((name for name in facts.tensors if name not in wanted and not name.startswith(drafting)), None)
    if strange is not None:
        raise UnsupportedError(f"it has a tensor {strange}")
