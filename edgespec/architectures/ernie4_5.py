"""ernie4_5: llama without rope factors, with optional biases."""

from __future__ import annotations

from edgespec.architectures.shape import Architecture, SavedForm

ARCHITECTURE = Architecture(
    name="ernie4_5",
    saved=SavedForm(),
    biases=frozenset({"attn_q", "attn_k", "attn_v", "attn_output"}),
    neighbours=True,
)
