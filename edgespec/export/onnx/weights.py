"""Converts GGUF weights to the layout of ONNX Runtime's MatMulNBits: pure functions from rows of bytes to arrays.

A matrix of (rows, columns) becomes ``weights``, uint8 (rows, columns / 32, 4 * bits), and ``scales``, (rows,
columns / 32): each block of 32 weights is scale * (q - 2**(bits - 1)), the operator's default zero point for 4 and
for 8 bits. With 4 bits, byte i of a block holds q[2i] in its low half and q[2i + 1] in its high half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edgespec.export.packages import require
from edgespec.files.gguf.records import GGML_TYPES, PLAIN_TYPES

BLOCK = 32  # weights that share a scale: that of Q4_0 and Q8_0, which then need no rounding

# Types in blocks of 32 whose weights are a float16 scale times an integer, with the integer's bits.
_EXACT = {"Q4_0": 4, "Q5_0": 8, "Q8_0": 8, "IQ4_NL": 8}

# The values of the 16 codes of IQ4_NL (kvalues_iq4nl in ggml-common.h).
_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int16)

_LARGEST_8_BIT = 127  # symmetric: -128 is left unused, as in Q8_0

_BLOCK_SIZES = {name: (elements, size) for name, elements, size in GGML_TYPES.values()}

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows in the layout of MatMulNBits, see the module. ``scales`` are float32, or float16 on request."""

    weights: Bytes
    scales: npt.NDArray[Any]


def exact_bits(type_name: str) -> int | None:
    """The bits per weight at which a ggml type is packed without rounding; None if rounding is needed."""
    return _EXACT.get(type_name)


def can_read(type_name: str) -> bool:
    """Whether weights of this ggml type can be read."""
    return type_name in PLAIN_TYPES or hasattr(require("gguf").quants, type_name)


def float_rows(raw: Bytes, type_name: str) -> Floats:
    """The weights of ``raw``, uint8 (rows, bytes of a row), as float32 (rows, columns)."""
    gguf = require("gguf")
    values: Floats = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    return values.astype(np.float32, copy=False)


def pack_rows(raw: Bytes, type_name: str, bits: int, *, half_scales: bool = False) -> PackedRows:
    """Pack rows of a ggml type, uint8 (rows, bytes of a row), to 4 or 8 ``bits``.

    Types whose ``exact_bits`` are ``bits`` keep their integers and scales. Other types are dequantised and rounded:
    to 8 bits by absmax / 127 per block, to 4 bits like llama.cpp's Q4_0. With ``half_scales`` the scales are float16,
    and weights are rounded with these scales. The columns must be a multiple of 32.

    If the source holds NaN or infinity, so do the scales; the caller checks.
    """
    if _EXACT.get(type_name) == bits:
        blocks = raw.reshape(len(raw), -1, _BLOCK_SIZES[type_name][1])
        scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
        integers = _EXACT_READERS[type_name](np.ascontiguousarray(blocks[..., 2:]))
        scales = scales if half_scales else scales.astype(np.float32)
    else:
        values = float_rows(raw, type_name).reshape(len(raw), -1, BLOCK)
        scales, integers = _rounded(values, bits, half_scales)
    return PackedRows(_halves(integers) if bits == 4 else integers, scales)


def _halves(integers: Bytes) -> Bytes:
    """Pack pairs of 4-bit numbers into bytes, the first number in the low half."""
    return np.asarray(integers[..., 0::2] | (integers[..., 1::2] << 4), dtype=np.uint8)


def _rounded(values: Floats, bits: int, half_scales: bool) -> tuple[npt.NDArray[Any], Bytes]:
    """Scales and integers (with the zero point added) for values of shape (rows, blocks, 32)."""
    kept = np.float16 if half_scales else np.float32
    with np.errstate(all="ignore"):  # NaN or infinite weights give NaN or infinite scales
        if bits == 8:
            scales = (np.abs(values).max(axis=-1) / np.float32(_LARGEST_8_BIT)).astype(kept)
        else:
            # ggml's Q4_0 (quantize_row_q4_0_ref): the weight of largest magnitude becomes -8, whatever its sign.
            largest = np.take_along_axis(values, np.abs(values).argmax(axis=-1)[..., None], axis=-1)[..., 0]
            scales = (largest / np.float32(-8)).astype(kept)
        factors = np.where(scales == 0, np.float32(0), np.float32(1) / scales.astype(np.float32))[..., None]
        if bits == 8:
            integers = np.clip(np.rint(values * factors), -_LARGEST_8_BIT, _LARGEST_8_BIT) + 128
        else:
            integers = np.clip(np.floor(values * factors + np.float32(8.5)), 0, 15)
        return scales, integers.astype(np.uint8)


# ------------------------------------------------------------- blocks of 32 without their scale, to q + zero point


def _q4_0(blocks: Bytes) -> Bytes:
    return np.concatenate([blocks & 15, blocks >> 4], axis=-1)


def _q5_0(blocks: Bytes) -> Bytes:
    """Four bytes with the fifth bit of each weight, then the low four bits as in Q4_0; 16 is the zero point."""
    high = np.unpackbits(blocks[..., :4], axis=-1, bitorder="little")
    return np.asarray((_q4_0(blocks[..., 4:]) | (high << 4)) + np.uint8(128 - 16), dtype=np.uint8)


def _q8_0(blocks: Bytes) -> Bytes:
    return blocks ^ np.uint8(128)  # two's complement to offset binary


def _iq4_nl(blocks: Bytes) -> Bytes:
    return (_IQ4_NL + 128).astype(np.uint8)[_q4_0(blocks)]


_EXACT_READERS = {"Q4_0": _q4_0, "Q5_0": _q5_0, "Q8_0": _q8_0, "IQ4_NL": _iq4_nl}
