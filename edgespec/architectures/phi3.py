"""phi3: queries, keys and values in one matrix, gate and input of the feed-forward in another, long rope factors."""

from __future__ import annotations

from edgespec.architectures.shape import (
    LONG_FACTORS,
    SHORT_FACTORS,
    Architecture,
    Facts,
    SavedForm,
    Sizes,
    TensorForm,
    decoder_layer,
)


def _windows(facts: Facts, sizes: Sizes) -> tuple[int, ...]:
    """A window applies to all layers, as in transformers. llama.cpp ignores it, and so differs behind its length."""
    window = facts.integer("attention.sliding_window", 0)
    return (window if window < sizes.context else 0,) * sizes.layers


ARCHITECTURE = Architecture(
    name="phi3",
    saved=SavedForm(classes={"Phi3ForCausalLM": "phi3"}, defaults={"rms_norm_eps": 1e-5}, rotates_part=True),
    layer=decoder_layer(
        qkv=(TensorForm("attn_qkv", {"attn_q": "queries", "attn_k": "keys", "attn_v": "keys"}, "width"),),
        gated=(TensorForm("ffn_up", {"ffn_gate": "inner", "ffn_up": "inner"}, "width"),),
    ),
    rope_tensors=frozenset({SHORT_FACTORS, LONG_FACTORS}),
    windows=_windows,
)
