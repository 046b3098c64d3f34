"""qwen3: llama with normalised queries and keys."""

from __future__ import annotations

from edgespec.architectures.shape import Architecture, SavedForm, decoder_layer

ARCHITECTURE = Architecture(
    name="qwen3",
    saved=SavedForm(classes={"Qwen3ForCausalLM": "qwen3"}),
    layer=decoder_layer(head_norms=True),
)
