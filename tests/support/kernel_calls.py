"""Single kernels called with numpy arrays."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.errors import RuntimeUnavailableError
from edgespec.runtimes.native.library import LEVELS, Matrix, NativeLibrary, load
from tests.support.k_quants import quantize

Floats = NDArray[np.float32]

TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ3_XXS": 18,
    "IQ4_NL": 20,
    "IQ3_S": 21,
    "IQ4_XS": 23,
    "BF16": 30,
    "MXFP4": 39,
}
FLOATS = ("F32", "F16", "BF16")

# Byte offsets of the halves in a block of a quantised type: its scale, and its minimum's scale.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q3_K": (108,),
    "IQ3_XXS": (0,),
    "IQ4_NL": (0,),
    "IQ3_S": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),  # one byte, an exponent
}

# struct activation_block
ACTIVATIONS = np.dtype(
    [
        ("scale", "<f4"),
        ("scaled_sum", "<f4"),
        ("minus8", "<i4"),
        ("minus32_low", "<i4"),
        ("minus32_high", "<i4"),
        ("q", "i1", 32),
    ]
)


@dataclass(frozen=True)
class Weights:
    """A matrix as a GGUF file holds it: uint8 of shape (rows, bytes of a row)."""

    kind: str
    rows: int
    columns: int
    raw: NDArray[np.uint8]

    @property
    def values(self) -> NDArray[np.float64]:
        """The dequantised matrix: (rows, columns)."""
        kind = gguf.GGMLQuantizationType[self.kind]
        data = self.raw.view({"F32": np.float32, "F16": np.float16}.get(self.kind, np.uint8))
        return np.asarray(gguf.dequantize(data, kind), dtype=np.float64)


def quantised(kind: str, values: Floats) -> Weights:
    """The matrix in that type."""
    raw = quantize(values, gguf.GGMLQuantizationType[kind])
    rows, columns = values.shape
    return Weights(kind, rows, columns, np.ascontiguousarray(raw).view(np.uint8).reshape(rows, -1))


def block_sizes(kind: str) -> tuple[int, int]:
    """Columns and bytes of a type's block in the file; for floats 1 and their size."""
    columns, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(columns), int(size)


def random_blocks(kind: str, seed: int, rows: int, columns: int) -> Weights:
    """Blocks with every bit random, except for scales of ordinary size and either sign."""
    random = np.random.default_rng(seed)
    per_block, size = block_sizes(kind)
    raw = random.integers(0, 256, (rows, columns // per_block, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = (random.standard_normal(raw.shape[:2]) * 0.01).astype("<f2")
        raw[:, :, at : at + 2] = halves[:, :, None].view(np.uint8)
    if kind == "MXFP4":
        raw[:, :, 0] = random.integers(112, 125, raw.shape[:2])
    return Weights(kind, rows, columns, raw.reshape(rows, -1))


def some_weights(kind: str, seed: int, rows: int, columns: int) -> Weights:
    """Weights of any type: normally distributed, or random blocks for types that gguf does not write.

    Columns of types with super-blocks are rounded up to whole super-blocks.
    """
    if kind.endswith("_K") or kind.startswith("IQ"):
        block, _ = block_sizes(kind)
        return random_blocks(kind, seed, rows, -(-columns // block) * block)
    return quantised(kind, np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32))


def relaid(library: NativeLibrary, weights: Weights) -> NDArray[np.uint8]:
    """The matrix laid out in tiles, as bytes."""
    size = library.api.es_relaid_bytes(TYPES[weights.kind], weights.rows, weights.columns)
    tiles = np.zeros(size, dtype=np.uint8)
    bad = library.api.es_relay(
        TYPES[weights.kind], weights.raw.ctypes.data, weights.rows, weights.columns, tiles.ctypes.data
    )
    assert bad == -1
    return tiles


def multiply(library: NativeLibrary, level: str, weights: Weights, x: Floats, bias: Floats | None = None) -> Floats:
    """x (inputs, columns) -> (inputs, rows)."""
    tiles = relaid(library, weights)
    matrix = Matrix(
        tiles=tiles.ctypes.data,
        bias=None if bias is None else bias.ctypes.data,
        rows=weights.rows,
        columns=weights.columns,
        type=TYPES[weights.kind],
    )
    y = np.full((len(x), weights.rows), np.nan, dtype=np.float32)
    x = np.ascontiguousarray(x, dtype=np.float32)
    checked(
        library.api.es_multiply(ctypes.byref(matrix), x.ctypes.data, len(x), y.ctypes.data, LEVELS[level]),
    )
    return y


def turns(library: NativeLibrary, angles: NDArray[np.float64]) -> Floats:
    """Cosines and sines: float32, the shape of ``angles`` with a last axis of 2."""
    y = np.empty((*angles.shape, 2), dtype=np.float32)
    angles = np.ascontiguousarray(angles)
    library.api.es_turns(angles.ctypes.data, angles.size, y.ctypes.data)
    return y


def quantise(library: NativeLibrary, level: str, x: Floats) -> NDArray[Any]:
    """Activation blocks of one row: ACTIVATIONS of shape (len(x) / 32,)."""
    blocks = np.zeros(len(x) // 32, dtype=ACTIVATIONS)
    checked(library.api.es_quantise(x.ctypes.data, len(x), blocks.ctypes.data, LEVELS[level]))
    return blocks


def normalise(library: NativeLibrary, level: str, x: Floats, weight: Floats, epsilon: float) -> Floats:
    y = np.empty_like(x)
    checked(
        library.api.es_normalise(x.ctypes.data, weight.ctypes.data, epsilon, len(x), y.ctypes.data, LEVELS[level])
    )
    return y


def exponential(library: NativeLibrary, level: str, x: Floats) -> Floats:
    y = np.empty_like(x)
    checked(library.api.es_exponential(x.ctypes.data, len(x), y.ctypes.data, LEVELS[level]))
    return y


def join(library: NativeLibrary, level: str, activation: int, gate: Floats, up: Floats) -> Floats:
    y, args = np.empty_like(gate), (gate.ctypes.data, up.ctypes.data, len(gate))
    checked(library.api.es_join(activation, *args, y.ctypes.data, LEVELS[level]))
    return y


def dequantise(library: NativeLibrary, weights: Weights, row: int) -> Floats:
    y = np.empty(weights.columns, dtype=np.float32)
    source = np.ascontiguousarray(weights.raw[row])
    checked(library.api.es_dequantise(TYPES[weights.kind], source.ctypes.data, weights.columns, y.ctypes.data))
    return y


def capped(library: NativeLibrary, level: str, x: Floats, most: float) -> Floats:
    y = x.copy()
    checked(library.api.es_cap(y.ctypes.data, len(y), most, LEVELS[level]))
    return y


def attend(
    library: NativeLibrary,
    level: str,
    keys: Floats,
    values: Floats,
    queries: Floats,
    visible: list[int],
    *,
    first: list[int] | None = None,
    own_from: int = 2**40,
    cap: float = 0.0,
    sinks: Floats | None = None,
) -> Floats:
    """keys, values (positions, length), queries (n, length) -> (n, length).

    Query i attends to the first ``visible[i]`` positions, or those from ``first[i]``. Positions from ``own_from`` are
    looked up as in a tree. ``sinks``: a score without a value for each query.
    """
    out = np.full_like(queries, np.nan)
    seen = np.array([[0] * len(visible) if first is None else first, visible], dtype=np.int64).T.copy()
    keys, values, queries = (np.ascontiguousarray(each) for each in (keys, values, queries))
    checked(
        library.api.es_attend(
            keys.ctypes.data,
            values.ctypes.data,
            len(keys),
            keys.shape[1],
            queries.ctypes.data,
            seen.ctypes.data,
            len(queries),
            own_from,
            cap,
            None if sinks is None else sinks.ctypes.data,
            out.ctypes.data,
            LEVELS[level],
        )
    )
    return out


def checked(code: int) -> None:
    assert code == 0, f"the kernel refused, code {code}"


def same_bits(left: Floats, right: Floats) -> bool:
    return left.shape == right.shape and left.tobytes() == right.tobytes()


def require_native() -> NativeLibrary:
    """The library, or skip the test if it was not compiled: installing without a compiler is allowed."""
    try:
        return load()
    except RuntimeUnavailableError as error:
        pytest.skip(error.message)
