"""How calibrated curves follow what forwards take."""

from __future__ import annotations

import math

import pytest

from edgespec.planning.cost import Curve
from edgespec.planning.pace import ContextCurves, Pace

CURVE = Curve(widths=(1, 2, 4), forward_s=(0.1, 0.12, 0.2))
CURVES = ContextCurves(contexts=(100,), curves=(CURVE,))


def seconds(pace: Pace, width: int) -> float:
    curve = pace.curve()
    assert curve is not None
    return curve.seconds(width)


def test_a_curve_for_every_context_length() -> None:
    longer = Curve(widths=(1, 2, 4), forward_s=(0.2, 0.24, 0.6))
    curves = ContextCurves(contexts=(100, 300), curves=(CURVE, longer))
    assert curves.at(0) == curves.at(100) == CURVE
    assert curves.at(300) == curves.at(10**6) == longer
    assert curves.at(150).forward_s == pytest.approx((0.125, 0.15, 0.3))


@pytest.mark.parametrize(
    ("contexts", "curves"),
    [
        ((), ()),
        ((1, 2), (CURVE,)),
        ((2, 1), (CURVE, CURVE)),
        ((1, 1), (CURVE, CURVE)),
        ((1, 2), (CURVE, Curve(widths=(1,), forward_s=(0.1,)))),
    ],
)
def test_curves_that_do_not_fit_together(contexts: tuple[int, ...], curves: tuple[Curve, ...]) -> None:
    with pytest.raises(ValueError, match=r"curve|context"):
        ContextCurves(contexts=contexts, curves=curves)


def test_without_calibration_only_plain_speed_is_known() -> None:
    pace = Pace()
    assert pace.curves is None
    for _ in range(4):
        assert pace.plain_s is None
        assert pace.record(1, 10, 0.5)
        pace.record(3, 10, 9.0)
    assert pace.plain_s == 0.5
    assert pace.curve() is None
    assert pace.factor == 1.0


def test_what_was_calibrated_stands_until_enough_was_seen() -> None:
    pace = Pace(CURVES)
    assert pace.curve() == CURVE
    pace.record(1, 10, 0.3)
    pace.record(1, 10, 0.3)
    assert seconds(pace, 4) == 0.2


def test_a_slower_machine_is_slower_at_every_width() -> None:
    pace = Pace(CURVES)
    for _ in range(9):
        pace.record(1, 10, 0.15)
    assert pace.factor == pytest.approx(1.5, rel=0.05)
    assert [seconds(pace, width) for width in (1, 2, 4)] == pytest.approx([0.15, 0.18, 0.3], rel=0.05)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_one_stall_changes_nothing(width: int) -> None:
    pace = Pace(CURVES)
    for _ in range(20):
        for own in (1, 2, 4):
            pace.record(own, 10, CURVE.seconds(own))
    assert pace.record(width, 10, 10 * CURVE.seconds(width))
    assert [seconds(pace, own) for own in (1, 2, 4)] == pytest.approx(CURVE.forward_s, rel=1e-6)


def test_a_width_that_differs_is_learned_by_itself() -> None:
    pace = Pace(CURVES)
    for _ in range(60):
        pace.record(1, 10, 0.1)
        pace.record(2, 10, 0.18)
        pace.record(1, 10, 0.1)
    assert seconds(pace, 1) == pytest.approx(0.1, rel=0.1)
    assert seconds(pace, 2) / seconds(pace, 1) == pytest.approx(1.8, rel=0.1)
    assert seconds(pace, 4) / seconds(pace, 1) == pytest.approx(2.0, rel=0.1)


def test_a_change_of_shape_shows_though_plain_forwards_are_rare() -> None:
    pace = Pace(CURVES)
    for place in range(6 * 64):
        if place % 64 == 63:
            pace.record(1, 10, 0.1)
        else:
            pace.record(4, 10, 0.4)
    assert seconds(pace, 4) == pytest.approx(0.4, rel=0.1)
    assert seconds(pace, 1) < 0.13, "wide forwards take twice as long, plain ones do not"


def test_a_change_of_more_than_a_stall_is_believed_the_second_time() -> None:
    pace = Pace(CURVES)
    for place in range(400):
        pace.record(1, 10, 0.1)
        pace.record(4, 10, 0.2 if place < 20 else 1.0)
        pace.record(1, 10, 0.1)
    assert seconds(pace, 4) / seconds(pace, 1) == pytest.approx(10, rel=0.15)


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf, 0.0, -1.0, 51 * 0.1, 1e9])
def test_a_clock_that_jumped_says_nothing(spoilt: float) -> None:
    pace = Pace(CURVES)
    for _ in range(9):
        assert not pace.record(1, 10, spoilt)
    assert pace.curve() == CURVE
    assert pace.plain_s is None
    assert pace.record(1, 10, 49 * 0.1)


def test_without_a_curve_the_plain_speed_seen_tells_what_is_implausible() -> None:
    pace = Pace()
    assert pace.record(1, 10, 1e6), "nothing to compare with yet"
    for _ in range(9):
        pace.record(1, 10, 0.1)
    assert not pace.record(2, 10, 6.0)


def test_the_curve_is_that_of_the_latest_context() -> None:
    longer = Curve(widths=(1, 2, 4), forward_s=(0.2, 0.24, 0.4))
    pace = Pace(ContextCurves(contexts=(100, 300), curves=(CURVE, longer)))
    assert pace.curve() == CURVE
    pace.record(1, 300, 0.2)
    assert pace.curve() == longer


def test_new_curves_forget_what_was_learned_of_the_old() -> None:
    pace = Pace(CURVES)
    for _ in range(20):
        pace.record(1, 10, 0.3)
        pace.record(2, 10, 0.2)
    assert pace.curve() != CURVE
    pace.curves = CURVES
    assert pace.curve() == CURVE
    assert pace.factor == 1.0
    assert pace.plain_s == pytest.approx(0.3), "that was measured, whatever was calibrated"
