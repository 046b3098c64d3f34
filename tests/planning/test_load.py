"""Answers that share steps: time beyond a plain step counts for every answer that it delays."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from edgespec.interfaces.drafting import DraftTree
from edgespec.interfaces.model import ALONE, Company
from edgespec.planning.cost.curve import FREE, ContextCurves, Curve, DraftCost
from edgespec.planning.cost.live_times import LiveTimes
from edgespec.planning.cost.margins import DRAFT_MARGIN
from edgespec.planning.depth.answer import AnswerDepth
from edgespec.planning.depth.control import DepthControl
from edgespec.planning.depth.load import (
    MET,
    MOST_PAUSE_S,
    MOST_PAUSE_WITH_PROMPT_S,
    MOST_STEP_S,
    Load,
    charged,
    drafting_price,
)
from edgespec.planning.depth.price import FIRST_REST, PricedGate, choose_nodes
from tests.planning.test_depth_control import begun, control, drafting, round_of
from tests.support.drawn_requests import NATIVE, believed

THREE = Company(answers=3, rows=3)
CURVE = Curve(widths=tuple(range(1, 65)), forward_s=tuple(1.0 + 0.1 * rows for rows in range(64)))


def chain(length: int, odds: float, source: str = "model") -> DraftTree:
    tree, above = DraftTree(), -1
    for token in range(length):
        above = tree.add(above, token, odds, source)
    return tree


def with_others(answer: AnswerDepth, rounds: int, company: Company = THREE) -> None:
    """Plain rounds in steps with others, as long as calibrated."""
    for _ in range(rounds):
        verify_s = NATIVE.forward_s(1 + company.rows, 100)
        answer.record(replace(round_of(), verify_s=verify_s, round_s=verify_s, company=company))


def test_time_beyond_a_plain_step_counts_once_for_each_answer() -> None:
    assert charged(1.5, 1.0, 0) == 1.5
    assert charged(1.5, 1.0, 3) == 3.0
    assert charged(0.9, 1.0, 3) == 0.9


def test_answers_that_draft_in_the_same_forwards_pay_their_parts() -> None:
    assert charged(1.5, 1.0, 1, draft_s=0.5, drafting=1) == pytest.approx(1.5), "each of two answers pays half twice"
    assert charged(1.5, 1.0, 3, draft_s=0.5, drafting=1) == pytest.approx(2.0)
    assert charged(1.7, 1.0, 1, draft_s=0.5, drafting=1) == pytest.approx(1.9), "rows are not shared"
    assert charged(0.9, 1.0, 3, draft_s=0.5, drafting=3) == 0.9


def test_a_shared_forward_costs_a_row_more_for_each_answer_and_reading_is_not_shared() -> None:
    cost = DraftCost(token_s=0.010, lag_token_s=0.001)
    assert drafting_price(cost, 0, 0) == cost
    alone, together = drafting_price(cost, 1, 0), drafting_price(cost, 1, 1)
    assert (alone.token_s, alone.lag_token_s) == pytest.approx((0.020, 0.002))
    assert (together.token_s, together.lag_token_s) == pytest.approx((0.011, 0.002))
    at_once = DraftCost(one_pass=Curve(widths=(1, 2), forward_s=(0.010, 0.012)))
    assert drafting_price(at_once, 3, 1).seconds(2) == pytest.approx(0.024)


def test_an_answer_pays_for_its_part_of_the_rows_beyond_one_an_answer() -> None:
    assert charged(1.6, 1.0, 1, part=0.5) == pytest.approx(1.6), "the other caused half of the delay of both"
    assert charged(1.6, 1.0, 1, part=0.0) == pytest.approx(1.0)
    assert charged(1.6, 1.0, 1, draft_s=0.2, drafting=1, part=0.5) == pytest.approx(1.6)


def test_the_rows_of_a_step_are_those_of_all_that_draft_as_much() -> None:
    assert [Load().rows(width, 0.0) for width in (1, 4)] == [1, 4]
    load = Load(others=3.0)
    assert [load.rows(width, 3.0) for width in (1, 2, 4)] == [4, 8, 16]
    assert [load.rows(width, 0.0) for width in (1, 2, 4)] == [4, 5, 7]


def test_an_answer_that_shares_its_drafters_forwards_pays_less_and_those_that_gave_up_do_not_share() -> None:
    depths = control()
    first, second = begun(depths), begun(depths)
    with_others(first, 40, Company(answers=1, rows=1))
    price = first._price("model")
    assert price is not None
    shared = drafting_price(price.own, first._load.others, MET * first._load.others)
    assert price.charged.token_s == pytest.approx(shared.token_s)
    assert shared.token_s < 1.25 * price.own.token_s
    second._trust.end(10)
    lone = first._price("model")
    assert lone is not None
    assert lone.charged.token_s == pytest.approx(2 * lone.own.token_s)
    assert lone.own == price.own


def test_an_answer_that_has_not_begun_to_draft_for_long_pays_for_no_draft_of_others() -> None:
    depths = control()
    young, old, drafts = begun(depths), begun(depths), drafting(depths)
    assert old.drafts_soon
    with_others(old, FIRST_REST, ALONE)
    with_others(drafts, FIRST_REST, ALONE)
    assert (young.drafts_soon, old.drafts_soon, drafts.drafts_soon) == (True, False, True)
    assert old.may_draft, "or each would wait for another to begin"


def test_a_draft_is_judged_as_if_those_that_may_draft_had_drafted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each would stop before another begins."""
    charges: list[float] = []
    monkeypatch.setattr(
        AnswerDepth, "_judge", lambda _answer, _step_s, working_s, _emitted: charges.append(working_s)
    )
    for failed in (False, True):
        depths = control()
        first, second = begun(depths), begun(depths)
        with_others(first, 20, Company(answers=1, rows=1))
        if failed:
            second._trust.end(10)
        drafted = replace(
            round_of(), source="model", draft_s=0.02, draft_forwards=1, company=Company(answers=1, rows=1)
        )
        verify_s = 2 * NATIVE.forward_s(2, 100)
        first.record(replace(drafted, verify_s=verify_s, round_s=verify_s + 0.02))
    assert charges[0] < charges[1]


def test_the_ledger_counts_no_wait_for_other_answers() -> None:
    alone, beside = drafting(control()), drafting(control())
    drafted = replace(round_of(), source="model", draft_s=0.02, draft_forwards=1)
    before = [answer.ledger.spent_s for answer in (alone, beside)]
    alone.record(drafted)
    beside.record(replace(drafted, round_s=drafted.round_s + 5.0, waited_s=5.0, company=Company(answers=1, rows=1)))
    spent = [answer.ledger.spent_s - old for answer, old in zip((alone, beside), before, strict=True)]
    assert spent == pytest.approx([drafted.round_s] * 2)


def test_drafting_beside_others_has_to_promise_more_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = begun(control())
    for company, margin in ((ALONE, -1.0), (Company(answers=1, rows=1), 0.05), (THREE, 0.15)):
        answer._load = Load()
        answer._load.see(company)
        for beyond, delays in ((-0.01, margin > 0.0), (0.01, False)):
            monkeypatch.setattr(AnswerDepth, "_usual", lambda *_, gain=DRAFT_MARGIN - 1.0 + margin + beyond: gain)
            assert answer._delays_others() is delays


def test_an_answer_alone_has_no_load() -> None:
    load = Load()
    load.see(ALONE)
    assert load == Load()
    assert load.charge([1.0, 1.5, 3.0], 0.0) == [1.0, 1.5, 3.0]


def test_load_follows_the_company_and_ends_with_it() -> None:
    load = Load()
    for _ in range(30):
        load.see(THREE)
    assert load.others == pytest.approx(3.0, abs=0.01)
    assert load.charge([1.0, 1.5], 0.0)[1] == pytest.approx(3.0, abs=0.01)
    assert load.charge([1.0, 1.5], 3.0)[1] == pytest.approx(1.5, abs=0.01)
    for _ in range(20):
        load.see(ALONE)
    assert (load.others, load.seen) == (0.0, True)


def test_a_drafter_reads_at_length_only_while_its_answer_is_alone() -> None:
    load = Load()
    assert not load.forbids(100.0)
    load.see(Company(answers=1, rows=1))
    assert [load.forbids(factor * MOST_PAUSE_S) for factor in (0.9, 1.1)] == [False, True]
    for company in (Company(reading=True), Company(answers=1, rows=1, reading=True)):
        load.see(company)
        assert [load.forbids(factor * MOST_PAUSE_WITH_PROMPT_S) for factor in (0.9, 1.1)] == [False, True]
    for _ in range(20):
        load.see(ALONE)
    assert not load.forbids(100.0)


def test_drafts_are_shorter_while_a_prompt_is_read_in_the_same_steps() -> None:
    def rows_s(rows: int) -> float:
        return MOST_STEP_S * rows / 16

    load = Load()
    load.see(Company(answers=3, rows=30))
    assert load.most_depth(12, rows_s) == 12
    load.see(Company(answers=3, rows=30, reading=True))
    assert load.most_depth(12, rows_s) == 3, "four answers with four rows each"
    assert load.most_depth(2, rows_s) == 2
    assert load.most_depth(12, lambda rows: MOST_STEP_S * rows) == 0
    alone = Load()
    alone.see(Company(reading=True))
    assert alone.most_depth(20, rows_s) == 15


def test_a_slower_machine_shortens_drafts_while_a_prompt_is_read_and_the_prompts_own_time_does_not() -> None:
    def deepest(slower: float, prompt: float) -> int:
        answer = begun(control())
        for company, factor in ((ALONE, slower), (Company(answers=3, rows=3, reading=True), slower * prompt)):
            for _ in range(8):
                verify_s = factor * NATIVE.forward_s(1 + company.rows, 100)
                answer.record(replace(round_of(), verify_s=verify_s, round_s=verify_s, company=company))
        answer.ledger.plain_s += 100.0
        return answer.allow_free("lookup").depth

    assert deepest(1.0, 1.0) == deepest(1.0, 2.0) > deepest(3.0, 1.0)


@pytest.mark.parametrize("company", [ALONE, Company(answers=1, rows=1), Company(reading=True)])
def test_an_answer_pauses_for_a_drafter_that_reads_a_long_text_only_if_alone(company: Company) -> None:
    alone = company == ALONE
    beginning = begun(control(), prompt_tokens=2000)
    with_others(beginning, 40, company)
    beginning.learn_hindsight("model", [True] * 14)
    assert (beginning.allow("model", 600).depth > 0) is alone
    why = beginning.why_off("model")
    assert (why is None) is alone
    depths = control()
    running, _other = drafting(depths), begun(depths)
    running.record(replace(round_of(), company=company))
    running.ledger.plain_s += 100.0
    assert (running.allow("model", 300).depth > 0) is alone, "the drafter fell behind"
    assert alone is running._trust.on


@pytest.mark.parametrize("company", [ALONE, Company(answers=1, rows=1)])
def test_what_a_drafter_skipped_is_read_only_while_the_answer_is_alone(company: Company) -> None:
    answer = drafting(control())
    answer.record(replace(round_of(), company=company))
    answer.ledger.plain_s += 100.0
    assert answer.allow("model", 3, unread=120).window == (None if company != ALONE else answer._context)


def test_each_answers_nodes_are_those_with_the_most_tokens_of_all_answers() -> None:
    tree = chain(10, 0.8)
    reach = tree.reach()
    found = []
    for others in range(8):
        load = Load(others=float(others))
        rows = [load.rows(width, float(others)) for width in range(1, 12)]
        charge = load.charge([CURVE.seconds(each) for each in rows], float(others))

        def all_tokens_per_s(nodes: int, answers: int = 1 + others) -> float:
            return answers * (1.0 + sum(reach[:nodes])) / CURVE.seconds(answers * (1 + nodes))

        best = max(range(11), key=all_tokens_per_s)
        own_rate = (1.0 + sum(reach[:best])) / charge[best]
        found.append(len(choose_nodes(charge, tree, 10, own_rate).nodes))
        assert found[-1] == best
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_times_of_rows_lie_on_a_line_also_beyond_the_known_ones() -> None:
    times = LiveTimes(ContextCurves(contexts=(100,), curves=(CURVE,)), 8)
    for rows in (1.0, 2.6, 8.0, 63.5, 64.0, 96.0):
        assert times.between_s(rows, 100) == pytest.approx(1.0 + 0.1 * (rows - 1.0))


def test_times_with_others_are_those_of_all_rows() -> None:
    times = LiveTimes(ContextCurves(contexts=(100,), curves=(CURVE,)), 8)
    assert times.all_now(100) == pytest.approx([CURVE.seconds(rows) for rows in range(1, 9)])
    assert times.all_now(100, 5) == pytest.approx([CURVE.seconds(rows) for rows in range(6, 14)])
    assert times.all_now(100, 1000) == pytest.approx([CURVE.seconds(rows) for rows in range(57, 65)])


def test_steps_with_others_show_the_pace_but_say_nothing_about_single_widths() -> None:
    times = LiveTimes(ContextCurves(contexts=(100,), curves=(CURVE,)), 8)
    for _ in range(10):
        times.record(1, 100, CURVE.seconds(1))
        for width in (2, 4):
            assert times.record(
                width, 100, 3.0 * CURVE.seconds(width + 3), Company(answers=3, rows=3)
            ) == pytest.approx(3.0)
    assert times.factor == pytest.approx(3.0)
    for _ in range(5):
        times.record(1, 100, CURVE.seconds(1))
    assert times.all_now(100) == pytest.approx([CURVE.seconds(rows) for rows in range(1, 9)])


def test_a_plain_round_with_others_counts_as_plain_timing() -> None:
    times = LiveTimes(ContextCurves(contexts=(100,), curves=(CURVE,)), 8)
    times.record(1, 100, CURVE.seconds(1))
    for _ in range(6):
        times.record(2, 100, 2.0 * CURVE.seconds(5), THREE)
    assert times.since_plain == 6
    assert times.moved == pytest.approx(2.0)
    times.record(1, 100, 2.0 * CURVE.seconds(4), THREE)
    assert times.since_plain == 0
    assert times.moved == pytest.approx(1.0)


def test_the_drafting_model_is_off_while_it_would_delay_others_and_returns_afterwards() -> None:
    many = Company(answers=7, rows=7)
    answer = drafting(control())
    with_others(answer, 20, many)
    assert answer.allow("model", 2).depth == 0
    why = answer.why_off("model")
    assert why is not None
    assert (why.code, "other answers" in why.text) == ("not_paying_now", True)
    for _ in range(20):
        answer.record(round_of())
    assert answer.why_off("model") is None
    assert answer.allow("model", 2).depth > 0


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_machines_pace_changes_nothing_about_what_drafting_saves_among_others(factor: float) -> None:
    def usual(factor: float) -> float:
        answer = begun(control(), first_s=factor * NATIVE.forward_s(1, 100))
        for _ in range(20):
            seconds = factor * NATIVE.forward_s(2, answer._context)
            answer.record(replace(round_of(), verify_s=seconds, round_s=seconds, company=Company(answers=1, rows=1)))
        return answer._usual(0)

    assert usual(factor) == pytest.approx(usual(1.0), rel=0.02)
    assert usual(1.0) > 0.05


def test_free_guesses_are_fewer_while_others_share_the_steps() -> None:
    alone, loaded = begun(control()), begun(control())
    for _ in range(20):
        alone.record(round_of())
    with_others(loaded, 20, Company(answers=7, rows=7))

    def chosen(answer: AnswerDepth) -> int:
        gate = answer.allow_free("lookup").gate
        assert isinstance(gate, PricedGate)
        return len(gate.choose(chain(8, 0.7, "lookup"), 8).nodes)

    assert chosen(loaded) < chosen(alone)


def test_answers_with_others_teach_nothing_about_drafting_alone() -> None:
    own = control()
    before = own.history()
    answer = drafting(own)
    with_others(answer, 30, Company(answers=7, rows=7))
    answer.end()
    assert own.history().greedy == before.greedy
    assert own.history().lengths != before.lengths


def test_the_first_forward_already_shows_the_company() -> None:
    answer = control().answer(prompt_tokens=100)
    answer.began(10.0, 3.0 * NATIVE.forward_s(8, 100), Company(answers=7, rows=7))
    assert isinstance(answer, AnswerDepth)
    assert answer._load.others == 7.0
    assert answer._times.factor == pytest.approx(3.0)
    assert answer.allow("model", 100).depth == 0


def test_an_answer_that_begins_among_others_expects_their_company() -> None:
    own = control()
    first = begun(own)
    with_others(first, 30)
    second = begun(own)
    assert second._load.others == pytest.approx(0.75 * 3.0, abs=0.01), "its first forward was alone"
    assert not second._load.seen
    for answer in (first, second, second):
        answer.end()
    assert begun(own)._load == Load()


def test_an_answer_that_never_began_changes_nothing() -> None:
    own = control()
    never = own.answer(prompt_tokens=0)  # of a session without an answer
    first = begun(own)
    with_others(first, 30)
    first.end()
    never.end()
    assert begun(own)._load == Load(), "no answer runs"
    assert len(own.history().lengths) == 1


def test_a_forgotten_answer_does_not_run() -> None:
    own = control()
    with_others(begun(own), 30)
    gc.collect()
    assert begun(own)._load == Load()


def test_what_was_learned_fades_when_an_answer_begins_and_not_before() -> None:
    own = control()
    first = begun(own)
    for _ in range(40):
        first.learn("model", [0.9] * 4, [True] * 4)
    known = own.modes[False].sources["model"]
    seen = known.overall
    own.answer(prompt_tokens=0)
    assert known.overall == seen
    begun(own)
    assert known.overall != seen


def test_a_step_that_reads_a_prompt_says_nothing_about_widths_or_plain_decoding() -> None:
    reading = Company(reading=True)
    times = LiveTimes(ContextCurves(contexts=(100,), curves=(CURVE,)), 8)
    for _ in range(30):
        times.record(1, 100, CURVE.seconds(1))
        times.record(4, 100, 1.4 * CURVE.seconds(4), reading)
    assert times.usual_s(4, 100) == CURVE.seconds(4)
    own = control()
    answer = begun(own)
    for _ in range(10):
        answer.record(replace(round_of(), width=1, proposed=0, source=None, company=reading))
    assert answer.plain_tokens_per_s is None


def test_copies_without_a_drafting_model_are_priced_among_others() -> None:
    copies = replace(believed(NATIVE), drafts={"lookup": FREE})
    answer = begun(DepthControl(copies, NATIVE.depth_cap))
    with_others(answer, 20)
    assert answer.why_off("lookup") is None
    assert answer.allow_free("lookup").depth > 0
