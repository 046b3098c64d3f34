"""Answers that have a form: target and drafters draw what it allows, and drafting changes no text."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from edgespec.decoding.constraint import Bound
from edgespec.decoding.round_base import LoopLimits
from edgespec.decoding.sampling import Chooser, Sampling, distribution, request_of
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.combination import Combination
from edgespec.drafters.lookup import LookupDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.errors import NoneAllowedError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import DraftRequest
from edgespec.interfaces.drawing import draw_from
from edgespec.interfaces.rows import Rows
from edgespec.planning.depth.base import FixedDepth
from tests.decoding.chi_square import chi_square, threshold
from tests.decoding.test_bans import RULES, Watched, pipelined, serial
from tests.decoding.test_loop import KEYED, PROMPT, REJECTION, TOKENS, VOCABULARY_SIZE
from tests.decoding.test_pipeline import Late, at_once
from tests.decoding.test_tree_rounds import random_trees
from tests.support import scripted_drafters as scripted
from tests.support.fake_runtime import FakeModel
from tests.support.forms import RandomForm

FORM = RandomForm(VOCABULARY_SIZE)


def chooser(sampling: Sampling, form: RandomForm = FORM, prompt_tokens: int = len(PROMPT)) -> Chooser:
    own = Chooser(sampling)
    own.bound = Bound(form, prompt_tokens)
    return own


def plain(sampling: Sampling) -> list[int]:
    return serial(sampling, scripted.empty(), 0, chooser(sampling))


ALL_RULES = {**RULES, "temperature": Sampling(temperature=1.0, seed=2), "top_k": replace(KEYED, top_k=3)}


@pytest.mark.parametrize("rule", ALL_RULES)
def test_a_plain_answer_is_the_best_or_the_drawn_one_of_the_allowed_tokens(rule: str) -> None:
    sampling, model, history = ALL_RULES[rule], FakeModel(), list(PROMPT)
    tokens = plain(sampling)
    assert FORM.cursor().allows(tokens) == TOKENS
    assert tokens != serial(sampling, scripted.empty(), 0, Chooser(sampling))
    if rule == "greedy":
        for token in tokens:
            scores, allowed = model.scores(history), FORM.allowed(history[len(PROMPT) :])
            assert token == max(allowed, key=lambda each: scores[each])
            history.append(token)


@pytest.mark.parametrize("rule", ALL_RULES)
def test_drafting_leaves_the_text_of_an_answer_with_a_form_unchanged(rule: str) -> None:
    sampling = ALL_RULES[rule]
    expected = plain(sampling)
    known = [*PROMPT, *expected]
    for drafter in (
        scripted.oracle(known),
        scripted.often_right(known, VOCABULARY_SIZE),
        scripted.random_tokens(VOCABULARY_SIZE, 1),
    ):
        assert serial(sampling, drafter, 4, chooser(sampling)) == expected
    assert serial(sampling, random_trees(known), 6, chooser(sampling), trees=True) == expected
    for submit in (at_once, Late(lambda: 1)):
        often = scripted.often_right(known, VOCABULARY_SIZE)
        assert pipelined(sampling, often, submit, chooser(sampling)) == expected


@pytest.mark.parametrize("rule", ALL_RULES)
def test_a_drafting_model_with_the_targets_scores_keeps_the_form_and_is_always_right(rule: str) -> None:
    sampling = ALL_RULES[rule]
    for run in (
        lambda own, state: serial(sampling, state, 4, own),
        lambda own, state: pipelined(sampling, state, at_once, own),
    ):
        own = chooser(sampling)
        request = DraftRequest(chooser=own, vocabulary_size=VOCABULARY_SIZE, context_length=100)
        state = Watched(ModelDrafter(FakeModel).start(request))
        assert run(own, state) == plain(sampling)
        assert state.proposed > TOKENS / 2
        assert state.right


def test_copies_are_cut_where_the_form_forbids_them() -> None:
    allowed = FORM.allowed([])
    first = allowed[0]
    second = next(token for token in range(VOCABULARY_SIZE) if token not in FORM.allowed([first]))
    prompt = [2, 8, 6, 9, 2, first, second, 2, 8, 6, 9, 2]
    for bound, expected in ((None, [first, second]), (Bound(FORM, len(prompt)), [first])):
        own = Chooser(Sampling())
        own.bound = bound
        request = DraftRequest(chooser=own, vocabulary_size=VOCABULARY_SIZE, context_length=100)
        state = Combination([LookupDrafter()], FixedDepth(2).answer(prompt_tokens=12, most=9, sampled=False)).start(
            request
        )
        assert list(state.propose(Context(prompt), 2).tokens) == expected


def test_behind_a_guess_that_the_form_forbids_nothing_is_guessed() -> None:
    wrong = next(token for token in range(VOCABULARY_SIZE) if token not in FORM.allowed([]))
    scores = np.arange(VOCABULARY_SIZE, dtype=np.float32)
    for sampling in ALL_RULES.values():
        own = chooser(sampling)
        context = [*PROMPT, wrong]
        assert (own.allows(context, [1]), list(own.forced(context))) == (0, [])
        assert own.draft(Rows(1, lambda _: scores), 0, context, None) is None
        assert own.allows(PROMPT, FORM.allowed([])[:1]) == 1, "the cursor still works"


@pytest.mark.parametrize("rule", ["greedy", "keyed"])
def test_tokens_reused_where_the_form_forbids_them_end_neither_the_answer_nor_the_drafter(rule: str) -> None:
    sampling = ALL_RULES[rule]
    for seed in range(1, 7):
        own = chooser(sampling)
        request = DraftRequest(chooser=own, vocabulary_size=VOCABULARY_SIZE, context_length=100)
        policy = FixedDepth(3).answer(prompt_tokens=len(PROMPT), most=9, sampled=False)
        drafters = [LookupDrafter(), ModelDrafter(partial(FakeModel, seed=seed))]
        state = Combination(drafters, policy).start(request)
        assert pipelined(sampling, state, at_once, own, reuse=True) == plain(sampling)
        assert state.failures == {}


def test_forced_tokens_are_guesses_in_the_drafters_own_forwards() -> None:
    only = RandomForm(VOCABULARY_SIZE, share=0.0)  # each text has one token that may follow
    proposals = []
    for guesses in (True, False):
        request = DraftRequest(chooser=chooser(Sampling(), only), vocabulary_size=VOCABULARY_SIZE, context_length=100)
        model = FakeModel(bit_equal_by_construction=guesses)
        proposals.append(ModelDrafter(lambda model=model: model).start(request).propose(Context(list(PROMPT)), 4))
    guessed, alone = proposals
    assert guessed.tokens == alone.tokens
    assert only.cursor().allows(guessed.tokens) == 4
    assert (guessed.forwards, alone.forwards) == (1, 4)


def test_a_drafter_that_scores_no_allowed_token_drafts_nothing_and_a_target_says_so() -> None:
    only = RandomForm(VOCABULARY_SIZE, share=0.0)
    (token,) = only.allowed([])
    rows = Rows(1, lambda _: np.zeros(token, dtype=np.float32))  # a short head without that token
    for sampling in (Sampling(), KEYED, REJECTION):
        own = chooser(sampling, only)
        assert own.draft(rows, 0, PROMPT, None) is None
        with pytest.raises(NoneAllowedError):
            own.target_token(rows, 0, PROMPT)


def test_tokens_of_the_prompt_need_not_keep_the_form() -> None:
    own = chooser(Sampling(), RandomForm(VOCABULARY_SIZE, share=0.0))
    scores = np.zeros(VOCABULARY_SIZE, dtype=np.float32)
    scores[7] = 1.0
    draft = own.draft(Rows(1, lambda _: scores), 0, PROMPT[:2], None)
    assert draft is not None
    assert draft.token == 7
    assert own.allows(PROMPT[:2], [7, 7]) == 2


def test_log_probabilities_are_those_among_the_allowed_tokens() -> None:
    own, model = chooser(Sampling()), FakeModel()
    limits = LoopLimits(max_tokens=6, depth_cap=0, vocabulary_size=VOCABULARY_SIZE, logprobs=20)
    loop = DecodeLoop(model.open(100), scripted.empty(), FixedDepth(0), own, list(PROMPT), limits)
    said: list[int] = []
    for step in loop.steps():
        for token, found in zip(step.tokens, step.logprobs, strict=True):
            allowed = FORM.allowed(said)
            assert sorted(each for each, _ in found.top) == allowed
            assert sum(np.exp(value) for _, value in found.top) == pytest.approx(1.0)
            assert found.token_id == token
            said.append(token)


ANSWERS, LAW_TOKENS, SMALL = 2500, 3, 5


@pytest.mark.parametrize("rule", ["keyed", "rejection"])
def test_an_answer_with_a_form_follows_the_targets_distribution_over_the_allowed_tokens(rule: str) -> None:
    """Pearson's test over whole answers, with a drafter of other scores."""
    target, form = FakeModel(SMALL, seed=1, spread=2.0), RandomForm(SMALL, share=0.6, seed=3)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LAW_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, mass in law.items():
            mask = np.array([sum(1 << token for token in form.allowed(tokens))], dtype=np.uint32)
            own = distribution(target.scores([0, *tokens]), Sampling(temperature=1.0), [0, *tokens], mask=mask)
            longer |= {(*tokens, t): mass * p for t, p in zip(own.ids.tolist(), own.probs.tolist(), strict=True)}
        law = longer
    counts = dict.fromkeys(law, 0)
    for seed in range(ANSWERS):
        choosing = chooser(Sampling(temperature=1.0, rule=rule, seed=seed), form, 1)
        request = DraftRequest(chooser=choosing, vocabulary_size=SMALL, context_length=32)
        drafter = ModelDrafter(lambda: FakeModel(SMALL, seed=2, spread=2.0)).start(request)
        history = [0]
        limits = LoopLimits(max_tokens=LAW_TOKENS, depth_cap=2, vocabulary_size=SMALL)
        for _ in DecodeLoop(target.open(32), drafter, FixedDepth(2), choosing, history, limits).steps():
            pass
        counts[tuple(history[1:])] += 1  # a KeyError is a token that the form forbids
        target.sequences.clear()
    common = [tokens for tokens, mass in law.items() if mass * ANSWERS >= 8]
    seen = [counts[tokens] for tokens in common] + [sum(counts.values()) - sum(counts[t] for t in common)]
    probs = [law[tokens] for tokens in common] + [1 - sum(law[tokens] for tokens in common)]
    if probs[-1] * ANSWERS < 5:
        seen, probs = seen[:-1], probs[:-1]
    assert len(probs) > 8
    assert chi_square(seen, np.array(probs) / sum(probs)) < threshold(len(probs) - 1)


@pytest.mark.parametrize("seed", range(2))
def test_keyed_draws_of_twenty_tokens_follow_the_distribution_of_those_a_random_mask_allows(seed: int) -> None:
    draw = np.random.default_rng(seed)
    scores, mask = draw.normal(0, 0.7, 20).astype(np.float32), draw.integers(1, 2**20, 1).astype(np.uint32)
    sampling = Sampling(temperature=0.9, top_p=(1.0, 0.9)[seed % 2])
    law = distribution(scores, sampling, [], mask=mask)
    counts = dict.fromkeys(law.ids.tolist(), 0)
    for number in range(25_000):
        request = replace(request_of(replace(sampling, seed=number), [seed]), mask=mask)
        counts[draw_from(scores, request).tokens[0]] += 1  # a KeyError is a token that the mask forbids
    assert len(counts) > 4
    assert chi_square(list(counts.values()), law.probs) < threshold(len(counts) - 1)
