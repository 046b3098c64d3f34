"""qwen3moe: qwen3 whose feed-forwards are mixtures of experts."""

from __future__ import annotations

from edgespec.architectures.shape import (
    EXPERTS,
    EXPERTS_DOWN,
    Architecture,
    SavedForm,
    decoder_layer,
    softmax_experts,
)

ARCHITECTURE = Architecture(
    name="qwen3moe",
    saved=SavedForm(),
    layer=decoder_layer(gated=EXPERTS, down=EXPERTS_DOWN, head_norms=True),
    experts=softmax_experts,
)
