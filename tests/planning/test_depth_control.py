"""The proposed depth object: what it may lose, when it buys, and when it stops."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.cost.acceptance import Acceptance
from edgespec.planning.cost.live_times import LiveTimes
from edgespec.planning.depth.chain_gate import PricedGate
from edgespec.planning.depth.control import LEAST_READ, MOST_READ, PLAIN_EVERY, TRIAL, DepthControl, Experience
from edgespec.planning.depth.purchase import RISK, Ledger, Lengths, Offer, worth_buying
from tests.support.controlled_clock import Controlled
from tests.support.drawn_requests import (
    CALIBRATED_AT,
    LLAMA,
    NATIVE,
    Request,
    Scenario,
    World,
    believed,
    draw_request,
    draw_scenario,
    generator,
)
from tests.support.request_bounds import LEAST, LEAST_MEAN, OF_A_SCENARIO, ORDER, SOON_TOKENS, order, serve_drawn
from tests.support.simulated_clock import Served, serve, serve_each

STEP_S = NATIVE.forward_s(1, 100)


def scenario(world: World = NATIVE, **changes: object) -> Scenario:
    return Scenario(seed=0, world=world, costs=believed(world), **changes)  # type: ignore[arg-type]


def control(world: World = NATIVE, *, load_s: float = 0.0) -> DepthControl:
    return DepthControl(believed(world), world.depth_cap, load_s=load_s)


def round_of(width: int = 1, emitted: int = 1, *, context: int = 100, factor: float = 1.0) -> RoundRecord:
    verify_s = factor * NATIVE.forward_s(width, context)
    return RoundRecord(
        width=width,
        context_length=context,
        proposed=width - 1,
        evaluated=min(width - 1, emitted),
        accepted=emitted - 1,
        invalid=0,
        emitted=emitted,
        source="model" if width > 1 else None,
        draft_s=0.0,
        sync_s=0.0,
        verify_s=verify_s,
        round_s=verify_s,
    )


# ---------------------------------------------------------------------------------------------------- the ledger


def test_an_answer_that_ends_after_losing_all_its_room_took_the_stated_share_longer() -> None:
    ledger = Ledger(spent_s=9.0, plain_s=10.0)
    assert ledger.saved_s == 1.0
    assert (ledger.spent_s + ledger.room_s) / ledger.plain_s == pytest.approx(1.0 + RISK)
    assert 1.0 / (1.0 + RISK) > 0.89


# -------------------------------------------------------------------------------------------------- the purchase


def test_without_experience_it_buys_when_as_many_tokens_again_would_earn_the_price() -> None:
    offer = Offer(price_s=1.0, gain_s=0.02, trial_s=0.0)
    bought = next(done for done in range(1, 1000) if worth_buying(offer, done, None, None, 10))
    assert bought == 51
    assert not worth_buying(offer, 51, 60, None, 10), "nine tokens are left"
    assert worth_buying(offer, 51, 200, None, 10)
    assert worth_buying(offer, 51, None, [], 10), "this answer is longer than all before it"


def test_with_short_answers_learned_it_waits_until_they_have_ended() -> None:
    """Four of five answers have 8 tokens, one has 800."""
    longer = [*([8] * 16), *([800] * 4)]
    offer = Offer(price_s=0.3, gain_s=0.02, trial_s=0.0)
    assert not worth_buying(offer, 1, None, longer, 40)
    assert worth_buying(offer, 9, None, [800] * 4, 40)
    assert not worth_buying(offer, 1, None, [8] * 20, 40)
    assert worth_buying(offer, 1, None, [800] * 20, 40)


def test_lengths_are_known_after_a_few_answers_and_end_with_the_budget() -> None:
    lengths = Lengths()
    assert lengths.longer_than(0, None) is None
    for tokens in (5, 7, 300, 9, 11, 400):
        lengths.add(tokens)
    assert lengths.longer_than(9, None) == [11, 300, 400]
    assert lengths.longer_than(9, 64) == [11, 64, 64]
    assert lengths.longer_than(500, None) == []
    for _ in range(40):
        lengths.add(20)
    assert lengths.longer_than(0, None) == [20] * 32


def test_experience_follows_the_answers_and_fades_where_nothing_is_tried() -> None:
    known = Experience(usual=0.4)
    assert known.gain == pytest.approx(0.6 * 0.4)
    assert known.trial == pytest.approx(0.4 * TRIAL)
    for _ in range(30):
        known.learn(-2.0, 100, 10)
    assert known.gain < 0.03
    assert known.trial > 1.8
    for _ in range(200):
        known.learn(0.0, 100, 0)
    assert known.gain > 0.2
    for _ in range(40):
        known.learn(50.0, 100, 30)
    assert known.gain == pytest.approx(0.5, abs=0.05)
    assert known.trial < 0.3


# ------------------------------------------------------------------------------------------------ T(w) as it is


def test_times_are_lines_over_the_context_beyond_what_was_calibrated() -> None:
    curves = believed(NATIVE).curves
    assert curves is not None
    times = LiveTimes(curves, 8)
    for width in (1, 4, 8):
        for context in (*CALIBRATED_AT, 4000):
            assert times.now_s(width, context) == pytest.approx(NATIVE.forward_s(width, context))
    assert times.all_now(500) == pytest.approx([NATIVE.forward_s(width, 500) for width in range(1, 9)])


def test_a_slower_machine_is_told_from_a_slower_width() -> None:
    curves = believed(NATIVE).curves
    assert curves is not None
    times = LiveTimes(curves, 8)
    for _ in range(5):
        times.record(1, 100, 2.0 * STEP_S)
    assert times.factor == pytest.approx(2.0)
    assert times.now_s(4, 100) == pytest.approx(2.0 * NATIVE.forward_s(4, 100))
    for _ in range(20):
        times.record(1, 100, STEP_S)
        for _ in range(5):
            times.record(4, 100, 1.5 * NATIVE.forward_s(4, 100))
    assert times.now_s(4, 100) / times.now_s(1, 100) == pytest.approx(
        1.5 * NATIVE.forward_s(4, 100) / STEP_S, rel=0.03
    )


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e6])
def test_what_is_no_time_teaches_nothing(seconds: float) -> None:
    curves = believed(NATIVE).curves
    assert curves is not None
    times = LiveTimes(curves, 8)
    assert times.record(1, 100, seconds) is None
    assert (times.factor, times.since_plain, times.moved) == (1.0, 0, 1.0)


def test_a_stall_moves_nothing() -> None:
    curves = believed(NATIVE).curves
    assert curves is not None
    times = LiveTimes(curves, 8)
    for place in range(20):
        times.record(1 + place % 4, 100, NATIVE.forward_s(1 + place % 4, 100) * (20.0 if place == 10 else 1.0))
    assert times.factor == pytest.approx(1.0)
    assert times.now_s(3, 100) == pytest.approx(NATIVE.forward_s(3, 100), rel=0.25)


# --------------------------------------------------------------------------------------------------- the answer


def test_a_chain_ends_where_the_next_token_costs_more_than_it_saves() -> None:
    forward_s = [NATIVE.forward_s(width, 0) for width in range(1, 9)]
    gate = PricedGate(forward_s, NATIVE.draft_token_s, Acceptance(), 7, 1.0 / forward_s[0])
    assert gate.admits(0.95, None)
    assert gate.goes_on()
    assert not PricedGate(forward_s, forward_s[0], Acceptance(), 7, 1.0 / forward_s[0]).goes_on()
    assert not PricedGate(forward_s, NATIVE.draft_token_s, Acceptance(), 7, 1.0 / forward_s[0]).admits(0.0, None)
    short = PricedGate(forward_s, 0.0, Acceptance(), 1, 1.0 / forward_s[0])
    assert short.admits(0.9, None)
    assert not short.goes_on()
    assert not PricedGate.needs_entropy


def test_nothing_is_drafted_that_the_answer_could_not_afford_to_lose() -> None:
    """A prompt of one token and a copy: the first rounds have no room for a wide forward."""
    answer = control().answer(prompt_tokens=1, most=None, prompt_s=0.0, first_s=NATIVE.forward_s(1, 0))
    depths = []
    for _ in range(30):
        depths.append(answer.allow("lookup").depth)
        answer.record(round_of())
    assert depths[0] <= 2
    assert depths == sorted(depths)
    assert depths[-1] == 7


def test_a_short_answer_to_a_long_prompt_reads_little_or_nothing() -> None:
    long_s = NATIVE.prompt_s(4000)
    learned = control()
    for _ in range(20):
        learned.lengths.add(300)
    answer = learned.answer(prompt_tokens=4000, most=None, prompt_s=long_s, first_s=NATIVE.forward_s(1, 4000))
    assert answer.allow("model", 4000).depth > 0
    assert answer.window == MOST_READ
    for _ in range(32):
        learned.lengths.add(3)
    answer = learned.answer(prompt_tokens=4000, most=None, prompt_s=long_s, first_s=NATIVE.forward_s(1, 4000))
    assert answer.allow("model", 4000).depth == 0
    budget = learned.answer(prompt_tokens=4000, most=8, prompt_s=long_s, first_s=NATIVE.forward_s(1, 4000))
    assert budget.allow("model", 4000).depth == 0


def test_a_short_prompt_is_read_in_part_before_all_of_it_is_affordable() -> None:
    learned = control()
    for _ in range(20):
        learned.lengths.add(300)
    prompt_s, first_s = NATIVE.prompt_s(300), NATIVE.forward_s(1, 300)
    answer = learned.answer(prompt_tokens=300, most=None, prompt_s=prompt_s, first_s=first_s)
    assert answer.allow("model", 300).depth > 0
    assert answer.window is not None
    assert LEAST_READ <= answer.window < 300
    assert answer.window * NATIVE.lag_token_s <= RISK * (prompt_s + first_s)


def test_plain_decoding_is_timed_now_and_then() -> None:
    answer = control().answer(prompt_tokens=100, most=None, prompt_s=10.0, first_s=STEP_S)
    for _ in range(PLAIN_EVERY):
        assert answer.allow("lookup").depth > 0
        answer.record(round_of(4, 4))
    assert answer.allow("lookup").depth == 0
    answer.record(round_of())
    assert answer.allow("lookup").depth > 0


def test_a_drafter_that_cannot_pay_is_never_bought() -> None:
    slow = replace(NATIVE, draft_token_s=2 * NATIVE.rows_s[0])
    answer = control(slow).answer(prompt_tokens=1000, most=None, prompt_s=10.0, first_s=STEP_S)
    for _ in range(200):
        assert answer.allow("model", 1000).depth == 0
        answer.record(round_of())
    assert answer.allow("unknown").depth == 0


def test_a_load_waits_for_an_answer_that_can_afford_it() -> None:
    world = replace(NATIVE, load_s=1.0)
    one = scenario(world, kinds=("code",))
    decider = Controlled(one)
    requests = [draw_request(generator(place), "code", 200, 600) for place in range(3)]
    served = serve_each(one, decider, requests)
    assert [answer.spent["load"] > 0 for answer in served] == [True, False, False]
    assert all(answer.ratio > 1.0 for answer in served)
    short = [draw_request(generator(place), "code", 200, 20) for place in range(3)]
    assert all(answer.spent["load"] == 0.0 for answer in serve_each(one, Controlled(one), short))


def test_a_text_that_it_cannot_guess_costs_what_a_trial_may() -> None:
    one = scenario(LLAMA)
    for seed in range(5):
        answer = serve(LLAMA, Controlled(one), draw_request(generator(seed), "foreign", 300, 1000))
        assert answer.ratio > 0.97


def test_code_is_drafted_from_the_first_answers_on() -> None:
    one = scenario()
    decider = Controlled(one)
    requests = [draw_request(generator(place), "code", 150, 300) for place in range(6)]
    served = serve_each(one, decider, requests)
    assert served[-1].ratio > 1.5
    assert decider.control.experience("greedy").gain > 0.3


# ---------------------------------------------------------------------------------------------------- the bounds


def bought_at(served: Served) -> int | None:
    """Tokens of the answer before its first round that drafted with the model; None if none did."""
    return next((at for at, own in zip(served.tokens_at, served.records, strict=True) if own.source == "model"), None)


def ended_after(request: Request, tokens: int) -> Request:
    """The same answer, ended after so many tokens."""
    known = request.right[:tokens], request.copied[:tokens]
    behind = [False] * (len(request.right) - tokens)
    return replace(request, tokens=tokens, right=known[0] + behind, copied=known[1] + behind)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_an_answer_that_ends_right_after_a_purchase_is_at_most_a_tenth_slower(seed: int) -> None:
    """The worst end there is for a purchase, by a drafter that is wrong from then on."""
    scenario = draw_scenario(seed)
    for place in range(0, 24, 4):
        before, request = [scenario.request(index) for index in range(place)], scenario.request(place)
        bought = bought_at(serve_each(scenario, Controlled(scenario), [*before, request], keep=True)[-1])
        if bought is None:
            continue
        wrong = replace(request, right=[*request.right[:bought], *[False] * (len(request.right) - bought)])
        for more in (1, 2, 6):
            ended = ended_after(wrong, min(request.tokens, bought + more))
            served = serve_each(scenario, Controlled(scenario), [*before, ended])[-1]
            assert served.ratio >= LEAST, f"request {place}, bought after {bought} tokens, ended after {ended.tokens}"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_no_drawn_request_is_below_the_bound_and_no_distribution_in_the_mean(first: int) -> None:
    drawn = serve_drawn(Controlled, 10 * OF_A_SCENARIO, first)
    assert drawn.requests == 400
    assert drawn.worst[0][0] >= LEAST
    for lengths, ratios in drawn.learned.items():
        assert statistics.fmean(ratios) >= LEAST_MEAN, lengths


@pytest.mark.parametrize(("kind", "before"), [("code", "translation"), ("translation", "code")])
def test_a_text_is_drafted_as_alone_after_twenty_of_another_kind(kind: str, before: str) -> None:
    one = order(Controlled, NATIVE, kind, before)
    assert one.off > -ORDER
    if kind == "code":
        assert statistics.median(one.first_drafts) <= SOON_TOKENS
