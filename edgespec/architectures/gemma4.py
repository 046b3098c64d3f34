"""gemma4: windows in most layers, two head lengths, values that are keys, caches that late layers share with earlier
ones, inputs of each layer (E2B, E4B), and a dense feed-forward beside experts (26B).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from edgespec.architectures.shape import (
    DEFAULT_ROPE_BASE,
    EMBEDDING,
    EXPERTS,
    EXPERTS_DOWN,
    INPUT_NORM,
    INPUT_PROJECTION,
    INPUT_ROWS,
    ROPE_FACTORS,
    ROUTER,
    Architecture,
    Experts,
    Facts,
    Length,
    Rope,
    SavedForm,
    Scales,
    Sizes,
    TensorForm,
    UnsupportedError,
    Variations,
    softmax_experts,
    windows_by_pattern,
)

_LOGIT_CAP = 30.0  # llama.cpp's, for a file that states none
_CAPS = (1e-3, 1e6)  # as in gemma2


def _kinds(facts: Facts) -> tuple[bool, ...]:
    """Whether each layer has a window."""
    layers, pattern = facts.integer("block_count"), facts.value("attention.sliding_window_pattern")
    if not isinstance(pattern, tuple) or len(pattern) != layers:
        raise facts.wrong(f"it does not state for each of its {layers} layers whether it has a window")
    return tuple(map(bool, pattern))


def windows(facts: Facts, sizes: Sizes) -> tuple[int, ...]:
    if any(_kinds(facts)):
        facts.integer("attention.sliding_window", least=1)
    return windows_by_pattern(facts, sizes, period=1)


def _head(facts: Facts, kind: str) -> int:
    key, value = (facts.integer(f"attention.{part}_length{kind}", least=1) for part in ("key", "value"))
    if key != value:
        raise UnsupportedError("its attention keys and values differ in length")
    return key


def ropes(facts: Facts) -> tuple[Rope, ...]:
    """Layers with a window rotate by another base, without divisors."""
    if facts.value("rope.scaling.type") not in (None, "none"):
        raise UnsupportedError(f"its rope scaling is {facts.value('rope.scaling.type')!r:.40}")
    head = _head(facts, "_swa")
    length = facts.integer("rope.dimension_count_swa", facts.integer("rope.dimension_count", head))
    if not 0 < length <= head or length % 2:
        raise facts.wrong(f"{length} of {head} elements of a head cannot be rotated")
    if length > facts.integer("rope.dimension_count", _head(facts, "")):
        raise UnsupportedError("its layers with a window rotate more elements of a head than the others")
    base = facts.number("rope.freq_base", DEFAULT_ROPE_BASE)
    return (
        Rope(base=base, factors=ROPE_FACTORS),
        Rope(base=facts.number("rope.freq_base_swa", DEFAULT_ROPE_BASE), length=length),
    )


def _scales(facts: Facts, sizes: Sizes) -> Scales:
    if facts.value("attn_logit_softcapping"):
        raise UnsupportedError("it has attn_logit_softcapping")
    key = "final_logit_softcapping"
    cap = 0.0 if facts.value(key) == 0 else facts.number(key, _LOGIT_CAP, within=_CAPS)
    return Scales(embedding=math.sqrt(sizes.width), score=1.0, logit_cap=cap)


def _experts(facts: Facts) -> Experts | None:
    return softmax_experts(facts) if facts.integer("expert_count", 0) else None


# Facts, whether each layer has a window, and its key-value heads.
Caches: TypeAlias = Callable[[Facts, tuple[bool, ...], tuple[int, ...]], tuple[int, ...]]


def _caches(facts: Facts, kinds: tuple[bool, ...], kv_heads: tuple[int, ...]) -> tuple[int, ...]:
    """The last layers read the caches of the last two that have one, of which the first has a window."""
    layers, shared = len(kinds), facts.integer("attention.shared_kv_layers", 0)
    own = layers - shared
    if shared and (own < 2 or not kinds[own - 2] or kinds[own - 1]):
        raise facts.wrong(f"{shared} of its {layers} layers share caches, and those before have none of their kinds")
    caches = tuple(layer if layer < own else own - (2 if kinds[layer] else 1) for layer in range(layers))
    if any(kv_heads[layer] != kv_heads[cache] for layer, cache in enumerate(caches)):
        raise facts.wrong("layers that share a cache differ in their attention.head_count_kv")
    return caches


def varied(facts: Facts, caches_of: Caches = _caches) -> Variations:
    """``caches_of`` says whose keys and values each layer reads."""
    kinds, kv_heads = _kinds(facts), facts.integers("attention.head_count_kv", least=1)
    inner, inputs = facts.integers("feed_forward_length"), facts.integer("embedding_length_per_layer_input", 0)
    heads, width = facts.integer("attention.head_count", least=1), facts.integer("embedding_length", least=1)
    layers = len(kinds)
    if any(heads % own for own in kv_heads):
        raise facts.wrong(f"{heads} attention heads cannot share {max(kv_heads)} key-value heads")
    lengths = tuple(_head(facts, kind) for kind in ("", "_swa"))
    largest = Sizes(
        layers=layers,
        context=facts.integer("context_length"),
        width=width,
        inner=max(inner),
        heads=heads,
        kv_heads=max(kv_heads),
        head=max(lengths),
        inputs=inputs,
    )
    if lengths[0] < lengths[1]:
        raise UnsupportedError("its heads are longer in layers with a window")
    experts, caches = _experts(facts), caches_of(facts, kinds, kv_heads)
    sizes, forms = list[Sizes](), list[tuple[TensorForm, ...]]()
    for layer in range(layers):
        own = replace(largest, kv_heads=kv_heads[layer], head=lengths[kinds[layer]], inner=inner[layer])
        if experts is not None and f"blk.{layer}.{ROUTER}.weight" in facts.tensors:
            own = replace(own, inner=experts.inner, experts=experts.count, dense=inner[layer])
        sizes.append(own)
        forms.append(_forms(facts, own, f"blk.{layer}.", has_keys=caches[layer] == layer))
    if experts is not None and not any(own.experts for own in sizes):
        raise facts.wrong(f"it states {experts.count} experts, and none of its {layers} layers has a router")
    rows = (*facts.tensors.get(EMBEDDING, ()), 0, 0)[1]  # as many, and those are checked
    more: dict[str, tuple[int, ...]] = {}
    if inputs:
        more = {
            INPUT_ROWS: (inputs * layers, rows),
            INPUT_PROJECTION: (width, inputs * layers),
            INPUT_NORM: (inputs,),
        }
    return Variations(largest=largest, sizes=tuple(sizes), forms=tuple(forms), caches=caches, tensors=more)


def _norm(name: str, length: Length = "width") -> TensorForm:
    return TensorForm(name, {name: length})


_INPUTS = (
    TensorForm("inp_gate", {"inp_gate": "inputs"}, "width"),
    TensorForm("proj", {"proj": "width"}, "inputs"),
    _norm("post_norm"),
)


def _mixture(optional: Callable[[TensorForm], tuple[TensorForm, ...]]) -> tuple[TensorForm, ...]:
    """A dense feed-forward, then experts. The router has a norm."""
    return (
        TensorForm("ffn_gate", {"dense_gate": "dense"}, "width"),
        TensorForm("ffn_up", {"dense_up": "dense"}, "width"),
        TensorForm("ffn_down", {"dense_down": "width"}, "dense"),
        *(_norm("post_ffw_norm_1"), TensorForm(ROUTER, {"router_norm": "width"}, ends=".scale"), EXPERTS[0]),
        *(_norm("pre_ffw_norm_2"), *EXPERTS[1:], EXPERTS_DOWN),
        *optional(TensorForm("ffn_down_exps", {"expert_scales": "experts"}, ends=".scale")),
        _norm("post_ffw_norm_2"),
    )


def _forms(facts: Facts, sizes: Sizes, block: str, *, has_keys: bool) -> tuple[TensorForm, ...]:
    def optional(form: TensorForm) -> tuple[TensorForm, ...]:
        return (form,) if f"{block}{form.name}{form.ends}" in facts.tensors else ()

    value = TensorForm("attn_v", {"attn_v": "keys"}, "width")
    keys: tuple[TensorForm, ...] = (TensorForm("attn_k", {"attn_k": "keys"}, "width"), *optional(value))
    norms: tuple[TensorForm, ...] = (_norm("attn_k_norm", "head"),)
    if not has_keys:  # a file may hold what is not computed
        unused = (replace(form, parts={f"unused {form.name}": "keys"}) for form in (keys[0], value))
        keys = tuple(each for form in unused for each in optional(form))
        norms = optional(TensorForm("attn_k_norm", {"unused attn_k_norm": "head"}))
    feed_forward = (
        _mixture(optional)
        if sizes.experts
        else (
            TensorForm("ffn_gate", {"ffn_gate": "inner"}, "width"),
            TensorForm("ffn_up", {"ffn_up": "inner"}, "width"),
            TensorForm("ffn_down", {"ffn_down": "width"}, "inner"),
        )
    )
    return (
        _norm("attn_norm"),
        *(TensorForm("attn_q", {"attn_q": "queries"}, "width"), *keys, _norm("attn_q_norm", "head"), *norms),
        TensorForm("attn_output", {"attn_output": "width"}, "queries"),
        *(_norm("post_attention_norm"), _norm("ffn_norm"), *feed_forward, _norm("post_ffw_norm")),
        *(_INPUTS if sizes.inputs else ()),
        *optional(_norm("layer_output_scale", "one")),
    )


def _as_llama_cpp_reads(facts: Mapping[str, object], *, is_multimodal: bool) -> Mapping[str, object] | None:
    """Its tokenizer's name: Ollama's converter (convert_gemma4.go) calls it SentencePiece, and its scores are ids."""
    if facts.get("tokenizer.ggml.model") != "llama" or "tokenizer.ggml.merges" not in facts:
        return None
    return {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.add_space_prefix": False}


ARCHITECTURE = Architecture(
    name="gemma4",
    saved=SavedForm(),
    rope_tensors=frozenset({ROPE_FACTORS}),
    gelu=True,
    windows=windows,
    ropes=ropes,
    scales=_scales,
    experts=_experts,
    varied=varied,
    norms_values=True,
    caps=True,
    scales_tokens_only=True,
    completed=_as_llama_cpp_reads,
)
