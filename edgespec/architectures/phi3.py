"""phi3: queries, keys and values in one matrix, gate and input of the feed-forward in another, long rope factors."""

from __future__ import annotations

from edgespec.architectures.shape import (
    ATTENDED,
    ATTENTION_NORM,
    DOWN,
    FEED_FORWARD_NORM,
    LONG_FACTORS,
    SHORT_FACTORS,
    Architecture,
    Facts,
    SavedForm,
    Sizes,
    stacked,
)


def _windows(facts: Facts, sizes: Sizes) -> tuple[int, ...]:
    """A window applies to all layers, as in transformers. llama.cpp ignores it, and so differs behind its length."""
    window = facts.integer("attention.sliding_window", 0)
    return (window if window < sizes.context else 0,) * sizes.layers


ARCHITECTURE = Architecture(
    name="phi3",
    saved=SavedForm(classes={"Phi3ForCausalLM": "phi3"}, rotates_part=True),
    layer=(
        ATTENTION_NORM,
        stacked("attn_qkv", "width", attn_q="queries", attn_k="keys", attn_v="keys"),
        ATTENDED,
        FEED_FORWARD_NORM,
        stacked("ffn_up", "width", ffn_gate="inner", ffn_up="inner"),
        DOWN,
    ),
    rope_tensors=frozenset({SHORT_FACTORS, LONG_FACTORS}),
    windows=_windows,
)
