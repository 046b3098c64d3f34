"""The default policy of a pipeline: it drafts while that pays with both sides at work."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from edgespec.decoding.pipelined.loop import PipelinedLoop
from edgespec.decoding.round_base import LoopLimits
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.drafters.combination import CombinationState
from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.cost.acceptance import AcceptancePrior
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, ContextCurves, Curve, DraftCost
from edgespec.planning.depth.cost_model import PLAIN_EVERY_ROUNDS
from edgespec.planning.depth.pipeline_budget import MeasuredBudget
from edgespec.planning.depth.pipelined import PipelinedDepth
from tests.decoding.test_pipeline import at_once
from tests.support.simulated_decoding import (
    FLAT,
    WRONG,
    Machine,
    SimulatedDrafter,
    Source,
    Target,
    Time,
    always,
    costs_of,
)

CURVE = Curve(widths=(1, 8), forward_s=(0.1, 0.1))
MODEL = DraftCost(token_s=0.03, lag_token_s=0.002)


def costs(contention: Contention | None = None, cost: DraftCost = MODEL) -> Costs:
    return Costs(
        curves=ContextCurves(contexts=(128,), curves=(CURVE,)),
        drafts={"model": cost, "lookup": FREE},
        contention=contention,
    )


def policy_for(contention: Contention | None = None, rate: float = 0.8, cost: DraftCost = MODEL) -> PipelinedDepth:
    policy = PipelinedDepth(4, ["model", "lookup"], costs(contention, cost))
    for place in range(200):
        policy.learn("model", (), [int((place + 1) * rate) > int(place * rate)])
    return policy


def round_of(width: int, emitted: int, *, slower: float = 1.0, overlapped: bool = True) -> RoundRecord:
    seconds = slower * CURVE.seconds(width)
    return RoundRecord(
        width=width,
        context_length=100,
        proposed=width if overlapped else 0,
        evaluated=emitted,
        accepted=emitted - 1,
        invalid=0,
        emitted=emitted,
        source="model" if overlapped else None,
        draft_s=3 * MODEL.token_s * slower if overlapped else 0.0,
        sync_s=0.0,
        verify_s=seconds,
        round_s=seconds,
        draft_forwards=3 if overlapped else 0,
        overlapped=overlapped,
    )


def test_it_drafts_one_token_more_than_the_cap_and_lets_the_loop_end_the_chain() -> None:
    policy = policy_for()
    allowance = policy.allow("model")
    assert (allowance.depth, allowance.gate) == (5, None)
    assert policy.why_off("model") is None


def test_a_free_source_is_gated_as_in_turns() -> None:
    allowance = policy_for().allow("lookup")
    assert allowance.depth == 4
    assert allowance.gate is not None


def test_contention_parks_a_drafter_that_would_pay_without() -> None:
    policy = policy_for(Contention(target_factor=3.0, drafter_factor=3.0))
    assert policy.allow("model").depth == 0
    reason = policy.why_off("model")
    assert reason is not None
    assert "x plain" in reason
    policy.calibrate(costs(), 4)
    assert policy.allow("model").depth == 5


def test_rounds_that_take_longer_than_expected_park_it_and_a_new_measurement_is_believed() -> None:
    policy = policy_for()
    assert policy.allow("model").depth == 5
    for _ in range(9):
        policy.record(round_of(4, 3, slower=4.0))
    assert policy.allow("model").depth == 0
    policy.calibrate(costs(), 4)
    assert policy.allow("model").depth == 5


def test_rounds_as_slow_as_contention_says_change_nothing() -> None:
    both = Contention(target_factor=1.4, drafter_factor=1.4)
    policy = policy_for(both, rate=0.9)
    assert policy.allow("model").depth == 5
    for _ in range(30):
        policy.record(round_of(4, 3, slower=1.4))
    assert policy.allow("model").depth == 5


def test_overlapped_rounds_are_no_plain_rounds_however_narrow() -> None:
    policy = policy_for()
    for _ in range(PLAIN_EVERY_ROUNDS):
        assert policy.allow("model").depth == 5
        policy.record(round_of(1, 1))
    assert policy.plain_tokens_per_s is None
    assert policy.allow("model").depth == 0, "now plain decoding is timed"
    policy.record(round_of(1, 1, overlapped=False))
    assert policy.allow("model").depth == 5


def test_it_drafts_again_after_plain_decoding_was_timed() -> None:
    """Where nobody may draft a flight is made for nothing, and beside it the target is alone."""
    machine, time, source = Machine(), Time(), Source(text=always(1.0))
    target: Any = Target(machine, time, random.Random(0), 1)
    policy = PipelinedDepth(5, ["model"], costs_of([source]))
    drafter = SimulatedDrafter("model", source.text, source.cost, machine, time, 0, 1)
    loop = PipelinedLoop(
        target,
        CombinationState([("model", drafter)], policy),
        policy,
        Chooser(Sampling()),
        [0],
        LoopLimits(max_tokens=2000, depth_cap=5, vocabulary_size=2 * WRONG),
        clock=time.read,
        submit=at_once,
        budget=MeasuredBudget(5, FLAT),
    )
    records = [step.record for step in loop.steps() if step.record is not None]
    assert len(records) < 400, "six tokens a round"
    alone = [record for record in records if not record.overlapped]
    assert 1 <= len(alone) <= 3 * len(records) / PLAIN_EVERY_ROUNDS, "what was put forward is verified first"
    assert min(record.width for record in alone) == 1


def test_plain_speed_is_that_of_rounds_without_a_drafter() -> None:
    policy = policy_for()
    for _ in range(20):
        policy.record(round_of(1, 1, overlapped=False))
        policy.record(round_of(1, 1, slower=2.0))
    assert policy.plain_tokens_per_s == pytest.approx(10)


def test_reading_a_long_text_costs_only_what_it_slows_the_target() -> None:
    assert policy_for(rate=0.9).allow("model", 100_000).depth == 5
    crowded = Contention(target_factor=1.3, drafter_factor=1.3)
    assert policy_for(crowded, rate=0.9).allow("model", 10).depth == 5
    assert policy_for(crowded, rate=0.9).allow("model", 100_000).depth == 0


def test_what_it_learned_outlives_a_calibration_and_priors_reach_it() -> None:
    policy = policy_for(rate=0.0)
    assert policy.allow("model").depth == 0
    policy.calibrate(costs(), 4)
    assert policy.allow("model").depth == 0
    sure = {"model": AcceptancePrior(by_position=(0.95,) * 8)}
    assert PipelinedDepth(4, ["model"], costs(), sure).priors()["model"].by_position[0] == pytest.approx(0.95)
    assert PipelinedDepth(4, ["model"]).allow("model").depth == 0, "nothing is calibrated"


def test_a_drafters_own_pace_is_that_of_drafting_alone() -> None:
    both = Contention(target_factor=1.0, drafter_factor=2.0)
    policy = policy_for(both, rate=0.9)
    for _ in range(12):
        record = round_of(3, 3)
        policy.record(replace(record, draft_s=2 * record.draft_s))
    assert policy.allow("model").depth == 5
