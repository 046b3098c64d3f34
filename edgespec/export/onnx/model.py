"""Which models can be exported to ONNX, and the tables that rotate their queries and keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgespec.architectures.shape import Facts, Rope, Shape, UnsupportedError, read_shape
from edgespec.architectures.table import find
from edgespec.errors import InvalidRequestError
from edgespec.files.gguf.records import GgufHeader

_HEAD_MULTIPLE = 16  # GroupQueryAttention rotates only heads with a multiple of 16 elements


def describe_model(header: GgufHeader) -> Shape:
    """The shape of the model of ``header``, with every tensor's shape checked.

    Raises InvalidRequestError if the model cannot be exported to ONNX, and ModelFileError if the file contradicts
    itself.
    """
    try:
        tensors = {tensor.name: tensor.shape for tensor in header.tensors}
        facts = Facts(header.path, header.architecture, header.metadata, tensors)
        shape = read_shape(find(header.architecture), facts, header.vocabulary_size)
        if shape.sizes.head % _HEAD_MULTIPLE:
            raise UnsupportedError(f"its heads have {shape.sizes.head} elements, not a multiple of {_HEAD_MULTIPLE}")
        if shape.rope_length != shape.sizes.head:
            raise UnsupportedError(f"it rotates {shape.rope_length} of the {shape.sizes.head} elements of a head")
        if (part := _without_operators(shape)) is not None:
            raise UnsupportedError(f"the ONNX graph has no {part}")
    except UnsupportedError as error:
        raise InvalidRequestError(
            f"{header.path.name} cannot be exported to ONNX: {error}",
            hint="`--to gguf` exports every model",
        ) from None
    return shape


def _without_operators(shape: Shape) -> str | None:
    """What of this model the graph lacks, in a few words; None if it has all."""
    lacking = {
        "gated delta layers": shape.sizes.deltas is not None,
        "gates of heads": shape.architecture.gates_heads,
        "layers that differ in shape": shape.architecture.varied is not None,
        "mixtures of experts": shape.experts is not None,
        "layers without a rotation": not all(layer.turns for layer in shape.layers),
        "layers without a norm of their input": not all("attn_norm" in layer.parts for layer in shape.layers),
        "norms of all heads as one": shape.joins_heads,
        "caps of scores": bool(shape.scales.score_cap or shape.scales.logit_cap),
        "factors of queries": bool(shape.scales.temperature),
    }
    return next((part for part, is_lacking in lacking.items() if is_lacking), None)


def rope_tables(
    rope: Rope,
    positions: npt.NDArray[np.int64],
    length: int,
    factors: npt.NDArray[np.float32] | None = None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines at ``positions`` (P,), each float32 (P, length / 2).

    ``factors`` is float32 (length / 2,): the rope's divisors of the angles.
    """
    exponents = np.arange(0, length, 2, dtype=np.float64) / length
    with np.errstate(all="ignore"):  # an implausible base gives NaN or infinity, which the caller checks
        frequencies = np.float64(rope.base) ** -exponents / rope.divisors(length)
        if factors is not None:
            frequencies = frequencies / factors.astype(np.float64)
        # In float64: the float32 product of a late position and a frequency has an error of 0.01 radian.
        angles = positions.astype(np.float64)[:, None] * frequencies
        cosines, sines = rope.magnitude * np.cos(angles), rope.magnitude * np.sin(angles)
        return cosines.astype(np.float32), sines.astype(np.float32)
