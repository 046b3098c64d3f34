"""seed_oss: llama with biases, and another name for the feed-forward's norm."""

from __future__ import annotations

from edgespec.architectures.shape import Architecture, SavedForm, decoder_layer

ARCHITECTURE = Architecture(
    name="seed_oss",
    saved=SavedForm(classes={"SeedOssForCausalLM": "seed_oss"}, defaults={"head_dim": 128}),
    layer=decoder_layer(feed_forward_norm="post_attention_norm"),
    biases=frozenset({"attn_q", "attn_k", "attn_v"}),
)
