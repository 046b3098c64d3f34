"""Target and drafter read the prompt in parallel: the first token does not wait for the drafter."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import pytest

from edgespec.errors import ForwardError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import Proposal
from tests.decoding.test_loop import GREEDY, KNOWN, PLAIN, PROMPT, TEXT_RULES, TOKENS, start
from tests.decoding.test_pipeline import Late, at_once, check, pipelined
from tests.support import scripted_drafters as scripted
from tests.support.budgets import FixedBudget
from tests.support.fake_runtime import FakeModel, Faults

T = TypeVar("T")

BESIDE = FixedBudget(most=3, ahead=4, patience=0.0, overlaps_prefill=True)


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("rule", TEXT_RULES)
def test_drafting_during_the_prefill_leaves_plain_decodings_text_unchanged(rule: str, late: int) -> None:
    answer = start(FakeModel(), PROMPT)
    drafter = scripted.often_right(KNOWN[rule], 12)
    answer.take(
        pipelined(answer, drafter, sampling=TEXT_RULES[rule], budget=BESIDE, submit=Late(lambda: late)).steps()
    )
    assert answer.tokens == PLAIN[rule][:TOKENS]
    check(answer, 3)


def test_tokens_drafted_during_the_prefill_are_verified_in_the_first_round() -> None:
    answer = start(FakeModel(), PROMPT)
    loop = pipelined(answer, scripted.oracle(KNOWN["greedy"]), budget=BESIDE)
    steps = loop.steps()
    first = next(steps)
    assert first.tokens == tuple(PLAIN["greedy"][:1])
    second = next(steps)
    assert second.record is not None
    assert second.record.proposed > 0, "the drafter had the next tokens ready"
    steps.close()
    without = start(FakeModel(), PROMPT)
    assert FixedBudget(most=3, ahead=4).overlaps_prefill is False
    asked: list[int] = []

    class Watching:
        free = False

        def propose(self, context: Context, depth: int, gate: object = None) -> Proposal:
            asked.append(len(context))
            return Proposal()

        def __getattr__(self, name: str) -> object:
            return lambda *_: None

    without.take(pipelined(without, Watching()).steps())  # type: ignore[arg-type]
    assert min(asked) == len(PROMPT) + 1, "by default nothing is drafted before the first token"


def test_a_failed_prefill_ends_the_drafting_in_flight() -> None:
    model = FakeModel(faults=Faults(raise_at=1))
    answer = start(model, PROMPT)
    ended: list[bool] = []

    def submit(job: object) -> object:
        future = at_once(job)  # type: ignore[arg-type]
        ended.append(future.done())
        return future

    with pytest.raises(ForwardError):
        answer.take(pipelined(answer, scripted.oracle(KNOWN["greedy"]), budget=BESIDE, submit=submit).steps())  # type: ignore[arg-type]
    assert ended == [True]
    assert answer.tokens == []


@pytest.mark.parametrize("most", [1, 3])
def test_an_answer_of_one_token_does_not_let_the_drafter_read(most: int) -> None:
    answer = start(FakeModel(), PROMPT)
    during: list[int] = []

    def submit(job: Callable[[], T]) -> Future[T]:
        during.append(len(answer.tokens))
        return at_once(job)

    drafter = scripted.oracle(KNOWN["greedy"])
    answer.take(pipelined(answer, drafter, budget=BESIDE, max_tokens=most, submit=submit).steps())
    assert (answer.tokens, answer.finish) == (PLAIN["greedy"][:most], "length")
    assert answer.history == [*PROMPT, *PLAIN["greedy"][:most]]
    assert (0 in during) == (most == 3)
    assert TEXT_RULES["greedy"] == GREEDY


def test_a_prompt_that_is_only_read_starts_no_drafting() -> None:
    answer = start(FakeModel(), PROMPT)
    answer.take(pipelined(answer, scripted.oracle(KNOWN["greedy"]), budget=BESIDE, max_tokens=0).steps())
    assert (answer.tokens, answer.history) == ([], PROMPT)
    assert answer.sequence.log.fed == [tuple(PROMPT[:-1])]
