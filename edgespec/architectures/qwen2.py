"""qwen2: llama with biases on queries, keys and values."""

from __future__ import annotations

from edgespec.architectures.shape import Architecture, SavedForm

ARCHITECTURE = Architecture(
    name="qwen2",
    saved=SavedForm(classes={"Qwen2ForCausalLM": "qwen2"}, needs_biases=True),
    biases=frozenset({"attn_q", "attn_k", "attn_v"}),
)
