"""The pipelined loop on a runtime without weights: plain decoding's text with late drafters and after failures."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from edgespec.decoding.pipelined.in_flight import Drafted
from edgespec.decoding.pipelined.loop import PipelinedLoop
from edgespec.decoding.round_base import LoopLimits
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.errors import CancelledError, ForwardError, NonFiniteLogitsError, RewindError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import ChainGate, DraftState, Proposal
from edgespec.planning.depth.base import FixedDepth
from tests.decoding.test_loop import (
    DRAFTERS,
    GREEDY,
    KEYED,
    KNOWN,
    PLAIN,
    PROMPT,
    TEXT_RULES,
    TOKENS,
    VOCABULARY_SIZE,
    Answer,
    start,
)
from tests.support import scripted_drafters as scripted
from tests.support.budgets import FixedBudget
from tests.support.fake_runtime import FakeModel, Faults
from tests.support.sleepy import Sleepy

Job = Callable[[], Drafted]
Submit = Callable[[Job], "Future[Drafted]"]


def at_once(job: Job) -> Future[Drafted]:
    """A submit whose job is done before the target begins."""
    future: Future[Drafted] = Future()
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)
    return future


class Late:
    """A drafter's thread that finishes a job ``rounds`` landings after it was due."""

    def __init__(self, rounds: Callable[[], int]) -> None:
        self._rounds = rounds

    def __call__(self, job: Job) -> Future[Drafted]:
        return LateFuture(job, self._rounds())


class LateFuture(Future[Drafted]):
    def __init__(self, job: Job, rounds: int) -> None:
        super().__init__()
        self._job = job
        self._left = 2 * rounds  # a landing asks twice: before and after it waits

    def done(self) -> bool:
        if not super().done():
            if self._left > 0:
                self._left -= 1
                return False
            self.finish()
        return True

    def finish(self) -> None:
        if self.set_running_or_notify_cancel():
            try:
                self.set_result(self._job())
            except BaseException as error:
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> Drafted:
        if not super().done():
            self.finish()
        return super().result(timeout)


def pipelined(
    answer: Answer,
    drafter: DraftState,
    *,
    sampling: Sampling = GREEDY,
    depth: int = 3,
    budget: FixedBudget | None = None,
    submit: Submit = at_once,
    max_tokens: int | None = TOKENS,
    stop_ids: frozenset[int] = frozenset(),
    exact_length: int | None = None,
) -> PipelinedLoop:
    return PipelinedLoop(
        answer.sequence,
        drafter,
        FixedDepth(depth),
        Chooser(sampling),
        answer.history,
        LoopLimits(
            max_tokens=max_tokens,
            depth_cap=depth,
            vocabulary_size=VOCABULARY_SIZE,
            stop_ids=stop_ids,
            exact_length=exact_length,
        ),
        submit=submit,
        budget=budget or FixedBudget(most=depth, ahead=depth + 1, patience=0.0),
    )


def check(answer: Answer, depth: int) -> None:
    """The identities between rounds, tokens and forwards."""
    for record in answer.records:
        assert record.width <= depth + 1
        assert 0 <= record.accepted <= record.evaluated <= record.proposed <= record.width
        assert record.evaluated <= record.accepted + 1
        assert record.emitted in (record.accepted, record.accepted + 1)
    widths = answer.sequence.log.widths
    assert widths[len(widths) - len(answer.records) :] == [record.width for record in answer.records]
    assert len(answer.tokens) == 1 + sum(record.emitted for record in answer.records)


# ------------------------------------------------------------------------------------------------ same text


@pytest.mark.slow
@pytest.mark.parametrize("rule", TEXT_RULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_pipelined_drafting_leaves_plain_decodings_text_unchanged(drafter: str, rule: str) -> None:
    for depth, most, ahead, late in itertools.product((1, 5), (0, 1, 5), (1, 6), (0, 2)):
        own = start(FakeModel(), PROMPT)
        loop = pipelined(
            own,
            DRAFTERS[drafter](KNOWN[rule]),
            sampling=TEXT_RULES[rule],
            depth=depth,
            budget=FixedBudget(most=most, ahead=ahead, patience=0.0),
            submit=Late(lambda late=late: late),  # type: ignore[misc]
        )
        own.take(loop.steps())
        assert own.tokens == PLAIN[rule][:TOKENS], (depth, most, ahead, late)
        assert own.finish == "length"
        check(own, depth)


def test_a_pipeline_with_depth_zero_drafts_nothing() -> None:
    own, state = start(FakeModel(), PROMPT), scripted.oracle(KNOWN["greedy"])
    own.take(pipelined(own, state, depth=0).steps())
    assert own.tokens == PLAIN["greedy"][:TOKENS]
    assert state.asked == []
    assert {record.width for record in own.records} == {1}


def test_a_pipeline_accepts_an_oracles_tokens_without_a_bonus_token() -> None:
    """The first round checks the first token only; then each verifies a full window and one token of the next."""
    own = start(FakeModel(), PROMPT)
    own.take(pipelined(own, scripted.oracle(KNOWN["greedy"]), depth=3, max_tokens=14).steps())
    assert [(r.width, r.proposed, r.accepted, r.emitted) for r in own.records] == [
        (1, 1, 1, 1),
        (4, 4, 4, 4),
        (4, 4, 4, 4),
        (4, 4, 4, 4),
    ]


def test_each_pipelined_step_names_the_drafter_of_each_accepted_token() -> None:
    """Right k times, then wrong: a round that verifies k + 1 tokens names the drafter k times."""
    known = KNOWN["greedy"]
    for right in range(4):

        def script(tokens: list[int], depth: int, right: int = right) -> list[int]:
            first = len(PROMPT) + 1
            said = known[len(tokens) :][:depth]
            wrong = [(len(tokens) + at - first) % (right + 1) == right for at in range(len(said))]
            return [(token + bad) % VOCABULARY_SIZE for token, bad in zip(said, wrong, strict=True)]

        own = start(FakeModel(), PROMPT)
        own.take(pipelined(own, scripted.Scripted(script), depth=4, max_tokens=1 + 3 * (right + 1)).steps())
        assert own.guessed_by == [None, *[*[scripted.KIND] * right, None] * 3]


def test_after_a_wrong_guess_the_pipeline_verifies_one_place_while_it_drafts() -> None:
    own = start(FakeModel(), PROMPT)
    own.take(pipelined(own, scripted.worst(KNOWN["greedy"], VOCABULARY_SIZE), depth=3).steps())
    assert {(r.width, r.emitted) for r in own.records} == {(1, 1)}


def test_an_unsure_budget_checks_the_first_token_only() -> None:
    own = start(FakeModel(), PROMPT)
    budget = FixedBudget(most=0, ahead=2, patience=0.0)
    own.take(pipelined(own, scripted.oracle(KNOWN["greedy"]), depth=3, budget=budget).steps())
    assert {(r.width, r.accepted) for r in own.records} == {(1, 1)}
    assert own.tokens == PLAIN["greedy"][:TOKENS]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_late_proposal_is_used_only_if_the_text_agrees(wrong: bool) -> None:
    class Once(scripted.Scripted):
        """Right, except for the third token of its first proposal."""

        def _proposal(self, tokens: list[int], depth: int) -> Proposal:
            proposal = super()._proposal(tokens, depth)
            if len(self.asked) > 1 or not wrong:
                return proposal
            spoilt = [*proposal.tokens[:2], (proposal.tokens[2] + 1) % VOCABULARY_SIZE, *proposal.tokens[3:]]
            return Proposal(tokens=tuple(spoilt), drafted_by=scripted.KIND)

    known = KNOWN["greedy"]
    state = Once(lambda tokens, depth: known[len(tokens) : len(tokens) + depth])
    lateness = iter([3, *[0] * 99])
    own = start(FakeModel(), PROMPT)
    own.take(pipelined(own, state, depth=5, submit=Late(lambda: next(lateness)), max_tokens=12).steps())
    assert own.tokens == PLAIN["greedy"][:12]
    assert state.asked[0] == (len(PROMPT) + 1, 6)
    # In the fourth round six tokens for the place after the prefill arrive.
    assert [record.proposed for record in own.records[:4]] == [0, 0, 0, 0 if wrong else 1]


def test_tokens_behind_a_superfluous_guess_are_proposed_again() -> None:
    """The drafter repeats a word once; the tokens behind the repetition are right and need no second draft."""
    known = KNOWN["greedy"]

    def stutter(tokens: list[int], depth: int) -> list[int]:
        right = known[len(tokens) : len(tokens) + depth]
        wrong = (right[0] + 1) % VOCABULARY_SIZE if right else 0
        return [wrong, *right][:depth] if len(tokens) == len(PROMPT) + 1 else right

    class Numbered(scripted.Scripted):
        def _proposal(self, tokens: list[int], depth: int) -> Proposal:
            said = tuple(stutter(tokens, depth))
            sources = tuple(f"{len(tokens) - len(PROMPT)}.{place}" for place in range(len(said)))
            return Proposal(tokens=said, sources=sources, drafted_by=scripted.KIND)

    rounds, sources = [], []
    for reuse in (False, True):
        own, state = start(FakeModel(), PROMPT), Numbered(stutter)
        budget = FixedBudget(most=4, ahead=5, patience=0.0, reuse=reuse)
        own.take(pipelined(own, state, depth=4, budget=budget).steps())
        assert own.tokens == PLAIN["greedy"][:TOKENS]
        check(own, 4)
        rounds.append([record.accepted for record in own.records[:3]])
        sources.append(own.guessed_by[:6])
    assert rounds == [[0, 1, 5], [0, 4, 5]]
    first, reused = sources
    assert first == [None, None, "2.0", "2.1", "2.2", "2.3"]
    assert reused == [None, None, "1.2", "1.3", "1.4", "5.0"], "each token keeps its first source"


# ----------------------------------------------------------------------------------- limits, stops, outcomes


@pytest.mark.parametrize("room", range(1, 9))
@pytest.mark.parametrize("late", [0, 1])
def test_pipelined_drafts_end_at_the_context_and_token_limits(room: int, late: int) -> None:
    for depth, most, max_tokens in itertools.product((1, 2, 5), (0, 1, 5), (None, 1, 2, room, room + 3)):
        own = start(FakeModel(), PROMPT, len(PROMPT) + room)
        state = scripted.too_long(KNOWN["greedy"])
        budget = FixedBudget(most=most, ahead=4, patience=0.0)
        loop = pipelined(own, state, depth=depth, budget=budget, max_tokens=max_tokens, submit=Late(lambda: late))
        own.take(loop.steps())
        wanted = room if max_tokens is None else min(room, max_tokens)
        assert own.tokens == PLAIN["greedy"][:wanted]
        assert own.finish == "length"
        check(own, depth)
        for length, asked in state.asked:
            assert length + asked <= len(PROMPT) + wanted, "drafts past the end of the answer"


@pytest.mark.parametrize("rule", TEXT_RULES)
@pytest.mark.parametrize("drafter", ["oracle", "worst", "often right", "too long", "stop id inside"])
def test_a_stop_token_ends_the_pipelined_answer_at_any_place(drafter: str, rule: str) -> None:
    plain = PLAIN[rule]
    for place, stop_id in enumerate(plain[:12]):
        if stop_id in plain[:place]:
            continue
        for depth, late in itertools.product((1, 3, 6), (0, 1)):
            own = start(FakeModel(), PROMPT)
            state = DRAFTERS[drafter](KNOWN[rule])
            loop = pipelined(
                own,
                state,
                sampling=TEXT_RULES[rule],
                depth=depth,
                stop_ids=frozenset({stop_id}),
                submit=Late(lambda late=late: late),  # type: ignore[misc]
            )
            own.take(loop.steps())
            assert own.tokens == plain[: place + 1]
            assert own.finish == "stop"
            check(own, depth)


def test_each_pipelined_proposal_has_one_outcome() -> None:
    state = scripted.often_right(KNOWN["greedy"], VOCABULARY_SIZE)
    own = start(FakeModel(), PROMPT)
    own.take(pipelined(own, state, depth=3, max_tokens=50).steps())
    proposals = [outcome.proposal for outcome in state.outcomes]
    assert len({id(proposal) for proposal in proposals}) == len(proposals) > 8
    for outcome in state.outcomes:
        assert 0 <= outcome.accepted <= outcome.evaluated <= len(outcome.proposal.tokens)
        assert outcome.evaluated <= outcome.accepted + 1
    assert sum(o.accepted for o in state.outcomes) == sum(r.accepted for r in own.records)
    assert sum(o.evaluated for o in state.outcomes) == sum(r.evaluated for r in own.records)


# ------------------------------------------------------------------------------------------ failures, leaving


class Errors(scripted.Scripted):
    """Raises ``error`` in its ``at``-th proposal."""

    def __init__(self, known: list[int], error: BaseException, at: int) -> None:
        super().__init__(lambda tokens, depth: known[len(tokens) : len(tokens) + depth])
        self.error, self.at = error, at

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        proposal = super().propose(context, depth, gate)
        if len(self.asked) == self.at:
            raise self.error
        return proposal


@pytest.mark.parametrize("depth", [1, 3])
def test_pipelined_drafting_stops_at_the_longest_compared_context(depth: int) -> None:
    own, state = start(FakeModel(), PROMPT), scripted.oracle(KNOWN["greedy"])
    asked: list[int] = []

    def submit(job: Job) -> Future[Drafted]:
        asked.append(len(own.history))
        return at_once(job)

    own.take(pipelined(own, state, depth=depth, submit=submit, exact_length=len(PROMPT) + 12).steps())
    assert own.tokens == PLAIN["greedy"][: len(own.tokens)]
    ends = [record.context_length + record.width - 1 for record in own.records if record.width > 1]
    assert len(PROMPT) + 8 < max(ends) <= len(PROMPT) + 12
    assert max(asked) < len(PROMPT) + 12
    assert len(own.tokens) == TOKENS


def intact(own: Answer) -> None:
    assert own.sequence.length <= len(own.history)
    assert own.sequence.tokens == own.history[: own.sequence.length]
    assert own.history[len(PROMPT) :] == PLAIN["greedy"][: len(own.history) - len(PROMPT)]


@pytest.mark.parametrize(
    "error", [CancelledError("stop"), ForwardError("lost"), KeyboardInterrupt(), ValueError("bug")]
)
@pytest.mark.parametrize("at", range(1, 7))
def test_an_error_of_the_pipelined_drafter_rolls_back_to_the_last_committed_token(
    error: BaseException, at: int
) -> None:
    own = start(FakeModel(), PROMPT)
    state = Errors(KNOWN["greedy"], error, at)
    with pytest.raises(type(error)):
        own.take(pipelined(own, state, depth=2, submit=Late(lambda: 1)).steps())
    intact(own)
    again = Answer(own.history, own.sequence)
    again.take(pipelined(again, scripted.oracle(KNOWN["greedy"]), depth=2, max_tokens=8).steps())
    intact(again)


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("fault", ["raise_at", "cancel_at", "refuse_rewind_at", "nan_at"])
def test_an_error_of_the_target_ends_the_drafting_in_flight(fault: str, at: int) -> None:
    own = start(FakeModel(faults=Faults(**{fault: at})), PROMPT)
    state = scripted.often_right(KNOWN["greedy"], VOCABULARY_SIZE)
    jobs: list[Future[Drafted]] = []

    def submit(job: Job) -> Future[Drafted]:
        jobs.append(Late(lambda: 1)(job))
        return jobs[-1]

    # A fault at a call that this answer never makes has no effect.
    with contextlib.suppress(ForwardError, CancelledError, RewindError, NonFiniteLogitsError):
        own.take(pipelined(own, state, depth=3, submit=submit).steps())
    assert all(job.done() for job in jobs), "no job is still running"
    assert not state.cancelled
    if fault != "refuse_rewind_at":
        intact(own)


def test_leaving_the_iteration_ends_the_drafting_in_flight() -> None:
    for rounds in range(6):
        own = start(FakeModel(), PROMPT)
        jobs: list[Future[Drafted]] = []

        def submit(job: Job, jobs: list[Future[Drafted]] = jobs) -> Future[Drafted]:
            jobs.append(Late(lambda: 5)(job))
            return jobs[-1]

        steps = pipelined(own, scripted.oracle(KNOWN["greedy"]), submit=submit).steps()
        for _ in range(rounds + 1):
            next(steps)
        steps.close()
        assert all(job.done() or job.cancelled() for job in jobs)
        assert own.sequence.tokens == own.history[:-1]


# ------------------------------------------------------------------------------------------------- real threads


class SleepyDrafter(Sleepy, scripted.Scripted):
    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        ask = super().propose
        return self.slowly(lambda: ask(context, depth, gate), gate)


@pytest.fixture
def thread() -> Iterator[Submit]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


@pytest.mark.parametrize("sampling", [GREEDY, KEYED], ids=["greedy", "keyed"])
def test_random_delays_do_not_change_the_pipelined_text(
    thread: Submit, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(8)
    model = FakeModel()
    plain = start(FakeModel(), PROMPT, 2000)
    plain.take(pipelined(plain, scripted.empty(), sampling=sampling, max_tokens=400, submit=thread).steps())
    known = PROMPT + plain.tokens
    rounds = 0
    for patience in (0.0, 0.0005, 1.0):
        state = SleepyDrafter(
            scripted.often_right(known, VOCABULARY_SIZE)._script, pace=lambda: source.random() * 4e-4
        )
        own = start(model, PROMPT, 2000)
        forward = own.sequence.forward

        def slow(tokens: Any, rows: int, forward: Any = forward) -> Any:
            time.sleep(source.random() * 1e-3)
            return forward(tokens, rows)

        monkeypatch.setattr(own.sequence, "forward", slow)
        budget = FixedBudget(most=4, ahead=5, patience=patience)
        loop = pipelined(own, state, sampling=sampling, depth=4, budget=budget, max_tokens=400, submit=thread)
        own.take(loop.steps())
        assert own.tokens == plain.tokens
        rounds += len(own.records)
        assert sum(record.accepted for record in own.records) > 40
    assert rounds > 300


def test_the_drafter_stops_at_the_next_token_once_the_target_is_done(thread: Submit) -> None:
    """The drafter may write eight tokens, and writes as many as time allows: at least the current one."""

    class AsSlow(scripted.Scripted):
        """Its first token takes as long as the target, its others no time."""

        def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
            assert gate is not None
            whole, until = super().propose(context, depth, gate), time.monotonic() + 10
            while gate.goes_on() and time.monotonic() < until:
                time.sleep(0.001)
            for count in range(1, len(whole.tokens)):
                if not gate.goes_on():
                    return whole.cut(count)
            return whole

    state = AsSlow(scripted.oracle(KNOWN["greedy"])._script)
    own = start(FakeModel(), PROMPT)
    budget = FixedBudget(most=8, ahead=9)
    own.take(pipelined(own, state, depth=8, budget=budget, max_tokens=6, submit=thread).steps())
    assert own.tokens == PLAIN["greedy"][:6]
    assert [record.draft_forwards for record in own.records] == [0] * len(own.records)
    assert [record.proposed for record in own.records] == [1] * 5, "stopped in each round"


def test_drafting_that_begins_after_the_target_is_done_ends_immediately() -> None:
    goes_on: list[bool] = []

    class Asking(scripted.Scripted):
        def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
            assert gate is not None
            goes_on.append(gate.goes_on())
            return super().propose(context, depth, gate)

    known = KNOWN["greedy"]
    for submit, expected in ((Late(lambda: 0), False), (at_once, True)):
        own, state = (
            start(FakeModel(), PROMPT),
            Asking(lambda tokens, depth: known[len(tokens) : len(tokens) + depth]),
        )
        budget = FixedBudget(most=3, ahead=4, patience=0.0)
        own.take(pipelined(own, state, budget=budget, submit=submit).steps())
        assert set(goes_on) == {expected}
        goes_on.clear()


def test_cancelling_the_drafter_ends_the_pipelined_round(thread: Submit) -> None:
    state = SleepyDrafter(scripted.oracle(KNOWN["greedy"])._script, pace=lambda: 30.0)
    own = start(FakeModel(), PROMPT)
    loop = pipelined(own, state, budget=FixedBudget(most=3, ahead=4), submit=thread)
    timer = threading.Timer(0.1, state.cancel)
    timer.start()
    with pytest.raises(CancelledError):
        own.take(loop.steps())
    timer.join()
    intact(own)
    assert own.tokens == PLAIN["greedy"][:1]
