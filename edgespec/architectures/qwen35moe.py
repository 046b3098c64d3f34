"""qwen35moe: qwen35 whose feed-forwards are mixtures of experts, with a further expert that every row uses."""

from __future__ import annotations

from dataclasses import replace

from edgespec.architectures import qwen35
from edgespec.architectures.drafting import PAIR
from edgespec.architectures.shape import (
    EXPERTS,
    EXPERTS_DOWN,
    Architecture,
    Experts,
    Facts,
    SavedForm,
    TensorForm,
    decoder_layer,
    matrix,
    softmax_experts,
    vector,
)

_SHARED = (
    vector("ffn_gate_inp_shexp", "width"),
    matrix("ffn_gate_shexp", "shared", "width"),
    matrix("ffn_up_shexp", "shared", "width"),
    matrix("ffn_down_shexp", "width", "shared"),
)
_FEED_FORWARD: tuple[TensorForm, ...] = (*EXPERTS, EXPERTS_DOWN, *_SHARED)
_SHARED_LENGTH = "expert_shared_feed_forward_length"


def _experts(facts: Facts) -> Experts:
    # llama.cpp's default is the length of a feed-forward without experts.
    shared = facts.integer(_SHARED_LENGTH, 0) or facts.integer("feed_forward_length", least=1)
    return replace(softmax_experts(facts, known=(_SHARED_LENGTH, "expert_shared_count")), shared=shared)


_LAYER = decoder_layer(
    qkv=qwen35.QKV, gated=(*EXPERTS, *_SHARED), down=EXPERTS_DOWN, head_norms=True, feed_forward_norm=qwen35.NORM
)

ARCHITECTURE = Architecture(
    name="qwen35moe",
    saved=SavedForm(),
    layer=_LAYER,
    drafting_layer=(*PAIR, *_LAYER),
    delta_layer=(*qwen35.DELTA, *_FEED_FORWARD),
    deltas=qwen35.deltas,
    gates_heads=True,
    ropes=qwen35.ropes,
    experts=_experts,
    completed=qwen35.as_llama_cpp_reads,
    ollama=qwen35.OLLAMA,
)
