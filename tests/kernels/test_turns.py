"""The kernels' cosine and sine for rotary embeddings, compared with exact arithmetic and doubles."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest

from edgespec.runtimes.native.library import NativeLibrary
from edgespec.runtimes.native.weights import _power
from tests.support.kernel_calls import turns

Doubles = npt.NDArray[np.float64]

# Half a step of a float, plus the error of the series in doubles.
LARGEST_ERROR = 0.5 + 2.0**-20


def steps_off(found: npt.NDArray[np.float32], exact: Doubles) -> Doubles:
    """Each value's error in steps of a float."""
    return np.abs(found.astype(np.float64) - exact) / np.spacing(np.abs(exact).astype(np.float32))


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6, 1e7])
@pytest.mark.parametrize("length", [64, 128, 256])
def test_rotary_angles_are_within_half_a_step_at_positions_up_to_131072(
    library: NativeLibrary, base: float, length: int
) -> None:
    frequencies = np.array([_power(base, -pair, length) for pair in range(0, length, 2)])
    positions = np.r_[0:300, np.random.default_rng(length).integers(300, 131072, 700), 131072].astype(np.float64)
    angles = np.outer(positions, frequencies)
    found = turns(library, angles)
    for at, function in ((0, np.cos), (1, np.sin)):
        off = steps_off(found[..., at], function(angles))
        assert off.max() <= LARGEST_ERROR
        assert (found[..., at] != function(angles).astype(np.float32)).mean() < 1e-5


@functools.cache
def half_pi(bits: int = 1300) -> Fraction:
    """Half of pi by Machin's formula, within 2^-bits."""

    def arctan_of_one_over(whole: int) -> int:
        power = (1 << bits + 20) // whole
        total, number = power, 1
        while power:
            power //= whole * whole
            number += 2
            total += power // number * (-1 if number % 4 == 3 else 1)
        return total

    return Fraction(2 * (4 * arctan_of_one_over(5) - arctan_of_one_over(239)), 1 << bits + 20)


def exact_turn(angle: float) -> tuple[float, float]:
    """Cosine and sine, each within one step of the nearest double."""
    quarter = round(Fraction(angle) / half_pi())
    rest = float(Fraction(angle) - quarter * half_pi())
    cosine, sine = math.cos(rest), math.sin(rest)
    return ((cosine, sine), (-sine, cosine), (-cosine, -sine), (sine, -cosine))[quarter % 4]


# The double nearest to a multiple of a quarter turn (Muller 2006), and neighbours of the code's limits.
NEAREST_TO_A_QUARTER = 6381956970095103.0 * 2.0**797
EDGES = [
    0.0,
    5e-324,
    1e-300,
    1e-8,
    0.785,
    math.nextafter(0.785, 0),
    *(math.pi * part for part in (0.25, 0.5, 1, 1.5)),
]
HUGE = [1e5, 2.0**53, 1e22, NEAREST_TO_A_QUARTER, 1.7976931348623157e308, 2.0**64, 2.0**1023]


@pytest.mark.parametrize("angle", [*EDGES, *HUGE])
def test_the_angle_reduction_is_exact_for_hard_cases(library: NativeLibrary, angle: float) -> None:
    for sign in (1.0, -1.0):
        found = turns(library, np.array([sign * angle]))[0]
        exact = np.array(exact_turn(sign * angle))
        assert (steps_off(found, exact) <= LARGEST_ERROR).all()


def test_the_angle_reduction_is_exact_for_angles_of_every_size(library: NativeLibrary) -> None:
    draw = np.random.default_rng(0)
    angles = np.ldexp(draw.uniform(1, 2, 4000), draw.integers(-60, 1024, 4000))
    exact = np.array([exact_turn(float(angle)) for angle in angles])
    assert steps_off(turns(library, angles), exact).max() <= LARGEST_ERROR


@pytest.mark.parametrize("angle", [math.inf, -math.inf, math.nan])
def test_an_angle_that_is_not_finite_gives_nan(library: NativeLibrary, angle: float) -> None:
    assert np.isnan(turns(library, np.array([angle]))).all()


def test_cosine_and_sine_have_the_known_bits_on_every_processor(library: NativeLibrary) -> None:
    """Known bits of some angles; compare_levels.c compares many more between levels."""
    found = turns(library, np.array([1.0, 100.0, 131071.0 * _power(1e4, -2, 64), 1e22]))
    assert found.view(np.uint32).tolist() == [
        [0x3F0A5140, 0x3F576AA4],
        [0x3F5CC0EE, 0xBF01A12E],
        [0x3D5FB70D, 0x3F7F9E2D],
        [0x3F05F167, 0xBF5A29D6],
    ]


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1e6])
def test_rotary_frequencies_are_the_nearest_doubles(base: float) -> None:
    """The error of a power's logarithm is below half a step, as far as exact powers can show."""
    for under in (32, 64, 128):
        for over in range(0, under, 2):
            found = Fraction(_power(base, -over, under))
            step = Fraction(math.ulp(float(found))) / 2
            reduced = Fraction(over, under)
            wanted = 1 / Fraction(base) ** reduced.numerator  # equals found ** denominator without rounding
            assert (found - step) ** reduced.denominator <= wanted <= (found + step) ** reduced.denominator
