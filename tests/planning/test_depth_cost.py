"""The rules of the default policy one by one: what it refuses, what it says about it, and what it remembers."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import pytest

from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.cost.acceptance import Acceptance, AcceptancePrior
from edgespec.planning.cost.curve import FREE, ContextCurves, Curve, DraftCost
from edgespec.planning.depth.cost_model import (
    CHANGED_SPEED,
    FIRST_REST_TOKENS,
    LOOK_ROUNDS,
    PLAIN_AGAIN_ROUNDS,
    PLAIN_EVERY_ROUNDS,
    PLAIN_SOONER_ROUNDS,
    CostDepth,
    CostGate,
    Costs,
    ProbeGate,
    SourceState,
)
from tests.support.simulated_decoding import FLAT, MODEL, STEEP, Machine, Source, always, costs_of, decode

NOT_CALIBRATED = "this machine is not calibrated yet"


def costs(cost: DraftCost = MODEL, curve: Curve = FLAT, **others: DraftCost) -> Costs:
    return Costs(curves=ContextCurves(contexts=(128,), curves=(curve,)), drafts={"model": cost, **others})


def policy_for(cost: DraftCost = MODEL, curve: Curve = FLAT, rate: float | None = None) -> CostDepth:
    """A policy that has seen 200 tokens right as often as ``rate`` says, in turn."""
    policy = CostDepth(7, ["model"], costs(cost, curve))
    if rate is not None:
        for place in range(200):
            policy.learn("model", (), [int((place + 1) * rate) > int(place * rate)])
    return policy


def round_of(
    width: int = 1, emitted: int = 1, *, forwards: int = 0, curve: Curve = FLAT, draft_s: float | None = None
) -> RoundRecord:
    """A round that takes what calibration says; ``forwards`` of the drafter unless it was plain."""
    drafted_s = forwards * MODEL.token_s if draft_s is None else draft_s
    return RoundRecord(
        width=width,
        context_length=100,
        proposed=width - 1,
        evaluated=width - 1,
        accepted=emitted - 1,
        invalid=0,
        emitted=emitted,
        source="model" if forwards else None,
        draft_s=drafted_s,
        sync_s=0.0,
        verify_s=curve.seconds(width),
        round_s=curve.seconds(width) + drafted_s,
        draft_forwards=forwards,
    )


# ---------------------------------------------------------------------------------------------- what never drafts


def test_without_calibration_nothing_drafts() -> None:
    for policy in (CostDepth(7, ["model"]), CostDepth(7, ["model"], None, None), CostDepth(7, ["model"], Costs())):
        assert policy.allow("model").depth == 0
        assert policy.why_off("model") == NOT_CALIBRATED
        policy.record(round_of())
        assert policy.plain_tokens_per_s is None
    priced = CostDepth(7, ["model"], Costs(drafts={"model": FREE}))
    assert (priced.allow("model").depth, priced.why_off("model")) == (0, NOT_CALIBRATED)


def test_a_source_without_a_price_never_drafts() -> None:
    policy = CostDepth(7, ["model", "lookup"], costs())
    policy.learn("lookup", (), [True] * 7)
    assert policy.allow("lookup").depth == 0
    assert policy.why_off("lookup") == NOT_CALIBRATED
    assert policy.allow("model").depth == 7


def test_an_unknown_source_or_no_depth_at_all_is_off_without_a_word() -> None:
    policy = policy_for(rate=1.0)
    policy.learn("other", (0.5,), [True])
    assert policy.allow("other").depth == 0
    assert policy.why_off("other") is None
    closed = CostDepth(0, ["model"], costs())
    assert closed.allow("model").depth == 0
    assert closed.why_off("model") is None


def test_a_free_source_is_always_allowed_and_its_gate_decides() -> None:
    policy = CostDepth(7, ["lookup"], Costs(curves=costs().curves, drafts={"lookup": FREE}))
    for _ in range(50):
        policy.learn("lookup", (0.55,), [False])
    allowance = policy.allow("lookup")
    assert allowance.depth == 7
    assert allowance.gate is not None
    assert not allowance.gate.admits(0.55, None)
    assert policy.why_off("lookup") is None


# ------------------------------------------------------------------------------------------------- what it says


def test_a_drafter_too_slow_to_pay_is_hopeless() -> None:
    policy = policy_for(DraftCost(token_s=0.1))
    assert policy.allow("model").depth == 0
    assert policy.why_off("model") == "model drafting would reach 0.44x plain even if every token were accepted"
    for _ in range(5000):
        policy.record(round_of())
    assert policy.allow("model").depth == 0, "and it is not looked at again: there is nothing to find out"


def test_a_drafter_that_is_rarely_right_is_off_for_that() -> None:
    policy = policy_for(rate=0.1)
    assert policy.allow("model").depth == 0
    reason = policy.why_off("model")
    assert reason is not None
    assert reason.startswith("model drafting would come to 0.9")
    assert "x plain at the acceptance seen (0." in reason
    good = policy_for(rate=0.9)
    assert good.allow("model").depth == 7
    assert good.why_off("model") is None


# ------------------------------------------------------------------------------------------------- when it drafts


def test_a_small_gain_does_not_pay_for_a_long_lag() -> None:
    cost = DraftCost(token_s=0.005, lag_token_s=0.002)
    small, large = policy_for(cost, rate=0.3), policy_for(cost, rate=0.95)
    assert small.allow("model", 5).depth == 7
    assert policy_for(cost, rate=0.3).allow("model", 600).depth == 0
    assert large.allow("model", 600).depth == 7
    assert policy_for(cost, rate=0.95).allow("model", 10_000).depth == 0
    assert policy_for(cost, rate=0.3).allow("model").depth == 7, "no lag unless told"


def test_plain_decoding_is_timed_now_and_then() -> None:
    policy = CostDepth(7, ["model", "lookup"], costs(lookup=FREE))
    for _ in range(PLAIN_EVERY_ROUNDS):
        assert policy.allow("lookup").depth == 7
        policy.learn("model", (), [True] * 3)
        policy.record(round_of(4, 4, forwards=3))
    assert (policy.allow("model").depth, policy.allow("lookup").depth) == (0, 0)
    policy.record(round_of())
    assert (policy.allow("model").depth, policy.allow("lookup").depth) == (7, 7)


@pytest.mark.parametrize("pace", [1.5, 0.6, 1.1])
def test_plain_decoding_is_timed_sooner_where_rounds_took_another_pace(pace: float) -> None:
    policy = policy_for(rate=0.9)
    policy.record(round_of())
    plain = []
    for place in range(60):
        if policy.allow("model").depth:
            policy.record(round_of(4, 4, forwards=3, curve=FLAT.scaled(pace if place > 20 else 1.0)))
        else:
            plain.append(place)
            policy.record(round_of(curve=FLAT.scaled(pace)))
    changed = max(pace, 1 / pace) > CHANGED_SPEED
    begins = PLAIN_SOONER_ROUNDS
    assert plain == (list(range(begins, begins + PLAIN_AGAIN_ROUNDS)) if changed else [])


def test_what_the_gate_lets_through_too_rarely_is_off() -> None:
    """A drafter that is often right when its gate lets it speak, which is once in twenty rounds, only costs."""
    policy = policy_for(rate=0.6)
    assert policy.allow("model").depth == 7
    for place in range(40):
        policy.record(round_of(2, 2, forwards=1) if place % 20 == 0 else round_of(1, 1, forwards=1))
    assert policy.allow("model").depth == 0


def test_what_takes_longer_than_calibrated_costs_more() -> None:
    policy = policy_for(rate=0.4)
    assert policy.allow("model").depth == 7
    for _ in range(9):
        policy.record(round_of(2, 1, forwards=1, draft_s=0.05))
    assert policy.allow("model").depth == 0


@pytest.mark.parametrize("draft_s", [-1.0, 0.0, float("nan"), float("inf")])
def test_drafting_times_of_a_clock_that_jumped_are_discarded(draft_s: float) -> None:
    slow = DraftCost(token_s=0.1)
    policy = policy_for(slow)
    for _ in range(9):
        policy.record(round_of(2, 1, forwards=1, draft_s=draft_s))
    assert policy.allow("model").depth == 0
    good = policy_for(rate=0.9)
    for _ in range(9):
        good.record(round_of(2, 2, forwards=1, draft_s=draft_s))
    assert good.allow("model").depth == 7


def test_catching_up_is_not_the_price_of_a_draft() -> None:
    """The forward that catches up is timed apart, so a round of it alone says nothing of the price."""
    policy = policy_for(DraftCost(token_s=0.1))
    for _ in range(9):
        policy.record(replace(round_of(2, 1, forwards=1, draft_s=0.5), sync_s=0.4999))
    assert policy.allow("model").depth == 0
    assert policy.why_off("model") == "model drafting would reach 0.44x plain even if every token were accepted"


def looks(policy: CostDepth, tokens: int) -> list[int]:
    """Plain tokens before each round in which the drafter was looked at, and found wrong."""
    places = []
    for place in range(tokens):
        allowance = policy.allow("model", 1)
        if allowance.depth:
            assert allowance.depth == 1
            assert allowance.gate is not None
            assert allowance.gate.admits(0.0, None)
            assert not allowance.gate.goes_on()
            policy.learn("model", (0.0,), [False])
            policy.record(round_of(2, 1, forwards=1))
            places.append(place)
        else:
            policy.record(round_of())
    return places


def test_a_parked_drafter_is_looked_at_for_a_few_rounds_and_then_less_often() -> None:
    places = looks(policy_for(rate=0.1), 2000)
    begins = [place for last, place in zip([-100, *places], places, strict=False) if place > last + 1]
    assert begins[0] == 64
    waits = [after - before for before, after in itertools.pairwise(begins)]
    assert len(waits) >= 3
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(waits))
    assert all(sum(begin <= place < begin + LOOK_ROUNDS for place in places) <= LOOK_ROUNDS for begin in begins)
    assert len(places) > 2 * len(begins), "a look is more than one token"


def test_looks_stay_within_their_share_of_the_time() -> None:
    policy = policy_for(curve=STEEP, rate=0.1)
    spent_s = plain_s = 0.0
    for _ in range(4000):
        allowance = policy.allow("model", 1)
        own = round_of(2, 1, forwards=1, curve=STEEP) if allowance.depth else round_of(curve=STEEP)
        if allowance.depth:
            policy.learn("model", (), [False])
        policy.record(own)
        spent_s += own.round_s
        plain_s += STEEP.plain_s
    assert 1.0 < spent_s / plain_s < 1.011


@pytest.mark.parametrize(("draft_s", "paid"), [(0.005, 0.0), (0.035, 0.03), (1e9, 0.0)])
def test_a_look_that_took_longer_than_expected_is_paid_for(draft_s: float, paid: float) -> None:
    policy, usual = policy_for(rate=0.1), policy_for(rate=0.1)
    for one, took_s in ((policy, draft_s), (usual, 0.005)):  # each makes the budget grow by a hundredth of the round
        while not one.allow("model", 0).depth:
            one.record(round_of())
        one.record(round_of(2, 1, forwards=1, draft_s=took_s))
    assert usual._credit_s - policy._credit_s == pytest.approx(paid, abs=1.5e-3)


def test_looks_that_took_very_long_do_not_end_looking() -> None:
    policy = policy_for(rate=0.1)
    for _ in range(3):
        places = 0
        while not policy.allow("model", 0).depth:
            policy.record(round_of())
            places += 1
        assert places < 4000
        policy.record(round_of(2, 1, forwards=1, draft_s=45 * MODEL.token_s))


def test_the_longer_it_was_on_the_shorter_it_rests() -> None:
    known = SourceState(acceptance=Acceptance(), rest_tokens=1024)
    known.go_on()
    known.on_tokens = 100
    known.go_on()
    known.park()
    assert (known.rest_tokens, known.on, known.waited_tokens) == (924, False, 0)
    known.go_on()
    assert known.on_tokens == 0
    known.on_tokens = 5000
    known.park()
    assert known.rest_tokens == FIRST_REST_TOKENS


def test_new_measurements_ask_for_no_plain_rounds() -> None:
    policy = policy_for(rate=0.9)
    for _ in range(PLAIN_SOONER_ROUNDS):
        policy.record(round_of(4, 4, forwards=3, curve=FLAT.scaled(2.0)))
    assert policy.allow("model").depth == 0
    policy.calibrate(costs(curve=FLAT.scaled(2.0)), 7)
    for _ in range(PLAIN_SOONER_ROUNDS - 1):
        assert policy.allow("model").depth == 7 or policy._rounds_since_plain >= PLAIN_EVERY_ROUNDS
        policy.record(round_of(4, 4, forwards=3, curve=FLAT.scaled(2.0)))


def test_a_look_that_costs_more_than_there_is_waits() -> None:
    policy = policy_for(DraftCost(token_s=0.005, lag_token_s=0.01), rate=0.1)
    for _ in range(200):
        policy.record(round_of())
    assert policy.allow("model", 500).depth == 0
    assert policy.allow("model", 1).depth == 1


# -------------------------------------------------------------------------------------------------------- gates


def gate_for(curve: Curve, rate: float, tokens_per_s: float, token_s: float = 0.005, depth_cap: int = 7) -> CostGate:
    acceptance = Acceptance(AcceptancePrior(by_position=(rate,) * 8))
    return CostGate(curve, token_s, acceptance, depth_cap, tokens_per_s)


def test_the_gate_takes_what_saves_more_than_it_costs() -> None:
    # A second row costs 22.1 ms: 0.64 tokens of plain decoding.
    assert gate_for(STEEP, 0.6, 1 / STEEP.plain_s).admits(0.75, None)
    assert not gate_for(STEEP, 0.6, 1 / STEEP.plain_s).admits(0.55, None)
    assert not gate_for(STEEP, 0.6, 1.5 / STEEP.plain_s).admits(0.75, None), "time is dearer where tokens come fast"
    assert not gate_for(FLAT, 0.6, 1 / FLAT.plain_s).admits(0.01, None), "nothing gained, even where a row is free"
    assert not CostGate.needs_entropy


def test_the_gate_counts_on_the_whole_chain_surviving() -> None:
    gate = gate_for(FLAT, 0.9, 1.5 / FLAT.plain_s)
    admitted = 0
    while gate.admits(0.7, None):
        admitted += 1
    assert 2 <= admitted < 7


def test_the_gate_looks_ahead_over_a_step_of_the_curve() -> None:
    step = Curve(widths=(1, 2, 3, 4, 5), forward_s=(0.01, 0.025, 0.025, 0.025, 0.025))
    assert gate_for(step, 0.95, 100.0, 0.0, depth_cap=4).admits(0.95, None)
    assert not gate_for(step, 0.2, 100.0, 0.0, depth_cap=4).admits(0.95, None), "the next ones are seldom right"


def test_another_forward_is_made_only_if_it_is_worth_its_time() -> None:
    for token_s, goes_on in ((0.005, True), (0.03, False)):
        gate = gate_for(FLAT, 0.8, 1 / FLAT.plain_s, token_s)
        assert gate.admits(0.9, None)
        assert gate.goes_on() is goes_on


def test_the_gate_stops_at_the_cap() -> None:
    gate = gate_for(FLAT, 0.99, 1 / FLAT.plain_s, depth_cap=2)
    assert gate.admits(0.99, None)
    assert gate.goes_on()
    assert gate.admits(0.99, None)
    assert not gate.goes_on()
    assert not gate.admits(0.99, None)


def test_a_look_notes_what_would_have_been_put_forward() -> None:
    for sure in (0.9, 0.1):
        look = ProbeGate(gate_for(STEEP, 0.6, 1 / STEEP.plain_s))
        assert look.wanted is None
        assert look.admits(sure, None)
        assert look.wanted is (sure == 0.9)
        assert not look.goes_on()


# ---------------------------------------------------------------------------------------------- what it remembers


def test_what_was_learned_survives_a_conversation() -> None:
    sources = [Source(text=always(0.9))]
    first = CostDepth(7, ["model", "lookup"], costs_of(sources))
    decode(first, sources, Machine(), tokens=300)
    stored = {name: AcceptancePrior.from_json(prior.as_json()) for name, prior in first.priors().items()}
    assert list(stored) == ["model", "lookup"]
    assert all(rate is None for rate in stored["lookup"].by_position)
    again = CostDepth(7, ["model", "lookup"], costs_of(sources), stored)
    assert again.priors() == first.priors()
    unsure = CostDepth(7, ["model"], costs_of(sources, STEEP))
    assert unsure.allow("model").depth == 0
    assert CostDepth(7, ["model"], costs_of(sources, STEEP), stored).allow("model").depth == 7


def test_new_measurements_keep_what_is_known_of_acceptance() -> None:
    policy = CostDepth(0, ["model"])
    for _ in range(50):
        policy.learn("model", (0.9,), [True])
    before = policy.priors()
    policy.calibrate(costs(), 5)
    assert policy.priors() == before
    assert policy.allow("model").depth == 5
    policy.calibrate(costs(DraftCost(token_s=1.0)), 5)
    assert policy.allow("model").depth == 0
    policy.calibrate(Costs(), 5)
    assert policy.why_off("model") == NOT_CALIBRATED
    assert policy.priors() == before


def test_costs_know_nothing_by_default() -> None:
    assert Costs() == Costs(curves=None, drafts={}, acceptance={})


def test_plain_speed_is_measured_not_calibrated() -> None:
    policy = policy_for()
    for _ in range(4):
        assert policy.plain_tokens_per_s is None
        policy.record(replace(round_of(), verify_s=0.05))
    assert policy.plain_tokens_per_s == pytest.approx(20.0)


def test_threads_may_share_it() -> None:
    policy = CostDepth(7, ["model", "lookup"], costs(lookup=FREE))
    errors: list[BaseException] = []
    begin = threading.Barrier(4)

    def work(right: bool) -> None:
        try:
            begin.wait()
            for place in range(300):
                for source in ("model", "lookup"):
                    allowance = policy.allow(source, place % 3)
                    assert 0 <= allowance.depth <= 7
                    if allowance.gate is not None:
                        allowance.gate.admits(0.5, None)
                    policy.learn(source, (0.5, 0.6), [True, right])
                    policy.record(round_of(3, 2 + right, forwards=2))
                    policy.why_off(source)
                policy.priors()
                if place % 100 == 0:
                    policy.calibrate(costs(lookup=FREE), 7)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(right,)) for right in (True, True, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    policy.record(round_of())
    assert policy.allow("model").depth == 7
