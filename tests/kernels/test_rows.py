"""Functions of a row between two products: equal bits from every level, and numpy's numbers within a bound."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from edgespec.runtimes.native.layout import CLIPPED_SWIGLU, GEGLU, SWIGLU
from edgespec.runtimes.native.library import NativeLibrary
from tests.support.kernel_calls import Floats, capped, exponential, join, normalise, quantise, same_bits


def normal(seed: int, count: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(count, dtype=np.float32)


# --------------------------------------------------------------------------------------------- activations


@pytest.fixture(params=["normal", "outliers", "tiny and huge", "zeros"])
def row(request: pytest.FixtureRequest) -> Floats:
    x = normal(1, 640)
    if request.param == "outliers":
        x[::77] *= 3000
    if request.param == "tiny and huge":
        x *= np.float32(10.0) ** np.arange(-30, 34, 3.2, dtype=np.float32).repeat(32)
    if request.param == "zeros":
        x[:320] = 0
    return x


def as_half_without_bounds(x: np.float32) -> np.float32:
    """The nearest number of 11 significant bits, ties to even."""
    fraction, exponent = np.frexp(np.float64(x))
    return np.float32(np.ldexp(np.rint(fraction * 2**11) / 2**11, exponent))


def halves_summed(values: Floats) -> np.float32:
    """The sum of a power of two of floats, by repeatedly adding one half to the other."""
    while len(values) > 1:
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    return np.float32(values[0])


def rounded_to(top: int, x: Floats) -> tuple[npt.NDArray[np.int8], np.float32]:
    """The codes of a block whose largest value becomes ``top``, and the sum of their squared errors.

    The sum is in units of the largest value squared. Float64 products are exact here, so rounding them to float32
    equals a fused multiply-add.
    """
    exact = x.astype(np.float64) * float(np.float32(top) / np.abs(x).max())
    codes = np.rint(exact)
    miss = (exact - codes).astype(np.float32)
    high_squares = miss[16:] * miss[16:]
    squares = (miss[:16].astype(np.float64) ** 2 + high_squares).astype(np.float32)
    return codes.astype(np.int8), halves_summed(squares) * (np.float32(1) / np.float32(top * top))


def test_quantised_activations_equal_the_definition(library: NativeLibrary, level: str, row: Floats) -> None:
    blocks = quantise(library, level, row)
    for block, x in zip(blocks, row.reshape(-1, 32), strict=True):
        largest = np.abs(x).max()
        if largest < 127 * 2.0**-100:
            scale, codes = np.float32(0), np.zeros(32, np.int8)
        else:
            tried = {top: rounded_to(top, x) for top in (127, 125, 123, 121)}
            top = min(tried, key=lambda top: tried[top][1])
            codes, scale = tried[top][0], as_half_without_bounds(largest / np.float32(top))
        assert block["scale"] == scale
        assert np.array_equal(block["q"], codes)
        low, high = int(codes[:16].sum(dtype=int)), int(codes[16:].sum(dtype=int))
        total = low + high
        assert block[["minus8", "minus32_low", "minus32_high"]].tolist() == (-8 * total, -32 * low, -32 * high)
        assert block["scaled_sum"] == np.float32(scale) * np.float32(total)


def test_a_quantised_block_does_not_depend_on_the_number_of_blocks(
    library: NativeLibrary, level: str, row: Floats
) -> None:
    whole = quantise(library, level, row)
    for count in (1, 7, 8, 9, 15, 16, 17):
        assert quantise(library, level, row[: 32 * count]).tobytes() == whole[:count].tobytes(), count


def test_the_best_of_four_scales_has_less_error_than_the_finest(library: NativeLibrary, level: str) -> None:
    x = normal(3, 32 * 4096)
    blocks, rows = quantise(library, level, x), x.reshape(-1, 32).astype(np.float64)
    tops, counts = np.unique(np.abs(blocks["q"].astype(int)).max(axis=1), return_counts=True)
    assert tops.tolist() == [121, 123, 125, 127]
    assert counts.min() > 100
    finest = np.abs(rows).max(axis=1, keepdims=True) / 127
    missed = np.square(blocks["q"] * blocks["scale"][:, None].astype(np.float64) - rows).sum()
    assert 0.86 < missed / np.square(np.rint(rows / finest) * finest - rows).sum() < 0.89


def test_quantised_activations_have_an_error_of_half_a_step_at_most(
    library: NativeLibrary, level: str, row: Floats
) -> None:
    blocks = quantise(library, level, row)
    back = blocks["q"] * blocks["scale"][:, None].astype(np.float64)
    steps = blocks["scale"][:, None].astype(np.float64)
    flushed = 127 * 2.0**-100  # the largest value of a block with scale 0
    # Half a step, plus 127 times the scale's error: half a unit in its eleventh bit.
    assert (np.abs(back - row.reshape(-1, 32)) <= np.where(steps > 0, (0.5001 + 127 / 2**11) * steps, flushed)).all()


def test_a_value_that_is_not_finite_affects_only_its_block(library: NativeLibrary, level: str) -> None:
    spoilt = [3, 17]
    for bad, position in itertools.product((np.nan, -np.nan, np.inf, -np.inf), (0, 15, 16, 31)):
        x = normal(2, 32 * 20)  # more blocks than a level processes together
        x[np.array(spoilt) * 32 + position] = bad
        blocks = quantise(library, level, x)
        assert np.flatnonzero(np.isnan(blocks["scale"])).tolist() == spoilt
        assert np.flatnonzero(np.isnan(blocks["scaled_sum"])).tolist() == spoilt
        assert np.flatnonzero(~blocks["q"].any(axis=1)).tolist() == spoilt


def test_quantising_rounds_ties_to_even(library: NativeLibrary, level: str) -> None:
    x = np.arange(-3, 29, dtype=np.float32) * 4  # scale 1 fits best
    x[:6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]
    assert quantise(library, level, x)["q"][0][:6].tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.parametrize("top", [127, 125, 123, 121])
def test_quantising_finds_a_scale_that_fits_exactly(library: NativeLibrary, level: str, top: int) -> None:
    whole = np.linspace(-100, 100, 32).round().astype(np.float32)
    whole[5] = top
    block = quantise(library, level, whole)[0]
    assert (block["scale"], block["q"].tolist()) == (1, whole.tolist())


def test_of_equally_good_scales_quantising_takes_the_finest(library: NativeLibrary, level: str) -> None:
    alone = np.zeros(32, np.float32)
    alone[5] = 1
    assert quantise(library, level, alone)["q"][0][5] == 127


# ------------------------------------------------------------------------------------------------ functions


def everywhere() -> Floats:
    """Many floats from -90 to 90, and the limits."""
    x = np.linspace(-90, 90, 2**17 - 32, dtype=np.float32)
    edges = [
        -np.inf,
        np.inf,
        -87.0,
        -87.0001,
        88.0,
        88.1,
        0.0,
        -0.0,
        1e-30,
        -1e-30,
        1e30,
        -1e30,
        0.34657359,
        -0.34657359,
    ]
    return np.concatenate([x, np.resize(np.array(edges, np.float32), 32)])


def test_exp_is_within_two_units_in_the_last_place(library: NativeLibrary, level: str) -> None:
    x = everywhere()
    found = exponential(library, level, x)
    inside = (x >= -87) & (x <= 88)
    expected = np.exp(x[inside].astype(np.float64))
    assert (np.abs(found[inside] - expected) <= 2 * np.spacing(expected.astype(np.float32))).all()
    assert (found[x < -87] == 0).all()
    assert (found[x > 88] == exponential(library, level, np.full(32, 88, np.float32))[0]).all()


def test_exp_of_nan_is_nan(library: NativeLibrary, level: str) -> None:
    x = np.zeros(32, np.float32)
    x[3] = np.nan
    assert np.flatnonzero(np.isnan(exponential(library, level, x))).tolist() == [3]


def test_exp_is_the_same_on_every_level(library: NativeLibrary, fast: str) -> None:
    x = everywhere()
    assert same_bits(exponential(library, fast, x), exponential(library, "portable", x))


def joined(activation: int, gate: Floats, up: Floats) -> tuple[np.ndarray, np.ndarray]:
    """What numpy gives, and how far a kernel may be from it."""
    g, u = gate.astype(np.float64), up.astype(np.float64)
    if activation == SWIGLU:
        expected = g / (1 + np.exp(-g)) * u
        # exp is 2 units off, the sum, the quotient and the product half a unit each; all relative to the result.
        return expected, 4 * 2.0**-23 * np.abs(expected) + 1e-37
    if activation == GEGLU:
        exponent = np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
        expected = g * 0.5 * (1 + np.tanh(exponent)) * u
        # As for SwiGLU; and the exponent, twice that, has 4 roundings, which change the exponential by that relative
        # amount. numpy's own 1 + tanh loses what is below 2^-53 of 1.
        return expected, (4 + 4 * np.abs(exponent)) * 2.0**-23 * np.abs(expected) + 2.0**-50 * np.abs(g * u)
    g, u = np.minimum(g, 7), np.clip(u, -7, 7)
    expected = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    # As for SwiGLU; and 1.702 and the exponent are rounded, and so is the last sum, relative to its larger summand.
    return expected, (5 + 4 * np.abs(g)) * 2.0**-23 * np.abs(g / (1 + np.exp(-1.702 * g))) * (
        1 + np.abs(u + 1)
    ) + 1e-37


@pytest.mark.parametrize("activation", [SWIGLU, GEGLU, CLIPPED_SWIGLU])
def test_gates_equal_numpys_within_rounding_with_equal_bits_on_every_level(
    library: NativeLibrary, level: str, activation: int
) -> None:
    for spread in (3, 8):
        gate, up = normal(3, 4096) * (3 if activation == GEGLU else spread), normal(4, 4096) * spread
        found, (expected, bound) = join(library, level, activation, gate, up), joined(activation, gate, up)
        assert (np.abs(found - expected) <= bound).all()
        assert same_bits(found, join(library, "portable", activation, gate, up))


@pytest.mark.parametrize(("activation", "most"), [(SWIGLU, np.inf), (GEGLU, np.inf), (CLIPPED_SWIGLU, 7.0)])
def test_gates_of_large_values_do_not_overflow(
    library: NativeLibrary, level: str, activation: int, most: float
) -> None:
    gate = np.resize(np.array([1e4, -1e4, 88, -88, 1e20, -1e20], np.float32), 96)
    inputs = np.full(96, 0.0 if activation == CLIPPED_SWIGLU else 1.0, np.float32)
    found = join(library, level, activation, gate, inputs)
    assert np.allclose(found, np.clip(gate, 0, most), rtol=1e-5, atol=1e-15)


def test_nan_comes_through_a_gate_that_clips(library: NativeLibrary, level: str) -> None:
    gate, up = np.ones((2, 32), np.float32)
    gate[3] = up[7] = np.nan
    found = join(library, level, CLIPPED_SWIGLU, gate, up)
    assert np.flatnonzero(np.isnan(found)).tolist() == [3, 7]
    assert library.api.es_join(3, gate.ctypes.data, up.ctypes.data, 32, found.ctypes.data, 0) != 0, "no such gate"


@pytest.mark.parametrize("length", [32, 576, 1536])
def test_rmsnorm_equals_numpys_within_rounding_with_equal_bits_on_every_level(
    library: NativeLibrary, level: str, length: int
) -> None:
    x, weight = normal(5, length) * 20, normal(6, length)
    found = normalise(library, level, x, weight, 1e-6)
    exact = x.astype(np.float64)
    expected = exact / np.sqrt((exact**2).mean() + 1e-6) * weight
    # The sum's relative error is that of length / 16 + 4 additions, halved by the root; four more roundings follow.
    assert (np.abs(found - expected) <= (length / 32 + 6) * 2.0**-24 * np.abs(expected)).all()
    assert same_bits(found, normalise(library, "portable", x, weight, 1e-6))


@pytest.mark.parametrize("at", [0, 17, 63])
def test_a_row_whose_squares_have_no_finite_sum_is_normalised_to_nan(
    library: NativeLibrary, level: str, at: int
) -> None:
    x, weight = normal(5, 64), normal(6, 64)
    for value, is_finite in ((1.8e19, True), (1.9e19, False), (-3e38, False), (np.inf, False), (np.nan, False)):
        x[at] = value
        found = normalise(library, level, x, weight, 1e-6)
        assert np.isfinite(found).all() if is_finite else np.isnan(found).all()


def test_a_row_length_that_is_not_a_multiple_of_32_is_refused(library: NativeLibrary) -> None:
    x = np.zeros(64, np.float32)
    for length in (0, 16, 33, -32):
        assert library.api.es_exponential(x.ctypes.data, length, x.ctypes.data, 0) != 0
    assert library.api.es_exponential(x.ctypes.data, 32, x.ctypes.data, 99) != 0


@pytest.mark.parametrize("length", [1, 15, 16, 33, 256])
@pytest.mark.parametrize("most", [0.5, 30.0, 50.0])
def test_a_cap_equals_numpys_tangent_with_equal_bits_on_every_level(
    library: NativeLibrary, level: str, length: int, most: float
) -> None:
    x = (np.random.default_rng(length).standard_normal(length) * 2 * most).astype(np.float32)
    found = capped(library, level, x, most)
    expected = most * np.tanh(x.astype(np.float64) / most)
    assert np.abs(found - expected).max() <= 2.0**-21 * most  # a few roundings of numbers up to the cap
    assert same_bits(found, capped(library, "portable", x, most))


def test_a_cap_of_huge_scores_is_the_cap_and_of_none_that_are_finite_nan(library: NativeLibrary, level: str) -> None:
    x = np.array([0.0, 1e30, -1e30, np.inf, -np.inf, np.nan], np.float32)
    found = capped(library, level, x, 30.0)
    assert found[:3].tolist() == [0.0, 30.0, -30.0]
    assert np.isnan(found[3:]).all()
