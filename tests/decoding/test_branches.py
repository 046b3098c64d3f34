"""Branches of the pipelined loop: the text is plain decoding's, and a foreseen correction keeps the window full."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from edgespec.decoding.pipelined.correction_branches import Place, likeliest_corrections
from edgespec.decoding.pipelined.loop import PipelinedLoop
from edgespec.decoding.round_base import LoopLimits
from edgespec.decoding.sampling import Chooser
from edgespec.drafters.combination import CombinationState
from edgespec.drafters.model import ModelDrafter
from edgespec.errors import CancelledError, ForwardError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import ChainGate, DraftRequest, Proposal
from edgespec.planning.depth.base import FixedDepth
from tests.decoding.test_loop import GREEDY, KNOWN, PLAIN, PROMPT, TEXT_RULES, TOKENS, VOCABULARY_SIZE, Answer, start
from tests.decoding.test_pipeline import Submit, at_once, check, intact, pipelined
from tests.support import scripted_drafters as scripted
from tests.support.budgets import FixedBudget
from tests.support.fake_runtime import FakeModel, Faults
from tests.support.held_futures import Held
from tests.support.sleepy import Sleepy


class Unsure(scripted.Scripted):
    """Knows the text. At some places it proposes a wrong token with the right one as its alternative.

    ``others(right, place)`` replaces the right alternative, ``branched`` records lengths and depths of its branches.
    """

    forks = drafts_branches = True

    def __init__(
        self,
        known: list[int],
        slips: Callable[[int], bool],
        others: Callable[[int, int], object] = lambda right, place: right,
    ) -> None:
        super().__init__(lambda tokens, depth: known[len(tokens) : len(tokens) + depth])
        self.known = known
        self.slips = slips
        self.others = others
        self.branched: list[tuple[int, int]] = []
        self.made = 0

    def _proposal(self, tokens: list[int], depth: int) -> Proposal:
        right = list(self._script(tokens, depth))
        self.made += len(right)
        slips = [self.slips(len(tokens) + place) for place in range(len(right))]
        wrong = [(token + 1) % VOCABULARY_SIZE for token in right]
        said = tuple(w if slip else r for r, w, slip in zip(right, wrong, slips, strict=True))
        return Proposal(
            tokens=said,
            drafted_by=scripted.KIND,
            forwards=len(said),
            confidences=tuple(0.3 if slip else 0.9 for slip in slips),
            alternatives=tuple(
                ((self.others(r, len(tokens) + place) if slip else w, 0.5),)  # type: ignore[misc]
                for place, (r, w, slip) in enumerate(zip(right, wrong, slips, strict=True))
            ),
        )

    def branch(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        self.branched.append((len(context), depth))
        return self._proposal(list(context.tokens), depth)


def every(count: int) -> Callable[[int], bool]:
    return lambda place: place % count == 0


def never(_place: int) -> bool:
    return False


def answered(
    drafter: scripted.Scripted,
    branching: int,
    *,
    rule: str = "greedy",
    depth: int = 3,
    submit: Submit = at_once,
    **options: Any,
) -> Answer:
    own = start(FakeModel(), PROMPT)
    budget = FixedBudget(most=depth, ahead=depth + 1, patience=0.0, branching=branching)
    loop = pipelined(own, drafter, sampling=TEXT_RULES[rule], depth=depth, budget=budget, submit=submit, **options)
    return own.take(loop.steps())


# -------------------------------------------------------------------------------------------------- which places


def test_branches_start_at_the_likeliest_first_corrections() -> None:
    def order(*places: tuple[float | None, int | None]) -> list[tuple[int, int]]:
        return likeliest_corrections([Place(0, sure, other) for sure, other in places])

    assert order() == []
    assert order((0.9, 1), (0.5, 2), (0.9, 3)) == [(1, 2), (0, 1), (2, 3)]
    assert order((0.1, 1), (0.5, 2)) == [(0, 1), (1, 2)], "the second place is hardly ever reached"
    assert order((0.5, 1), (0.0, 2)) == [(0, 1), (1, 2)], "equal odds: in order of places"
    assert order((0.9, None), (0.9, 2)) == [(1, 2)], "no alternative, no branch"
    assert order((1.0, 1), (0.9, 2)) == [(1, 2)], "certain"
    assert order((0.9, 1), (None, 2), (0.9, 3)) == [(1, 2), (0, 1), (2, 3)], "unknown counts as even odds"


# ------------------------------------------------------------------------------------------------------ same text


@pytest.mark.parametrize("rule", TEXT_RULES)
def test_branches_leave_plain_decodings_text_unchanged(rule: str) -> None:
    source = random.Random(3)
    for depth, most, branching, looks in itertools.product((1, 2, 5), (0, 1, 5), (1, 9), (0, 1, 3)):
        slips = [source.random() < 0.4 for _ in range(200)]
        state = Unsure(KNOWN[rule], slips.__getitem__)
        own = start(FakeModel(), PROMPT)
        budget = FixedBudget(most=most, ahead=depth + 1, patience=0.0, branching=branching, reuse=depth == 5)
        loop = pipelined(
            own,
            state,
            sampling=TEXT_RULES[rule],
            depth=depth,
            budget=budget,
            submit=Held(lambda looks=looks: source.randrange(2 * looks + 1)),  # type: ignore[misc]
        )
        own.take(loop.steps())
        assert own.tokens == PLAIN[rule][:TOKENS], (depth, most, branching, looks)
        check(own, depth)
        assert state.branched


@pytest.mark.parametrize("other", [-1, VOCABULARY_SIZE, 10**9, True, 2.0, None, "same"])
def test_an_invalid_alternative_starts_no_branch(other: object) -> None:
    known = KNOWN["greedy"]
    state = Unsure(known, every(3), lambda right, place: (right + 1) % VOCABULARY_SIZE if other == "same" else other)
    own = answered(state, 9)
    assert own.tokens == PLAIN["greedy"][:TOKENS]
    assert all(length % 3 != 1 for length, _ in state.branched), "branches start after places that do not slip"


def test_missing_alternatives_are_those_of_the_last_tokens() -> None:
    class Curt(Unsure):
        def _proposal(self, tokens: list[int], depth: int) -> Proposal:
            whole = super()._proposal(tokens, depth)
            return Proposal(tokens=whole.tokens, drafted_by=scripted.KIND, alternatives=whole.alternatives[:1])

    own = answered(Curt(KNOWN["greedy"], every(3)), 9)
    assert own.tokens == PLAIN["greedy"][:TOKENS]


@pytest.mark.parametrize("rule", TEXT_RULES)
def test_a_foreseen_correction_is_followed_by_a_full_window(rule: str) -> None:
    without, with_branches = (
        answered(Unsure(KNOWN[rule], every(4)), count, rule=rule, max_tokens=40) for count in (0, 1)
    )
    assert without.tokens == with_branches.tokens == PLAIN[rule][:40]
    assert len(with_branches.records) < len(without.records)
    for own, width in ((without, 1), (with_branches, 4)):
        corrected = [place for place, record in enumerate(own.records[:-4]) if record.accepted < record.evaluated]
        assert corrected
        assert {own.records[place + 1].width for place in corrected} == {width}


def test_a_round_waits_for_a_late_branch_that_starts_with_its_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every branch is still being drafted when the target is done."""
    known, jobs, begun, met = KNOWN["greedy"], list[Future[Any]](), list[int](), list[int]()

    class Slow(Unsure):
        def branch(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
            assert gate is not None
            begun.append(len(context))
            while gate.goes_on():
                time.sleep(0.0005)
            return super().branch(context, depth, gate)

    own = start(FakeModel(), PROMPT)
    forward = own.sequence.forward

    def after_the_drafter(tokens: Any, rows: int) -> Any:
        while not (len(begun) > len(met) or all(job.done() for job in jobs)):
            time.sleep(0.0005)
        met[:] = begun  # without a branch of the forward before that still runs
        return forward(tokens, rows)

    monkeypatch.setattr(own.sequence, "forward", after_the_drafter)
    with ThreadPoolExecutor(1) as pool:

        def submit(job: Any) -> Future[Any]:
            jobs.append(pool.submit(job))
            return jobs[-1]

        budget = FixedBudget(most=3, ahead=4, patience=60.0, branching=1)
        own.take(pipelined(own, Slow(known, every(4)), depth=3, budget=budget, submit=submit).steps())
    assert own.tokens == PLAIN["greedy"][:TOKENS]
    in_time = answered(Unsure(known, every(4)), 1)
    assert [record.width for record in own.records] == [record.width for record in in_time.records]


def test_no_branch_is_drafted_if_the_budget_allows_none() -> None:
    state = Unsure(KNOWN["greedy"], every(4))
    answered(state, 0)
    assert state.branched == []


def test_the_loop_asks_for_one_alternative_if_it_drafts_branches() -> None:
    for branching in (0, 2):
        wanted: list[int] = []

        class Asked(Unsure):
            def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
                wanted.append(context.wants_alternatives)  # noqa: B023
                return super().propose(context, depth, gate)

        answered(Asked(KNOWN["greedy"], every(4)), branching)
        assert set(wanted) == {min(branching, 1)}


def test_a_drafter_without_branch_support_is_never_asked_for_branches() -> None:
    own = answered(scripted.often_right(KNOWN["greedy"], VOCABULARY_SIZE), 3)
    assert own.tokens == PLAIN["greedy"][:TOKENS]


def test_the_budget_is_asked_each_round_and_learns_each_correction() -> None:
    class Told(FixedBudget):
        asked: list[bool]
        met: list[bool]
        kept: list[bool]

        def branches(self, forks: bool) -> int:
            self.asked.append(forks)
            return super().branches(forks)

        def learn(self, what: str, well: bool) -> None:
            {"correction": self.met, "branch": self.kept}[what].append(well)

    for right in (True, False):
        budget = Told(most=3, ahead=4, patience=0.0, branching=9)
        object.__setattr__(budget, "asked", [])
        object.__setattr__(budget, "met", [])
        object.__setattr__(budget, "kept", [])
        other: Callable[[int, int], object]
        other = (lambda right, place: right) if right else (lambda right, place: (right + 2) % VOCABULARY_SIZE)
        own = start(FakeModel(), PROMPT)
        own.take(pipelined(own, Unsure(KNOWN["greedy"], every(4), other), budget=budget).steps())
        corrections = sum(record.accepted < record.evaluated for record in own.records)
        assert set(budget.asked) == {True}
        assert budget.met.count(right) >= corrections - 1 > 1, "except at the end of the answer"
        assert (set(budget.kept), len(budget.kept) >= corrections - 1) == ({True}, True) if right else not budget.kept


# ---------------------------------------------------------------------------------------- limits, stops, outcomes


@pytest.mark.parametrize("room", range(1, 9))
def test_branches_end_at_the_answers_token_limit(room: int) -> None:
    for depth, max_tokens in itertools.product((1, 3), (None, 2, room + 3)):
        own = start(FakeModel(), PROMPT, len(PROMPT) + room)
        state = Unsure(KNOWN["greedy"], every(2))
        budget = FixedBudget(most=depth, ahead=depth + 1, patience=0.0, branching=9)
        own.take(pipelined(own, state, depth=depth, budget=budget, max_tokens=max_tokens).steps())
        wanted = room if max_tokens is None else min(room, max_tokens)
        assert own.tokens == PLAIN["greedy"][:wanted]
        for length, asked in state.branched:
            assert 1 <= asked <= depth + 1
            assert length + asked <= len(PROMPT) + wanted, "drafts past the end of the answer"


def test_no_branch_continues_a_stop_token() -> None:
    plain = PLAIN["greedy"]
    for place, stop_id in enumerate(plain[:12]):
        if stop_id in plain[:place]:
            continue
        for slips in (every(2), never, lambda at: True):
            state = Unsure(KNOWN["greedy"], slips)
            own = answered(state, 9, stop_ids=frozenset({stop_id}))
            assert own.tokens == plain[: place + 1]
            assert own.finish == "stop"
            check(own, 3)


def test_each_proposal_has_one_outcome_with_branches() -> None:
    state = Unsure(KNOWN["greedy"], every(4))
    own = answered(state, 2, max_tokens=50)
    assert len({id(outcome.proposal) for outcome in state.outcomes}) == len(state.outcomes) > 8
    assert sum(outcome.accepted for outcome in state.outcomes) == sum(record.accepted for record in own.records)
    assert sum(outcome.evaluated for outcome in state.outcomes) == sum(record.evaluated for record in own.records)
    assert all(outcome.proposal.draft_probs is None for outcome in state.outcomes)
    for outcome in state.outcomes:  # though a proposal's tokens may be compared in several rounds
        said, accepted = outcome.proposal.tokens, outcome.accepted
        assert outcome.committed[:accepted] == said[:accepted]
        assert accepted == outcome.evaluated or outcome.committed[accepted] != said[accepted]


def test_the_round_record_includes_drafting_time_of_branches() -> None:
    ticks = itertools.count()
    own, state = start(FakeModel(), PROMPT), Unsure(KNOWN["greedy"], every(4))
    loop = PipelinedLoop(
        own.sequence,
        state,
        FixedDepth(3),
        Chooser(GREEDY),
        own.history,
        LoopLimits(max_tokens=TOKENS, depth_cap=3, vocabulary_size=VOCABULARY_SIZE),
        submit=at_once,
        budget=FixedBudget(most=3, ahead=4, patience=0.0, branching=1),
        clock=lambda: float(next(ticks)),
    )
    own.take(loop.steps())
    assert sum(record.draft_forwards for record in own.records) == state.made > 0
    assert all(record.draft_s >= 1 for record in own.records if record.draft_forwards)


# ------------------------------------------------------------------------------------------------ failures, leaving


class Failing(Unsure):
    """Raises in its branch number ``at``."""

    def __init__(self, error: BaseException, at: int) -> None:
        super().__init__(KNOWN["greedy"], every(3))
        self.error, self.at = error, at

    def branch(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        proposal = super().branch(context, depth, gate)
        if len(self.branched) == self.at:
            raise self.error
        return proposal


@pytest.mark.parametrize("error", [CancelledError("stop"), ForwardError("lost"), ValueError("bug")])
@pytest.mark.parametrize("at", range(1, 5))
@pytest.mark.parametrize("looks", [0, 2])
def test_an_error_in_a_branch_rolls_back_to_the_last_committed_token(
    error: BaseException, at: int, looks: int
) -> None:
    own = start(FakeModel(), PROMPT)
    budget = FixedBudget(most=2, ahead=3, patience=0.0, branching=2)
    with pytest.raises(type(error)):
        own.take(pipelined(own, Failing(error, at), budget=budget, submit=Held(lambda: looks)).steps())
    intact(own)
    again = Answer(own.history, own.sequence)
    again.take(pipelined(again, scripted.oracle(KNOWN["greedy"]), depth=2, max_tokens=8).steps())
    intact(again)


def test_leaving_the_iteration_ends_branch_drafting() -> None:
    for rounds, looks in itertools.product(range(6), (0, 9)):
        own, jobs = start(FakeModel(), PROMPT), list[Future[Any]]()

        def submit(job: Any, jobs: list[Future[Any]] = jobs, looks: int = looks) -> Future[Any]:
            jobs.append(Held(lambda: looks)(job))
            return jobs[-1]

        budget = FixedBudget(most=3, ahead=4, patience=0.0, branching=2)
        steps = pipelined(own, Unsure(KNOWN["greedy"], every(4)), budget=budget, submit=submit).steps()
        for _ in range(rounds + 1):
            next(steps)
        steps.close()
        assert all(job.done() or job.cancelled() for job in jobs)
        assert own.sequence.tokens == own.history[:-1]


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("fault", ["raise_at", "cancel_at"])
def test_an_error_of_the_target_ends_branch_drafting(fault: str, at: int) -> None:
    own = start(FakeModel(faults=Faults(**{fault: at})), PROMPT)
    jobs: list[Future[Any]] = []

    def submit(job: Any) -> Future[Any]:
        jobs.append(Held(lambda: 1)(job))
        return jobs[-1]

    budget = FixedBudget(most=3, ahead=4, patience=0.0, branching=2)
    with pytest.raises((ForwardError, CancelledError)):
        own.take(pipelined(own, Unsure(KNOWN["greedy"], every(4)), budget=budget, submit=submit).steps())
    assert all(job.done() for job in jobs), "no job is still running"
    intact(own)


# --------------------------------------------------------------------------------------------------- real threads


class SleepyDrafter(Sleepy, Unsure):
    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        ask = super().propose
        return self.slowly(lambda: ask(context, depth, gate), gate)

    def branch(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        ask = super().branch
        return self.slowly(lambda: ask(context, depth, gate), gate)


@pytest.fixture
def thread() -> Iterator[Submit]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "keyed"])
def test_random_delays_do_not_change_the_text_with_branches(
    thread: Submit, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(8)
    plain = start(FakeModel(), PROMPT, 2000)
    plain.take(pipelined(plain, scripted.empty(), sampling=TEXT_RULES[rule], max_tokens=300).steps())
    taken = 0
    for patience in (0.0, 0.0005, 1.0):
        state = SleepyDrafter(PROMPT + plain.tokens, every(3), pace=lambda: source.random() * 3e-4)
        own = start(FakeModel(), PROMPT, 2000)
        forward = own.sequence.forward

        def slow(tokens: Any, rows: int, forward: Any = forward) -> Any:
            time.sleep(source.random() * 4e-3)
            return forward(tokens, rows)

        monkeypatch.setattr(own.sequence, "forward", slow)
        budget = FixedBudget(most=3, ahead=4, patience=patience, branching=3)
        loop = pipelined(own, state, sampling=TEXT_RULES[rule], depth=3, budget=budget, max_tokens=300, submit=thread)
        own.take(loop.steps())
        assert own.tokens == plain.tokens
        taken += sum(
            before.accepted < before.evaluated and after.width > 1
            for before, after in itertools.pairwise(own.records)
        )
    assert taken > 10


# ------------------------------------------------------------------------------------------ with a drafting model


@pytest.mark.parametrize("rule", TEXT_RULES)
@pytest.mark.parametrize("can_fork", [False, True])
def test_a_draft_models_branches_leave_plain_decodings_text_unchanged(rule: str, can_fork: bool) -> None:
    """The drafter's alternative is the target's token wherever the drafter is wrong."""
    target = FakeModel()
    reads: dict[int, int] = {}

    def scores(prefix: tuple[int, ...]) -> list[float]:
        row = target.scores(prefix).copy()
        if len(prefix) % 3 == 0:
            best = int(row.argmax())
            row[(best + 1) % VOCABULARY_SIZE] = row[best] + 0.2
        return [float(score) for score in row]

    for branching in (0, 3):
        drafting = FakeModel(table=scores, can_fork=can_fork)
        own = start(FakeModel(), PROMPT)
        chooser = Chooser(TEXT_RULES[rule])
        request = DraftRequest(chooser=chooser, vocabulary_size=VOCABULARY_SIZE, context_length=100)
        state = CombinationState([("model", ModelDrafter(lambda: drafting).start(request))], FixedDepth(9))  # noqa: B023
        budget = FixedBudget(most=3, ahead=4, patience=0.0, branching=branching)
        own.take(pipelined(own, state, sampling=TEXT_RULES[rule], depth=3, budget=budget).steps())
        assert own.tokens == PLAIN[rule][:TOKENS]
        check(own, 3)
        assert state.forks is can_fork
        reads[branching] = len(own.records)
        state.close()
        assert all(sequence.closed for sequence in drafting.sequences)
    if rule == "greedy":
        assert reads[3] < reads[0]
