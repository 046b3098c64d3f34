"""qwen2: llama with biases on queries, keys and values."""

from __future__ import annotations

from edgespec.architectures.shape import Architecture

ARCHITECTURE = Architecture(name="qwen2", biases=frozenset({"attn_q", "attn_k", "attn_v"}))
