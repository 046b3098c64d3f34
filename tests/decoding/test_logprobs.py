"""Log-probabilities: the softmax of the target's raw scores, whatever the loop, the drafter and the sampling."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from edgespec.decoding.logprobs import MOST_TOP, TokenLogprob, token_logprob
from edgespec.decoding.round_base import LoopLimits, Rounds
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.decoding.serial import DecodeLoop
from edgespec.interfaces.drafting import DraftState
from edgespec.planning.depth.base import FixedDepth
from tests.decoding.test_loop import PROMPT, TOKENS, VOCABULARY_SIZE, Answer, start
from tests.decoding.test_pipeline import Late, pipelined
from tests.decoding.test_tree_rounds import random_trees
from tests.support import scripted_drafters as scripted
from tests.support.budgets import FixedBudget
from tests.support.fake_runtime import FakeModel

DEPTH, TOP = 4, 3
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, top_k=5, repeat_penalty=1.3, seed=4),
    Sampling(temperature=0.8, top_p=0.9, seed=4, rule="rejection"),
)


def by_definition(scores: list[float], token: int, top: int) -> TokenLogprob:
    """Log-softmax with Python's floats, and the best tokens by sorting."""
    peak = max(scores)
    total = peak + math.log(math.fsum(math.exp(score - peak) for score in scores))
    best = sorted(range(len(scores)), key=lambda each: (-scores[each], each))[:top]
    return TokenLogprob(token, scores[token] - total, tuple((each, scores[each] - total) for each in best))


def same(one: TokenLogprob, other: TokenLogprob) -> bool:
    """Equal but for rounding in the last bits."""
    ids = [(own.token_id, *(each for each, _ in own.top)) for own in (one, other)]
    values = [(own.logprob, *(value for _, value in own.top)) for own in (one, other)]
    return ids[0] == ids[1] and np.allclose(values[0], values[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("top", [0, 1, 4, MOST_TOP])
def test_a_log_probability_is_the_log_softmax_of_the_scores(top: int) -> None:
    source = random.Random(top)
    for spread in (0.01, 3.0, 200.0):
        scores = np.array([source.gauss(0, spread) for _ in range(50)], dtype=np.float32)
        scores[7] = scores[31] = scores[20] = scores.max()  # ties at the top go to the lowest id
        token = source.randrange(50)
        assert same(token_logprob(scores, token, top), by_definition(scores.tolist(), token, top))


def test_more_likely_tokens_than_the_vocabulary_has_are_all_of_it() -> None:
    found = token_logprob(np.zeros(3, dtype=np.float32), 1, MOST_TOP)
    assert [token for token, _ in found.top] == [0, 1, 2]
    assert found.logprob == pytest.approx(math.log(1 / 3))


def test_a_token_without_a_score_has_no_probability() -> None:
    scores = np.array([-np.inf, 2.0, -np.inf], dtype=np.float32)
    assert token_logprob(scores, 0, 1) == TokenLogprob(0, -math.inf, ((1, 0.0),))


def serial(own: Answer, sampling: Sampling, drafter: DraftState, top: int | None) -> Rounds:
    limits = LoopLimits(max_tokens=TOKENS, depth_cap=DEPTH, vocabulary_size=VOCABULARY_SIZE, logprobs=top)
    return DecodeLoop(own.sequence, drafter, FixedDepth(DEPTH), Chooser(sampling), own.history, limits, trees=True)


def in_parallel(own: Answer, sampling: Sampling, drafter: DraftState, top: int | None) -> Rounds:
    late = random.Random(3)
    budget = FixedBudget(most=DEPTH, ahead=DEPTH + 1, patience=0.0, reuse=True)
    submit = Late(lambda: late.randrange(3))
    loop = pipelined(own, drafter, sampling=sampling, depth=DEPTH, budget=budget, submit=submit)
    loop._limits = replace(loop._limits, logprobs=top)
    return loop


Begin = Callable[[Answer, Sampling, DraftState, "int | None"], Rounds]


def taken(loop: Rounds) -> list[TokenLogprob]:
    """The log-probabilities of all tokens; each belongs to its token."""
    found = list[TokenLogprob]()
    for step in loop.steps():
        assert tuple(each.token_id for each in step.logprobs) == step.tokens
        found += step.logprobs
    return found


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_every_loop_gives_the_log_probabilities_of_the_raw_scores(sampling: Sampling) -> None:
    model = FakeModel(can_branch=True, seed=2)
    plain = start(model, PROMPT)
    plain.take(serial(plain, sampling, scripted.empty(), None).steps())
    known = plain.history
    answers = list[list[int]]()
    for begin in (serial, in_parallel):
        for drafter in (scripted.empty(), scripted.often_right(known, VOCABULARY_SIZE, 5), random_trees(known, 5)):
            own = start(model, PROMPT)
            found = taken(begin(own, sampling, drafter, TOP))
            answers.append(own.history)
            for place, each in enumerate(found, len(PROMPT)):
                # Equal bits: the row's own, whatever else the forward computed.
                assert each == token_logprob(model.scores(own.history[:place]), own.history[place], TOP)
    if sampling.rule == "keyed":
        assert all(each == known for each in answers)


@pytest.mark.parametrize("begin", [serial, in_parallel])
def test_nothing_is_computed_unless_asked_for(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.decoding.round_base.token_logprob", None)
    own = start(FakeModel(), PROMPT)
    assert all(step.logprobs == () for step in begin(own, SAMPLINGS[0], scripted.empty(), None).steps())
