"""Guesses from stored text: what followed there, from the newest text, and none where the noise may be known."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from edgespec.decoding.round_base import LoopLimits
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.combination import CombinationState
from edgespec.drafters.lookup import LookupDrafter, LookupDraftState, match_confidence
from edgespec.drafters.stored import DATASTORE, HISTORY, StoredTextDrafter
from edgespec.files.stored_text import StoredText, Text
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import DraftRequest, DraftTree
from edgespec.planning.depth.base import FixedDepth
from edgespec.planning.depth.control import DepthControl
from tests.decoding.chi_square import chi_square, threshold
from tests.decoding.test_loop import PLAIN, PROMPT, TEXT_RULES, TOKENS, VOCABULARY_SIZE, Answer, start
from tests.decoding.test_loop_law import LAW_TOKENS, SMALL, joint_law
from tests.drafters.test_untrusted_sources import COSTS
from tests.support.fake_runtime import FakeModel

SIZE = 100


def stored(*texts: Sequence[int], size: int = SIZE) -> StoredText:
    return StoredText.of(bytes(32), size, [Text(np.array(tokens, dtype=np.uint32)) for tokens in texts])


def started(
    text: StoredText | None, chooser: Chooser | None = None, stop_ids: frozenset[int] = frozenset()
) -> LookupDraftState:
    own = chooser or Chooser(Sampling())
    request = DraftRequest(chooser=own, vocabulary_size=SIZE, context_length=64, stop_ids=stop_ids)
    return StoredTextDrafter(DATASTORE, lambda: text).start(request)


def test_what_followed_in_the_text_is_proposed_with_the_odds_of_the_match() -> None:
    proposal = started(stored([1, 2, 3, 4, 5, 6])).propose(Context([9, 2, 3]), 2)
    assert proposal.tokens == (4, 5)
    assert proposal.sources == (DATASTORE, DATASTORE)
    assert proposal.drafted_by == DATASTORE
    assert proposal.confidences == (match_confidence(2), match_confidence(3))


@pytest.mark.parametrize("text", [None, stored(), stored([7, 8, 9])])
def test_without_a_match_nothing_is_proposed(text: StoredText | None) -> None:
    state, tree = started(text), DraftTree()
    assert state.propose(Context([1, 2, 3]), 4).tokens == ()
    state.grow(Context([1, 2, 3]), tree, 0, float)
    assert len(tree) == 0
    assert state.lag(Context([1, 2, 3])) == 0


def test_a_copy_ends_at_a_stop_token() -> None:
    state = started(stored([1, 2, 3, 0, 5]), stop_ids=frozenset({0}))
    assert state.propose(Context([1, 2]), 9).tokens == (3, 0)


def test_a_tree_gets_both_continuations_and_what_follows_the_end_of_a_chain() -> None:
    state, tree = started(stored([1, 2, 3, 4], [1, 2, 5, 6], [3, 8, 9])), DraftTree()
    tree.add(-1, 3, 0.9, "model")
    tree.add(0, 8, 0.9, "model")
    state.grow(Context([1, 2]), tree, 2, lambda _: 0.5)
    nodes = set(zip(tree.tokens, tree.parents, strict=True))
    assert {(5, -1), (9, 1)} <= nodes
    assert tree.sources[tree.tokens.index(9)] == DATASTORE


def test_the_next_search_uses_a_text_that_replaced_the_old_one() -> None:
    texts = [stored([1, 2, 3])]
    request = DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=SIZE, context_length=64)
    state = StoredTextDrafter(HISTORY, lambda: texts[0]).start(request)
    first = Context([1, 2])
    assert state.propose(first, 1).tokens == (3,)
    texts[0] = stored([1, 2, 7])
    assert state.propose(first, 1).tokens == (3,)  # the same search
    assert state.propose(Context([1, 2]), 1).tokens == (7,)
    state.close()
    assert state.propose(Context([1, 2]), 1).tokens == (7,)


@pytest.mark.parametrize(
    ("sampling", "fresh", "silent"),
    [
        (Sampling(temperature=1.0, rule="rejection", seed=1), False, True),
        (Sampling(temperature=1.0, rule="rejection", seed=1), True, False),
        (Sampling(temperature=1.0, rule="keyed", seed=1), False, False),
        (Sampling(rule="rejection"), False, False),
    ],
)
def test_noise_that_stored_answers_may_know_silences_them(sampling: Sampling, fresh: bool, silent: bool) -> None:
    chooser = Chooser(sampling)
    assert not chooser.seed_is_fresh
    chooser.seed_is_fresh = fresh
    assert chooser.reuses_noise == silent
    assert (started(stored([1, 2, 3]), chooser).propose(Context([1, 2]), 3).tokens == ()) == silent


@pytest.mark.parametrize("rule", TEXT_RULES)
@pytest.mark.parametrize("trees", [True, False])
def test_no_stored_text_changes_an_answer(rule: str, trees: bool) -> None:
    known = PLAIN[rule][:TOKENS]
    source = random.Random(4)
    wrong = [source.randrange(VOCABULARY_SIZE) for _ in range(400)]
    accepted = {}
    for name, texts in {"right": [[*PROMPT, *known]], "wrong": [wrong], "both": [wrong, [*PROMPT, *known]]}.items():
        own: Answer = start(FakeModel(can_branch=True), PROMPT)
        chooser = Chooser(TEXT_RULES[rule])
        request = DraftRequest(chooser=chooser, vocabulary_size=VOCABULARY_SIZE, context_length=100)
        policy = DepthControl(COSTS, 7).answer(prompt_tokens=len(PROMPT))
        text = stored(*texts, size=VOCABULARY_SIZE)
        parts = [
            (drafter.kind, drafter.start(request))
            for drafter in (LookupDrafter(), StoredTextDrafter(HISTORY, lambda text=text: text))
        ]
        state = CombinationState(parts, policy)
        limits = LoopLimits(max_tokens=TOKENS, depth_cap=7, vocabulary_size=VOCABULARY_SIZE)
        own.take(DecodeLoop(own.sequence, state, policy, chooser, own.history, limits, trees=trees).steps())
        assert own.tokens == known, name
        accepted[name] = sum(record.accepted for record in own.records)
    assert accepted["right"] > accepted["wrong"]


def test_with_a_history_that_grows_by_each_answer_rejection_keeps_the_law() -> None:
    """As tests/decoding/test_loop_law.py, but each answer is guessed from the answers before it."""
    sampling = {"temperature": 1.0, "rule": "rejection"}
    target = FakeModel(SMALL, seed=1, spread=2.0)
    law = joint_law(target, Sampling(**sampling))  # type: ignore[arg-type]
    counts, accepted, answers = dict.fromkeys(law, 0), 0, list[list[int]]()
    number = 3000
    for seed in range(number):
        chooser = Chooser(Sampling(**sampling, seed=seed))  # type: ignore[arg-type]
        chooser.seed_is_fresh = True
        text = stored(*answers, size=SMALL)
        request = DraftRequest(chooser=chooser, vocabulary_size=SMALL, context_length=32)
        state = StoredTextDrafter(HISTORY, lambda text=text: text).start(request)
        history = [0]
        limits = LoopLimits(max_tokens=LAW_TOKENS, depth_cap=2, vocabulary_size=SMALL)
        for step in DecodeLoop(target.open(32), state, FixedDepth(2), chooser, history, limits).steps():
            accepted += step.record.accepted if step.record else 0
        counts[tuple(history[1:])] += 1
        target.sequences.clear()
        answers = [*answers[-7:], history]
    rare = [tokens for tokens, mass in law.items() if mass * number < 8]
    pairs = [(counts[tokens], mass) for tokens, mass in law.items() if tokens not in rare]
    if rare:
        pairs.append((sum(counts[tokens] for tokens in rare), sum(law[tokens] for tokens in rare)))
    assert chi_square([count for count, _ in pairs], [mass for _, mass in pairs]) < threshold(len(pairs) - 1)
    assert accepted > number / 2, "the history was used"
