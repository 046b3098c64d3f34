"""glm4: norms around both halves of a layer, feed-forward gate and input in one matrix, a part of a head rotated."""

from __future__ import annotations

from edgespec.architectures.shape import (
    Architecture,
    Facts,
    Rope,
    SavedForm,
    TensorForm,
    UnsupportedError,
    decoder_layer,
    one_rope,
)


def _ropes(facts: Facts) -> tuple[Rope, ...]:
    sections = facts.value("rope.dimension_sections")
    if isinstance(sections, tuple) and any(sections[1:]):
        raise UnsupportedError("its positions have several dimensions")
    return one_rope(facts)


ARCHITECTURE = Architecture(
    name="glm4",
    saved=SavedForm(
        classes={"Glm4ForCausalLM": "glm4"},
        defaults={"rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5},
        rotates_part=True,
        neighbours=True,
    ),
    layer=decoder_layer(
        gated=(TensorForm("ffn_up", {"ffn_gate": "inner", "ffn_up": "inner"}, "width"),), post_norms=True
    ),
    biases=frozenset({"attn_q", "attn_k", "attn_v"}),
    neighbours=True,
    ropes=_ropes,
)
