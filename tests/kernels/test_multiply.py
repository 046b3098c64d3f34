"""Products: each level equals the portable one to the bit, and the portable one equals numpy within a bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from edgespec.runtimes.native.library import NativeLibrary
from tests.support.kernel_calls import (
    FLOATS,
    HALVES,
    TYPES,
    Floats,
    Weights,
    block_sizes,
    dequantise,
    multiply,
    quantise,
    random_blocks,
    relaid,
    same_bits,
    some_weights,
)

QUANTISED = list(HALVES)

# Bits of a weight in tiles, where they are not the file's bits in another order.
UNPACKED = {"Q3_K": 3.625, "IQ4_XS": 4.375, "IQ3_S": 4.375, "IQ3_XXS": 4.375}
REORDERED = [kind for kind in TYPES if kind not in UNPACKED]

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
    """The activations that the product really uses: float64 of the shape of x."""
    if kind not in QUANTISED:
        return x.astype(np.float64)
    rows = [quantise(library, "portable", np.ascontiguousarray(row)) for row in x]
    return np.array([(row["q"] * row["scale"][:, None].astype(np.float64)).ravel() for row in rows])


def sizes(weights: Weights) -> np.ndarray:
    """Bounds of a weight's terms, scale times code and minimum, whose magnitudes count even if they cancel."""
    if weights.kind not in QUANTISED or len(HALVES[weights.kind]) < 2:
        return np.abs(weights.values)
    _, size = block_sizes(weights.kind)
    raw = weights.raw.reshape(weights.rows, -1, size).copy()
    raw[..., 1] &= 0x7F
    raw[..., 3] &= 0x7F
    raw[..., 3] |= 0x80 if weights.kind.endswith("_K") else 0  # K-quants subtract the minimum
    return Weights(weights.kind, weights.rows, weights.columns, raw.reshape(weights.rows, -1)).values


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_portable_product_equals_numpys_within_rounding(
    library: NativeLibrary, kind: str, rows: int, columns: int
) -> None:
    weights = some_weights(kind, 1, rows, columns)
    x = spread_input(2, 3, weights.columns)
    exact = exact_input(library, kind, x)
    expected = exact @ weights.values.T
    # One rounding of 2^-24 for each step of the chain (columns for floats, two for each block otherwise), of a sum
    # that never exceeds the sum of all sizes; one more for each scale.
    steps = weights.columns if kind in FLOATS else 3 * weights.columns // 32
    bound = (steps + 2) * 2.0**-24 * (np.abs(exact) @ sizes(weights).T)
    assert (np.abs(multiply(library, "portable", weights, x) - expected) <= bound).all()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_level_computes_the_portable_levels_product_bits(
    library: NativeLibrary, fast: str, kind: str, rows: int, columns: int
) -> None:
    weights = some_weights(kind, 3, rows, columns)
    x = spread_input(4, 11, weights.columns)
    bias = normal(5, rows)
    for own in (None, bias):
        expected = multiply(library, "portable", weights, x, own)
        assert np.isfinite(expected).all()
        assert same_bits(multiply(library, fast, weights, x, own), expected)


@pytest.mark.parametrize("kind", TYPES)
def test_a_rows_product_does_not_depend_on_the_other_rows(library: NativeLibrary, level: str, kind: str) -> None:
    weights = some_weights(kind, 6, 40, 288)
    x = spread_input(7, 40, weights.columns)
    alone = np.concatenate([multiply(library, level, weights, row[None]) for row in x])
    for width in range(1, 33):
        for start in (0, 40 - width):
            together = multiply(library, level, weights, x[start : start + width])
            assert same_bits(together, alone[start : start + width]), (width, start)


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("columns", [256, 480, 1536])
def test_products_of_many_rows_equal_those_of_single_rows(
    library: NativeLibrary, level: str, kind: str, columns: int
) -> None:
    """Two tiles at a time from 32 rows on, at most 256 rows; 40 outputs leave a single, incomplete tile."""
    weights = some_weights(kind, 11, 40, columns)
    x, bias = spread_input(12, 320, weights.columns), normal(13, 40)
    parts = [multiply(library, level, weights, x[start : start + 8], bias) for start in range(0, 320, 8)]
    alone = np.concatenate(parts)
    for width in (31, 32, 33, 35, 37, 39, 64, 65, 66, 67, 256, 257, 258, 259, 260, 261, 320):
        assert same_bits(multiply(library, level, weights, x[:width], bias), alone[:width]), width


def extreme(kind: str, byte: int, scale: float, minimum: float) -> Weights:
    """32 rows of two blocks in which every byte, including small scales, is ``byte``."""
    columns, size = block_sizes(kind)
    block = np.full(size, byte, dtype=np.uint8)
    for at, value in zip(HALVES[kind], (scale, minimum), strict=False):
        block[at : at + 2] = np.array([value], dtype="<f2").view(np.uint8)
    if kind == "MXFP4":
        block[0] = 120
    return Weights(kind, 32, 2 * columns, np.tile(block, (32, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUANTISED)
def test_the_largest_codes_and_activations_do_not_overflow(library: NativeLibrary, level: str, kind: str) -> None:
    """The smallest half-precision scales are not lost either."""
    for byte, (scale, minimum) in itertools.product(
        (0x00, 0xFF, 0x80, 0x7F, 0x0F, 0xF0), ((1.0, -3.0), (2.0**-24, 2.0**-24), (-0.0, 0.0))
    ):
        weights = extreme(kind, byte, scale, minimum)
        values, bounds = weights.values, sizes(weights)
        for signs in ((1, 1), (-1, -1), (1, -0.5)):
            x = np.tile(np.array(signs, dtype=np.float32) * 127, weights.columns // 2)[None]
            exact = exact_input(library, kind, x)
            found = multiply(library, level, weights, x)
            case = (byte, scale, minimum, signs)
            assert same_bits(multiply(library, level, weights, x.repeat(64, axis=0)), found.repeat(64, axis=0)), case
            bound = 2.0**-20 * (np.abs(exact) @ bounds.T).max()
            assert np.allclose(found, exact @ values.T, rtol=0, atol=bound), case
            assert same_bits(found, multiply(library, "portable", weights, x)), case


@pytest.mark.parametrize("kind", REORDERED)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_tiles_hold_the_files_bits_in_another_order(
    library: NativeLibrary, kind: str, rows: int, columns: int
) -> None:
    """The tile layout moves bits and adds only rows of zeros, and half a line to each group of Q6_K."""
    weights = some_weights(kind, 8, rows, columns)
    tiles = relaid(library, weights)
    padded = -(-rows // 16) * 16
    unused = padded // 16 * weights.columns // 256 * 32 if kind == "Q6_K" else 0
    assert len(tiles) == padded * weights.raw.shape[1] + unused
    assert len(tiles) <= 1.03 * padded * weights.raw.shape[1]
    assert np.bitwise_count(tiles).sum() == np.bitwise_count(weights.raw).sum()


@pytest.mark.parametrize(("kind", "bits"), UNPACKED.items())
def test_codes_and_scales_that_are_unpacked_take_more_bits_in_memory(
    library: NativeLibrary, kind: str, bits: float
) -> None:
    """Their values are those of the file: the tests of products compare them with gguf's."""
    assert library.api.es_relaid_bytes(TYPES[kind], 33, 512) == 48 * 512 * bits / 8


def test_the_least_and_the_first_invalid_exponents_of_mxfp4(library: NativeLibrary, level: str) -> None:
    """2^-127 and 2^-128 would make subnormals and count as 0; the standard's NaN is reported."""
    weights = random_blocks("MXFP4", 1, 16, 64)
    weights.raw[:, 0], weights.raw[:, 17] = (0, 1)
    x = normal(2, 1, 64) * 1e30
    assert not multiply(library, level, weights, x).any()
    assert not dequantise(library, weights, 3).any()
    weights.raw[:, 0], weights.raw[:, 17] = (2, 2)
    expected = exact_input(library, "MXFP4", x) @ weights.values.T
    assert np.allclose(multiply(library, level, weights, x), expected, rtol=1e-5, atol=1e-12)
    assert np.abs(expected).max() > 1e-8
    weights.raw[7, 17] = 255
    tiles = np.zeros(library.api.es_relaid_bytes(TYPES["MXFP4"], 16, 64), dtype=np.uint8)
    assert library.api.es_relay(TYPES["MXFP4"], weights.raw.ctypes.data, 16, 64, tiles.ctypes.data) == 7


@pytest.mark.parametrize("kind", REORDERED)
def test_each_bit_of_the_file_has_a_separate_place_in_the_tiles(library: NativeLibrary, kind: str) -> None:
    columns = 256
    per_block, size = block_sizes(kind)
    row_bytes = columns // per_block * size
    seen = np.zeros(library.api.es_relaid_bytes(TYPES[kind], 16, columns), dtype=np.uint8)
    for at in range(row_bytes):
        raw, tiles = np.zeros((16, row_bytes), dtype=np.uint8), np.zeros_like(seen)
        raw[5, at] = 0xFF
        library.api.es_relay(TYPES[kind], raw.ctypes.data, 16, columns, tiles.ctypes.data)
        assert not (seen & tiles).any(), at
        assert np.bitwise_count(tiles).sum() == 8, at
        seen |= tiles


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_the_first_row_with_a_scale_that_is_not_finite_is_reported(
    library: NativeLibrary, kind: str, bad: float
) -> None:
    columns, size = block_sizes(kind)
    for at in HALVES[kind]:
        weights = random_blocks(kind, 9, 20, 3 * columns)
        weights.raw[18, 2 * size + at : 2 * size + at + 2] = np.array([bad], dtype="<f2").view(np.uint8)
        tiles = np.zeros(library.api.es_relaid_bytes(TYPES[kind], 20, 3 * columns), dtype=np.uint8)
        found = library.api.es_relay(TYPES[kind], weights.raw.ctypes.data, 20, 3 * columns, tiles.ctypes.data)
        assert found == 18, at


@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [
        (2, 0, 32),
        (2, 16, 0),
        (2, 16, 48),
        (12, 16, 288),
        (13, 16, 32),
        (14, 16, 128),
        (9, 16, 256),
        (-1, 16, 32),
        *((kind, 16, 128) for kind in (11, 18, 21, 23)),
        (20, 16, 48),
        (39, 16, 16),
    ],
)
def test_types_and_shapes_without_a_tile_layout_have_size_zero(
    library: NativeLibrary, kind: int, rows: int, columns: int
) -> None:
    assert library.api.es_relaid_bytes(kind, rows, columns) == 0


@pytest.mark.parametrize("kind", TYPES)
def test_dequantised_embedding_rows_equal_the_gguf_librarys(library: NativeLibrary, kind: str) -> None:
    weights = some_weights(kind, 10, 4, 288)
    for row, expected in enumerate(weights.values):
        # gguf computes in floats, in the same order.
        assert np.array_equal(dequantise(library, weights, row), expected.astype(np.float32)), row
