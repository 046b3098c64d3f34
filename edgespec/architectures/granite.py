"""granite: llama with scales of the embedding, of what half of a layer adds, of attention scores and of logits."""

from __future__ import annotations

from edgespec.architectures.shape import (
    ROPE_FACTORS,
    Architecture,
    Facts,
    Rope,
    SavedForm,
    Scales,
    Sizes,
    UnsupportedError,
    one_rope,
)

# The keys of the scales, with transformers' members. llama.cpp takes 0 for a scale that is not stated, and divides
# logits by theirs.
_KEYS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}


def _scales(facts: Facts, _sizes: Sizes) -> Scales:
    embedding, residual, score, logit = (facts.number(key) if facts.value(key) else None for key in _KEYS)
    return Scales(embedding=embedding or 1.0, residual=residual or 1.0, score=score, logit=1.0 / (logit or 1.0))


def _ropes(facts: Facts) -> tuple[Rope, ...]:
    if facts.value("rope.scaling.finetuned") is False:  # llama.cpp's sign for granite without positions
        raise UnsupportedError("it rotates no positions")
    return one_rope(facts)


ARCHITECTURE = Architecture(
    name="granite",
    # transformers' defaults are 1, also for attention scores.
    saved=SavedForm(
        classes={"GraniteForCausalLM": "granite"}, defaults=dict.fromkeys(_KEYS.values(), 1.0), keys=_KEYS
    ),
    biases=frozenset({"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}),
    neighbours=True,
    rope_tensors=frozenset({ROPE_FACTORS}),
    ropes=_ropes,
    scales=_scales,
)
