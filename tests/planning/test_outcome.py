"""A plan is held to its word: what answers got, what that says of times and mode, and what two that agree change."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from edgespec.files.checked import read, to_json
from edgespec.interfaces.model import Company
from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.choice.settled import Answered, Settled
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, ContextCurves, Curve, DraftCost
from edgespec.planning.cost.margins import TREES_GAIN
from edgespec.planning.depth.answer import AnswerDepth
from edgespec.planning.depth.control import DepthControl
from edgespec.planning.depth.outcome import (
    DEARER,
    LEAST_ROUNDS,
    LEAST_STEP_S,
    NEAR,
    WRONG,
    Outcome,
    Seen,
    Spread,
)
from edgespec.planning.depth.price import LOOK
from tests.support.drawn_requests import NATIVE, Scenario, believed, prior_of
from tests.support.simulated_clock import Controlled, serve_all

STEP_S, DRAFT_S = 0.1, 0.02
FLAT = Curve(widths=(1, 16), forward_s=(STEP_S, STEP_S))
COSTS = Costs(
    curves=ContextCurves(contexts=(0,), curves=(FLAT,)),
    drafts={"model": DraftCost(token_s=DRAFT_S)},
    contention=Contention(),
)
CAP = 4


# ------------------------------------------------------------------------------------------------ what was seen


def test_the_intervals_are_those_of_the_rounds() -> None:
    seen = Seen()
    for tokens, seconds in ((1, 0.1), (3, 0.1), (1, 0.1), (3, 0.1)):
        seen.add(tokens, seconds)
    assert seen.tokens_per_round.mean == 2.0
    off = 3.182 * statistics.stdev((1, 3, 1, 3)) / 2
    assert seen.tokens_per_round.high - seen.tokens_per_round.low == pytest.approx(2 * off, rel=0.002)
    assert seen.token_s.mean == pytest.approx(0.05)
    assert seen.token_s.low < 0.05 < seen.token_s.high


@pytest.mark.parametrize(("rounds", "quantile"), [(3, 4.303), (5, 2.776), (9, 2.306), (31, 2.042), (1001, 1.962)])
def test_the_interval_of_few_rounds_is_that_of_students_t(rounds: int, quantile: float) -> None:
    seen, values = Seen(), [1 + at % 2 for at in range(rounds)]
    for tokens in values:
        seen.add(tokens, 0.1)
    off = quantile * statistics.stdev(values) / math.sqrt(rounds)
    assert seen.tokens_per_round.high - seen.tokens_per_round.mean == pytest.approx(off, rel=0.01)


def test_rounds_that_all_take_the_same_time_for_each_token_have_no_spread() -> None:
    seen = Seen()
    for tokens in (1, 2, 4, 3):
        seen.add(tokens, 0.02 * tokens)
    assert seen.token_s.low == pytest.approx(0.02)
    assert seen.token_s.high == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("drafting", "widths", "verdict"),
    [
        ([1.1, 0.9, 1.0], [1.0], "measured"),
        ([2.0, 2.1, 1.9], [1.0], "estimated"),
        ([0.5], [], "estimated"),
        ([1.0, 1.1], [2.0, 2.0], "estimated"),
        ([1.0, 1.0, 2.0, 1.0, 1.0], [], "measured"),  # one stall
        ([], [], None),
        ([], [1.0], None),
        ([], [0.5], "estimated"),
    ],
)
def test_times_are_contradicted_by_three_in_four_of_the_ratios(
    drafting: list[float], widths: list[float], verdict: str | None
) -> None:
    assert Seen(drafting=drafting, widths=widths).times() == verdict


def test_a_ratio_is_wrong_beyond_the_bound_only() -> None:
    assert Seen(drafting=[WRONG]).times() == "measured"
    assert Seen(drafting=[1.01 * WRONG]).times() == "estimated"
    assert Seen(drafting=[1.0 / WRONG]).times() == "measured"


# ----------------------------------------------------------------------------------------- outcomes of answers


def record(**changes: Any) -> RoundRecord:
    """A round; by default a plain one."""
    values: dict[str, Any] = {
        "width": 1,
        "context_length": 50,
        "proposed": 0,
        "evaluated": 0,
        "accepted": 0,
        "invalid": 0,
        "emitted": 1,
        "source": None,
        "draft_s": 0.0,
        "sync_s": 0.0,
        "verify_s": STEP_S,
        "round_s": STEP_S,
    }
    return RoundRecord(**{**values, **changes})


def drafted(tokens: int = 2, slower: float = 1.0) -> RoundRecord:
    """A serial round in which one of two guesses is right."""
    draft_s = slower * 2 * DRAFT_S
    return record(
        width=3,
        proposed=2,
        evaluated=2,
        accepted=tokens - 1,
        emitted=tokens,
        source="model",
        draft_s=draft_s,
        round_s=STEP_S + draft_s,
        draft_forwards=2,
    )


def overlapped(accepted: int, round_s: float = STEP_S) -> RoundRecord:
    """A pipelined round that compares a guess."""
    parallel = {"source": "model", "round_s": round_s, "overlapped": True}
    return record(width=2, proposed=1, evaluated=1, accepted=accepted, **parallel)


def answer(costs: Costs = COSTS, **settings: Any) -> AnswerDepth:
    own = DepthControl(costs, CAP, **settings).answer(prompt_tokens=50)
    assert isinstance(own, AnswerDepth)
    own.began(0.5, STEP_S)
    return own


def outcome_of(own: AnswerDepth, *records: RoundRecord) -> Outcome:
    for each in records:
        own.record(each)
    own.end()
    found = own.outcome()
    assert found is not None
    return found


def test_a_serial_answer_that_drafts_as_measured_confirms_the_times() -> None:
    found = outcome_of(answer(), record(), *[drafted()] * 6)
    assert (found.times, found.mode, found.rounds) == ("measured", None, 7)
    assert found.tokens_per_round.mean == pytest.approx(13 / 7)
    assert found.token_s.mean == pytest.approx((STEP_S + 6 * (STEP_S + 2 * DRAFT_S)) / 13)


@pytest.mark.parametrize("slower", [0.5, 2.0])
def test_a_drafter_that_is_not_as_fast_as_measured_contradicts_the_times(slower: float) -> None:
    assert outcome_of(answer(), record(), *[drafted(slower=slower)] * 6).times == "estimated"


def test_a_drafter_is_not_judged_beyond_the_context_at_which_it_was_timed() -> None:
    for context, times in ((NEAR, "estimated"), (NEAR + 1, None)):
        slow = replace(drafted(slower=2.0), context_length=context)
        assert outcome_of(answer(), record(), *[slow] * 6).times == times


@pytest.mark.parametrize("pace", [0.5, 2.0])
def test_a_machine_that_is_slower_as_a_whole_says_nothing_against_the_ratios(pace: float) -> None:
    plain, guessing = (
        replace(each, verify_s=pace * STEP_S, draft_s=pace * each.draft_s, round_s=pace * each.round_s)
        for each in (record(), drafted())
    )
    assert outcome_of(answer(), *[plain] * 6).times is None
    assert outcome_of(answer(), *[plain] * 6, *[guessing] * 6).times == "measured"


def test_estimated_times_are_not_judged() -> None:
    assert outcome_of(answer(replace(COSTS, measured=False)), record(), *[drafted(slower=2.0)] * 6).times is None


def test_without_a_drafting_model_no_time_is_judged() -> None:
    wide = record(width=3, verify_s=2 * STEP_S, round_s=2 * STEP_S, source="lookup")
    for drafts, times in ((COSTS.drafts, "estimated"), ({"lookup": FREE}, None)):
        assert outcome_of(answer(replace(COSTS, drafts=drafts)), record(), *[wide] * 6).times == times


def test_steps_so_short_that_python_is_a_part_of_them_tell_nothing() -> None:
    for share, times in ((1.5, "estimated"), (0.5, None)):
        tiny = share * LEAST_STEP_S / STEP_S
        plain, slow = (
            replace(each, verify_s=tiny * STEP_S, draft_s=tiny * each.draft_s, round_s=tiny * each.round_s)
            for each in (record(), drafted(slower=2.0))
        )
        assert outcome_of(answer(), *[plain] * 6, *[slow] * 6).times == times


@pytest.mark.parametrize(
    ("steps", "checked", "looks"), [(1.5, False, True), (1.5, True, False), (10.0, False, False), (0.2, True, False)]
)
def test_a_drafter_that_could_pay_if_it_were_twice_as_fast_is_timed_until_answers_confirmed_its_times(
    steps: float, checked: bool, looks: bool
) -> None:
    """One token after twenty that it reads, whatever it seems worth: the drafter and a wider forward are timed."""
    slow = replace(COSTS, drafts={"model": DraftCost(token_s=steps * STEP_S, lag_token_s=0.02 * STEP_S)})
    own = answer(replace(slow, checked=checked, contention=None))
    assert not own.buys_load("model", 50)
    for _ in range(30):
        own.record(record(emitted=1))
    allowed = own.allow("model", lag=80)
    assert (allowed.window == LOOK and allowed.depth == 1 and allowed.gate is None) is looks
    assert own.buys_load("model", 80) is (steps < 10.0 and not (checked and steps > 1.0))


def test_an_answer_beside_others_and_an_answer_of_one_round_have_no_outcome() -> None:
    own = answer()
    own.record(record())
    assert own.outcome() is None
    own.record(record())
    assert own.outcome() is not None
    shared = answer()
    for _ in range(4):
        shared.record(record(company=Company(answers=1, rows=1)))
    assert shared.outcome() is None


# ------------------------------------------------------------------------------------------------- the mode


def pipelined(token_s: float, rate: float = 0.7, rounds: int = 200, costs: Costs = COSTS) -> Outcome:
    """An answer whose guesses are right at that rate, and whose rounds take half of their mean more or less."""
    records = [overlapped(int(10 * rate) > 3 * at % 10, token_s * (0.5 + at % 2)) for at in range(rounds)]
    return outcome_of(answer(costs, pipelined=True), *records)


def serial_s(rate: float) -> float:
    return STEP_S / DepthControl(COSTS, CAP).serial_speedup(rate)


def test_a_pipelined_answer_is_compared_with_serial_drafting_at_the_same_share_of_right_guesses() -> None:
    same = serial_s(0.7)
    assert pipelined(1.3 * same).mode == "serial"
    assert pipelined(0.7 * same).mode == "pipelined"
    assert pipelined(same).mode is None, "it is within the interval"
    assert pipelined(1.3 * same, rounds=10).mode is None, "so few rounds tell nothing"
    assert [pipelined(30 * same, rounds=LEAST_ROUNDS - less).mode for less in (0, 1)] == ["serial", None]
    assert pipelined(same, rate=0.9).mode == "serial", "serial drafting would gain more in such a text"
    assert pipelined(1.3 * same).times is None


def played(slower: float, reading: int = 0, tokens: int = 96, costs: Costs = COSTS) -> tuple[Outcome | None, int]:
    """A pipelined answer whose rounds in parallel take ``slower`` plain steps, and how many rounds were in parallel.

    The drafter reads in the first ``reading`` of each trial, and every guess is right.
    """
    own, written, parallel, trial = answer(costs, pipelined=True), 0, 0, 0
    while written < tokens:
        took = {"round_s": slower * STEP_S, "verify_s": slower * STEP_S}
        if not own.allow("model", 1).depth:
            trial, own_round = 0, record()
        else:
            trial, parallel = trial + 1, parallel + 1
            own_round = replace(overlapped(1) if trial > reading else record(overlapped=True), **took)
        own.record(own_round)
        written += own_round.emitted
    own.end()
    return own.outcome(), parallel


@pytest.mark.parametrize("reading", [0, 1, 2])
@pytest.mark.parametrize("slower", [1.6, 2.0, 2.6])
def test_a_pipelined_answer_that_was_paused_for_what_it_lost_tells_so(slower: float, reading: int) -> None:
    found, parallel = played(slower, reading)
    assert found is not None
    assert found.mode == "serial"
    assert 2 <= parallel < 20


def test_a_pipelined_answer_whose_rounds_cost_what_the_plan_says_blames_the_text() -> None:
    known = replace(COSTS, contention=Contention(target_factor=2.0, drafter_factor=2.0))
    found, parallel = played(2.4, costs=known)
    assert found is not None
    assert (found.mode, parallel < LEAST_ROUNDS) == (None, True)
    dearer, _ = played(2.6, costs=known)
    assert dearer is not None
    assert dearer.mode == "serial"
    assert DEARER == 1.25


def test_a_pipelined_answer_that_gains_is_not_paused() -> None:
    found, parallel = played(1 / 4, tokens=400)
    assert found is not None
    assert (found.mode, parallel > 380) == ("pipelined", True)


def test_copies_of_the_text_make_serial_drafting_faster_by_what_trees_gain() -> None:
    with_copies = replace(COSTS, drafts={**COSTS.drafts, "lookup": FREE})
    token_s, rounds = serial_s(0.7) / (0.99 * TREES_GAIN), 20_000
    assert pipelined(0.97 * token_s, rounds=rounds, costs=with_copies).mode == "pipelined"
    assert pipelined(1.03 * token_s, rounds=rounds).mode == "pipelined"
    assert pipelined(1.03 * token_s, rounds=rounds, costs=with_copies).mode == "serial"


def test_plain_and_reading_rounds_of_a_pipelined_answer_are_not_counted() -> None:
    reading = record(overlapped=True, round_s=1.0)
    found = outcome_of(answer(pipelined=True), reading, overlapped(1), record(round_s=1.0), overlapped(0))
    assert found.rounds == 2


# ------------------------------------------------------------------------------------------- what answers agree on


def outcome(**verdicts: Any) -> Outcome:
    spread = Spread(2.0, 1.5, 2.5)
    return Outcome(rounds=9, tokens_per_round=spread, token_s=Spread(0.02, 0.01, 0.03), **verdicts)


def after(*outcomes: Outcome) -> Answered:
    state = Answered()
    for each in outcomes:
        state = state.after(each)
    return state


def test_two_answers_in_a_row_decide() -> None:
    wrong, right, nothing = outcome(times="estimated"), outcome(times="measured"), outcome()
    assert after(wrong).times.chosen is None
    assert after(wrong, wrong).times.chosen == "estimated"
    assert after(wrong, nothing, wrong).times.chosen == "estimated"
    assert after(wrong, right, wrong).times.chosen is None
    assert after(right, right, wrong, right, wrong).times.chosen == "measured"
    assert after(right, right, wrong, wrong).times.chosen == "estimated"
    lost = outcome(mode="serial")
    assert after(lost, wrong, lost).mode.chosen == "serial"


def test_a_mode_that_the_store_claims_to_gain_is_left_after_two_answers_that_lost() -> None:
    state = Answered(mode=Settled(chosen="pipelined"))
    lost = outcome(mode="serial")
    assert state.after(lost).mode.chosen == "pipelined"
    assert state.after(lost).after(lost).mode.chosen == "serial"
    gained = outcome(mode="pipelined")
    assert state.after(lost).after(gained).after(lost).mode.chosen == "pipelined"


def test_a_stored_record_is_read_unchanged() -> None:
    state = after(outcome(times="estimated", mode="serial", promised_token_s=0.01))
    assert read(Answered, to_json(state)) == state
    assert read(Answered, {}) == Answered()


def test_the_record_in_words() -> None:
    assert Answered().lines == ()
    promised = outcome(times="estimated", promised_tokens_per_round=3.0, promised_token_s=0.015)
    assert after(promised).lines == (
        "the latest: 2.00 tokens a round (1.50 to 2.50, 3.00 promised), "
        "20.0 ms a token (10.0 to 30.0, 15.0 promised)",
        "it contradicts the measured times: if the next does too, estimates replace them, if there are any",
    )
    assert after(outcome(mode="serial")).lines == (
        "the latest: 2.00 tokens a round (1.50 to 2.50), 20.0 ms a token (10.0 to 30.0)",
        "serial would be faster by it: if the next one agrees, the plan follows",
    )


# ----------------------------------------------------------------------------- a wrong store on a simulated clock


class Held(Controlled):
    """The policy in processes of one answer, whose record is kept; right estimates replace contradicted times."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._measured, self.record_of_answers = self._costs, Answered()
        self._estimates = replace(believed(scenario.world), measured=False)
        self._follow()

    def _follow(self) -> None:
        times = self.record_of_answers.times.chosen
        checked = replace(self._measured, checked=times == "measured")
        self._costs = self._estimates if times == "estimated" else checked
        self.control.replan(self._costs, self._cap)

    def end(self) -> None:
        super().end()
        assert isinstance(self.answer, AnswerDepth)
        found = self.answer.outcome()
        self.record_of_answers = self.record_of_answers if found is None else self.record_of_answers.after(found)
        self._follow()


def wrong_by(costs: Costs, target: float = 1.0, drafter: float = 1.0) -> Costs:
    """The same store with each model's times multiplied."""
    assert costs.curves is not None
    curves = tuple(curve.scaled(target) for curve in costs.curves.curves)
    drafts = {**costs.drafts, "model": costs.drafts["model"].scaled(drafter)}
    return replace(costs, curves=replace(costs.curves, curves=curves), drafts=drafts)


def gains(wrong: Mapping[str, float]) -> list[float]:
    """The mean gain of each answer over plain decoding: texts that the drafter knows, a process for each answer."""
    world = replace(NATIVE, noise=0.03, load_s=0.0)
    served = []
    for seed in range(8):
        scenario = Scenario(
            seed=seed,
            world=world,
            costs=wrong_by(believed(world), **wrong),
            prior=prior_of(0.7),
            lengths="similar",
            length=2.5,
            shortest_prompt=50,
            longest_prompt=300,
            process_requests=1,
        )
        served.append([each.ratio for each in serve_all(scenario, Held(scenario), 5)])
    return [statistics.fmean(each) for each in zip(*served, strict=True)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": 2.0},
        {"target": 0.5},
        {"drafter": 2.0},
        {"drafter": 0.5},
        {"target": 2.0, "drafter": 2.0},
        {"target": 0.5, "drafter": 0.5},
        {"target": 0.01, "drafter": 0.01},  # a machine a hundred times slower than measured
        {"target": 100.0},
    ],
    ids=str,
)
def test_a_store_with_wrong_times_is_left_within_two_answers(wrong: dict[str, float]) -> None:
    right, found = gains({}), gains(wrong)
    assert min(found) > 0.9
    assert statistics.fmean(found[2:]) > 0.94 * statistics.fmean(right[2:])
