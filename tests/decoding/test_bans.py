"""Tokens that may not come before a position: target and drafters leave them out, and drafting changes no text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.pipelined.loop import PipelinedLoop
from edgespec.decoding.round_base import LoopLimits, Step
from edgespec.decoding.sampling import Chooser, Sampling, distribution, request_of
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.model import ModelDrafter
from edgespec.interfaces.drafting import DraftRequest, DraftState
from edgespec.interfaces.rows import Rows
from edgespec.planning.depth.base import FixedDepth
from tests.decoding.test_loop import KEYED, PENALISED, PROMPT, REJECTION, TOKENS, VOCABULARY_SIZE
from tests.decoding.test_pipeline import Late, at_once
from tests.decoding.test_tree_rounds import random_trees
from tests.support import scripted_drafters as scripted
from tests.support.budgets import FixedBudget
from tests.support.fake_runtime import FakeModel
from tests.support.gates import at_least

START = len(PROMPT)
# Three tokens never, two more among the first eight: enough that every text changes.
BANS: Mapping[int, float] = {0: math.inf, 4: math.inf, 7: math.inf, 2: 8.0, 9: 8.0}
RULES = {"greedy": Sampling(), "keyed": KEYED, "penalised": PENALISED}


def chooser(sampling: Sampling, bans: Mapping[int, float] = BANS) -> Chooser:
    own = Chooser(sampling)
    own.not_before, own.begins = bans, START
    return own


def tokens_of(steps: Iterator[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def serial(sampling: Sampling, drafter: DraftState, depth: int, own: Chooser | None = None, **more: Any) -> list[int]:
    limits = LoopLimits(max_tokens=TOKENS, depth_cap=depth, vocabulary_size=VOCABULARY_SIZE)
    model = FakeModel(can_branch=True)
    loop = DecodeLoop(
        model.open(100), drafter, FixedDepth(depth), own or chooser(sampling), list(PROMPT), limits, **more
    )
    return tokens_of(loop.steps())


def pipelined(
    sampling: Sampling, drafter: DraftState, submit: Any, own: Chooser | None = None, *, reuse: bool = False
) -> list[int]:
    limits = LoopLimits(max_tokens=TOKENS, depth_cap=3, vocabulary_size=VOCABULARY_SIZE)
    loop = PipelinedLoop(
        FakeModel().open(100),
        drafter,
        FixedDepth(3),
        own or chooser(sampling),
        list(PROMPT),
        limits,
        submit=submit,
        budget=FixedBudget(most=3, ahead=4, patience=0.0, reuse=reuse),
    )
    return tokens_of(loop.steps())


PLAIN = {name: serial(sampling, scripted.empty(), 0) for name, sampling in RULES.items()}
FREE = {name: serial(sampling, scripted.empty(), 0, Chooser(sampling)) for name, sampling in RULES.items()}
DRAFTERS: dict[str, Callable[[list[int]], DraftState]] = {
    "right": scripted.oracle,
    "often right": lambda known: scripted.often_right(known, VOCABULARY_SIZE),
    "banned": lambda known: scripted.Scripted(lambda tokens, depth: [0, 2, 4, 9][:depth]),
    "banned after a right one": lambda known: scripted.eos_inside(known, stop_id=7),
}


def test_plain_text_has_no_banned_token_before_its_position() -> None:
    for name, tokens in PLAIN.items():
        assert all(place >= BANS.get(token, 0) for place, token in enumerate(tokens))
        assert tokens != FREE[name]
    model, history = FakeModel(), list(PROMPT)
    for token in PLAIN["greedy"]:
        scores = model.scores(history).copy()
        scores[[each for each, first in BANS.items() if len(history) - START < first]] = -np.inf
        assert token == int(np.argmax(scores))
        history.append(token)
    assert {2, 9} & set(PLAIN["greedy"][8:]), "the ban ends at its position"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafting_leaves_the_text_of_banned_tokens_unchanged(drafter: str, rule: str) -> None:
    known, sampling = [*PROMPT, *PLAIN[rule]], RULES[rule]
    for depth in (1, 4):
        assert serial(sampling, DRAFTERS[drafter](known), depth) == PLAIN[rule]
    assert serial(sampling, random_trees(known), 6, trees=True) == PLAIN[rule]
    for submit in (at_once, Late(lambda: 1)):
        assert pipelined(sampling, DRAFTERS[drafter](known), submit) == PLAIN[rule]


@pytest.mark.parametrize("rule", RULES)
def test_a_drafting_model_with_the_targets_scores_is_always_right(rule: str) -> None:
    """It draws with the same bans: none of its tokens is rejected."""
    for make in (lambda own, state: serial(RULES[rule], state, 4, own), run_pipelined):
        own = chooser(RULES[rule])
        request = DraftRequest(chooser=own, vocabulary_size=VOCABULARY_SIZE, context_length=100)
        state = Watched(ModelDrafter(FakeModel).start(request))
        assert make(own, state) == PLAIN[rule]
        assert state.proposed > TOKENS / 2
        assert state.right


def run_pipelined(own: Chooser, state: DraftState) -> list[int]:
    def submit(job: Callable[[], Any]) -> Future[Any]:
        return at_once(job)

    return pipelined(own.sampling, state, submit, own)


class Watched(DraftState):
    """Notes whether every compared token of a drafter was accepted."""

    def __init__(self, drafter: DraftState) -> None:
        self._drafter = drafter
        self.proposed, self.right = 0, True

    def propose(self, context: Any, depth: int, gate: Any = None) -> Any:
        proposal = self._drafter.propose(context, depth, gate)
        self.proposed += len(proposal.tokens)
        return proposal

    def observe(self, outcome: Any) -> None:
        self.right &= outcome.accepted == outcome.evaluated
        self._drafter.observe(outcome)


def test_under_the_rejection_rule_no_distribution_has_a_banned_token() -> None:
    rows, own = Rows(1, lambda _: FakeModel().scores(PROMPT)), chooser(REJECTION)
    early = own.distribution(rows, 0, PROMPT)
    assert early.ids.tolist() == [1, 3, 5, 6, 8, 10, 11]
    assert float(early.probs.sum()) == pytest.approx(1.0)
    late = own.distribution(rows, 0, [*PROMPT, *range(8)])
    assert late.ids.tolist() == [1, 2, 3, 5, 6, 8, 9, 10, 11]
    draft = own.draft(rows, 0, PROMPT, None)
    assert draft is not None
    assert draft.distribution is not None
    assert draft.distribution.ids.tolist() == early.ids.tolist()
    for seed in range(40):
        answer = serial(replace(REJECTION, seed=seed), scripted.random_tokens(VOCABULARY_SIZE, seed), 3)
        assert all(place >= BANS.get(token, 0) for place, token in enumerate(answer))


def test_alternatives_and_confidences_leave_banned_tokens_out() -> None:
    scores = np.log(np.array([8, 4, 2, 1, 1], dtype=np.float32))
    own = chooser(Sampling(temperature=1.0, seed=3), {0: math.inf})
    for length in range(30):
        draft = own.draft(Rows(1, lambda _: scores), 0, [1] * length, None, alternatives=3)
        assert draft is not None
        assert 0 not in {draft.token, *(token for token, _ in draft.alternatives)}
    greedy = chooser(Sampling(), {0: math.inf}).draft(Rows(1, lambda _: scores), 0, [], at_least(0.0), alternatives=9)
    assert greedy is not None
    assert (greedy.token, greedy.confidence) == (1, pytest.approx(0.5))
    assert [token for token, _ in greedy.alternatives] == [2, 3, 4]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 100.0])
def test_the_least_bias_bans_a_token_at_any_temperature(temperature: float) -> None:
    scores = np.array([90.0, 1.0, -60.0], dtype=np.float32)
    assert 0 not in distribution(scores, Sampling(temperature=temperature, logit_bias={0: -100})).ids
    if temperature == 100.0:
        assert 0 in distribution(scores, Sampling(temperature=temperature, logit_bias={0: -99.9})).ids


def test_a_ban_replaces_a_bias_and_other_biases_stay() -> None:
    sampling = Sampling(logit_bias={3: 100.0, 5: 0.5, 6: -100.0})
    found = request_of(sampling, [], banned=(3, 8)).bias
    assert dict(found) == {3: -math.inf, 5: 0.5, 6: -math.inf, 8: -math.inf}
    assert request_of(Sampling(), [], banned=()).bias == ()
