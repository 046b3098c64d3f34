"""olmo2 (OLMo 2 and 3): norms of what each half of a layer adds, and of a row's queries and keys as one vector."""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.architectures.shape import (
    Architecture,
    Facts,
    OllamaNames,
    Rope,
    SavedForm,
    Sizes,
    decoder_layer,
    one_rope,
    windows_by_pattern,
)

_PERIOD = 4  # of OLMo 3: every fourth layer sees all positions


def _windows(facts: Facts, sizes: Sizes) -> tuple[int, ...]:
    return windows_by_pattern(facts, sizes, period=_PERIOD)


def _ropes(facts: Facts) -> tuple[Rope, ...]:
    """Layers with a window rotate without scaling."""
    (full,) = one_rope(facts)
    return full, Rope(base=facts.number("rope.freq_base_swa", full.base))


def _as_llama_cpp_reads(facts: Mapping[str, object], *, is_multimodal: bool) -> Mapping[str, object] | None:
    """Keys that Ollama's converter wrote in another sense, or that are constants in its reader (model/models/olmo3).

    Its attention factor is transformers': YaRN's magnitude, which llama.cpp multiplies by the factor.
    """
    if facts.get("general.architecture") != _OLLAMA.architecture:
        return None
    return {"olmo2.rope.scaling.attn_factor": 1.0, "tokenizer.ggml.pre": "dbrx"}


_OLLAMA = OllamaNames(architecture="olmo3")


ARCHITECTURE = Architecture(
    name="olmo2",
    saved=SavedForm(
        classes={"Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo3"},
        defaults={"rms_norm_eps": 1e-5},
        keeps_windows=True,
    ),
    layer=decoder_layer(joined_norms=True, pre_norms=False, post_norms=True),
    windows=_windows,
    ropes=_ropes,
    completed=_as_llama_cpp_reads,
    ollama=_OLLAMA,
)
