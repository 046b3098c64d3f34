"""Which of a target's layers a drafter without keys reads."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.architectures.shape import UnsupportedError
from edgespec.runtimes.native.tensors import LayerTensors, ModelLayout


def layers_read(drafter: ModelLayout, target: ModelLayout) -> tuple[int, ...]:
    """For each layer of the drafter the target's layer whose keys and values it sees: the last one with a window for
    those with a window, for others the last one without. Raises UnsupportedError if it cannot read this target.
    """
    length = 0 if drafter.pair is None else drafter.pair.length
    if length != target.embedding:
        raise UnsupportedError(
            f"it reads rows of {length} elements, and those of this target have {target.embedding}"
        )
    if drafter.vocabulary != target.vocabulary:
        raise UnsupportedError(f"it drafts {drafter.vocabulary} tokens, and this target has {target.vocabulary}")
    return tuple(_read(number, layer, target.layers) for number, layer in enumerate(drafter.layers))


def _read(number: int, layer: LayerTensors, target: Sequence[LayerTensors]) -> int:
    kind = "with a window" if layer.window else "without a window"
    kinds = [None if each.delta is not None else bool(each.window) for each in target]
    last = max((other for other, each in enumerate(kinds) if each is bool(layer.window)), default=None)
    if last is None:
        raise UnsupportedError(f"its layer {number} reads a layer {kind}, and this target has none")
    found = target[last]
    for what, own, others in (
        ("key-value heads", layer.kv_heads, found.kv_heads),
        ("elements a head", layer.head_length, found.head_length),
        ("positions", layer.window, found.window),
    ):
        if own != others:
            raise UnsupportedError(
                f"its layer {number} needs {own} {what} in a layer {kind}, and this target's has {others}"
            )
    return last


def unread_reason(drafter: ModelLayout, target: ModelLayout) -> str | None:
    """Why the drafter cannot read this target's cache; None if it can."""
    try:
        layers_read(drafter, target)
    except UnsupportedError as error:
        return str(error)
    return None
