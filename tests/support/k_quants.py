"""Matrices in types that the gguf package reads but does not write.

Q4_K, Q5_K and Q6_K by plain rounding, no search. Of the others every bit is random, except for a scale that gives a
block the spread of its values: random weights need no rounding.
"""

from __future__ import annotations

import zlib

import gguf
import numpy as np
from numpy.typing import NDArray

__all__ = ["quantize"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


# Where the scale of a block is whose other bits are random.
_PLACES = {"Q3_K": 108, "IQ3_XXS": 0, "IQ3_S": 0, "IQ4_NL": 0, "IQ4_XS": 0}
_WRITTEN_HERE = {"Q4_K", "Q5_K", "Q6_K", *_PLACES}


def quantize(values: Floats, kind: gguf.GGMLQuantizationType) -> NDArray[np.uint8]:
    """The matrix in any type with a native kernel."""
    if kind.name not in _WRITTEN_HERE:
        return np.asarray(gguf.quantize(values, kind))
    length, _ = gguf.GGML_QUANT_SIZES[kind]
    blocks = values.reshape(-1, length)
    if kind.name in _PLACES:
        packed = _drawn(blocks, kind)
    else:
        packed = _six(blocks) if kind.name == "Q6_K" else _four_or_five(blocks, int(kind.name[1]))
    return packed.reshape(*values.shape[:-1], values.shape[-1] // length * packed.shape[1])


def _drawn(blocks: Floats, kind: gguf.GGMLQuantizationType) -> Bytes:
    place, (_, size) = _PLACES[kind.name], gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(zlib.crc32(blocks.tobytes()))
    packed: Bytes = random.integers(0, 256, (len(blocks), size), dtype=np.uint8)
    scale = slice(place, place + 2)
    packed[:, scale] = _halves(np.ones(len(blocks), np.float32))[1]
    spread: Floats = np.asarray(gguf.dequantize(packed, kind), dtype=np.float32).std(axis=1)
    packed[:, scale] = _halves(blocks.std(axis=1) / spread)[1]
    return packed


def _halves(values: Floats) -> tuple[Floats, Bytes]:
    """Rounded to half precision, and the bytes: (n,) -> (n, 1), (n, 2)."""
    halves = values.astype("<f2")[:, None]
    return halves.astype(np.float32), halves.view(np.uint8)


def _over(values: Floats, unit: Floats) -> Floats:
    """The quotient, 0 where the unit is 0."""
    return np.divide(values, unit, out=np.zeros_like(values), where=unit > 0)


def _four_or_five(blocks: Floats, bits: int) -> Bytes:
    parts = blocks.reshape(-1, 8, 32)
    least = np.minimum(parts.min(axis=2), 0)
    steps = (parts.max(axis=2) - least) / (2**bits - 1)
    d, d_bytes = _halves(steps.max(axis=1) / 63)
    dmin, dmin_bytes = _halves(-least.min(axis=1) / 63)
    scales = np.clip(np.rint(_over(steps, d)), 0, 63).astype(np.uint8)
    minimums = np.clip(np.rint(_over(-least, dmin)), 0, 63).astype(np.uint8)
    shifted = parts + (dmin * minimums)[:, :, None]
    codes = np.clip(np.rint(_over(shifted, (d * scales)[:, :, None])), 0, 2**bits - 1).astype(np.uint8)
    low, high = slice(0, 4), slice(4, 8)
    packed_scales = np.hstack(
        [
            scales[:, low] | scales[:, high] >> 4 << 6,
            minimums[:, low] | minimums[:, high] >> 4 << 6,
            (scales[:, high] & 15) | (minimums[:, high] & 15) << 4,
        ]
    )
    nibbles = (codes[:, 0::2] & 15) | (codes[:, 1::2] & 15) << 4
    fifths = np.bitwise_or.reduce((codes >> 4) << np.arange(8, dtype=np.uint8)[None, :, None], axis=1)
    parts_of_file = [d_bytes, dmin_bytes, packed_scales, *([fifths] if bits == 5 else []), nibbles.reshape(-1, 128)]
    return np.hstack(parts_of_file)


def _six(blocks: Floats) -> Bytes:
    parts = blocks.reshape(-1, 16, 16)
    steps = np.abs(parts).max(axis=2) / 31
    d, d_bytes = _halves(steps.max(axis=1) / 127)
    scales = np.clip(np.rint(_over(steps, d)), 0, 127).astype(np.int8)
    scales[:, ::2] *= -1  # the type permits both signs
    step = (d * scales)[:, :, None]
    codes = np.clip(np.rint(np.divide(parts, step, out=np.zeros_like(parts), where=step != 0)), -32, 31)
    by_run = (codes + 32).astype(np.uint8).reshape(-1, 2, 4, 32)  # halves of 128 columns, runs of 32
    low = np.stack([by_run[:, :, j] & 15 | (by_run[:, :, j + 2] & 15) << 4 for j in range(2)], axis=2)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    high = np.bitwise_or.reduce((by_run >> 4) << shifts, axis=2)
    return np.hstack([low.reshape(-1, 128), high.reshape(-1, 64), scales.view(np.uint8), d_bytes])
