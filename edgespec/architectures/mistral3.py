"""mistral3 (Ministral 3, Mistral Small): llama with YaRN, and queries that grow with the number of contexts read."""

from __future__ import annotations

from edgespec.architectures.shape import ROPE_FACTORS, Architecture, Facts, SavedForm, Scales, Sizes

_TEMPERATURE = "attention.temperature_scale"
_MOST_SPANS = 4096  # of a table of factors; Ministral 3 has 16


def _scales(facts: Facts, sizes: Sizes) -> Scales:
    score = facts.number("attention.scale") if facts.value("attention.scale") else None
    if not facts.value(_TEMPERATURE):
        return Scales(score=score)
    span = facts.integer("rope.scaling.original_context_length", least=1)
    if sizes.context > _MOST_SPANS * span:
        raise facts.wrong(f"its context is more than {_MOST_SPANS} times its original one")
    return Scales(score=score, temperature=facts.number(_TEMPERATURE, within=(1e-6, 1e3)), span=span)


ARCHITECTURE = Architecture(
    name="mistral3",
    saved=SavedForm(
        classes={"Ministral3ForCausalLM": "ministral3", "Mistral3ForConditionalGeneration": "mistral3"},
        multimodal=frozenset({"Mistral3ForConditionalGeneration"}),
        defaults={"rms_norm_eps": 1e-5},
        rope_keys={
            _TEMPERATURE: "llama_4_scaling_beta",
            "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
        },
    ),
    neighbours=True,
    rope_tensors=frozenset({ROPE_FACTORS}),
    scales=_scales,
)
