"""How times follow observed forwards: the machine's pace, and the correction of each width."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable
from dataclasses import replace

import pytest

from edgespec.interfaces.model import Company
from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.cost.curve import ContextCurves, Curve, ExpertTimes
from edgespec.planning.cost.live_times import LiveTimes, PlainTimes
from edgespec.planning.depth.control import DepthControl
from tests.support.drawn_requests import CALIBRATED_AT, NATIVE, believed
from tests.support.planning import a_round

# T(w) / T(1) of a kernel with cheap further rows, and how often decoding with a drafter uses each width.
WIDE = Curve(widths=tuple(range(1, 9)), forward_s=(1.0, 1.086, 1.126, 1.19, 1.25, 1.31, 1.4, 1.49))
OFTEN = {1: 4, 2: 25, 3: 30, 4: 20, 5: 10, 6: 5, 8: 1}

# Seconds of a forward, relative to the median of this noise.
NOISES = {
    "little": lambda chance: math.exp(chance.gauss(0, 0.03)),
    "much": lambda chance: math.exp(chance.uniform(-0.15, 0.15)),
    "stalls": lambda chance: (
        math.exp(chance.gauss(0, 0.03)) * (chance.uniform(1.3, 3) if chance.random() < 0.05 else 1)
    ),
    "late": lambda chance: math.exp(chance.expovariate(1 / 0.08) - 0.08 * math.log(2)),
}


def fresh() -> LiveTimes:
    return LiveTimes(ContextCurves(contexts=(100,), curves=(WIDE,)), 8)


def forwards(times: LiveTimes, widths: Iterable[int], noise: str = "", seed: int = 0, **off: float) -> LiveTimes:
    """Forwards of ``widths`` in turn with the calibrated median time, times ``off`` for a width (``w3=1.1``)."""
    chance = random.Random(f"noise {seed}")  # drawn separately from the widths
    for width in widths:
        factor = NOISES[noise](chance) if noise else 1.0
        times.record(width, 100, WIDE.seconds(width) * off.get(f"w{width}", 1.0) * factor)
    return times


def mixed(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(list(OFTEN), list(OFTEN.values()), k=count)


def off(times: LiveTimes, width: int) -> float:
    """A width's time relative to plain forwards, 1.0 as calibrated."""
    return times.now_s(width, 100) / times.now_s(1, 100) / (WIDE.seconds(width) / WIDE.seconds(1))


@pytest.mark.parametrize(("noise", "usual", "most"), [("little", 0.02, 0.05), ("stalls", 0.02, 0.05)])
def test_noise_does_not_change_a_curve(noise: str, usual: float, most: float) -> None:
    worst = []
    for seed in range(20):
        times = forwards(fresh(), mixed(400, seed), noise, seed)
        worst.append(max(abs(off(times, width) - 1.0) for width in (2, 3, 4)))
    assert statistics.median(worst) < usual
    assert max(worst) < most


@pytest.mark.parametrize("noise", ["much", "late"])
def test_more_noise_changes_a_curve_by_less_than_the_noise(noise: str) -> None:
    worst = [max(abs(off(forwards(fresh(), mixed(400, seed), noise, seed), width) - 1.0) for width in (2, 3, 4))
             for seed in range(20)]  # fmt: skip
    assert statistics.median(worst) < 0.05
    assert max(worst) < 0.15


@pytest.mark.parametrize("noise", NOISES)
def test_errors_from_noise_do_not_accumulate(noise: str) -> None:
    """A width is as far off after 8000 forwards as after 400."""
    times = forwards(fresh(), mixed(8000, 1), noise, 1)
    assert [off(times, width) for width in (2, 3, 4)] == pytest.approx([1.0] * 3, abs=0.1)


def test_a_width_that_is_never_decoded_stays_as_calibrated() -> None:
    times = forwards(fresh(), mixed(400, 0), "much")
    assert off(times, 7) == pytest.approx(1.0)


def test_one_slower_width_is_detected_among_the_others() -> None:
    times = forwards(fresh(), mixed(600, 0), "little", w3=1.2)
    assert off(times, 3) == pytest.approx(1.2, rel=0.03)
    assert [off(times, width) for width in (2, 4, 5, 8)] == pytest.approx([1.0] * 4, rel=0.04)


@pytest.mark.parametrize("slower", [1.3, 2.5, 10.0])
def test_a_width_that_becomes_slower_is_corrected_at_the_fourth_forward(slower: float) -> None:
    """Calibration counts as three forwards, however far off they are."""
    times = fresh()
    told = []
    for _ in range(6):
        forwards(times, [1, 4], w4=slower)
        told.append(off(times, 4))
    assert told[:2] == pytest.approx([1.0, 1.0])
    assert told[3:] == pytest.approx([slower] * 3)


def test_a_slower_width_is_detected_even_if_plain_forwards_are_rare() -> None:
    times = forwards(fresh(), [1, *[4] * 62] * 3, w4=2.0)
    assert off(times, 4) == pytest.approx(2.0, rel=0.01)
    assert times.moved == pytest.approx(1.0, rel=0.01), "the speed of plain decoding is unchanged"


def test_the_correction_of_a_width_is_undone_once_its_times_recover() -> None:
    times = forwards(fresh(), [1, 4] * 100, w4=3.0)
    assert off(times, 4) == pytest.approx(3.0)
    forwards(times, [1, 4] * 9)
    assert off(times, 4) == pytest.approx(3.0)
    forwards(times, [1, 4] * 6)
    assert off(times, 4) == pytest.approx(1.0)


@pytest.mark.parametrize("block", [1, 2, 40])
def test_two_alternating_widths_do_not_count_as_a_change_of_speed(block: int) -> None:
    times = fresh()
    for place in range(400):
        forwards(times, [4 if place // block % 2 else 1], w4=2.2)
        if place > 300:
            assert off(times, 4) == pytest.approx(2.2, rel=0.01)
            assert times.now_s(1, 100) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("block", [1, 2, 40])
def test_a_change_of_speed_does_not_count_as_a_slower_width(block: int) -> None:
    times = fresh()
    for place in range(400):
        slower = 1.0 if place < 100 else 2.0
        forwards(times, [4 if place // block % 2 else 1], w4=slower, w1=slower)
    assert times.factor == pytest.approx(2.0)
    assert off(times, 4) == pytest.approx(1.0)


def test_forwards_long_after_a_plain_one_do_not_correct_their_width() -> None:
    times = forwards(fresh(), [1, *[4] * 8])
    forwards(times, [4] * 100, w4=1.5)
    assert off(times, 4) == pytest.approx(1.0)
    assert times.factor == pytest.approx(1.5)
    assert times.moved == pytest.approx(1.5), "so plain decoding has to be timed again"


def test_three_slow_forwards_change_the_pace_and_two_do_not() -> None:
    times = forwards(fresh(), [1] * 5)
    forwards(times, [1] * 2, w1=4.0)
    assert times.factor == pytest.approx(1.0)
    forwards(times, [1], w1=4.0)
    assert times.factor == pytest.approx(4.0)


def test_plain_speed_is_known_without_calibration() -> None:
    plain = PlainTimes()

    def speed() -> float | None:
        return plain.tokens_per_s(lambda context: 1.0)

    for seconds in (1e6, 0.5, 0.5, 0.5):
        assert speed() is None
        plain.record(seconds, 100)
    assert speed() == pytest.approx(2.0)
    for seconds in (26.0, math.nan, -1.0, 0.0, math.inf):
        plain.record(seconds, 100)
    for _ in range(3):
        plain.record(0.25, 100)
    assert speed() == pytest.approx(2.0)
    plain.record(0.25, 100)
    plain.record(0.25, 100)
    assert speed() == pytest.approx(4.0)


def test_an_answer_is_compared_with_plain_steps_at_its_own_context() -> None:
    """Plain steps of a short conversation are known, and those of this one take longer."""

    def plain_round(context: int) -> RoundRecord:
        return replace(a_round(0, evaluated=0, verify_s=NATIVE.forward_s(1, context)), context_length=context)

    control = DepthControl(believed(NATIVE), NATIVE.depth_cap)
    short = control.answer(prompt_tokens=100)
    for _ in range(9):
        short.record(plain_round(100))
    long = control.answer(prompt_tokens=4000)
    assert short.plain_tokens_per_s == pytest.approx(1.0 / NATIVE.forward_s(1, 100), rel=0.001)
    assert long.plain_tokens_per_s == pytest.approx(1.0 / NATIVE.forward_s(1, 4000), rel=0.001)
    long.began(0.0, NATIVE.forward_s(1, 4000))
    for context in range(4001, 5000):
        long.record(plain_round(context))
    assert long.plain_tokens_per_s == pytest.approx(1.0 / NATIVE.forward_s(1, 4500), rel=0.001)


@pytest.mark.parametrize("slower", [100.0, 1e6])
def test_a_machine_far_slower_than_measured_teaches_its_pace_after_three_forwards(slower: float) -> None:
    times = fresh()
    seconds = slower * times.usual_s(1, 100)
    assert [times.record(1, 100, seconds) for _ in range(2)] == [None, None]
    assert times.factor == 1.0
    assert times.record(1, 100, seconds) == pytest.approx(slower)
    assert times.factor == pytest.approx(slower)
    assert times.record(1, 100, seconds) == pytest.approx(slower)


def test_two_stalls_between_ordinary_forwards_teach_nothing() -> None:
    times = fresh()
    usual_s = times.usual_s(1, 100)
    for seconds in (usual_s, 60 * usual_s, 60 * usual_s, usual_s, 60 * usual_s, usual_s):
        times.record(1, 100, seconds)
    assert (times.factor, times.latest, times.moved) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_that_no_clock_measures_teaches_nothing(seconds: float) -> None:
    times, plain = fresh(), PlainTimes()
    for _ in range(5):
        assert times.record(1, 100, seconds) is None
        plain.record(seconds, 100)
    assert (times.factor, times.since_plain, times.moved) == (1.0, 0, 1.0)
    assert plain.tokens_per_s(lambda context: 1.0) is None


def test_what_a_width_is_off_is_known_for_forwards_that_were_compared_with_a_plain_one() -> None:
    times = fresh()
    times.record(4, 100, times.usual_s(4, 100))
    assert times.off is None, "there was no plain forward"
    times.record(1, 100, 2 * times.usual_s(1, 100))
    assert times.off is None
    times.record(4, 100, 3 * times.usual_s(4, 100))
    assert times.off == pytest.approx(1.5)


def test_times_beyond_the_calibrated_contexts_are_extrapolated_linearly() -> None:
    curves = believed(NATIVE).curves
    assert curves is not None
    times = LiveTimes(curves, 8)
    for width in (1, 4, 8):
        for context in (*CALIBRATED_AT, 4000):
            assert times.now_s(width, context) == pytest.approx(NATIVE.forward_s(width, context))
    assert times.all_now(500) == pytest.approx([NATIVE.forward_s(width, 500) for width in range(1, 9)])


# ------------------------------------------------------------------------------------------------- experts

# How many experts the rows of one text read, 0.2 ms each; without them a forward takes 30 ms.
READ = ExpertTimes(widths=(1, 2, 4, 8), read=(100.0, 180.0, 320.0, 560.0), expert_s=0.0002)
MIXED = Curve(widths=(1, 2, 4, 8), forward_s=tuple(0.03 + READ.expert_s * read for read in READ.read))


def mixture() -> LiveTimes:
    return LiveTimes(ContextCurves(contexts=(100,), curves=(MIXED,), experts=READ), 8)


def read_by(width: int, sharing: float) -> int:
    """How many experts rows read that add ``sharing`` times as many to those of one row as calibrated."""
    return round(100 + sharing * (READ.read_by(width) - 100))


def decode(times: LiveTimes, sharing: float, rounds: int = 60) -> None:
    for number in range(rounds):
        for width in (1, 2 + number % 3):
            read = read_by(width, sharing)
            times.record(width, 100, 0.03 + READ.expert_s * read, experts=read)


def test_a_forward_is_compared_with_that_of_as_many_experts() -> None:
    times = mixture()
    times.record(1, 100, MIXED.seconds(1), experts=100)
    shown = times.record(4, 100, 0.03 + READ.expert_s * 200, experts=200)
    assert (shown, times.factor, times.off) == (pytest.approx(1.0), pytest.approx(1.0), pytest.approx(1.0))
    uncounted = mixture().record(4, 100, 0.03 + READ.expert_s * 200)
    assert uncounted == pytest.approx(0.07 / MIXED.seconds(4))


@pytest.mark.parametrize("sharing", [0.0, 0.5, 1.0, 1.3])
def test_the_times_of_a_mixture_follow_how_many_experts_the_rows_of_a_text_share(sharing: float) -> None:
    times = mixture()
    decode(times, sharing)
    for width in (1, 2, 4, 8):
        expected = 0.03 + READ.expert_s * read_by(width, sharing)
        assert times.now_s(width, 100) == pytest.approx(expected, rel=0.05), width
        assert times.all_now(100)[width - 1] == times.now_s(width, 100)
    assert times.factor == pytest.approx(1.0)
    decode(times, 1.0, 150)
    assert times.all_now(100) == pytest.approx([MIXED.seconds(width) for width in range(1, 9)], rel=0.02)


def test_a_slow_machine_is_distinguished_from_a_text_that_shares_few_experts() -> None:
    times = mixture()
    for _ in range(30):
        for width in (1, 4):
            read = read_by(width, 0.6)
            times.record(width, 100, 2.0 * (0.03 + READ.expert_s * read), experts=read)
    assert times.factor == pytest.approx(2.0)
    assert times.usual_s(4, 100) == pytest.approx(0.03 + READ.expert_s * read_by(4, 0.6), rel=0.05)


def test_experts_of_a_prompt_in_the_same_forward_say_nothing_about_a_text() -> None:
    times = mixture()
    for _ in range(30):
        times.record(4, 100, 0.2, Company(reading=True), experts=800)
    assert times.usual_s(4, 100) == MIXED.seconds(4)


def test_counted_experts_change_nothing_where_their_times_are_unknown() -> None:
    counted, plain = fresh(), fresh()
    for width in mixed(100, 3):
        assert counted.record(width, 100, 1.1, experts=7 * width) == plain.record(width, 100, 1.1)
    assert counted.all_now(100) == plain.all_now(100)


def test_more_experts_than_were_ever_counted_leave_times_positive() -> None:
    times = LiveTimes(
        ContextCurves(contexts=(0,), curves=(MIXED,), experts=replace(READ, expert_s=100.0 * READ.expert_s)), 8
    )
    decode(times, 0.0)
    assert min(times.all_now(0)) > 0.0


@pytest.mark.parametrize(
    ("read", "expert_s"),
    [((), 0.1), ((1.0,), 0.1), ((2.0, 1.0), 0.1), ((1.0, math.nan), 0.1), ((1.0, math.inf), 0.1), ((1.0, 2.0), -0.1)],
)
def test_impossible_experts_are_refused(read: tuple[float, ...], expert_s: float) -> None:
    with pytest.raises(ValueError, match="experts"):
        ExpertTimes(widths=(1, 2), read=read, expert_s=expert_s)
