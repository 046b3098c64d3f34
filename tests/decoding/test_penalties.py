"""Penalties and bias in every loop: the specification's tokens; their cost does not grow with the text."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, SupportsIndex

import pytest
from hypothesis import given, settings, strategies as st

from edgespec.decoding.round_base import LoopLimits, Rounds
from edgespec.decoding.sampling import Chooser, Rule, Sampling, request_of
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.model import ModelDrafter
from edgespec.errors import NonFiniteLogitsError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import ChainGate, DraftRequest, DraftState, Proposal
from edgespec.planning.depth.base import FixedDepth
from tests.decoding.test_loop import PROMPT, TOKENS, VOCABULARY_SIZE, Answer, start
from tests.decoding.test_pipeline import Late, pipelined
from tests.decoding.test_tree_rounds import random_trees
from tests.interfaces.draw_specification import specified
from tests.support import scripted_drafters as scripted
from tests.support.budgets import FixedBudget
from tests.support.fake_runtime import FakeModel, Faults

DEPTH = 4


def plain(model: FakeModel, sampling: Sampling) -> list[int]:
    """The specification's text, one token at a time; occurrences are counted from scratch for each."""
    text = list(PROMPT)
    for _ in range(TOKENS):
        first = max(0, len(text) - sampling.repeat_last_n) if sampling.repeat_last_n >= 0 else 0
        answer = Counter(text[max(first, len(PROMPT)) :])
        request = replace(request_of(sampling, text), seen={token: answer[token] for token in text[first:]})
        drawn = specified(model.scores(text).tolist(), request)
        assert drawn is not None
        text.append(drawn.tokens[0])
    return text[len(PROMPT) :]


def serial(own: Answer, drafter: DraftState, chooser: Chooser) -> Rounds:
    limits = LoopLimits(max_tokens=TOKENS, depth_cap=DEPTH, vocabulary_size=VOCABULARY_SIZE)
    return DecodeLoop(own.sequence, drafter, FixedDepth(DEPTH), chooser, own.history, limits, trees=True)


def at_once(own: Answer, drafter: DraftState, chooser: Chooser) -> Rounds:
    late = random.Random(3)
    budget = FixedBudget(most=DEPTH, ahead=DEPTH + 1, patience=0.0, reuse=True)
    submit = Late(lambda: late.randrange(3))
    loop = pipelined(own, drafter, sampling=chooser.sampling, depth=DEPTH, budget=budget, submit=submit)
    loop._chooser = chooser  # the drafter shares the chooser, as in a session
    return loop


Begin = Callable[[Answer, DraftState, Chooser], Rounds]
SAMPLED = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.8]),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    repeat_last_n=st.sampled_from([-1, 3, 9]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.2, -0.1]),
    seed=st.integers(0, 9),
    logit_bias=st.sampled_from([{}, {3: 2.5, 9: -100.0}]),
)


def drafters(known: list[int], seed: int, chooser: Chooser) -> Iterator[DraftState]:
    yield scripted.often_right(known, VOCABULARY_SIZE, seed)
    yield scripted.worst(known, VOCABULARY_SIZE)
    request = DraftRequest(chooser=chooser, vocabulary_size=VOCABULARY_SIZE, context_length=100)
    yield ModelDrafter(lambda: FakeModel(seed=seed, can_fork=bool(seed % 2))).start(request)


@settings(max_examples=20)
@given(sampling=SAMPLED, seed=st.integers(0, 9))
@pytest.mark.parametrize("begin", [serial, at_once])
def test_every_loop_applies_penalties_and_bias_as_the_specification(
    begin: Begin, sampling: Sampling, seed: int
) -> None:
    model, chooser = FakeModel(can_branch=True, seed=seed % 3), Chooser(sampling)
    expected = plain(model, sampling)
    for drafter in drafters(PROMPT + expected, seed, chooser):
        own = start(model, PROMPT)
        assert own.take(begin(own, drafter, chooser).steps()).tokens == expected
    own = start(model, PROMPT)
    assert own.take(serial(own, random_trees(PROMPT + expected, seed), chooser).steps()).tokens == expected


@pytest.mark.parametrize("at", range(3, 7))
def test_penalties_ignore_the_assumed_tokens_of_a_failed_round(at: int) -> None:
    sampling = Sampling(temperature=0.8, repeat_penalty=1.3, frequency_penalty=0.2, seed=1)
    expected = plain(FakeModel(), sampling)
    own = start(FakeModel(faults=Faults(nan_at=at)), PROMPT)
    loop = serial(own, scripted.oracle(PROMPT + expected), Chooser(sampling))
    step, failed = loop._prefill(), 0  # a session stops after an error; the next round checks the same
    while step.finish is None:
        try:
            step = loop._round()
        except NonFiniteLogitsError:
            failed += 1
    assert (own.history[len(PROMPT) :], failed) == (expected, 1)


class Watched(list[int]):
    """Counts the tokens that are read from it."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        for token in super().__iter__():
            self.read += 1
            yield token

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(found, list) else 1
        return found


class Blind(scripted.Scripted):
    """Drafts without reading the text."""

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        return self._proposal([], depth)


@pytest.mark.parametrize("drafts", [0, 1, DEPTH])
def test_penalties_do_not_reread_the_whole_text_for_each_token(drafts: int) -> None:
    sampling, model = Sampling(temperature=0.8, repeat_penalty=1.3, seed=6), FakeModel(order=2)
    history = Watched(PROMPT * 200)
    own = Answer(history, model.open(2000))
    loop = serial(own, Blind(lambda tokens, depth: range(drafts)), Chooser(sampling))
    steps = loop.steps()
    next(steps)  # counts the prompt
    loop._text.tokens = watched = Watched(loop._text.tokens)
    history.read = 0
    records = [step.record for step in steps]
    assert sum(record is not None and record.proposed for record in records) >= drafts * TOKENS // 2
    assert history.read + watched.read <= 20 * len(records), "only a few tokens at the end are read"


def test_penalties_do_not_reread_the_whole_text_for_each_drafted_token() -> None:
    chooser = Chooser(Sampling(temperature=0.8, repeat_penalty=1.3, seed=6))
    request = DraftRequest(chooser=chooser, vocabulary_size=VOCABULARY_SIZE, context_length=2000)
    state = ModelDrafter(lambda: FakeModel(order=2)).start(request)
    text = PROMPT * 200
    reads = []
    for depth in (1, 41):
        state.propose(Context(text), 1)
        state._text.tokens = watched = Watched(state._text.tokens)
        assert len(state.propose(Context(text), depth).tokens) == depth
        reads.append(watched.read)
    assert reads[1] - reads[0] <= 3 * 40, "once a proposal, to compare it with the context"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=5)], ids=str)
@pytest.mark.parametrize("rule", ["keyed", "rejection"])
def test_drafters_draw_with_the_bias_of_the_target(sampling: Sampling, rule: Rule) -> None:
    """A drafter equal to the target is always right, and a forbidden token never comes."""
    model, free = FakeModel(seed=2), plain(FakeModel(seed=2), sampling)
    forbidden = Counter(free).most_common(3)
    own = replace(sampling, rule=rule, logit_bias={token: -100.0 for token, _ in forbidden})
    chooser, answer = Chooser(own), start(model, PROMPT)
    request = DraftRequest(chooser=chooser, vocabulary_size=VOCABULARY_SIZE, context_length=100)
    answer.take(serial(answer, ModelDrafter(lambda: FakeModel(seed=2)).start(request), chooser).steps())
    assert not {token for token, _ in forbidden} & set(answer.tokens)
    assert all(record.accepted == record.evaluated > 0 for record in answer.records if record.proposed)
    assert sum(record.accepted for record in answer.records) >= TOKENS // 2
