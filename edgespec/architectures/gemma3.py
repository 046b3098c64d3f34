"""gemma3: norms around both halves of a layer, GELU, and a sliding window in most layers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from edgespec.architectures.shape import (
    DEFAULT_ROPE_BASE,
    Architecture,
    Facts,
    Rope,
    SavedForm,
    Scales,
    Sizes,
    decoder_layer,
    every_but,
    one_rope,
    windows_by_pattern,
)

PERIOD = 6  # every sixth layer sees all positions, unless the file says otherwise
_LAYERS_OF_27B = 62  # the largest model scales attention by width / heads (its config.json)
_ROPE_BASE, _POSITIONS = 1e6, 131_072  # of Google's models; from that context on they scale positions by _SCALE
_SCALE = 8.0


def _windows(facts: Facts, sizes: Sizes) -> tuple[int, ...]:
    return windows_by_pattern(facts, sizes, period=PERIOD)


def _ropes(facts: Facts) -> tuple[Rope, ...]:
    """Layers with a window rotate by another base, without scaling."""
    (full,) = one_rope(facts)
    return full, Rope(base=facts.number("rope.freq_base_swa", DEFAULT_ROPE_BASE), magnitude=full.magnitude)


def _scales(_facts: Facts, sizes: Sizes) -> Scales:
    share = sizes.width // sizes.heads if sizes.layers == _LAYERS_OF_27B else sizes.head
    return Scales(embedding=math.sqrt(sizes.width), score=1.0 / math.sqrt(share))


_OLLAMA_BASES = {"rope.freq_base": "rope.global.freq_base", "rope.freq_base_swa": "rope.local.freq_base"}


def _as_llama_cpp_reads(facts: Mapping[str, object], *, is_multimodal: bool) -> Mapping[str, object] | None:
    """Keys that Ollama's converter named otherwise, or left out because its reader has these defaults.

    The defaults are those of Ollama's model/models/gemma3, and of its llama/compat for llama.cpp.
    """
    marks = (*_OLLAMA_BASES.values(), "mm.tokens_per_image")
    if not is_multimodal and not any(f"gemma3.{name}" in facts for name in marks):
        return None
    found: dict[str, object] = {
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.rope.freq_base": _ROPE_BASE,
        "gemma3.rope.freq_base_swa": DEFAULT_ROPE_BASE,
        # Gemma adds no space before the text; llama.cpp's default for SentencePiece vocabularies adds one.
        "tokenizer.ggml.add_space_prefix": False,
    }
    for key, old in _OLLAMA_BASES.items():
        if f"gemma3.{old}" in facts:
            found[f"gemma3.{key}"] = facts[f"gemma3.{old}"]
    context = facts.get("gemma3.context_length")
    if isinstance(context, int) and context >= _POSITIONS and "gemma3.rope.scaling.type" not in facts:
        found |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": _SCALE}
    found |= {key: facts[key] for key in found.keys() & facts.keys()}
    pattern = facts.get("gemma3.attention.sliding_window_pattern")
    if isinstance(pattern, tuple) and pattern == every_but(PERIOD, len(pattern)):  # Ollama wrote one bool for each
        found["gemma3.attention.sliding_window_pattern"] = PERIOD
    return found


ARCHITECTURE = Architecture(
    name="gemma3",
    saved=SavedForm(
        classes={"Gemma3ForCausalLM": "gemma3_text", "Gemma3ForConditionalGeneration": "gemma3"},
        multimodal=frozenset({"Gemma3ForConditionalGeneration"}),
        activation="hidden_activation",
        activations=frozenset({"gelu_pytorch_tanh"}),
        # Of transformers' Gemma3TextConfig; the config.json of the larger models leaves them out.
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "max_position_embeddings": _POSITIONS,
            "rope_theta": _ROPE_BASE,
            "tie_word_embeddings": True,
        },
        norm_offset=1.0,
        keeps_windows=True,
    ),
    layer=decoder_layer(head_norms=True, post_norms=True),
    gelu=True,
    windows=_windows,
    ropes=_ropes,
    scales=_scales,
    scales_tokens_only=True,
    completed=_as_llama_cpp_reads,
)
