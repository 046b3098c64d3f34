"""Rows from which no token can be chosen: drafting emits what plain decoding emits before them, then its error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.constraint import Bound
from edgespec.decoding.round_base import LoopLimits, Rounds
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.decoding.serial import DecodeLoop
from edgespec.errors import EdgespecError, NoneAllowedError, NonFiniteLogitsError
from edgespec.planning.depth.base import FixedDepth
from tests.decoding.test_loop import KEYED, PROMPT, REJECTION, VOCABULARY_SIZE, Answer, check_rolled_back, start
from tests.decoding.test_pipeline import Late, at_once, pipelined
from tests.decoding.test_tree_rounds import random_trees, second_guess
from tests.support import scripted_drafters as scripted
from tests.support.fake_runtime import FakeModel
from tests.support.forms import RandomForm

END = 9  # how many tokens plain decoding emits before the row without one
SAMPLINGS = {"greedy": Sampling(), "keyed": KEYED, "rejection": REJECTION}
FREE = FakeModel()


class Ending(RandomForm):
    """A form whose texts have at most END tokens."""

    def allowed(self, tokens: Sequence[int]) -> list[int]:
        return super().allowed(tokens) if len(tokens) < END else []


def broken(prefix: tuple[int, ...]) -> list[float]:
    """Scores with a NaN behind END tokens."""
    scores = FREE.scores(prefix).copy()
    scores[-1] = np.nan if len(prefix) - len(PROMPT) >= END else scores[-1]
    found: list[float] = scores.tolist()
    return found


ERRORS: dict[str, type[EdgespecError]] = {"form": NoneAllowedError, "NaN": NonFiniteLogitsError}


def answer_of(error: str, sampling: Sampling, loop: Callable[..., Rounds], **options: Any) -> Answer:
    """The answer up to its error; ``loop`` gets the answer, and the limits and chooser that it takes."""
    own = start(FakeModel(can_branch=True, table=broken if error == "NaN" else None), PROMPT)
    rounds = loop(own, sampling, **options)
    if error == "form":
        rounds._chooser.bound = Bound(Ending(VOCABULARY_SIZE), len(PROMPT))
    with pytest.raises(ERRORS[error]):
        own.take(rounds.steps())
    check_rolled_back(own)
    return own


def serial(own: Answer, sampling: Sampling, drafter: Any = None, depth: int = 0, *, trees: bool = False) -> Rounds:
    limits = LoopLimits(max_tokens=40, depth_cap=depth, vocabulary_size=VOCABULARY_SIZE, logprobs=1)
    state = drafter or scripted.empty()
    return DecodeLoop(own.sequence, state, FixedDepth(depth), Chooser(sampling), own.history, limits, trees=trees)


def in_parallel(own: Answer, sampling: Sampling, drafter: Any, depth: int, submit: Any = at_once) -> Rounds:
    return pipelined(own, drafter, sampling=sampling, depth=depth, submit=submit, max_tokens=40)


def check_records(own: Answer) -> None:
    for record in own.records:
        assert record.accepted <= record.evaluated <= min(record.proposed, record.accepted + 1)
        assert record.emitted in (record.accepted, record.accepted + 1)
    assert len(own.tokens) == 1 + sum(record.emitted for record in own.records)


@pytest.mark.parametrize("rule", ["greedy", "keyed"])
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_deep_in_a_draft_comes_behind_the_tokens_of_plain_decoding(error: str, rule: str) -> None:
    sampling = SAMPLINGS[rule]
    plain = answer_of(error, sampling, serial)
    assert len(plain.tokens) == END
    known = [*PROMPT, *plain.tokens, *range(6)]  # the drafter does not know where the text ends
    drafted = 0
    for depth in range(1, 8):
        ways = [
            answer_of(error, sampling, serial, drafter=scripted.oracle(known), depth=depth),
            *(
                answer_of(error, sampling, serial, drafter=make(known), depth=depth, trees=True)
                for make in (second_guess, random_trees, scripted.oracle)
            ),
            *(
                answer_of(error, sampling, in_parallel, drafter=scripted.oracle(known), depth=depth, submit=submit)
                for submit in (at_once, Late(lambda: 1))
            ),
        ]
        for own in ways:
            assert own.tokens == plain.tokens
            check_records(own)
            drafted += sum(record.accepted for record in own.records)
    assert drafted > END


@pytest.mark.parametrize("error", ERRORS)
def test_under_the_rejection_rule_such_an_answer_has_all_its_tokens_too(error: str) -> None:
    for depth in range(1, 8):
        for loop in (serial, in_parallel):
            drafter: scripted.Scripted = scripted.Stochastic(FREE, REJECTION)
            if error == "form":
                drafter = scripted.oracle([*PROMPT, *answer_of(error, REJECTION, serial).tokens, 1, 2])
            own = answer_of(error, REJECTION, loop, drafter=drafter, depth=depth)
            assert len(own.tokens) == END
            check_records(own)


def test_a_pipelined_round_that_ends_there_counts_no_token_behind_the_accepted_ones() -> None:
    plain = answer_of("NaN", Sampling(), serial)
    drafter = scripted.oracle([*PROMPT, *plain.tokens, *range(6)])
    own = answer_of("NaN", Sampling(), in_parallel, drafter=drafter, depth=4)
    assert own.records[-1].emitted == own.records[-1].accepted == own.records[-1].evaluated
    assert own.records[-1].accepted < own.records[-1].proposed
