"""A one-pass drafter in planning: its forward's time by width, the length of its chain, and its plan's words."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.choice.options import Candidate, Ranking
from edgespec.planning.choice.planner import decide, make_plan
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import (
    ContextCurves,
    Curve,
    DraftCost,
    choose_depth,
    drafting_speedup,
    round_seconds,
)
from edgespec.planning.cost.widths import WidthProbe
from edgespec.planning.depth.answer import AnswerDepth
from edgespec.planning.depth.base import OFF
from edgespec.planning.depth.control import DepthControl
from edgespec.planning.depth.price import LEAST_READ, chain_at_once, drafting_slowness
from tests.planning.test_plan_made import FACTS
from tests.planning.test_ranking import APART, ROOMY, drafter, target
from tests.support.planning import SMALL, model_facts, request

GROWING = Curve(widths=(1, 4, 12), forward_s=(0.010, 0.013, 0.021))  # 1 ms a row
ONE_PASS = DraftCost(one_pass=GROWING, lag_token_s=0.0005)
FLAT = Curve(widths=(1, 16), forward_s=(0.1, 0.1))


def record(**changes: object) -> RoundRecord:
    values: dict[str, object] = {
        "width": 5,
        "context_length": 100,
        "proposed": 4,
        "evaluated": 4,
        "accepted": 4,
        "invalid": 0,
        "emitted": 5,
        "source": "model",
        "draft_s": 0.0,
        "sync_s": 0.0,
        "verify_s": 0.1,
        "round_s": 0.1,
        "draft_forwards": 1,
    }
    return RoundRecord(**{**values, **changes})  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------- the forward's time


def test_a_one_pass_forward_takes_the_time_of_its_width() -> None:
    assert ONE_PASS.seconds(0) == 0.0
    assert ONE_PASS.seconds(0, lag=9) == 0.0
    assert [ONE_PASS.seconds(depth) for depth in (1, 4, 8)] == pytest.approx([0.010, 0.013, 0.017])
    assert ONE_PASS.seconds(4, lag=4) == pytest.approx(0.017), "read and drafted in the same forward"
    assert ONE_PASS.seconds(4, lag=8) == pytest.approx(0.021)
    assert ONE_PASS.seconds(4, lag=108) == pytest.approx(0.021 + 100 * 0.0005), "the rest is a prompt"
    assert ONE_PASS.seconds(20, lag=2) == pytest.approx(0.029 + 2 * 0.0005), "deeper than was measured"
    later = replace(ONE_PASS, round_s=0.002)
    assert later.seconds(4) == pytest.approx(0.015)
    slower = later.scaled(2.0)
    assert slower.seconds(4, lag=4) == pytest.approx(2 * later.seconds(4, lag=4))
    assert slower.seconds(4, lag=30) == pytest.approx(2 * later.seconds(4, lag=30))
    assert later.scaled(1.0) == later


def test_in_a_round_a_one_pass_drafter_reads_what_the_round_before_committed() -> None:
    assert ONE_PASS.usual_seconds(4, 1.0) == ONE_PASS.seconds(4)
    assert ONE_PASS.usual_seconds(4, 3.5) == ONE_PASS.seconds(4, lag=3)
    assert ONE_PASS.usual_seconds(0, 3.5) == 0.0
    ordinary = DraftCost(token_s=0.01, lag_token_s=0.003)
    assert ordinary.usual_seconds(4, 3.5) == ordinary.seconds(4), "it read its own tokens while drafting"
    assert (ONE_PASS.forwards(0), ONE_PASS.forwards(1), ONE_PASS.forwards(7)) == (0, 1, 1)
    assert [ordinary.forwards(depth) for depth in (0, 1, 7)] == [0, 1, 7]
    assert round_seconds(FLAT, ONE_PASS, 4, 3.5) == pytest.approx(0.116)


@pytest.mark.parametrize("acceptance", [(0.5,), (0.9,), (0.9, 0.7, 0.5)])
def test_the_best_depth_of_a_one_pass_drafter_is_found_by_trying_each(acceptance: tuple[float, ...]) -> None:
    target_curve = Curve(widths=(1, 8, 12), forward_s=(0.03, 0.034, 0.05))
    best, rates = choose_depth(target_curve, ONE_PASS, acceptance, 11), [1 / 0.03]
    tokens, survives = 1.0, 1.0
    for depth in range(1, 12):
        survives *= acceptance[min(depth, len(acceptance)) - 1]
        tokens += survives
        rates.append(tokens / round_seconds(target_curve, ONE_PASS, depth, tokens))
    assert best.depth == max(range(12), key=rates.__getitem__)
    assert best.tokens_per_s == pytest.approx(max(rates))
    full = acceptance + (acceptance[-1],) * (11 - len(acceptance))
    assert drafting_speedup(target_curve, ONE_PASS, full) == pytest.approx(max(rates[1:]) * 0.03)


# ------------------------------------------------------------------------------------------- the length of a chain


def gain(length: int, rates: list[float], read: int, worth: float, forward_s: list[float]) -> float:
    gained, survives = 0.0, 1.0
    for probability in rates[:length]:
        survives *= probability
        gained += survives
    return gained - worth * (ONE_PASS.seconds(length, read) + forward_s[length])


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("read", [0, 4, 40])
def test_a_one_pass_chain_has_the_length_that_gains_the_most(rate: float, read: int) -> None:
    forward_s = [0.030, 0.031, 0.032, 0.033, 0.034, 0.036, 0.04, 0.06, 0.08]
    for worth in (20.0, 33.3, 70.0):
        found = chain_at_once(forward_s, ONE_PASS, read, [rate] * 8, worth)
        assert found == max(range(1, 9), key=lambda length: gain(length, [rate] * 8, read, worth, forward_s))


def test_worse_later_tokens_shorten_a_one_pass_chain_and_other_drafters_have_no_fixed_length() -> None:
    forward_s = [0.03 + 0.001 * width for width in range(9)]
    assert chain_at_once(forward_s, ONE_PASS, 0, [0.9] * 8, 33.0) == 8
    assert chain_at_once(forward_s, ONE_PASS, 0, [0.9, 0.9, 0.05, *[0.05] * 5], 33.0) == 2
    assert chain_at_once(forward_s, ONE_PASS, 0, [0.0] * 8, 33.0) == 1, "at least one token is drafted"
    assert chain_at_once(forward_s, DraftCost(token_s=0.01), 0, [0.9] * 8, 33.0) is None


def test_slowness_is_the_time_over_that_of_the_same_forward() -> None:
    usual = record(draft_s=2 * ONE_PASS.seconds(5, 3))
    assert drafting_slowness(ONE_PASS, usual, 1.0, 3, 5) == pytest.approx((2.0, 2.0))
    assert drafting_slowness(ONE_PASS, usual, 2.0, 3, 5) == pytest.approx((1.0, 1.0))
    assert drafting_slowness(ONE_PASS, record(draft_s=ONE_PASS.seconds(1)), 1.0, 0, 0) == pytest.approx((1.0, 1.0))
    ordinary = DraftCost(token_s=0.01, lag_token_s=0.001)
    assert drafting_slowness(ordinary, record(draft_s=0.06, draft_forwards=3), 1.0, 0, 0) == (
        None,
        pytest.approx(2.0),
    )
    caught_up = record(draft_s=0.09, sync_s=0.06, draft_forwards=2)
    assert drafting_slowness(ordinary, caught_up, 1.0, 20, 0) == pytest.approx((2.0, 3.0))
    only = record(draft_s=0.06, sync_s=0.06, draft_forwards=1)
    assert drafting_slowness(ordinary, only, 1.0, 20, 0) == pytest.approx((2.0, 2.0))


# ---------------------------------------------------------------------------------------------------- the policy


def answering() -> tuple[DepthControl, AnswerDepth]:
    costs = Costs(
        curves=ContextCurves(contexts=(0,), curves=(Curve(widths=(1, 12), forward_s=(0.04, 0.045)),)),
        drafts={"model": DraftCost(one_pass=GROWING.scaled(0.5), lag_token_s=0.0005)},
    )
    control = DepthControl(costs, 7)
    answer = control.answer(prompt_tokens=100)
    assert isinstance(answer, AnswerDepth)
    answer.began(10.0, 0.04)
    return control, answer


def test_the_policy_names_the_length_of_a_one_pass_chain() -> None:
    control, answer = answering()
    assert control.possible > 2
    for _ in range(40):
        answer.record(
            record(width=1, proposed=0, emitted=1, source=None, draft_forwards=0, round_s=0.04, verify_s=0.04)
        )
    first = answer.allow("model", 4)
    assert (first.depth, first.chain) == (1, 1), "the drafter's speed is timed first"
    answer.record(record(width=2, proposed=1, emitted=2, draft_s=0.0065, round_s=0.047, verify_s=0.0405))
    for _ in range(6):
        allowance = answer.allow("model", 4)
        assert allowance is not OFF
        assert allowance.chain is not None
        answer.learn("model", [0.9] * allowance.chain, [True] * allowance.chain)
        emitted = allowance.chain + 1
        drafted = GROWING.scaled(0.5).seconds(allowance.chain + 4)
        answer.record(
            record(
                width=emitted,
                proposed=emitted - 1,
                emitted=emitted,
                draft_s=drafted,
                verify_s=0.042,
                round_s=0.042 + drafted,
            )
        )
    assert allowance.depth == allowance.chain == 7, "right guesses lengthen the chain"
    price = control.price("model", answer._times, 100)
    assert price is not None
    assert price.seconds(7) == pytest.approx(GROWING.scaled(0.5).seconds(7), rel=0.1), "as calibrated"
    for _ in range(90):
        answer.learn("model", [0.9, 0.9], [True, False])
    shorter = answer.allow("model", 4)
    assert shorter.chain is not None
    assert shorter.chain < shorter.depth, "a tree may have more nodes than the chain"


def test_a_slow_one_pass_forward_raises_the_price_of_drafting_and_a_long_one_that_of_reading() -> None:
    control, answer = answering()
    times = answer._times
    expected_s = control.costs.drafts["model"].seconds(5, 3)
    for _ in range(5):
        assert control.learn_price(record(draft_s=3 * expected_s), 1.0, 3, 5)
    price = control.price("model", times, 100)
    assert price is not None
    assert price.seconds(5, 3) == pytest.approx(3 * expected_s, rel=0.01)
    assert not control._slow_reading, "three tokens say nothing about reading a text"
    long_s = control.costs.drafts["model"].seconds(5, LEAST_READ)
    assert control.learn_price(record(draft_s=2 * long_s), 1.0, LEAST_READ, 5)
    assert list(control._slow_reading) == pytest.approx([2.0])


TARGET_S = [0.034 + 0.001 * extra for extra in range(8)]  # by drafted tokens
PROMPT_S = 0.5
DRAFT_S = [0.008 + 0.0008 * rows for rows in range(13)]  # by the rows of its forward


def answer_seconds(control: DepthControl, rate: float, tokens: int, seed: int, slower: float = 1.0) -> float:
    """Seconds of an answer, prompt included, whose drafted tokens are each right with probability ``rate``.

    The drafter's forwards take ``slower`` times as long as calibrated.
    """
    random, done, spent_s = np.random.default_rng(seed), 1, 0.0
    first = known = 0  # the drafter's cache holds the tokens from ``first`` to ``known``
    answer = control.answer(prompt_tokens=100)
    answer.began(PROMPT_S - TARGET_S[0], TARGET_S[0])
    while done < tokens:
        context = 100 + done
        allowed = answer.allow("model", context - 1 - known, first)
        chain = min(allowed.chain or 0, tokens - done)
        draft_s, forwards, sync_s = 0.0, int(chain > 0), 0.0
        if chain:
            begins = 0 if allowed.window is None else max(0, context - 1 - allowed.window)
            if not known or (allowed.window is not None and not first <= begins <= known):
                first = known = begins
            lag = context - 1 - known
            draft_s = slower * (DRAFT_S[min(12, chain + lag)] + 0.001 * max(0, lag - 12 + chain))
            sync_s, known = draft_s if lag > 8 else 0.0, context
        right = random.random(chain) < rate
        if chain and allowed.hindsight:
            answer.learn_hindsight("model", (random.random(allowed.hindsight) < rate).tolist())
        gate, sure = allowed.gate, np.clip(rate + 0.2 * (right - 0.5), 0.0, 1.0)  # tells a little of right from wrong
        admitted = (gate is None or gate.admits(sure[place], None) for place in range(chain))
        kept = len(list(itertools.takewhile(bool, admitted)))
        accepted = next((place for place in range(kept) if not right[place]), kept)
        evaluated = min(kept, accepted + 1)
        answer.learn("model", sure[:evaluated].tolist(), right[:evaluated].tolist())
        emitted = min(accepted + 1, tokens - done)
        verify_s = TARGET_S[kept]
        answer.record(
            record(
                width=kept + 1,
                context_length=context,
                proposed=kept,
                evaluated=evaluated,
                accepted=accepted,
                emitted=emitted,
                source="model" if chain else None,
                draft_s=draft_s,
                sync_s=sync_s,
                verify_s=verify_s,
                round_s=verify_s + draft_s,
                draft_forwards=forwards,
            )
        )
        spent_s += verify_s + draft_s
        done += emitted
    answer.end()
    return PROMPT_S + spent_s


def calibrated() -> DepthControl:
    target_curve = Curve(widths=tuple(range(1, 9)), forward_s=tuple(TARGET_S))
    forward = Curve(widths=tuple(range(1, 13)), forward_s=tuple(DRAFT_S[1:13]))
    return DepthControl(
        Costs(
            curves=ContextCurves(contexts=(0,), curves=(target_curve,)),
            drafts={"model": DraftCost(one_pass=forward, lag_token_s=0.001)},
        ),
        7,
    )


@pytest.mark.parametrize("slower", [1.0, 1.3])
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5])
def test_answers_lose_at_most_a_tenth_with_a_wrong_or_slow_one_pass_drafter(rate: float, slower: float) -> None:
    control, ratios = calibrated(), []
    for seed, tokens in enumerate([3, 20, 60, 120, 300, 40, 200, 90, 500, 12] * 3):
        plain_s = PROMPT_S + (tokens - 1) * TARGET_S[0]
        ratios.append(answer_seconds(control, rate, tokens, seed, slower) / plain_s)
    assert max(ratios) < 1.12
    assert sum(ratios) / len(ratios) < 1.04


@pytest.mark.parametrize("rate", [0.6, 0.7, 0.8, 0.9])
def test_a_right_one_pass_drafter_gains_what_its_forward_leaves(rate: float) -> None:
    control, tokens = calibrated(), 1200
    seconds = [answer_seconds(control, rate, tokens, seed) for seed in range(6)]
    target_curve = Curve(widths=tuple(range(1, 9)), forward_s=tuple(TARGET_S))
    best = choose_depth(target_curve, control.costs.drafts["model"], (rate,), 7)
    gained = (tokens - 1) * TARGET_S[0] / (np.mean(seconds[1:]) - PROMPT_S)
    assert best.speedup > 1.4
    assert gained > 0.92 * best.speedup


# ------------------------------------------------------------------------------------------------------ the plan


def ranked(mode: str = "auto") -> Ranking:
    one = replace(drafter("GPU0"), cost=ONE_PASS)
    found = decide(request("model", mode=mode), [target()], [one], ROOMY, APART)
    assert found is not None
    return found


def test_a_plan_reads_a_one_pass_drafters_weights_once_a_round() -> None:
    best = ranked().best
    assert isinstance(best, Candidate)
    assert (best.mode, best.depth) == ("serial", 7)
    assert best.memory_bound_speedup == pytest.approx(best.tokens_per_round / (1 + 1 / 4))
    assert best.round_s == pytest.approx(0.1 + ONE_PASS.usual_seconds(7, best.tokens_per_round), abs=0.001)


def test_a_one_pass_drafter_is_planned_serially_with_a_reason() -> None:
    refused = [one for one in ranked().rejected if one.mode == "pipelined"]
    assert [one.verdict.code for one in refused] == ["drafter_one_pass"]
    assert "all tokens in one forward" in refused[0].sentence
    assert ranked("pipelined").best.mode == "plain"


@pytest.mark.parametrize("one_pass", [True, False])
def test_a_plan_says_that_the_drafter_drafts_all_tokens_in_one_forward(one_pass: bool) -> None:
    costs = Costs(plain_s=0.1, drafts={"model": ONE_PASS}, contention=Contention())
    probe = WidthProbe(widths=tuple(range(1, 9)), complete=True)
    for depth in ("auto", 3):
        small = model_facts("small", mask_id=5 if one_pass else None)
        wanted = request("model", depth=depth, drafters=(replace(SMALL, facts=small),))
        plan = make_plan(wanted, FACTS, probe, (), costs, ranked() if depth == "auto" else None)
        assert ("the drafter drafts all tokens in one forward" in plan.reasons) == one_pass
        assert ("drafter_one_pass" in [reason.code for reason in plan.why]) == one_pass


def test_an_unmeasured_one_pass_drafter_has_no_predicted_speed() -> None:
    assert decide(request("model", depth=3), [target()], [], ROOMY, APART) is None
