"""olmo2 (OLMo 2 and 3): norms of what each half of a layer adds, and of a row's queries and keys as one vector."""

from __future__ import annotations

from edgespec.architectures.shape import (
    Architecture,
    Facts,
    Rope,
    SavedForm,
    Sizes,
    decoder_layer,
    one_rope,
    windows_by_pattern,
)

_PERIOD = 4  # of OLMo 3: every fourth layer sees all positions


def _windows(facts: Facts, sizes: Sizes) -> tuple[int, ...]:
    return windows_by_pattern(facts, sizes, period=_PERIOD)


def _ropes(facts: Facts) -> tuple[Rope, ...]:
    """Layers with a window rotate without scaling."""
    (full,) = one_rope(facts)
    return full, Rope(base=facts.number("rope.freq_base_swa", full.base))


ARCHITECTURE = Architecture(
    name="olmo2",
    saved=SavedForm(
        classes={"Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo3"},
        defaults={"rms_norm_eps": 1e-5},
        keeps_windows=True,
    ),
    layer=decoder_layer(joined_norms=True, pre_norms=False, post_norms=True),
    windows=_windows,
    ropes=_ropes,
)
