"""The depth policies that use no measured times, by example."""

from __future__ import annotations

import math

import pytest

from edgespec.interfaces.policy import RoundRecord
from edgespec.interfaces.reasons import Reason
from edgespec.planning.cost.live_times import PlainTimes
from edgespec.planning.depth.base import ConfidenceGate, EntropyGate, FixedDepth
from tests.support.planning import a_round


def plain_round(seconds: float, width: int = 1) -> RoundRecord:
    return a_round(width - 1, evaluated=0, verify_s=seconds)


def test_fixed_depth_is_allowed_in_every_round() -> None:
    policy = FixedDepth(3)
    policy.record(plain_round(1000.0))
    policy.learn("model", (0.1,), (False,))
    for source in ("model", "anything"):
        assert policy.allow(source).depth == policy.allow(source, 10**6).depth == 3
        assert policy.allow(source).gate is None
    assert policy.why_off("model") is None
    assert FixedDepth(0).allow("model").depth == 0
    assert FixedDepth(0).why_off("model") == Reason("depth_zero", "depth 0 was asked for")
    assert FixedDepth(0, None).why_off("model") is None


def test_a_fixed_policy_is_its_own_answer_and_buys_loads() -> None:
    policy = FixedDepth(3)
    own = policy.answer(prompt_tokens=9)
    own.began(1.0, 1.0)
    assert own is policy
    assert own.buys_load("model")
    assert not FixedDepth(0).buys_load("model", 5)
    own.end()
    assert policy.plain_tokens_per_s is None


def test_plain_times_can_be_shared_between_policies() -> None:
    plain = PlainTimes()
    own = FixedDepth(0, None, plain)
    for _ in range(4):
        own.record(plain_round(0.25))
    assert FixedDepth(2, plain=plain).plain_tokens_per_s == own.plain_tokens_per_s == pytest.approx(4.0)


@pytest.mark.parametrize("policy", [FixedDepth(2), FixedDepth(2, gate=EntropyGate)])
def test_plain_speed_is_the_median_of_enough_plain_rounds(policy: FixedDepth) -> None:
    for seconds in (0.5, 100.0, 0.5):
        policy.record(plain_round(seconds))
        policy.record(plain_round(7.0, width=3))
        assert policy.plain_tokens_per_s is None
    policy.record(plain_round(0.5))
    assert policy.plain_tokens_per_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("entropy", "admitted"), [(0.0, True), (0.24, True), (0.26, False), (-1e-6, True), (5.0, False)]
)
def test_svip_stops_where_the_root_of_the_entropy_exceeds_the_limit(entropy: float, admitted: bool) -> None:
    gate = EntropyGate(0.5)
    assert gate.needs_entropy
    assert gate.goes_on()
    assert gate.admits(0.0, entropy) is admitted
    assert gate.admits(1.0, entropy) is admitted, "the confidence does not matter"


def test_svip_uses_the_confidence_of_copies() -> None:
    assert EntropyGate(0.5).admits(math.exp(-0.49), None)
    assert not EntropyGate(0.5).admits(math.exp(-0.51), None)


def test_the_default_entropy_limit_is_one_nat() -> None:
    for gate in (EntropyGate(), FixedDepth(3, gate=EntropyGate).allow("model").gate):
        assert gate is not None
        assert gate.admits(0.0, 0.999)
        assert not gate.admits(0.0, 1.001)


def test_specdec_stops_once_a_rejection_is_likely() -> None:
    gate = ConfidenceGate(0.4)
    assert not gate.needs_entropy
    assert gate.admits(0.9, None)
    assert gate.goes_on()
    assert gate.admits(0.7, None), "0.63 of such chains are accepted whole"
    assert not gate.admits(0.9, None), "0.57 are accepted whole"
    assert not ConfidenceGate(0.4).admits(0.59, None)


def test_the_default_rejection_limit_is_even_odds() -> None:
    for limited in (ConfidenceGate(), FixedDepth(3, gate=ConfidenceGate).allow("model").gate):
        assert limited is not None
        assert limited.admits(0.51, None)
        assert not ConfidenceGate().admits(0.49, None)


@pytest.mark.parametrize("policy", [FixedDepth(4, gate=EntropyGate), FixedDepth(4, gate=ConfidenceGate)])
def test_every_proposal_has_a_separate_gate_up_to_the_cap(policy: FixedDepth) -> None:
    first, second = policy.allow("model", 10**6), policy.allow("model")
    assert (first.depth, second.depth) == (4, 4)
    assert first.gate is not None
    assert first.gate is not second.gate
    assert policy.why_off("model") is None


@pytest.mark.parametrize("kind", [EntropyGate, ConfidenceGate])
def test_a_gates_limit_can_be_set(kind: type[EntropyGate] | type[ConfidenceGate]) -> None:
    gate = FixedDepth(4, gate=lambda: kind(0.1)).allow("model").gate
    assert gate is not None
    assert gate.admits(0.95, 0.005)
    assert not gate.admits(0.8, 0.5)
