"""ernie4_5: llama without rope factors, with optional biases."""

from __future__ import annotations

from edgespec.architectures.shape import Architecture, SavedForm

ARCHITECTURE = Architecture(
    name="ernie4_5",
    saved=SavedForm(
        classes={"Ernie4_5ForCausalLM": "ernie4_5"},
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True},
        neighbours=True,
    ),
    biases=frozenset({"attn_q", "attn_k", "attn_v", "attn_output"}),
    neighbours=True,
)
