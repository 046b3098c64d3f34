"""Weights of every type requantised to Q4_0: numpy's bytes from the same arithmetic, and the error."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.runtimes.native.library import LEVELS, NativeLibrary
from tests.support.kernel_calls import TYPES, Floats, Weights, dequantise, quantised, some_weights

ROWS, COLUMNS = 5, 512

# The code of a block's largest weight under each scale that is tried.
TOPS = (-7.25, -7.75, -8.25, -8.75, -9.25)


def coarse(library: NativeLibrary, level: str, weights: Weights) -> tuple[NDArray[np.uint8], int]:
    """Rows of Q4_0, (rows, bytes of a row), and the first row that Q4_0 cannot hold."""
    found = np.full((weights.rows, weights.columns // 32 * 18), 255, dtype=np.uint8)
    source, number = np.ascontiguousarray(weights.raw), TYPES[weights.kind]
    bad = library.api.es_coarsen(
        number, source.ctypes.data, weights.rows, weights.columns, found.ctypes.data, LEVELS[level]
    )
    return found, int(bad)


def codes_of(x: Floats, inverse: Floats) -> Floats:
    return np.rint(np.clip(x * inverse[:, None], np.float32(-8), np.float32(7)))


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def lanes_sum(lanes: Floats) -> Floats:
    """(blocks, 16) -> (blocks,), halves onto halves."""
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    return lanes[:, 0]


def reference(values: Floats) -> NDArray[np.uint8]:
    """The same arithmetic in numpy, for blocks of 32 columns: (rows, bytes of a row)."""
    x = values.reshape(-1, 32).astype(np.float32)
    most, least = x.max(axis=1), (-x).max(axis=1)
    top = np.where(most >= least, most, -least)
    small = np.abs(top) < 2.0**-24
    top[small] = 1
    best, scale = np.full(len(x), -1, dtype=np.float32), np.zeros(len(x), dtype=np.float32)
    size = np.abs(x)
    for wanted in TOPS:
        codes = codes_of(x, np.float32(wanted) / top)
        product, square = (np.zeros((len(x), 16), dtype=np.float32) for _ in range(2))
        for half in (slice(0, 16), slice(16, 32)):
            product = fma(size[:, half] * x[:, half], codes[:, half], product)
            square = fma(size[:, half] * codes[:, half], codes[:, half], square)
        both, own = lanes_sum(product), lanes_sum(square)
        tried = np.divide(both, own, out=np.zeros_like(both), where=own > 0)
        better = tried * both > best
        best, scale = np.where(better, tried * both, best), np.where(better, tried, scale)
    with np.errstate(over="ignore"):
        half_scale = np.where(small, np.float32(0), scale).astype(np.float16)
    kept = np.isfinite(half_scale) & (half_scale != 0)
    half_scale[~kept] = 0  # positive zero
    inverse = np.divide(1, half_scale.astype(np.float32), out=np.zeros_like(scale), where=kept)
    codes = np.where(kept[:, None], codes_of(x, inverse).astype(np.int64) + 8, 0)
    packed = (codes[:, :16] | codes[:, 16:] << 4).astype(np.uint8)
    return np.concatenate((half_scale[:, None].view(np.uint8), packed), axis=1).reshape(len(values), -1)


def values_of(raw: NDArray[np.uint8]) -> NDArray[np.float64]:
    return np.asarray(gguf.dequantize(raw, gguf.GGMLQuantizationType.Q4_0), dtype=np.float64)


@pytest.mark.parametrize("kind", TYPES)
def test_requantising_any_type_to_q4_0_gives_numpys_bytes(library: NativeLibrary, level: str, kind: str) -> None:
    weights = some_weights(kind, 3, ROWS, COLUMNS)
    values = np.array([dequantise(library, weights, row) for row in range(ROWS)])
    found, bad = coarse(library, level, weights)
    assert bad == -1
    assert np.array_equal(found, reference(values))


@pytest.mark.parametrize("size", [1e-7, 1e-3, 1e5, 4e5])
def test_requantising_weights_of_any_magnitude_gives_numpys_bytes(
    library: NativeLibrary, level: str, size: float
) -> None:
    values = (np.random.default_rng(5).uniform(-1, 1, (ROWS, COLUMNS)) * size).astype(np.float32)
    found, bad = coarse(library, level, quantised("F32", values))
    assert bad == -1
    assert np.array_equal(found, reference(values))


def test_requantising_has_less_error_than_a_scale_from_the_largest_weight(library: NativeLibrary) -> None:
    values = np.random.default_rng(8).standard_normal((64, COLUMNS), dtype=np.float32)
    ours = values_of(coarse(library, "portable", quantised("F32", values))[0])
    usual = values_of(quantised("Q4_0", values).raw)
    own, theirs = ((np.abs(values) * (kept - values) ** 2).sum() for kept in (ours, usual))
    assert own < 0.9 * theirs
    assert np.corrcoef(ours.ravel(), values.ravel())[0, 1] > 0.995


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-42, -1e-30])
def test_weights_too_small_for_a_half_precision_scale_become_zero(
    library: NativeLibrary, level: str, value: float
) -> None:
    found, bad = coarse(library, level, quantised("F32", np.full((1, 64), value, dtype=np.float32)))
    assert bad == -1
    assert not found.any()


@pytest.mark.parametrize("column", [32, 40, 50, 63])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -5e5])
def test_the_first_row_that_q4_0_cannot_hold_is_reported(
    library: NativeLibrary, level: str, value: float, column: int
) -> None:
    values = np.random.default_rng(2).standard_normal((ROWS, 64), dtype=np.float32)
    values[3, column] = values[4, column] = value
    found, bad = coarse(library, level, quantised("F32", values))
    assert bad == 3
    assert not found[3:, 18:].any()
    assert np.array_equal(found[:3], reference(values[:3]))
    assert np.array_equal(found[3:, :18], reference(values[3:, :32]))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_block_whose_best_scale_is_beyond_half_precision_is_reported(
    library: NativeLibrary, level: str, sign: int
) -> None:
    values = np.random.default_rng(2).standard_normal((ROWS, 64), dtype=np.float32)
    values[3, 32:] = sign * np.float32(132180)
    values[3, 50] = sign * np.float32(456000)
    found, bad = coarse(library, level, quantised("F32", values))
    assert bad == 3
    assert np.array_equal(found, reference(values))


def test_requantising_an_unsupported_type_or_shape_reads_nothing(library: NativeLibrary) -> None:
    nothing = np.zeros(64, dtype=np.uint8)
    for kind, columns, number in ((1000, 32, 0), (TYPES["Q4_K"], 32, 0), (TYPES["Q8_0"], 33, 0), (0, 32, 99)):
        found = library.api.es_coarsen(kind, nothing.ctypes.data, 1, columns, nothing.ctypes.data, number)
        assert (found, nothing.any()) == (0, False)
