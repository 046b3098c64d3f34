"""exaone4: norms of what each half of a layer adds and of each head; the 32B has windows, and rotates only there."""

from __future__ import annotations

from edgespec.architectures.shape import (
    ROPE_FACTORS,
    Architecture,
    Facts,
    SavedForm,
    Sizes,
    decoder_layer,
    no_windows,
    windows_by_pattern,
)

_PERIOD, _LAYERS_OF_32B, _WINDOW = 4, 64, 4096  # llama.cpp takes the pattern for models of this many layers alone


def _windows(facts: Facts, sizes: Sizes) -> tuple[int, ...]:
    if sizes.layers == _LAYERS_OF_32B:
        return windows_by_pattern(facts, sizes, period=_PERIOD, default=_WINDOW)
    return no_windows(facts, sizes)


def _turns(facts: Facts, sizes: Sizes) -> tuple[bool, ...]:
    windows = _windows(facts, sizes)
    return tuple(window > 0 or not any(windows) for window in windows)


ARCHITECTURE = Architecture(
    name="exaone4",
    saved=SavedForm(classes={"Exaone4ForCausalLM": "exaone4"}, defaults={"rms_norm_eps": 1e-5}, keeps_windows=True),
    layer=decoder_layer(head_norms=True, pre_norms=False, post_norms=True),
    rope_tensors=frozenset({ROPE_FACTORS}),
    windows=_windows,
    turns=_turns,
)
