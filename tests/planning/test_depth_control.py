"""The default depth policy: what it may lose, when it buys and stops drafting, its reasons, and its memory."""

from __future__ import annotations

import itertools
import math
import re
import statistics
import threading
from dataclasses import replace

import pytest

from edgespec.files.checked import read, to_json
from edgespec.interfaces.policy import RoundRecord
from edgespec.interfaces.reasons import Reason
from edgespec.planning.cost.acceptance import Acceptance, AcceptancePrior
from edgespec.planning.cost.costs import Costs
from edgespec.planning.depth.answer import AT_ONCE, MOVED, PLAIN_AGAIN, PLAIN_EVERY, AnswerDepth
from edgespec.planning.depth.base import NOT_CALIBRATED
from edgespec.planning.depth.control import DepthControl
from edgespec.planning.depth.experience import NO_HISTORY, SAMPLED, History, Lengths
from edgespec.planning.depth.price import (
    FIRST_REST,
    HINDSIGHT,
    LEAST_READ,
    LOOK,
    RISK,
    USUAL_GAIN,
    Ledger,
    PricedGate,
    worth_buying,
)
from tests.support.drawn_requests import (
    LLAMA,
    NATIVE,
    Scenario,
    World,
    believed,
    draw_request,
    generator,
)
from tests.support.planning import a_round
from tests.support.request_bounds import SOON_TOKENS
from tests.support.simulated_clock import Controlled, serve, serve_each

STEP_S = NATIVE.forward_s(1, 100)


def scenario(world: World = NATIVE, **changes: object) -> Scenario:
    return Scenario(seed=0, world=world, costs=believed(world), **changes)  # type: ignore[arg-type]


def control(world: World = NATIVE, *, load_s: float = 0.0) -> DepthControl:
    return DepthControl(replace(believed(world), load_s=load_s), world.depth_cap)


def begun(
    own: DepthControl,
    prompt_tokens: int = 100,
    *,
    most: int | None = None,
    prompt_s: float = 10.0,
    first_s: float = STEP_S,
    sampled: bool = False,
) -> AnswerDepth:
    answer = own.answer(prompt_tokens=prompt_tokens, most=most, sampled=sampled)
    assert isinstance(answer, AnswerDepth)
    answer.began(prompt_s, first_s)
    return answer


def drafting(own: DepthControl, tokens: int = 60, *, sampled: bool = False) -> AnswerDepth:
    """An answer long enough for the drafter to be bought."""
    answer = begun(own, sampled=sampled)
    for _ in range(tokens):
        if answer.allow("model", 100).depth and answer.why_off("model") is None:
            return answer
        answer.record(round_of())
    raise AssertionError("never bought")


def round_of(width: int = 1, emitted: int = 1, *, context: int = 100, factor: float = 1.0) -> RoundRecord:
    return a_round(
        width - 1,
        emitted - 1,
        context=context,
        evaluated=min(width - 1, emitted),
        source="model" if width > 1 else None,
        verify_s=factor * NATIVE.forward_s(width, context),
    )


# ---------------------------------------------------------------------------------------------------- the ledger


def test_an_answer_that_uses_up_its_ledger_is_slower_by_the_risk_share() -> None:
    ledger = Ledger(spent_s=9.0, plain_s=10.0)
    assert ledger.saved_s == 1.0
    assert (ledger.spent_s + ledger.room_s) / ledger.plain_s == pytest.approx(1.0 + RISK)
    assert 1.0 / (1.0 + RISK) > 0.89


# -------------------------------------------------------------------------------------------------- the purchase


def test_without_experience_drafting_is_bought_once_doubling_the_answer_repays() -> None:
    offer = 1.0, 0.02
    bought = next(done for done in range(1, 1000) if worth_buying(*offer, done, None, None, 10))
    assert bought == 51
    assert not worth_buying(*offer, 51, 60, None, 10), "nine tokens are left"
    assert worth_buying(*offer, 51, 200, None, 10)
    assert worth_buying(*offer, 51, None, [], 10), "this answer is longer than all before it"


def test_after_short_answers_drafting_is_bought_only_in_longer_ones() -> None:
    """Four of five answers have 8 tokens, one has 800."""
    longer = [*([8] * 16), *([800] * 4)]
    offer = 0.3, 0.02
    assert not worth_buying(*offer, 1, None, longer, 40)
    assert worth_buying(*offer, 9, None, [800] * 4, 40)
    assert not worth_buying(*offer, 1, None, [8] * 20, 40)
    assert worth_buying(*offer, 1, None, [800] * 20, 40)


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


def test_a_draft_that_the_answer_cannot_afford_to_lose_is_not_made() -> None:
    """A prompt of one token and a copy: the first rounds have no room for a wide forward."""
    answer = begun(control(), 1, prompt_s=0.0, first_s=NATIVE.forward_s(1, 0))
    depths = []
    for _ in range(30):
        depths.append(answer.allow_free("lookup").depth)
        answer.record(round_of())
    assert depths[0] <= 2
    assert depths == sorted(depths)
    assert depths[-1] == 7


def test_a_short_answer_reads_only_part_of_a_long_prompt_or_none() -> None:
    long_s = NATIVE.prompt_s(4000)
    learned = control()
    for _ in range(20):
        learned.lengths.known.append(1000)
    answer = begun(learned, 4000, most=None, prompt_s=long_s, first_s=NATIVE.forward_s(1, 4000))
    allowance = answer.allow("model", 4000)
    assert allowance.depth > 0
    assert allowance.window == 1000
    assert allowance.patience_s == pytest.approx(
        1.25 * 1000 * NATIVE.lag_token_s + NATIVE.forward_s(1, 4000), rel=0.01
    )
    for _ in range(32):
        learned.lengths.known.append(3)
    answer = begun(learned, 4000, most=None, prompt_s=long_s, first_s=NATIVE.forward_s(1, 4000))
    assert answer.allow("model", 4000).depth == 0
    budget = begun(learned, 4000, most=8, prompt_s=long_s, first_s=NATIVE.forward_s(1, 4000))
    assert budget.allow("model", 4000).depth == 0


def test_a_short_prompt_is_read_in_part_until_all_of_it_is_affordable() -> None:
    learned = control()
    for _ in range(20):
        learned.lengths.known.append(300)
    prompt_s, first_s = NATIVE.prompt_s(300), NATIVE.forward_s(1, 300)
    answer = begun(learned, 300, most=None, prompt_s=prompt_s, first_s=first_s)
    allowance = answer.allow("model", 300)
    assert allowance.depth > 0
    assert allowance.window is not None
    assert LEAST_READ <= allowance.window < 300
    assert allowance.window * NATIVE.lag_token_s <= AT_ONCE * RISK * (prompt_s + first_s)


def disappointed() -> DepthControl:
    """A policy after twenty answers of 200 tokens that the drafter did not know."""
    own = control()
    own.lengths = Lengths([200] * 20)
    for _ in range(20):
        own.modes[False].learn(-2.0, 200, 10)
    return own


def looked(own: DepthControl, hits: list[bool]) -> AnswerDepth:
    """An answer of 300 tokens whose drafter was asked what it would have guessed."""
    answer = begun(own, 300, prompt_s=NATIVE.prompt_s(300))
    for _ in range(HINDSIGHT - 1):
        assert answer.allow("model", 300).depth == 0
        answer.record(round_of(context=300))
    allowance = answer.allow("model", 300)
    assert (allowance.depth, allowance.window, allowance.hindsight) == (1, LOOK, HINDSIGHT)
    answer.learn_hindsight("model", hits)
    answer.record(round_of(2, context=300))
    return answer


def test_where_the_drafter_draws_its_own_noise_nothing_is_guessed_in_hindsight() -> None:
    answers = [disappointed().answer(prompt_tokens=300, hindsight=False) for _ in range(2)]
    for answer, tokens in zip(answers, (300, 2), strict=True):
        answer.began(NATIVE.prompt_s(300), STEP_S)
        for _ in range(100):
            allowance = answer.allow("model", tokens)
            assert (allowance.window == LOOK, allowance.hindsight) == (False, 0)
            answer.record(round_of(context=300))


def test_after_failures_the_drafter_reads_a_few_tokens_to_test_its_guesses() -> None:
    known = looked(disappointed(), [True] * 10 + [False] * 4)
    allowance = known.allow("model", 1, 295)
    assert allowance.depth > 0
    assert allowance.window is not None, "more of the text is read by now"
    assert allowance.window > LOOK
    assert known.why_off("model") is None
    unknown = looked(disappointed(), [False] * 13 + [True])
    assert unknown.allow("model", 1, 295).depth == 0
    assert unknown.why_off("model") == Reason(
        "not_paying_now", "the drafting model would have guessed 1 of 14 tokens of this answer, too few to pay"
    )
    for _ in range(40):
        assert unknown.allow("model", 1, 295).depth == 0
        unknown.record(round_of(context=300))


@pytest.mark.parametrize(("lag", "unread", "window"), [(60, 0, None), (60, 2900, LOOK), (1600, 0, LOOK)])
def test_a_look_keeps_what_the_drafter_has_read_if_that_is_more_than_it_lacks(
    lag: int, unread: int, window: int | None
) -> None:
    costs = replace(believed(NATIVE), checked=False)
    own = DepthControl(costs, NATIVE.depth_cap, history=replace(NO_HISTORY, greedy=(20.0, -1000.0, 0.0)))
    answer = begun(own, 3000, prompt_s=NATIVE.prompt_s(3000))
    while not (allowance := answer.allow("model", lag, unread)).depth:
        assert answer._done < 400, "never looked"
        answer.record(round_of(context=3000))
    assert (allowance.window, allowance.hindsight) == (window, HINDSIGHT)


def first_look(own: DepthControl) -> int:
    """Tokens of an answer when the drafter first guesses in hindsight. The prompt is too long to be read."""
    answer = begun(own, 3000, prompt_s=NATIVE.prompt_s(3000))
    for done in range(1, 200):
        if answer.allow("model", 3000).window == LOOK:
            return done
        answer.record(round_of(context=3000))
    return 200


def test_hindsight_guesses_are_bought_once_doubling_the_answer_repays_them() -> None:
    hardly = DepthControl(believed(NATIVE), NATIVE.depth_cap, history=replace(NO_HISTORY, greedy=(20.0, 4000.0, 0.0)))
    assert HINDSIGHT <= first_look(control()) <= SOON_TOKENS < first_look(hardly) < 200


def test_an_answer_with_only_hindsight_guesses_is_remembered_by_them() -> None:
    gains = []
    for hits in ([True] * HINDSIGHT, [False] * HINDSIGHT):
        own = disappointed()
        answer = looked(own, hits)
        before = own.modes[False].gain(0.4)
        answer.end()
        gains.append(own.modes[False].gain(0.4) - before)
    assert gains[0] > 0.0 >= gains[1]


def test_the_whole_text_is_read_once_that_repays() -> None:
    own = control()
    own.lengths = Lengths([400] * 20)
    answer = drafting(own)
    assert answer.allow("model", 1, 60).window is not None
    answer.learn_hindsight("model", [True] * 14)
    read = answer.allow("model", 1, 60)
    assert read.window == answer._context
    assert answer.allow("model", 1).window is None
    short = control()
    short.lengths = Lengths([70] * 20)
    answer = drafting(short)
    for _ in range(60 - answer._done):
        answer.record(round_of())
    assert answer.allow("model", 1, 60).window is None, "the answer is nearly over"


def test_plain_decoding_is_timed_at_intervals() -> None:
    answer = begun(control())
    for _ in range(PLAIN_EVERY):
        assert answer.allow_free("lookup").depth > 0
        answer.record(round_of(4, 4))
    assert answer.allow_free("lookup").depth == 0
    answer.record(round_of())
    assert answer.allow_free("lookup").depth > 0


def test_a_drafter_that_cannot_pay_is_never_bought() -> None:
    slow = replace(NATIVE, draft_token_s=2 * NATIVE.rows_s[0])
    answer = begun(control(slow), 1000)
    for _ in range(200):
        assert answer.allow("model", 1000).depth == 0
        answer.record(round_of())
    assert not answer.buys_load("model", 1000)
    assert answer.allow("unknown").depth == 0
    assert answer.why_off("unknown") == NOT_CALIBRATED
    why = answer.why_off("model")
    assert why is not None
    assert why.code == "no_drafter_pays"
    assert re.fullmatch(r"the drafting model cannot speed this up here \(0\.\d\dx at best\): off", why.text)


def test_a_load_waits_for_an_answer_that_can_afford_it() -> None:
    world = replace(NATIVE, load_s=1.0)
    one = scenario(world, kinds=("code",))
    decider = Controlled(one)
    requests = [draw_request(generator(place), "code", 200, 600) for place in range(3)]
    served = serve_each(one, decider, requests)
    assert [answer.spent["load"] > 0 for answer in served] == [True, False, False]
    assert served[0].ratio > 1.0 - RISK / 2
    assert all(answer.ratio > 1.2 for answer in served[1:])
    short = [draw_request(generator(place), "code", 200, 20) for place in range(3)]
    assert all(answer.spent["load"] == 0.0 for answer in serve_each(one, Controlled(one), short))


def test_a_text_the_drafter_cannot_guess_costs_at_most_a_trial() -> None:
    one = scenario(LLAMA)
    for seed in range(5):
        answer = serve(LLAMA, Controlled(one), draw_request(generator(seed), "foreign", 300, 1000))
        assert answer.ratio > 0.97


def test_code_is_drafted_from_the_first_answers() -> None:
    one = scenario()
    decider = Controlled(one)
    requests = [draw_request(generator(place), "code", 150, 300) for place in range(6)]
    served = serve_each(one, decider, requests)
    assert statistics.fmean(answer.ratio for answer in served[-3:]) > 1.35
    assert decider.control.modes[False].gain(0.5) > 0.3


# ------------------------------------------------------------------------------------------------- reasons


def test_no_reason_is_given_before_the_first_token_or_for_active_drafters() -> None:
    own = control()
    answer = own.answer(prompt_tokens=9)
    assert answer.why_off("model") is None
    answer.began(1.0, STEP_S)
    assert answer.why_off("lookup") is None
    why = answer.why_off("model")
    assert why is not None
    assert why.code == "answer_too_short"
    assert drafting(own).why_off("model") is None


def test_a_drafter_that_does_not_pay_pauses_for_a_while() -> None:
    answer = drafting(control())
    while answer.allow("model", 1).depth:
        answer.record(replace(round_of(4, 1), draft_s=0.03, draft_forwards=3, round_s=0.07))
    why = answer.why_off("model")
    assert why is not None
    assert (why.code, why.text) == (
        "not_paying_now",
        "the drafting model's guesses did not pay in this answer; it may guess again in the next",
    )
    for _ in range(FIRST_REST - 1):
        assert answer.allow("model", 1).depth == 0
        answer.record(round_of())


def test_an_answer_that_was_long_enough_is_not_called_too_short() -> None:
    rare = DepthControl(believed(NATIVE), NATIVE.depth_cap, history=replace(NO_HISTORY, greedy=(20.0, 2000.0, 0.0)))
    why = begun(rare).why_off("model")
    assert why is not None
    assert (why.code, why.text.partition(";")[0]) == (
        "not_paying_now",
        "the drafting model's guesses hardly paid in recent answers",
    )
    why = begun(control()).why_off("model")
    assert why is not None
    assert why.text.endswith("longer answers get guesses")


def test_without_calibration_plain_speed_is_measured_but_no_token_drafted() -> None:
    own = DepthControl(Costs(), 7)
    for _ in range(4):
        answer = own.answer(prompt_tokens=9)
        assert answer.plain_tokens_per_s is None
        answer.began(1.0, 0.05)
        answer.record(round_of(1, 1))
        assert answer.allow("model").depth == 0
        assert not answer.buys_load("model")
        assert answer.why_off("model") == NOT_CALIBRATED
    assert answer.plain_tokens_per_s == pytest.approx(1.0 / round_of().verify_s)
    closed = DepthControl(believed(NATIVE), 0).answer(prompt_tokens=9)
    assert (closed.allow("model").depth, closed.why_off("model")) == (0, None)


def test_a_model_without_a_measured_cost_never_drafts() -> None:
    costs = believed(NATIVE)
    answer = begun(DepthControl(replace(costs, drafts={"lookup": costs.drafts["lookup"]}), 7))
    answer.learn("model", (), [True] * 7)
    answer.learn_alternatives("model", (0.5,), [True])
    assert answer.allow("model").depth == 0
    assert answer.why_off("model") == NOT_CALIBRATED


def test_a_free_source_needs_no_price_and_is_learned_from() -> None:
    own = DepthControl(replace(believed(NATIVE), drafts={}), 7)
    answer = begun(own)
    assert answer.allow_free("new").depth > 0

    def believed_now() -> float:
        gate = answer.allow_free("new").gate
        assert isinstance(gate, PricedGate)
        return gate.believes(0.5)

    assert believed_now() == pytest.approx(0.5, abs=0.1), "as it claims"
    for _ in range(50):
        answer.learn("new", (0.5,), [True])
    assert believed_now() > 0.9
    assert own.priors()["new"].by_confidence[5] is not None


def test_a_free_source_is_allowed_from_the_first_token_and_gated() -> None:
    answer = begun(control())
    for _ in range(50):
        answer.learn("lookup", (0.55,), [False])
    allowance = answer.allow_free("lookup")
    assert allowance.depth > 0
    assert allowance.gate is not None
    assert not allowance.gate.admits(0.55, None)


def test_a_round_with_the_model_gains_as_much_as_its_rounds_do() -> None:
    answer = drafting(control())
    assert answer.prefers("model", USUAL_GAIN - 0.01), "the answer has been plain so far"
    assert not answer.prefers("model", USUAL_GAIN + 0.01)
    for _ in range(200):
        answer.record(round_of(4, 3))
    gain = 3 / (NATIVE.forward_s(4, 100) / NATIVE.forward_s(1, 100)) - 1
    assert answer.prefers("model", 0.85 * gain)
    assert not answer.prefers("model", 1.15 * gain)
    for _ in range(200):
        answer.record(round_of(4, 1))
    assert not answer.prefers("model", 0.01)
    assert answer.prefers("model", 0.0), "there is nothing else to guess with"


def test_rounds_that_are_fast_because_of_free_guesses_earn_the_model_no_trust() -> None:
    trusted, rivalled = drafting(control()), drafting(control())
    for _ in range(30):
        trusted.prefers("model", 0.0)
        rivalled.prefers("model", 1.5)
        for answer in (trusted, rivalled):
            answer.record(round_of(4, 3, factor=1.2))
    assert trusted.why_off("model") is None
    assert rivalled.why_off("model") is not None


# ------------------------------------------------------------------------------------------------------- loading


def test_a_load_starts_once_and_no_times_are_learned_until_it_ends() -> None:
    own = control(load_s=0.2)
    own.lengths = Lengths([400] * 20)
    answer = begun(own)
    assert not own.answer(prompt_tokens=9).buys_load("model"), "no load before the first token"
    assert answer.buys_load("model", 100)
    assert not answer.buys_load("model", 100)
    before = own.times.factor if own.times is not None else 0.0
    spent_s = answer.ledger.room_s
    for _ in range(5):
        answer.record(round_of(factor=3.0))
    assert own.times is not None
    assert own.times.factor == before
    assert answer.ledger.room_s < spent_s - 5 * 1.8 * STEP_S, "a round during a load counts toward the load's cost"
    assert answer.allow("model", 105).depth > 0
    answer.record(round_of(factor=3.0))
    assert begun(own).buys_load("model", 100), "another answer uses the same load, already paid for"


def test_a_load_that_costs_more_than_the_answer_may_lose_waits() -> None:
    own = control(load_s=5.0)
    own.lengths = Lengths([400] * 20)
    answer = begun(own)
    assert not answer.buys_load("model", 100)
    assert begun(own).allow("model", 100).depth > 0, "a drafter that is asked is loaded"


def test_missed_savings_are_counted_until_they_pay_for_the_load() -> None:
    own = control(load_s=2.0)
    for _ in range(6):
        own.lengths.known.append(60)
    begun_at = own.missed_s
    answer = begun(own, prompt_s=100.0)
    for _ in range(59):
        assert not answer.buys_load("model", 100)
        answer.record(round_of())
    assert own.missed_s > begun_at
    for _ in range(20):
        answer.end()
        answer = begun(own, prompt_s=100.0)
        for _ in range(40):
            if answer.buys_load("model", 100):
                return
            answer.record(round_of())
    raise AssertionError("never loaded")


def test_estimated_times_are_used_until_the_drafter_was_timed() -> None:
    """Three times as expensive as estimated: the first purchase detects it; later only a few tokens are read."""
    own = DepthControl(replace(believed(NATIVE), measured=False), 7)
    answer = drafting(own)
    while answer.allow("model", 1).depth:
        answer.record(replace(round_of(4, 1), draft_s=0.12, draft_forwards=3, round_s=0.16))
    answer.end()
    answer, looks = begun(own), 0
    for _ in range(300):
        if answer.allow("model", 100).depth:
            assert answer.why_off("model") is not None
            looks += 1
            answer.learn_hindsight("model", [True] * HINDSIGHT)
            answer.record(replace(round_of(2, 1), draft_s=0.04, draft_forwards=1, round_s=0.08))
        else:
            answer.record(round_of())
    assert looks <= 3
    good = DepthControl(replace(believed(NATIVE), measured=False), 7)
    answer = drafting(good)
    for _ in range(20):
        answer.allow("model", 1)
        answer.record(replace(round_of(4, 4), draft_s=0.03, draft_forwards=3, round_s=0.07))
    answer.end()
    assert drafting(good).allow("model", 1).depth > 0


# --------------------------------------------------------------------------------------------- times and clocks


def test_plain_decoding_is_timed_sooner_after_a_change_of_pace() -> None:
    answer = begun(control())
    for _ in range(8):
        assert answer.allow_free("lookup").depth > 0
        answer.record(round_of(4, 4))
    allowed = []
    for _ in range(8):
        allowed.append(answer.allow_free("lookup").depth > 0)
        answer.record(round_of(4, 4, factor=MOVED * 1.2) if allowed[-1] else round_of(factor=MOVED * 1.2))
    assert not all(allowed)
    assert PLAIN_AGAIN < PLAIN_EVERY


@pytest.mark.parametrize("jump_s", [-5.0, -0.03, 0.0, 1e7, math.nan, math.inf])
def test_a_clock_jump_does_not_change_the_depth(jump_s: float) -> None:
    answer = drafting(control())
    for place in range(40):
        allowance = answer.allow("model", 1)
        own = round_of(4, 4) if allowance.depth else round_of()
        if allowance.depth:
            own = replace(own, draft_s=0.03, draft_forwards=3, round_s=own.verify_s + 0.03)
        if place % 7 == 3:
            own = replace(own, round_s=jump_s, draft_s=jump_s if place % 2 else own.draft_s)
        answer.record(own)
    assert answer.allow("model", 1).depth == 7
    assert answer.ledger.room_s > 0


def test_a_session_with_a_long_context_does_not_change_another_sessions_depth() -> None:
    own = control()
    short, long = drafting(own), begun(own, 6000)
    before = short.allow("model", 1)
    long.record(round_of(context=6000))
    after = short.allow("model", 1)
    assert (after.depth, after.window) == (before.depth, before.window)
    assert short._now == pytest.approx(own.times.all_now(short._context) if own.times is not None else [])


# ---------------------------------------------------------------------------------------------- memory of answers


def test_sampled_and_greedy_answers_learn_separately() -> None:
    own = control()
    greedy, sampled = begun(own), begun(own, sampled=True)
    for _ in range(20):
        greedy.learn("model", (), [True])
        sampled.learn("model", (), [False])
    priors = own.priors()
    assert set(priors) == {"model", "model" + SAMPLED}
    assert (priors["model"].by_position[0] or 0.0) > 0.8
    assert (priors["model" + SAMPLED].by_position[0] or 1.0) < 0.3
    once = DepthControl(believed(NATIVE), 7, {"model": priors["model"]})
    begun(once, sampled=True)
    first = once.modes[True].sources["model"].by_position(1)[0]
    assert first == pytest.approx(priors["model"].by_position[0]), (
        "without a prior for sampled answers the greedy one is used"
    )
    assert own.modes[True] is not own.modes[False]


def test_a_history_survives_json_and_malformed_ones_are_refused() -> None:
    own = control()
    answer = drafting(own)
    answer.record(replace(round_of(4, 4), draft_s=0.03, draft_forwards=3, round_s=0.07))
    answer.end()
    stored = own.history()
    assert stored.lengths == (answer._done,)
    assert stored.greedy[0] > 0
    assert stored.sampled == (0.0,) * 3
    again = DepthControl(believed(NATIVE), 7, None, read(History, to_json(stored)))
    assert again.history() == stored
    assert again.modes[False].sums == own.modes[False].sums
    once = {**to_json(stored), "greedy": [*stored.greedy, 7.0]}
    assert read(History, once) == stored, "there was a fourth sum"
    for change in ({"greedy": [1.0]}, {"lengths": [-1]}, {"sampled": [math.nan] * 4}, {"greedy": None}):
        with pytest.raises((ValueError, TypeError)):
            read(History, {**to_json(stored), **change})


def test_new_measurements_keep_experience_and_add_missing_priors() -> None:
    own = control()
    begun(own).learn("model", (0.9,) * 50, [True] * 50)
    before = own.priors()
    sure = AcceptancePrior(by_position=(0.1,) * 8)
    own.replan(believed(NATIVE), 5, {"model": sure, "lookup": sure})
    assert own.priors() == {**before, "lookup": sure}
    assert begun(own, prompt_s=100.0).allow_free("lookup").depth <= 5
    own.replan(replace(believed(NATIVE), drafts={}), 5)
    assert begun(own).why_off("model") == NOT_CALIBRATED
    own.replan(Costs(), 5)
    assert own.answer(prompt_tokens=1).why_off("model") is None or own.priors() == {**before, "lookup": sure}


def test_threads_can_share_a_depth_control() -> None:
    own = control()
    errors: list[BaseException] = []
    begin = threading.Barrier(4)

    def work(right: bool) -> None:
        try:
            begin.wait()
            for place in range(6):
                answer = begun(own, sampled=place % 2 == 0)
                for step in range(50):
                    for source in ("model", "lookup"):
                        allowance = (
                            answer.allow_free(source) if source == "lookup" else answer.allow(source, step % 3)
                        )
                        assert 0 <= allowance.depth <= 7
                        if allowance.gate is not None:
                            allowance.gate.admits(0.5, None)
                        answer.learn(source, (0.5, 0.6), [True, right])
                        answer.why_off(source)
                    answer.record(replace(round_of(3, 2 + right), draft_s=0.02, draft_forwards=2, round_s=0.06))
                own.priors()
                own.replan(believed(NATIVE), 7)
                answer.end()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(right,)) for right in (True, True, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(own.history().lengths) == 24


def test_a_plan_that_gets_a_drafter_or_new_priors_does_not_disturb_a_running_answer() -> None:
    """The times of a drafter that was loaded, or measured by another process, come at any time."""
    sure = AcceptancePrior(by_position=(0.9,) * 8)
    for before, sampled in itertools.product((replace(believed(NATIVE), drafts={}), believed(NATIVE)), (False, True)):
        own = DepthControl(before, 5)
        answer = own.answer(prompt_tokens=100, most=200, sampled=sampled)
        own.replan(believed(NATIVE), 5, dict.fromkeys(("model", "model" + SAMPLED, "lookup"), sure))
        answer.began(0.01, before.curves.curves[0].plain_s if before.curves else 0.01)
        assert answer.allow("model", 100, 0).depth >= 0
        answer.learn_hindsight("model", (True, False))
        answer.learn("model", (0.5,), (True,))
        assert own.known("model", sampled=sampled).overall > 0.85, "from its prior"
