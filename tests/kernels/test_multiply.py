"""Products: each instruction set against the portable one to the bit, and that one against numpy within a bound."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.runtimes.native_library import NativeLibrary
from tests.support.kernel_calls import (
    TYPES,
    Floats,
    Weights,
    dequantise,
    multiply,
    quantise,
    quantised,
    relaid,
    same_bits,
)

QUANTISED = ["Q4_0", "Q4_1", "Q8_0"]

# Rows that end inside a tile, columns that end inside a group of 256.
SHAPES = [(16, 32), (17, 256), (48, 288), (5, 480), (33, 1536)]


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def spread_input(seed: int, rows: int, columns: int) -> Floats:
    """Like activations: blocks of very different size, and a few outliers."""
    x = normal(seed, rows, columns) * np.exp(normal(seed + 1, rows, columns // 32).repeat(32, axis=1))
    x[:, :: columns // 8] *= 50
    return x


def exact_input(library: NativeLibrary, kind: str, x: Floats) -> np.ndarray:
    """What the product really multiplies by: float64 of the shape of x."""
    if kind not in QUANTISED:
        return x.astype(np.float64)
    rows = [quantise(library, "portable", np.ascontiguousarray(row)) for row in x]
    return np.array([(row["q"] * row["scale"][:, None].astype(np.float64)).ravel() for row in rows])


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_portable_product_is_numpys_up_to_rounding(
    library: NativeLibrary, kind: str, rows: int, columns: int
) -> None:
    weights = quantised(kind, normal(1, rows, columns))
    x = spread_input(2, 3, columns)
    exact = exact_input(library, kind, x)
    expected = exact @ weights.values.T
    # One rounding of 2^-24 for each step of the chain (columns for floats, two for each block otherwise), of a sum
    # that never exceeds the sum of all sizes; one more for each scale.
    steps = columns if kind not in QUANTISED else 3 * columns // 32
    bound = (steps + 2) * 2.0**-24 * (np.abs(exact) @ np.abs(weights.values).T)
    assert (np.abs(multiply(library, "portable", weights, x) - expected) <= bound).all()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_level_computes_the_portable_bits(
    library: NativeLibrary, fast: str, kind: str, rows: int, columns: int
) -> None:
    weights = quantised(kind, normal(3, rows, columns))
    x = spread_input(4, 11, columns)
    bias = normal(5, rows)
    for own in (None, bias):
        expected = multiply(library, "portable", weights, x, own)
        assert np.isfinite(expected).all()
        assert same_bits(multiply(library, fast, weights, x, own), expected)


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_is_the_same_beside_any_others(library: NativeLibrary, level: str, kind: str) -> None:
    weights = quantised(kind, normal(6, 40, 288))
    x = spread_input(7, 40, 288)
    alone = np.concatenate([multiply(library, level, weights, row[None]) for row in x])
    for width in range(1, 33):
        for start in (0, 40 - width):
            together = multiply(library, level, weights, x[start : start + width])
            assert same_bits(together, alone[start : start + width]), (width, start)


def extreme(kind: str, codes: int, scale: float, minimum: float = 0.0) -> Weights:
    """16 rows of 64 columns whose code bytes are all ``codes``."""
    halves = np.array([scale, minimum][: 2 if kind == "Q4_1" else 1], dtype=np.float16).view(np.uint8)
    bytes_of_codes = np.full(32 if kind == "Q8_0" else 16, codes, dtype=np.uint8)
    block = np.concatenate([halves, bytes_of_codes])
    return Weights(kind, 16, 64, np.tile(block, (16, 2)))


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("codes", [0x00, 0xFF, 0x80, 0x7F, 0x0F, 0xF0])
@pytest.mark.parametrize("signs", [(1, 1), (-1, -1), (1, -0.5)], ids=["up", "down", "uneven"])
def test_the_largest_codes_and_activations_do_not_saturate(
    library: NativeLibrary, level: str, kind: str, codes: int, signs: tuple[float, float]
) -> None:
    weights = extreme(kind, codes, 1.0, -3.0)
    x = np.tile(np.array(signs, dtype=np.float32) * 127, 32)[None]
    expected = exact_input(library, kind, x) @ weights.values.T
    found = multiply(library, level, weights, x)
    assert np.allclose(found, expected, rtol=2.0**-20, atol=0)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_tiles_hold_the_files_own_bytes(library: NativeLibrary, kind: str, rows: int, columns: int) -> None:
    """Laying out again moves bytes and adds nothing but rows of zeros."""
    weights = quantised(kind, normal(8, rows, columns))
    tiles = relaid(library, weights)
    assert len(tiles) == -(-rows // 16) * 16 * weights.raw.shape[1]
    padding = len(tiles) - weights.raw.size
    expected = np.concatenate([weights.raw.ravel(), np.zeros(padding, np.uint8)])
    assert np.array_equal(np.bincount(tiles, minlength=256), np.bincount(expected, minlength=256))


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_found(library: NativeLibrary, kind: str, bad: float) -> None:
    weights = quantised(kind, normal(9, 20, 512))
    block = weights.raw.shape[1] // 16
    weights.raw[18, 9 * block : 9 * block + 2] = np.array([bad], dtype=np.float16).view(np.uint8)
    tiles = np.zeros(library.api.es_relaid_bytes(TYPES[kind], 20, 512), dtype=np.uint8)
    assert library.api.es_relay(TYPES[kind], weights.raw.ctypes.data, 20, 512, tiles.ctypes.data) == 18


@pytest.mark.parametrize(
    ("kind", "rows", "columns"), [(2, 0, 32), (2, 16, 0), (2, 16, 48), (12, 16, 256), (-1, 16, 32)]
)
def test_what_has_no_layout_has_no_size(library: NativeLibrary, kind: int, rows: int, columns: int) -> None:
    assert library.api.es_relaid_bytes(kind, rows, columns) == 0


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_of_the_embedding_is_what_the_file_says(library: NativeLibrary, kind: str) -> None:
    weights = quantised(kind, normal(10, 4, 288))
    for row, expected in enumerate(weights.values):
        found = dequantise(library, weights, row)
        # Q4_1 multiplies and adds, which numpy does as well; the others round once.
        assert np.array_equal(found, expected.astype(np.float32)), row
