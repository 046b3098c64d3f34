"""gpt-oss: experts, attention sinks, a window in every other layer, YaRN, and biases on every matrix."""

from __future__ import annotations

from dataclasses import replace

from edgespec.architectures.shape import (
    EXPERTS,
    EXPERTS_DOWN,
    Architecture,
    Facts,
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
)
