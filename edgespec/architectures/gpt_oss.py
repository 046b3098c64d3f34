"""gpt-oss: experts, attention sinks, a window in every other layer, YaRN, and biases on every matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edgespec.architectures.shape import (
    EXPERTS,
    EXPERTS_DOWN,
    Architecture,
    Facts,
    OllamaNames,
    Rope,
    SavedForm,
    Sizes,
    decoder_layer,
    one_rope,
    softmax_experts,
    windows_by_pattern,
)

_BASE_IN_WINDOWS = "rope.freq_base_swa"


def _windows(facts: Facts, sizes: Sizes) -> tuple[int, ...]:
    facts.integer("attention.sliding_window", least=1)  # llama.cpp needs it stated
    return windows_by_pattern(facts, sizes, period=2)


def _ropes(facts: Facts) -> tuple[Rope, ...]:
    (full,) = one_rope(facts)
    if facts.value(_BASE_IN_WINDOWS) is None:
        return (full,)
    return full, replace(full, base=facts.number(_BASE_IN_WINDOWS))


def _as_llama_cpp_reads(facts: Mapping[str, object], *, is_multimodal: bool) -> Mapping[str, object] | None:
    """Keys that Ollama's converter left out, or named for a model without experts.

    Its reader (model/models/gptoss) has YaRN and the words' pattern as constants.
    """
    if facts.get("general.architecture") != _OLLAMA.architecture:
        return None
    found: dict[str, object] = {"gpt-oss.rope.scaling.type": "yarn", "tokenizer.ggml.pre": "gpt-4o"}
    length = facts.get("gptoss.expert_feed_forward_length", facts.get("gptoss.feed_forward_length"))
    return found if length is None else {**found, "gpt-oss.expert_feed_forward_length": length}


_JOINED = ("attn_qkv.weight", "attn_qkv.bias", "ffn_gate_up_exps.weight", "ffn_gate_up_exps.bias")
_OLLAMA = OllamaNames(
    architecture="gptoss",
    tensors={
        "attn_out.weight": "attn_output.weight",
        "attn_out.bias": "attn_output.bias",
        "attn_sinks": "attn_sinks.weight",
        "ffn_norm.weight": "post_attention_norm.weight",
        **dict.fromkeys(_JOINED, ""),
    },
)


ARCHITECTURE = Architecture(
    name="gpt-oss",
    saved=SavedForm(),
    layer=decoder_layer(gated=EXPERTS, down=EXPERTS_DOWN, feed_forward_norm="post_attention_norm", sinks=True),
    biases=frozenset(
        {
            *("attn_q", "attn_k", "attn_v", "attn_output"),
            *("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
        }
    ),
    requires_biases=True,
    clips=True,
    windows=_windows,
    ropes=_ropes,
    experts=softmax_experts,
    completed=_as_llama_cpp_reads,
    ollama=_OLLAMA,
)
