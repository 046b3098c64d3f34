"""Weights of every type as Q4_0: the bytes that numpy finds with the same arithmetic, and how far they are off."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.runtimes.native_library import NativeLibrary
from tests.support.kernel_calls import TYPES, Floats, Weights, dequantise, quantised, some_weights

ROWS, COLUMNS = 5, 512

# What each scale that is tried makes of a block's largest weight.
TOPS = (-7.25, -7.75, -8.25, -8.75, -9.25)


def narrow(library: NativeLibrary, weights: Weights) -> tuple[NDArray[np.uint8], int]:
    """Rows of Q4_0, (rows, bytes of a row), and the first row that is not finite."""
    found = np.zeros((weights.rows, weights.columns // 32 * 18), dtype=np.uint8)
    source = np.ascontiguousarray(weights.raw)
    bad = library.api.es_narrow(
        TYPES[weights.kind], source.ctypes.data, weights.rows, weights.columns, found.ctypes.data
    )
    return found, int(bad)


def codes_of(x: Floats, inverse: Floats) -> Floats:
    return np.rint(np.clip(x * inverse[:, None], np.float32(-8), np.float32(7)))


def reference(values: Floats) -> NDArray[np.uint8]:
    """The same in numpy, for blocks of 32 columns: (rows, bytes of a row)."""
    x = values.reshape(-1, 32).astype(np.float32)
    top = x[np.arange(len(x)), np.abs(x).argmax(axis=1)]
    best, scale = np.full(len(x), -1, dtype=np.float32), np.zeros(len(x), dtype=np.float32)
    for wanted in TOPS:
        with np.errstate(divide="ignore", invalid="ignore"):
            codes = codes_of(x, np.float32(wanted) / top)
            weight = np.abs(x)
            lanes = [np.zeros((len(x), 8), dtype=np.float32) for _ in range(2)]
            for k in range(0, 32, 8):
                part = slice(k, k + 8)
                lanes[0] += weight[:, part] * x[:, part] * codes[:, part]
                lanes[1] += weight[:, part] * codes[:, part] * codes[:, part]
            both, own = np.zeros(len(x), dtype=np.float32), np.zeros(len(x), dtype=np.float32)
            for i in range(8):
                both += lanes[0][:, i]
                own += lanes[1][:, i]
            tried = np.where(own > 0, both / own, np.float32(0))
            better = tried * both > best
        best, scale = np.where(better, tried * both, best), np.where(better, tried, scale)
    half = np.where(top != 0, scale, np.float32(0)).astype(np.float16)
    with np.errstate(divide="ignore"):
        inverse = np.where(half != 0, np.float32(1) / half.astype(np.float32), np.float32(0))
    codes = codes_of(x, inverse).astype(np.int64) + 8
    packed = (codes[:, :16] | codes[:, 16:] << 4).astype(np.uint8)
    return np.concatenate((half[:, None].view(np.uint8), packed), axis=1).reshape(len(values), -1)


def values_of(raw: NDArray[np.uint8]) -> NDArray[np.float64]:
    return np.asarray(gguf.dequantize(raw, gguf.GGMLQuantizationType.Q4_0), dtype=np.float64)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_becomes_what_the_definition_says(library: NativeLibrary, kind: str) -> None:
    weights = some_weights(kind, 3, ROWS, COLUMNS)
    values = np.array([dequantise(library, weights, row) for row in range(ROWS)])
    found, bad = narrow(library, weights)
    assert bad == -1
    assert np.array_equal(found, reference(values))


def test_it_is_nearer_than_a_scale_from_the_largest_weight_alone(library: NativeLibrary) -> None:
    values = np.random.default_rng(8).standard_normal((64, COLUMNS), dtype=np.float32)
    ours = values_of(narrow(library, quantised("F32", values))[0])
    usual = values_of(quantised("Q4_0", values).raw)
    own, theirs = ((np.abs(values) * (kept - values) ** 2).sum() for kept in (ours, usual))
    assert own < 0.9 * theirs
    assert np.corrcoef(ours.ravel(), values.ravel())[0, 1] > 0.995


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-42, 1e-30])
def test_what_is_too_small_for_a_half_is_nothing(library: NativeLibrary, value: float) -> None:
    found, bad = narrow(library, quantised("F32", np.full((1, 64), value, dtype=np.float32)))
    assert bad == -1
    assert not values_of(found).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_a_row_that_is_not_finite_is_told(library: NativeLibrary, value: float) -> None:
    values = np.random.default_rng(2).standard_normal((ROWS, 64), dtype=np.float32)
    values[3, 40] = value
    found, bad = narrow(library, quantised("F32", values))
    assert bad == 3
    assert np.array_equal(found[:3], reference(values[:3]))


def test_what_has_no_layout_is_not_read(library: NativeLibrary) -> None:
    nothing = np.zeros(64, dtype=np.uint8)
    for kind, columns in ((1000, 32), (TYPES["Q4_K"], 32), (TYPES["Q8_0"], 33)):
        assert library.api.es_narrow(kind, nothing.ctypes.data, 1, columns, nothing.ctypes.data) == 0
    assert not nothing.any()
