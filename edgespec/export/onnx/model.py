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
    except UnsupportedError as error:
        raise InvalidRequestError(
            f"{header.path.name} cannot be exported to ONNX: {error}",
            hint="`--to gguf` exports every model",
        ) from None
    return shape


def rope_tables(
    rope: Rope,
    positions: npt.NDArray[np.int64],
    length: int,
    factors: npt.NDArray[np.float32] | None = None,
    *,
    magnitude: float = 1.0,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines at ``positions`` (P,), each float32 (P, length / 2), times the ``magnitude``.

    ``factors`` is float32 (length / 2,): the rope's divisors of the angles.
    """
    exponents = np.arange(0, length, 2, dtype=np.float64) / length
    with np.errstate(all="ignore"):  # an implausible base gives NaN or infinity, which the caller checks
        frequencies = 1 / rope.scale * np.float64(rope.base) ** -exponents
        if factors is not None:
            frequencies = frequencies / factors.astype(np.float64)
        # In float64: the float32 product of a late position and a frequency has an error of 0.01 radian.
        angles = positions.astype(np.float64)[:, None] * frequencies
        cosines, sines = magnitude * np.cos(angles), magnitude * np.sin(angles)
        return cosines.astype(np.float32), sines.astype(np.float32)
