"""gemma3: norms around both halves of a layer, GELU, and a sliding window in most layers."""

from __future__ import annotations

import math

from edgespec.architectures.shape import (
    ATTENDED,
    ATTENTION_NORM,
    DEFAULT_ROPE_BASE,
    DOWN,
    FEED_FORWARD_NORM,
    GATE,
    HEAD_NORMS,
    KEYS,
    POST_NORMS,
    QUERIES,
    UP,
    VALUES,
    Architecture,
    Facts,
    Rope,
    Scales,
    Sizes,
    one_rope,
)

PERIOD = 6  # every sixth layer sees all positions, unless the file says otherwise
_LAYERS_OF_27B = 62  # the largest model scales attention by width / heads (its config.json)
_POST_ATTENTION, _POST_FEED_FORWARD = POST_NORMS


def _windows(facts: Facts, sizes: Sizes) -> tuple[int, ...]:
    """The pattern is a period of layers without a window, or one bool for each layer: whether it has one.

    With a period, layer i has no window if i + 1 is a multiple of it, as in llama.cpp.
    """
    window = facts.integer("attention.sliding_window", 0)
    pattern = facts.value("attention.sliding_window_pattern")
    if not isinstance(pattern, tuple):
        period = facts.integer("attention.sliding_window_pattern", PERIOD, least=1)
        pattern = tuple((layer + 1) % period != 0 for layer in range(sizes.layers))
    if len(pattern) != sizes.layers:
        raise facts.wrong(f"its sliding_window_pattern lists {len(pattern)} of {sizes.layers} layers")
    return tuple(window if narrow else 0 for narrow in pattern)


def _ropes(facts: Facts) -> tuple[Rope, ...]:
    """Layers with a window rotate by another base, without scaling."""
    return (*one_rope(facts), Rope(base=facts.number("rope.freq_base_swa", DEFAULT_ROPE_BASE)))


def _scales(_facts: Facts, sizes: Sizes) -> Scales:
    share = sizes.width // sizes.heads if sizes.layers == _LAYERS_OF_27B else sizes.head
    return Scales(embedding=math.sqrt(sizes.width), score=1.0 / math.sqrt(share))


ARCHITECTURE = Architecture(
    name="gemma3",
    layer=(
        *(ATTENTION_NORM, QUERIES, KEYS, VALUES, *HEAD_NORMS, ATTENDED, _POST_ATTENTION),
        *(FEED_FORWARD_NORM, GATE, UP, DOWN, _POST_FEED_FORWARD),
    ),
    gelu=True,
    windows=_windows,
    ropes=_ropes,
    scales=_scales,
)
