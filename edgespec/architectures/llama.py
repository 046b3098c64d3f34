"""llama, with its relatives that llama.cpp reads as llama: Mistral, SmolLM."""

from __future__ import annotations

from edgespec.architectures.shape import ROPE_FACTORS, Architecture, SavedForm

# Its converter reorders the rows of queries and keys, so that rotary embedding pairs neighbours.
ARCHITECTURE = Architecture(
    name="llama",
    saved=SavedForm(classes={"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"}),
    biases=frozenset({"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}),
    neighbours=True,
    rope_tensors=frozenset({ROPE_FACTORS}),
)
