"""A drafter's matrices in four bits: what reads fewer bytes drafts faster, and being a little off costs no exactness.

The file stays as it is. Each matrix that would take a good deal less as Q4_0 is laid out so, and a row of it computed
as if the file had it in Q4_0: the same kernels, the same bits at every width.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.files.gguf import GgufHeader
from edgespec.runtimes.native_layout import read_layout
from edgespec.runtimes.native_tensors import LayerTensors, ModelLayout, WeightTensor

__all__ = ["NARROW_TYPE", "bytes_spared", "narrowed"]

NARROW_TYPE = "Q4_0"

# A matrix stays as it is unless it shrinks to this part of its bytes. Q4_K is as small as Q4_0, and Q4_1, a ninth
# larger, is not worth being rounded twice. A choice: of what files have, Q5_0 is next, with 0.82.
_WORTH_IT = 0.85


def narrowed(layout: ModelLayout) -> ModelLayout:
    """The same model with its matrices as Q4_0 where that is worth it; the layout itself if it is nowhere."""
    narrow = replace(layout, layers=tuple(map(_narrow_layer, layout.layers)), head=_narrow(layout.head))
    changed = any(weight.kept_as is not None for weight in narrow.matrices)
    return replace(narrow, is_narrow=True) if changed else layout


def bytes_spared(header: GgufHeader) -> int:
    """How many bytes less a model's matrices take when they are narrow.

    Raises RuntimeUnavailableError, ModelFileError.
    """
    return sum(weight.tensor.byte_count - weight.kept_bytes for weight in narrowed(read_layout(header)).matrices)


def _narrow_layer(layer: LayerTensors) -> LayerTensors:
    return replace(
        layer,
        query=_narrow(layer.query),
        key=_narrow(layer.key),
        value=_narrow(layer.value),
        output=_narrow(layer.output),
        gate=_narrow(layer.gate),
        up=_narrow(layer.up),
        down=_narrow(layer.down),
    )


def _narrow(weight: WeightTensor) -> WeightTensor:
    narrow = replace(weight, kept_as=NARROW_TYPE)
    return narrow if narrow.kept_bytes <= _WORTH_IT * weight.kept_bytes else weight
