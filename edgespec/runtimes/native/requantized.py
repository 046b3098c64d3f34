"""A drafter's matrices in four bits: what reads fewer bytes drafts faster, and being a little off costs no exactness.

The file stays as it is. Each matrix that would take a good deal less as Q4_0 is laid out so, and a row of it computed
as if the file had it in Q4_0: the same kernels, the same bits at every width.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.files.gguf.header import GgufHeader
from edgespec.files.trimmed_drafter import TrimmedDrafter
from edgespec.runtimes.native.layout import read_layout
from edgespec.runtimes.native.tensors import LayerTensors, ModelLayout, WeightTensor

__all__ = ["COARSE_TYPE", "bytes_spared", "coarsened", "spared_by"]

COARSE_TYPE = "Q4_0"

# A matrix stays as it is unless it shrinks to this part of its bytes. Q4_K is as small as Q4_0, and Q4_1, a ninth
# larger, is not worth being rounded twice. A choice: of what files have, Q5_0 is next, with 0.82.
_WORTH_IT = 0.85


def coarsened(layout: ModelLayout) -> ModelLayout:
    """The same model with its matrices as Q4_0 where that is worth it; the layout itself if it is nowhere."""
    coarse = replace(layout, layers=tuple(map(_coarsen_layer, layout.layers)), head=_coarsen(layout.head))
    return coarse if any(weight.kept_as is not None for weight in coarse.matrices) else layout


def bytes_spared(header: GgufHeader, trimmed: TrimmedDrafter | None = None) -> int:
    """How many bytes less a model's matrices, or a ``trimmed`` drafter's, take when they are coarse.

    Raises RuntimeUnavailableError, ModelFileError.
    """
    return spared_by(coarsened(read_layout(header, trimmed)))


def spared_by(layout: ModelLayout) -> int:
    """How many bytes less the matrices of this layout take than the file's."""
    return sum(weight.tensor.byte_count - weight.kept_bytes for weight in layout.matrices)


def _coarsen_layer(layer: LayerTensors) -> LayerTensors:
    return replace(
        layer,
        query=_coarsen(layer.query),
        key=_coarsen(layer.key),
        value=_coarsen(layer.value),
        output=_coarsen(layer.output),
        gate=_coarsen(layer.gate),
        up=_coarsen(layer.up),
        down=_coarsen(layer.down),
    )


def _coarsen(weight: WeightTensor) -> WeightTensor:
    coarse = replace(weight, kept_as=COARSE_TYPE)
    return coarse if coarse.kept_bytes <= _WORTH_IT * weight.kept_bytes else weight
