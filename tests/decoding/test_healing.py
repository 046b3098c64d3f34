"""Prompts whose end is spelled again: the target does it before the first round, and drafting changes no text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.pipelined.loop import PipelinedLoop
from edgespec.decoding.round_base import LoopLimits, Rounds, Step
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.model import ModelDrafter
from edgespec.errors import NoneAllowedError
from edgespec.interfaces.drafting import DraftRequest, DraftState
from edgespec.interfaces.drawing import are_allowed
from edgespec.planning.depth.base import FixedDepth
from edgespec.text.conversation.healing import Healing
from edgespec.text.tokenizers.spellings import Spellings
from tests.decoding.test_loop import KEYED, PENALISED, PROMPT, REJECTION, TOKENS, VOCABULARY_SIZE
from tests.decoding.test_pipeline import Late, at_once
from tests.decoding.test_tree_rounds import random_trees
from tests.support import scripted_drafters as scripted
from tests.support.budgets import FixedBudget
from tests.support.fake_runtime import FakeModel
from tests.support.listed_tokens import ListedTokens

TEXTS = [b"a", b"b", b"ab", b"abb", b"ba", b"a", b"\xc3", b"\xa9", b"\xc3\xa9", b"", b"bc", b"\xa9b"]
SPELLINGS = Spellings(ListedTokens(TEXTS), VOCABULARY_SIZE)
ENDS = [b"a", b"ab", b"abab", b"\xc3\xa9", b"babab", b"b\xc3"]
RULES = {"greedy": Sampling(), "keyed": KEYED, "penalised": PENALISED, "top_k": replace(KEYED, top_k=2)}


class Healed:
    """One run: its tokens, what of the first one is the prompt's, and where the answer begins."""

    def __init__(
        self,
        end: bytes,
        sampling: Sampling,
        drafter: DraftState | None = None,
        depth: int = 0,
        submit: Any = None,
        own: Chooser | None = None,
        **more: Any,
    ) -> None:
        limits = LoopLimits(
            max_tokens=TOKENS,
            depth_cap=depth,
            vocabulary_size=VOCABULARY_SIZE,
            healing=Healing(end, 1, SPELLINGS),
            logprobs=2 if submit is None and not more else None,
        )
        self.history = list(PROMPT)
        sequence = FakeModel(can_branch=True).open(100)
        parts = (sequence, drafter or scripted.empty(), FixedDepth(depth), own or Chooser(sampling), self.history)
        loop: Rounds = (
            DecodeLoop(*parts, limits, **more)
            if submit is None
            else PipelinedLoop(*parts, limits, submit=submit, budget=FixedBudget(most=3, ahead=4, patience=0.0))
        )
        self.steps = list(loop.steps())
        self.tokens = [token for step in self.steps for token in step.tokens]
        self.begins = len(self.history) - len(self.tokens)
        self.held = self.steps[0].held
        assert sequence.tokens == self.history[:-1]

    @property
    def spelled(self) -> list[int]:
        """The tokens that joined the prompt."""
        return self.history[len(PROMPT) : self.begins]


def reference(end: bytes) -> list[int]:
    """The best tokens of those that agree with the end, by trying all; then the best of all."""
    model, history, left = FakeModel(), list(PROMPT), end
    while len(history) < len(PROMPT) + TOKENS:
        scores = model.scores(history).copy()
        if left:
            own = Healing(left, 1, SPELLINGS).mask(0)
            assert own is not None
            scores[~are_allowed(own, np.arange(VOCABULARY_SIZE))] = -np.inf
        history.append(int(np.argmax(scores)))
        left = left[len(TEXTS[history[-1]]) :]
    return history


@pytest.mark.parametrize("end", ENDS)
def test_the_end_is_spelled_and_the_first_token_that_is_longer_begins_the_answer(end: bytes) -> None:
    run = Healed(end, Sampling())
    assert run.history[: len(PROMPT) + TOKENS] == reference(end)
    before = b"".join(TEXTS[token] for token in run.spelled)
    assert before + TEXTS[run.tokens[0]][: run.held] == end
    assert all(step.held == 0 for step in run.steps[1:])
    assert run.held < len(TEXTS[run.tokens[0]]) or run.held == 0
    assert len(run.tokens) == TOKENS, "tokens that spell the prompt's end are none of the answer's"


def test_some_ends_join_the_prompt_and_some_the_first_token() -> None:
    runs = [Healed(end, rule) for end in ENDS for rule in RULES.values()]
    assert {bool(run.held) for run in runs} == {True, False}
    assert {len(run.spelled) for run in runs} >= {0, 1, 2}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("rule", RULES)
def test_drafting_leaves_the_text_unchanged(rule: str, end: bytes) -> None:
    sampling = RULES[rule]
    plain = Healed(end, sampling)
    known = plain.history
    for drafter in (
        scripted.oracle(known),
        scripted.often_right(known, VOCABULARY_SIZE),
        scripted.random_tokens(VOCABULARY_SIZE, 1),
    ):
        found = Healed(end, sampling, drafter, 4)
        assert (found.history, found.held) == (known, plain.held)
        assert logprobs(found.steps) == logprobs(plain.steps)
    assert Healed(end, sampling, random_trees(known), 6, trees=True).history == known
    for submit in (at_once, Late(lambda: 1)):
        often = scripted.often_right(known, VOCABULARY_SIZE)
        assert Healed(end, sampling, often, 3, submit).history == known


def logprobs(steps: list[Step]) -> list[Any]:
    return [own for step in steps for own in step.logprobs]


@pytest.mark.parametrize("rule", [*RULES, "rejection"])
def test_a_drafting_model_with_the_targets_scores_is_always_right(rule: str) -> None:
    sampling = {**RULES, "rejection": REJECTION}[rule]
    for end in ENDS:
        own = Chooser(sampling)
        request = DraftRequest(chooser=own, vocabulary_size=VOCABULARY_SIZE, context_length=100)
        run = Healed(end, sampling, ModelDrafter(FakeModel).start(request), 3, own=own)
        records = [step.record for step in run.steps if step.record is not None]
        assert sum(record.proposed for record in records) > 0
        assert all(record.accepted == record.proposed for record in records)


def test_log_probabilities_are_of_the_tokens_that_agree_with_the_end() -> None:
    for end in ENDS:
        run = Healed(end, Sampling())
        first, later = run.steps[0].logprobs[0], run.steps[1].logprobs[0]
        if not run.held:
            continue
        left = end[len(b"".join(TEXTS[token] for token in run.spelled)) :]
        mask = Healing(left, 1, SPELLINGS).mask(0)
        assert mask is not None
        assert all(are_allowed(mask, np.array([token]))[0] for token, _ in first.top)
        assert first.logprob == max(own for _, own in first.top)
        assert later.token_id == run.steps[1].tokens[0]


def test_bans_count_from_the_answers_first_token() -> None:
    for end in (b"", *ENDS):
        own = Chooser(Sampling())
        own.not_before = dict.fromkeys((0, 2, 4), 8.0)
        run = Healed(end, Sampling(), own=own)
        assert not {0, 2, 4} & set(run.tokens[run.held > 0 : 8])
        assert own.begins == run.begins


def test_an_end_that_no_token_may_spell_is_an_error() -> None:
    own = Chooser(Sampling(logit_bias=dict.fromkeys(range(VOCABULARY_SIZE - 1), -100)))
    with pytest.raises(NoneAllowedError):
        Healed(b"ab", Sampling(), own=own)
