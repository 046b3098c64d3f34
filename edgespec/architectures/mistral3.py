"""mistral3 (Ministral 3, Mistral Small): llama with YaRN, and queries that grow with the number of contexts read."""

from __future__ import annotations

from edgespec.architectures.shape import ROPE_FACTORS, Architecture, Facts, SavedForm, Scales, Sizes


def _scales(facts: Facts, _sizes: Sizes) -> Scales:
    score, temperature = (
        facts.number(key) if facts.value(key) else None for key in ("attention.scale", "attention.temperature_scale")
    )
    if temperature is None:
        return Scales(score=score)
    span = facts.integer("rope.scaling.original_context_length", least=1)
    return Scales(score=score, temperature=temperature, span=span)


ARCHITECTURE = Architecture(
    name="mistral3", saved=SavedForm(), neighbours=True, rope_tensors=frozenset({ROPE_FACTORS}), scales=_scales
)
