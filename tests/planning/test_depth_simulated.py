"""The default policy on a simulated clock: its depth, its largest loss, and its distance from the best depth."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from edgespec.planning.cost.acceptance import BINS, POSITIONS, AcceptancePrior
from edgespec.planning.cost.curve import FREE, Curve, DraftCost
from edgespec.planning.depth.base import FixedDepth
from edgespec.planning.depth.control import DepthControl
from edgespec.planning.depth.price import RISK
from tests.support.simulated_decoding import (
    FLAT,
    MODEL,
    NATIVE,
    READING,
    STEEP,
    Kind,
    Machine,
    Run,
    Source,
    Text,
    always,
    costs_of,
    curve_of,
    decode,
    in_turn,
)


def policy_for(sources: Sequence[Source], curve: Curve = FLAT, depth_cap: int = 7) -> DepthControl:
    return DepthControl(costs_of(sources, curve), depth_cap)


def run(
    text: Text, machine: Machine | None = None, cost: DraftCost = MODEL, *, tokens: int = 512, seed: int = 0
) -> Run:
    """One answer from a cold start, with one drafter, on a correctly calibrated machine."""
    machine = machine or Machine()
    sources = [Source(text=text, cost=cost)]
    return decode(policy_for(sources, machine.curve), sources, machine, tokens=tokens, seed=seed)


def mean(text: Text, curve: Curve, cost: DraftCost, seeds: int = 4) -> float:
    return statistics.fmean(run(text, Machine(curve=curve), cost, seed=seed).speedup for seed in range(seeds))


def best_fixed(text: Text, curve: Curve, cost: DraftCost, seeds: int = 2) -> tuple[float, int]:
    """The speed-up of the best constant depth, and that depth."""
    sources = [Source(text=text, cost=cost)]

    def speedup(depth: int) -> float:
        machine = Machine(curve=curve)
        runs = [decode(FixedDepth(depth), sources, machine, tokens=512, seed=seed) for seed in range(seeds)]
        return statistics.fmean(one.speedup for one in runs)

    return max((speedup(depth), depth) for depth in range(8))


# ------------------------------------------------------------------------------------------ depth follows the text


@pytest.mark.parametrize("token_s", [0.004, 0.006])
def test_on_a_flat_curve_code_is_drafted_deep(token_s: float) -> None:
    code = run(always(0.9), cost=DraftCost(token_s=token_s))
    assert 3 <= code.mean_depth <= 6
    assert code.speedup > 1.9


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.3])
@pytest.mark.parametrize("token_s", [0.004, 0.006])
def test_on_a_flat_curve_short_answers_are_hardly_drafted(rate: float, token_s: float) -> None:
    assert run(always(rate), cost=DraftCost(token_s=token_s)).mean_depth < 1.2


def test_on_a_steep_curve_drafts_stay_shallow() -> None:
    for rate in (0.1, 0.3, 0.6):
        assert run(always(rate), Machine(curve=STEEP)).mean_depth < 0.1
    assert run(always(0.9), Machine(curve=STEEP)).mean_depth < 3


def test_depth_follows_a_text_that_changes() -> None:
    text = in_turn((200, Kind(rate=0.95)), (300, Kind(rate=0.05)), (10**6, Kind(rate=0.95)))
    answer = run(text, tokens=1500)
    depths: dict[str, list[int]] = {"code": [], "answer": [], "code again": []}
    emitted = 0
    for record in answer.records:
        if 20 < emitted < 190:
            depths["code"].append(record.proposed)
        elif 230 < emitted < 490:
            depths["answer"].append(record.proposed)
        elif emitted > 1000:
            depths["code again"].append(record.proposed)
        emitted += record.emitted
    assert statistics.fmean(depths["code"]) > 3
    assert statistics.fmean(depths["answer"]) < 0.5
    assert statistics.fmean(depths["code again"]) > 3


# -------------------------------------------------------------------------------------------------- never slower


def check_never_slower(sources: Sequence[Source], machine: Machine, seed: int) -> None:
    for tokens, least in ((128, 1 / (1 + RISK)), (512, 0.95)):
        answer = decode(policy_for(sources, machine.curve), sources, machine, tokens=tokens, seed=seed)
        assert answer.speedup >= least, f"{tokens} tokens"


@pytest.mark.slow
@pytest.mark.parametrize("confidence", ["informative", "useless", "none"])
@pytest.mark.parametrize("cost", [MODEL, FREE, DraftCost(token_s=0.02), DraftCost(token_s=0.004, round_s=0.003)])
@pytest.mark.parametrize("curve", [FLAT, STEEP], ids=["flat", "steep"])
def test_a_drafter_that_is_almost_never_right_costs_little_time(
    curve: Curve, cost: DraftCost, confidence: str
) -> None:
    for rate in (0.0, 0.05):
        text = always(rate, confidence)  # type: ignore[arg-type]
        check_never_slower([Source(text=text, cost=cost)], Machine(curve=curve), seed=1)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """From flat to steeper than rows that share no work, with a knee anywhere."""
    steepness = draw(st.sampled_from([0.0, 0.02, 0.1, 0.3, 0.6, 1.0]))
    rises = [draw(st.floats(0, 2)) * steepness * rows for rows in (1, 1, 1, 1, 3, 8)]
    return curve_of(28.0, *(28.0 * (1 + sum(rises[: place + 1])) for place in range(6)))


@st.composite
def texts(draw: st.DrawFn) -> Text:
    return always(
        draw(st.sampled_from([0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])),
        draw(st.sampled_from(["informative", "useless", "none"])),
    )


@pytest.mark.slow
@given(curves(), texts(), st.floats(0.02, 0.6), st.integers(0, 3))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_costly_drafter_never_slows_an_answer_beyond_the_bound(
    curve: Curve, text: Text, relative_cost: float, seed: int
) -> None:
    cost = DraftCost(token_s=relative_cost * curve.plain_s)
    check_never_slower([Source(text=text, cost=cost)], Machine(curve=curve), seed)


@pytest.mark.slow
@given(curves(), texts(), texts(), st.sampled_from([0.0, 0.03]), st.integers(0, 3))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_free_and_costly_drafters_never_slow_an_answer_beyond_the_bound(
    curve: Curve, copied: Text, drafted: Text, noise: float, seed: int
) -> None:
    sources = [Source(text=copied, cost=FREE, kind="lookup"), Source(text=drafted)]
    check_never_slower(sources, Machine(curve=curve, noise=noise), seed)


# ----------------------------------------------------------------------------------------------------- near the best


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("cost", [MODEL, FREE], ids=["model", "free"])
def test_on_a_flat_curve_the_policy_nearly_equals_the_best_depth(cost: DraftCost, rate: float) -> None:
    best, _ = best_fixed(always(rate), FLAT, cost)
    assert mean(always(rate), FLAT, cost) >= 0.95 * best


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_on_a_steep_curve_a_free_drafter_nearly_equals_the_best_depth(rate: float) -> None:
    best, _ = best_fixed(always(rate), STEEP, FREE)
    assert mean(always(rate), STEEP, FREE) >= 0.95 * best


@pytest.mark.parametrize("rate", [0.8, 0.9, 1.0])
def test_on_a_steep_curve_an_experienced_policy_nearly_equals_the_best_depth(rate: float) -> None:
    sources = [Source(text=always(rate))]
    machine = Machine(curve=STEEP)
    learned = policy_for(sources, FLAT)
    decode(learned, sources, Machine(curve=FLAT), tokens=512, seed=9)
    policy = DepthControl(costs_of(sources, STEEP), 7, learned.priors(), learned.history())
    speed = statistics.fmean(decode(policy, sources, machine, tokens=512, seed=seed).speedup for seed in range(3))
    best, _ = best_fixed(always(rate), STEEP, MODEL)
    assert speed >= 0.95 * best


@pytest.mark.parametrize(("curve", "soon"), [(FLAT, 64), (STEEP, 64)], ids=["flat", "steep"])
def test_a_free_drafter_that_is_always_right_is_soon_drafted_deep(curve: Curve, soon: int) -> None:
    """Without a confidence: within one of the best depth after a few sentences."""
    text = always(1.0, "none")
    _, depth = best_fixed(text, curve, FREE, seeds=1)
    answer = run(text, Machine(curve=curve), FREE, tokens=300)
    emitted, later = 0, []
    for record in answer.records[:-2]:  # the budget's end cuts the last drafts
        if emitted > soon and record.proposed:
            later.append(record.proposed)
        emitted += record.emitted
    assert statistics.median(later) >= depth - 1
    assert max(later) <= depth + 1


# ------------------------------------------------------------------------------------------- stalls, drift, clocks


def decided(run: Run) -> bool:
    """Whether most of the last rounds drafted."""
    return statistics.fmean(record.source is not None for record in run.records[-20:]) > 0.5


@pytest.mark.parametrize("stalled", range(20, 60, 7))
@pytest.mark.parametrize(("rate", "drafts"), [(0.9, True), (0.0, False)])
def test_one_stall_does_not_change_whether_rounds_draft(stalled: int, rate: float, drafts: bool) -> None:
    sources = [Source(text=always(rate))]
    policy = policy_for(sources)
    calm = decode(policy_for(sources), sources, Machine(), tokens=160)
    answer = decode(policy, sources, Machine(stalls={stalled: 10.0}), tokens=160)
    assert decided(answer) is drafts
    assert abs(answer.mean_depth - calm.mean_depth) < 0.5


def test_a_drafter_that_becomes_slow_is_turned_off() -> None:
    sources = [Source(text=always(0.8))]
    policy = policy_for(sources)
    machine = Machine(drafter_slower=lambda place: 1.0 if place < 200 else 10.0)
    answer = decode(policy, sources, machine, tokens=600)
    assert answer.drafted_at()[0] < 16
    late = [place for place in answer.drafted_at() if place > 260]
    assert len(late) < 30
    assert not decided(answer)


def test_a_curve_that_becomes_steep_turns_drafting_off() -> None:
    sources = [Source(text=always(0.6))]
    policy = policy_for(sources)
    machine = Machine(slower=lambda width, place: 1.0 if place < 100 or width == 1 else 2.5)
    answer = decode(policy, sources, machine, tokens=1500)
    assert not decided(answer)
    assert sum(place > 900 for place in answer.drafted_at()) < 40


def test_a_machine_that_slows_down_evenly_keeps_the_depth() -> None:
    sources = [Source(text=always(0.9))]
    policy = policy_for(sources)
    machine = Machine(slower=lambda width, place: 1.0 if place < 100 else 2.0)
    assert decided(decode(policy, sources, machine, tokens=600))


@pytest.mark.parametrize("jump_s", [-5.0, -0.03, 1e7, math.nan])
@pytest.mark.parametrize(("rate", "drafts"), [(0.9, True), (0.0, False)])
def test_a_clock_jump_does_not_change_whether_rounds_draft(jump_s: float, rate: float, drafts: bool) -> None:
    sources = [Source(text=always(rate))]
    policy = policy_for(sources)
    machine = Machine(clock_jumps=dict.fromkeys(range(10, 60, 10), jump_s))
    answer = decode(policy, sources, machine, tokens=160)
    assert decided(answer) is drafts
    assert answer.speedup > (1.8 if drafts else 0.95)
    plain = policy.answer(prompt_tokens=0).plain_tokens_per_s
    assert plain is None or plain == pytest.approx(1 / 0.028, rel=0.01)


def test_drafting_survives_the_noise_of_a_shared_machine() -> None:
    good = [run(always(0.9), Machine(noise=0.05), seed=seed).speedup for seed in range(4)]
    bad = [run(always(0.0, "useless"), Machine(noise=0.05), seed=seed).speedup for seed in range(4)]
    assert min(good) > 1.9
    assert min(bad) > 0.96


# --------------------------------------------------------------------------------------------------- trying again


def between_looks(places: Sequence[int]) -> list[int]:
    """Tokens between two trials, from the positions at which tokens were drafted."""
    looks = [place for last, place in zip([-100, *places], places, strict=False) if place - last > 30]
    return [after - before for before, after in itertools.pairwise(looks)]


def test_a_hopeless_drafter_is_tried_at_growing_intervals() -> None:
    answer = run(always(0.0), tokens=6000)
    places = list(itertools.accumulate(record.emitted for record in answer.records))
    places = [place for place, record in zip(places, answer.records, strict=True) if record.source == "model"]
    waits = between_looks(places)
    assert len(waits) >= 4
    assert all(after > 1.5 * before for before, after in itertools.pairwise(waits[1:]))
    assert len(places) < 100


def test_a_drafter_parked_by_bad_luck_is_resumed() -> None:
    text = in_turn((40, Kind(rate=0.0)), (10**6, Kind(rate=0.9)))
    answer = run(text, tokens=600)
    assert answer.drafted_at()[-1] > 590
    assert answer.speedup > 1.4


def taught(rate: float) -> DepthControl:
    """A policy with a learned acceptance of ``rate``, whose drafter has to catch up first."""
    prior = AcceptancePrior(
        by_position=(rate,) * POSITIONS, by_confidence=tuple((i + 0.5) / BINS for i in range(BINS))
    )
    return DepthControl(costs_of([Source(text=always(rate), cost=READING)], NATIVE), 7, {"model": prior})


def answers(policy: DepthControl, rates: Sequence[float], *, tokens: int = 100, seed: int = 0) -> list[Run]:
    """Consecutive answers, each to a prompt of 200 tokens that is new to the drafter."""
    machine = Machine(curve=NATIVE, noise=0.03)
    return [
        decode(
            policy,
            [Source(text=always(rate), cost=READING)],
            machine,
            tokens=tokens,
            prompt_tokens=200,
            seed=100 * seed + place,
        )
        for place, rate in enumerate(rates)
    ]


def test_one_answer_of_another_kind_does_not_park_the_drafter_in_later_ones() -> None:
    follow = [answers(taught(0.7), (0.9, 0.9, 0.2, 0.9, 0.9, 0.9), seed=seed)[3:] for seed in range(6)]
    alone = [answers(taught(0.7), (0.9,) * 6, seed=seed)[3:] for seed in range(6)]
    speedups = {name: [run.speedup for runs in own for run in runs] for name, own in (("f", follow), ("a", alone))}
    assert statistics.fmean(speedups["f"]) > 0.9 * statistics.fmean(speedups["a"]), "one of three answers was bad"
    assert min(speedups["f"]) > 1.0


def test_trials_take_no_more_time_than_drafting_saved() -> None:
    for seed in range(6):
        good, *bad = answers(taught(0.7), (0.9, *(0.2,) * 20), seed=seed)
        saved_s = good.plain_s - good.seconds
        lost_s = sum(run.seconds - run.plain_s for run in bad[1:])
        assert lost_s < 0.5 * saved_s + 0.02 * sum(run.plain_s for run in bad)
        assert sum(run.plain_s for run in bad) / sum(run.seconds for run in bad) > 0.97


@pytest.mark.parametrize(("rate", "least"), [(0.7, 1.1), (0.75, 1.15), (0.8, 1.2)])
def test_early_bad_luck_does_not_park_a_useful_drafter(rate: float, least: float) -> None:
    speedups = [answers(taught(rate), (rate,), tokens=600, seed=seed)[0].speedup for seed in range(10)]
    assert statistics.fmean(speedups) > least
    assert min(speedups) > 1.0


@pytest.mark.parametrize("seed", range(4))
def test_slow_wide_forwards_are_distinguished_from_a_slow_machine(seed: int) -> None:
    sources = [Source(text=always(0.6))]
    machine = Machine(slower=lambda width, place: 1.0 if place < 100 or width == 1 else 2.5)
    policy = policy_for(sources)
    answer = decode(policy, sources, machine, tokens=3000, seed=seed)
    assert sum(150 < place < 1000 for place in answer.drafted_at()) < 30
    assert answer.speedup > 0.985


@pytest.mark.parametrize("slow_tokens", [1, 8])
def test_first_drafts_that_wait_for_a_file_do_not_park_a_useful_drafter(slow_tokens: int) -> None:
    sources = [Source(text=always(0.8), cost=READING)]
    machine = Machine(curve=NATIVE, drafter_slower=lambda place: 30.0 if place < slow_tokens else 1.0)
    answer = decode(taught(0.8), sources, machine, tokens=300)
    assert statistics.fmean(answer.depths[len(answer.depths) // 2 :]) > 1


def test_a_drafter_that_was_slow_for_a_while_is_resumed() -> None:
    sources = [Source(text=always(0.8), cost=READING)]
    machine = Machine(curve=NATIVE, drafter_slower=lambda place: 8.0 if 200 < place < 250 else 1.0)
    answer = decode(taught(0.8), sources, machine, tokens=600)
    assert not [place for place in answer.drafted_at() if 230 < place < 250]
    assert statistics.fmean(answer.depths[-50:]) > 1


@pytest.mark.parametrize("slower", [60.0, 200.0])
def test_a_drafter_far_slower_than_calibrated_drafts_in_six_rounds_at_most(slower: float) -> None:
    sources = [Source(text=always(0.8), cost=READING)]
    answer = decode(taught(0.8), sources, Machine(curve=NATIVE, drafter_slower=lambda place: slower), tokens=1000)
    assert len(answer.drafted_at()) <= 6


def test_a_drafter_too_slow_to_believe_is_believed_after_three_rounds() -> None:
    sources = [Source(text=always(0.8), cost=READING)]
    answer = decode(taught(0.8), sources, Machine(curve=NATIVE, drafter_slower=lambda place: 1e4), tokens=1000)
    assert 3 <= len(answer.drafted_at()) <= 6


@pytest.mark.parametrize("slower", [2.0, 3.0, 4.0, 8.0])
def test_a_drafter_slower_than_calibrated_costs_little_time(slower: float) -> None:
    sources = [Source(text=always(0.8), cost=READING)]
    machine = Machine(curve=NATIVE, drafter_slower=lambda place: slower)
    policy = taught(0.8)
    for seed in range(3):
        assert decode(policy, sources, machine, tokens=1000, seed=seed).speedup > 0.97


def test_a_drafter_that_fails_each_trial_is_tried_at_growing_intervals() -> None:
    """Its cost is reset before each trial, so that every trial finds it quick at first."""
    sources = [Source(text=always(0.8))]
    machine = Machine(curve=NATIVE, drafter_slower=lambda place: 8.0)
    answer = decode(policy_for(sources, NATIVE), sources, machine, tokens=8000)
    waits = between_looks(answer.drafted_at())
    assert len(waits) >= 4
    assert all(after > 1.5 * before for before, after in itertools.pairwise(waits[1:]))
