"""mistral3 (Ministral 3, Mistral Small): llama with YaRN, and queries that grow with the number of contexts read."""

from __future__ import annotations

from collections.abc import Mapping

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


# The names of Ollama's converter (convert_mistral.go, convert_mistral_causal.go).
_OLLAMA = {
    "rope.scaling.yarn_beta_fast": "rope.scaling.beta_fast",
    "rope.scaling.yarn_beta_slow": "rope.scaling.beta_slow",
    "rope.scaling.yarn_log_multiplier": "rope.scaling.mscale_all_dim",
    _TEMPERATURE: "rope.scaling_beta",
}


def _as_llama_cpp_reads(facts: Mapping[str, object], *, is_multimodal: bool) -> Mapping[str, object] | None:
    """Keys that Ollama's converter named otherwise, and the pre-tokenizer, which it did not know."""
    found = {
        f"mistral3.{key}": facts[f"mistral3.{old}"]
        for key, old in _OLLAMA.items()
        if f"mistral3.{old}" in facts and f"mistral3.{key}" not in facts
    }
    if found and facts.get("tokenizer.ggml.pre") in (None, "", "default"):
        found["tokenizer.ggml.pre"] = "tekken"
    return found or None


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
    completed=_as_llama_cpp_reads,
)
