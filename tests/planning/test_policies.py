"""Every depth policy by its name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.interfaces.policy import AnswerPolicy, DepthPolicy
from edgespec.planning.cost.acceptance import AcceptancePrior
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.depth.base import POLICY_NAMES, ConfidenceGate, EntropyGate, FixedDepth, PolicyName
from edgespec.planning.depth.control import DepthControl, make_policy
from edgespec.planning.depth.experience import NO_HISTORY
from edgespec.planning.depth.pipeline_budget import MeasuredBudget
from tests.planning.test_depth import plain_round
from tests.support.simulated_decoding import FLAT, Source, always, costs_of, decode

KINDS = {
    "fixed": FixedDepth,
    "entropy": FixedDepth,
    "confidence": FixedDepth,
    "cost": DepthControl,
}
GATES = {"fixed": type(None), "entropy": EntropyGate, "confidence": ConfidenceGate}
SOURCES = [Source(text=always(0.9))]


def test_every_policy_name_makes_a_policy() -> None:
    assert set(POLICY_NAMES) == set(KINDS)
    for name in POLICY_NAMES:
        policy = make_policy(name, 4)
        assert type(policy) is KINDS[name]
        assert type(policy.answer(prompt_tokens=1).allow("model").gate) is GATES.get(name, type(None))


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_no_policy_exceeds_its_depth_cap(name: PolicyName) -> None:
    for depth_cap in (1, 4):
        policy = make_policy(name, depth_cap, costs_of(SOURCES))
        answer = decode(policy, SOURCES, tokens=200)
        assert max(answer.depths) == depth_cap


def begun(policy: DepthPolicy) -> AnswerPolicy:
    own = policy.answer(prompt_tokens=1000)
    own.began(100.0, FLAT.plain_s)
    for _ in range(100):
        own.record(plain_round(FLAT.plain_s))
    return own


def test_only_the_cost_policy_is_plain_without_measured_times() -> None:
    depths = {name: begun(make_policy(name, 4)).allow("model").depth for name in POLICY_NAMES}
    assert depths == {"fixed": 4, "entropy": 4, "confidence": 4, "cost": 0}


def test_costs_priors_and_history_reach_the_cost_policy() -> None:
    assert begun(make_policy("cost", 4, costs_of(SOURCES, FLAT))).allow("model").depth == 1, (
        "before a draft was timed"
    )
    assert begun(make_policy("cost", 4, costs_of(SOURCES, FLAT.scaled(0.1)))).allow("model").depth == 0
    prior, history = AcceptancePrior(by_position=(0.95,) * 8), replace(NO_HISTORY, lengths=(2,) * 9)
    policy = make_policy("cost", 4, costs_of(SOURCES), {"model": prior}, history)
    assert isinstance(policy, DepthControl)
    assert policy.priors() == {"model": prior}
    assert policy.history() == history


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_pipelined_policies_allow_one_more_token_in_a_chain(name: PolicyName) -> None:
    assert begun(make_policy(name, 4, costs_of(SOURCES), pipelined=True)).allow("model").depth == 5
    assert begun(make_policy(name, 0, costs_of(SOURCES), pipelined=True)).allow("model").depth == 0


def test_a_pipelined_budget_uses_the_contention() -> None:
    apart, crowded = costs_of(SOURCES), replace(costs_of(SOURCES), contention=Contention(target_factor=1.5))
    assert MeasuredBudget(4, Costs()).window(9) == 4
    assert not MeasuredBudget(4, apart).overlaps_prefill, "the contention is unknown"
    assert MeasuredBudget(4, replace(apart, contention=Contention())).overlaps_prefill
    assert not MeasuredBudget(4, crowded).overlaps_prefill
    assert MeasuredBudget(4, Costs()).patience_s() < 1.0
    assert MeasuredBudget(4, Costs(), waits=True).patience_s() > 3600.0, "waits while the drafter reads the prompt"
