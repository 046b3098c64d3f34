"""smollm3: llama whose every fourth layer rotates nothing."""

from __future__ import annotations

from edgespec.architectures.shape import ROPE_FACTORS, Architecture, Facts, SavedForm, Sizes, every_but

_PERIOD = 4  # llama.cpp's constant; the file does not state it


def _turns(_facts: Facts, sizes: Sizes) -> tuple[bool, ...]:
    return every_but(_PERIOD, sizes.layers)


ARCHITECTURE = Architecture(
    name="smollm3",
    saved=SavedForm(
        classes={"SmolLM3ForCausalLM": "smollm3"},
        defaults={"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
    ),
    neighbours=True,
    rope_tensors=frozenset({ROPE_FACTORS}),
    turns=_turns,
)
