"""How calibrated curves follow what forwards take."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from edgespec.planning.cost.curve import ContextCurves, Curve
from edgespec.planning.cost.live_curve import LiveCurve

CURVE = Curve(widths=(1, 2, 4), forward_s=(0.1, 0.12, 0.2))
CURVES = ContextCurves(contexts=(100,), curves=(CURVE,))


def seconds(pace: LiveCurve, width: int) -> float:
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
    pace = LiveCurve()
    assert pace.curves is None
    for _ in range(4):
        assert pace.plain_s is None
        assert pace.record(1, 10, 0.5)
        pace.record(3, 10, 9.0)
    assert pace.plain_s == 0.5
    assert pace.curve() is None
    assert pace.factor == 1.0


def test_what_was_calibrated_stands_until_enough_was_seen() -> None:
    pace = LiveCurve(CURVES)
    assert pace.curve() == CURVE
    pace.record(1, 10, 0.3)
    pace.record(1, 10, 0.3)
    assert seconds(pace, 4) == 0.2


def test_a_slower_machine_is_slower_at_every_width() -> None:
    pace = LiveCurve(CURVES)
    for _ in range(9):
        pace.record(1, 10, 0.15)
    assert pace.factor == pytest.approx(1.5, rel=0.05)
    assert [seconds(pace, width) for width in (1, 2, 4)] == pytest.approx([0.15, 0.18, 0.3], rel=0.05)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_one_stall_changes_nothing(width: int) -> None:
    pace = LiveCurve(CURVES)
    for _ in range(20):
        for own in (1, 2, 4):
            pace.record(own, 10, CURVE.seconds(own))
    assert pace.record(width, 10, 10 * CURVE.seconds(width))
    assert [seconds(pace, own) for own in (1, 2, 4)] == pytest.approx(CURVE.forward_s, rel=1e-6)


def test_a_width_that_differs_is_learned_by_itself() -> None:
    pace = LiveCurve(CURVES)
    for _ in range(60):
        pace.record(1, 10, 0.1)
        pace.record(2, 10, 0.18)
        pace.record(1, 10, 0.1)
    assert seconds(pace, 1) == pytest.approx(0.1, rel=0.1)
    assert seconds(pace, 2) / seconds(pace, 1) == pytest.approx(1.8, rel=0.1)
    assert seconds(pace, 4) / seconds(pace, 1) == pytest.approx(2.0, rel=0.1)


def test_a_change_of_shape_shows_though_plain_forwards_are_rare() -> None:
    pace = LiveCurve(CURVES)
    for place in range(6 * 64):
        if place % 64 == 63:
            pace.record(1, 10, 0.1)
        else:
            pace.record(4, 10, 0.4)
    assert seconds(pace, 4) == pytest.approx(0.4, rel=0.1)
    assert seconds(pace, 1) < 0.13, "wide forwards take twice as long, plain ones do not"


def test_a_change_of_more_than_a_stall_is_believed_the_second_time() -> None:
    pace = LiveCurve(CURVES)
    for place in range(400):
        pace.record(1, 10, 0.1)
        pace.record(4, 10, 0.2 if place < 20 else 1.0)
        pace.record(1, 10, 0.1)
    assert seconds(pace, 4) / seconds(pace, 1) == pytest.approx(10, rel=0.15)


# Widths of ordinary decoding with a drafter, and T(w) / T(1) of a kernel for which a further row is cheap.
OFTEN = {1: 4, 2: 25, 3: 30, 4: 20, 5: 10, 6: 5, 8: 1}
WIDE = Curve(widths=tuple(range(1, 9)), forward_s=(1.0, 1.086, 1.126, 1.19, 1.25, 1.31, 1.4, 1.49))


def decode(noise: str, widths: list[int], seed: int, off: dict[int, float] | None = None) -> LiveCurve:
    """Forwards of ``widths`` whose median is the calibrated time, times ``off`` of that width."""
    chance, pace = random.Random(seed), LiveCurve(ContextCurves(contexts=(100,), curves=(WIDE,)))
    for width in widths:
        factor = {
            "little": math.exp(chance.gauss(0, 0.03)),
            "much": math.exp(chance.uniform(-0.15, 0.15)),
            "stalls": math.exp(chance.gauss(0, 0.03)) * (chance.uniform(1.3, 3) if chance.random() < 0.05 else 1),
            "late": math.exp(chance.expovariate(1 / 0.08) - 0.08 * math.log(2)),
        }[noise]
        pace.record(width, 10, WIDE.seconds(width) * (off or {}).get(width, 1.0) * factor)
    return pace


def mixed(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(list(OFTEN), list(OFTEN.values()), k=count)


@pytest.mark.parametrize("noise", ["little", "much", "stalls", "late"])
def test_noise_does_not_bend_a_curve(noise: str) -> None:
    worst = []
    for seed in range(20):
        pace = decode(noise, mixed(400, seed), seed)
        rises = [seconds(pace, width + 1) - seconds(pace, width) for width in (1, 2, 3)]
        right = [WIDE.seconds(width + 1) - WIDE.seconds(width) for width in (1, 2, 3)]
        worst.append(max(abs(rise / pace.factor - known) for rise, known in zip(rises, right, strict=True)))
    assert statistics.median(worst) < 0.01, "of T(1); a further row costs some 0.06"
    assert max(worst) < 0.05


@pytest.mark.parametrize("noise", ["little", "much", "stalls", "late"])
@pytest.mark.parametrize("usual", [3, 1])
def test_widths_that_are_never_decoded_are_not_carried_away(noise: str, usual: int) -> None:
    widths = [usual, *(4 - usual if place % 64 == 0 else usual for place in range(3000))]
    pace = decode(noise, widths, 0)
    assert 0.8 < seconds(pace, 8) / WIDE.seconds(8) < 1.25
    assert seconds(pace, 8) / seconds(pace, usual) == pytest.approx(WIDE.seconds(8) / WIDE.seconds(usual), rel=0.05)


def test_one_width_that_is_off_is_found_among_the_others() -> None:
    pace = decode("little", mixed(600, 0), 0, {3: 1.1})
    found = {width: seconds(pace, width) / (WIDE.seconds(width) * pace.factor) for width in OFTEN}
    assert found.pop(3) == pytest.approx(1.1, rel=0.03)
    assert list(found.values()) == pytest.approx([1.0] * len(found), rel=0.02)


@pytest.mark.parametrize("block", [1, 2, 40])
def test_two_widths_in_turn_give_way_without_overshooting(block: int) -> None:
    pace = LiveCurve(CURVES)
    for place in range(400):
        width = 4 if place // block % 2 else 1
        pace.record(width, 10, 0.26 if width == 4 else 0.1)
        if place > 300:
            assert seconds(pace, 4) / seconds(pace, 1) == pytest.approx(2.6, rel=0.03)


def test_a_width_that_is_alone_tells_nothing_of_the_shape() -> None:
    pace = LiveCurve(CURVES)
    for _ in range(100):
        pace.record(4, 10, 0.3)
    assert [seconds(pace, width) for width in (1, 2, 4)] == pytest.approx([0.15, 0.18, 0.3])


def test_three_forwards_of_a_width_do_not_outweigh_its_calibration() -> None:
    pace = LiveCurve(CURVES)
    for _ in range(9):
        pace.record(1, 10, 0.1)
    told = []
    for _ in range(8):
        pace.record(2, 10, 0.24)
        told.append(seconds(pace, 2) / seconds(pace, 1))
        pace.record(1, 10, 0.1)
    assert told[:2] == pytest.approx([1.2, 1.2], rel=0.01)
    assert told[-1] == pytest.approx(2.4, rel=0.05)


def test_a_width_that_is_avoided_is_believed_in_again() -> None:
    pace = LiveCurve(CURVES)
    for _ in range(60):
        pace.record(1, 10, 0.1)
        pace.record(1, 10, 0.1)
        pace.record(4, 10, 0.6)
    for forwards in range(8300):
        if forwards % 1000 == 0:
            assert seconds(pace, 4) / seconds(pace, 1) == pytest.approx(6.0, rel=0.1)
        pace.record(1, 10, 0.1)
    assert seconds(pace, 4) / seconds(pace, 1) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf, 0.0, -1.0, 51 * 0.1, 1e9])
def test_a_clock_that_jumped_says_nothing(spoilt: float) -> None:
    pace = LiveCurve(CURVES)
    for _ in range(9):
        assert not pace.record(1, 10, spoilt)
    assert pace.curve() == CURVE
    assert pace.plain_s is None
    assert pace.record(1, 10, 49 * 0.1)


def test_without_a_curve_the_plain_speed_seen_tells_what_is_implausible() -> None:
    pace = LiveCurve()
    assert pace.record(1, 10, 1e6), "nothing to compare with yet"
    for _ in range(9):
        pace.record(1, 10, 0.1)
    assert not pace.record(2, 10, 6.0)


def test_the_curve_is_that_of_the_latest_context() -> None:
    longer = Curve(widths=(1, 2, 4), forward_s=(0.2, 0.24, 0.4))
    pace = LiveCurve(ContextCurves(contexts=(100, 300), curves=(CURVE, longer)))
    assert pace.curve() == CURVE
    pace.record(1, 300, 0.2)
    assert pace.curve() == longer


def test_new_curves_forget_what_was_learned_of_the_old() -> None:
    pace = LiveCurve(CURVES)
    for _ in range(20):
        pace.record(1, 10, 0.3)
        pace.record(2, 10, 0.2)
    assert pace.curve() != CURVE
    pace.curves = CURVES
    assert pace.curve() == CURVE
    assert pace.factor == 1.0
    assert pace.plain_s == pytest.approx(0.3), "that was measured, whatever was calibrated"
