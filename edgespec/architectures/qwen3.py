"""qwen3: llama with normalised queries and keys."""

from __future__ import annotations

from edgespec.architectures.shape import (
    ATTENDED,
    ATTENTION_NORM,
    DOWN,
    FEED_FORWARD_NORM,
    GATE,
    HEAD_NORMS,
    KEYS,
    QUERIES,
    UP,
    VALUES,
    Architecture,
    SavedForm,
)

ARCHITECTURE = Architecture(
    name="qwen3",
    saved=SavedForm(classes={"Qwen3ForCausalLM": "qwen3"}),
    layer=(ATTENTION_NORM, QUERIES, KEYS, VALUES, *HEAD_NORMS, ATTENDED, FEED_FORWARD_NORM, GATE, UP, DOWN),
)
