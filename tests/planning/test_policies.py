"""Every policy by its name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.planning.cost.acceptance import AcceptancePrior
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.depth.bandit import BanditDepth
from edgespec.planning.depth.base import POLICY_NAMES, ConfidenceDepth, EntropyDepth, FixedDepth, PolicyName
from edgespec.planning.depth.cost_model import CostDepth
from edgespec.planning.depth.factory import make_budget, make_policy
from tests.support.simulated_decoding import FLAT, STEEP, Machine, Source, always, costs_of, decode

KINDS = {
    "fixed": FixedDepth,
    "entropy": EntropyDepth,
    "confidence": ConfidenceDepth,
    "cost": CostDepth,
    "bandit": BanditDepth,
}
SOURCES = [Source(text=always(0.9))]


def test_every_name_has_a_policy() -> None:
    assert set(POLICY_NAMES) == set(KINDS)
    for name in POLICY_NAMES:
        assert type(make_policy(name, 4, ["model"])) is KINDS[name]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_no_policy_exceeds_its_cap(name: PolicyName) -> None:
    for depth_cap in (1, 4):
        policy = make_policy(name, depth_cap, ["model"], costs_of(SOURCES))
        answer = decode(policy, SOURCES, tokens=200)
        assert max(answer.depths) == depth_cap


def test_only_those_that_know_prices_are_plain_without_any() -> None:
    depths = {name: make_policy(name, 4, ["model"]).allow("model").depth for name in POLICY_NAMES}
    assert depths == {"fixed": 4, "entropy": 4, "confidence": 4, "cost": 0, "bandit": 0}


def test_prices_and_experience_reach_the_policy() -> None:
    priors = {"model": AcceptancePrior(by_position=(0.95,) * 8)}
    assert make_policy("cost", 4, ["model"], costs_of(SOURCES, STEEP)).allow("model").depth == 0
    assert make_policy("cost", 4, ["model"], costs_of(SOURCES, STEEP), priors).allow("model").depth == 4
    assert make_policy("cost", 4, [], costs_of(SOURCES, STEEP), priors).allow("model").depth == 0


def test_the_bandit_times_plain_decoding_first_and_knows_the_others() -> None:
    policy = make_policy("bandit", 4, ["model"], costs_of(SOURCES))
    assert isinstance(policy, BanditDepth)
    seen = []
    for place in range(5 * 4):
        if place % 4 == 0:
            seen.append(policy.current)
        decode(policy, SOURCES, Machine(), tokens=1)
    assert seen == ["plain", "cost", "confidence", "entropy", "fixed"]
    assert policy.plain_tokens_per_s == pytest.approx(1 / FLAT.plain_s)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_beside_the_target_a_chain_has_one_token_more(name: PolicyName) -> None:
    policy = make_policy(name, 4, ["model"], costs_of(SOURCES), pipelined=True)
    assert policy.allow("model").depth == 5
    assert make_policy(name, 0, ["model"], costs_of(SOURCES), pipelined=True).allow("model").depth == 0


def test_a_budget_counts_with_the_drafter_at_work() -> None:
    apart, crowded = costs_of(SOURCES), replace(costs_of(SOURCES), contention=Contention(target_factor=1.5))
    assert make_budget(4, Costs()).window((None,) * 9) == 4
    assert not make_budget(4, apart).drafts_during_prefill(), "what it would cost is not known"
    assert make_budget(4, replace(apart, contention=Contention())).drafts_during_prefill()
    assert not make_budget(4, crowded).drafts_during_prefill()
