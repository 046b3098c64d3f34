"""Alternatives of a chain in the serial loop: plain decoding's text, more tokens a round, and depth statistics."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from edgespec.decoding.round_base import DecodeStats, LoopLimits, height
from edgespec.decoding.sampling import Chooser
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.combination import Combination, CombinationState
from edgespec.drafters.model import ModelDrafter
from edgespec.interfaces.drafting import DraftRequest, Proposal
from edgespec.planning.depth.base import FixedDepth
from tests.decoding.test_loop import (
    PLAIN,
    PROMPT,
    REJECTION,
    TEXT_RULES,
    TOKENS,
    VOCABULARY_SIZE,
    Answer,
    check_statistics,
    start,
)
from tests.support.fake_runtime import FakeModel, noise_words
from tests.support.gates import Shape
from tests.support.planning import a_round

TARGET = FakeModel(can_branch=True)


def drafting_model(off: float) -> FakeModel:
    """A drafter with the target's scores, changed by at most ``off``."""
    return FakeModel(
        table=lambda prefix: TARGET.scores(prefix) + off * noise_words("off", prefix, count=VOCABULARY_SIZE)
    )


class Beside(FixedDepth):
    """Chains of ``depth`` with ``ranks[i]`` alternatives at place i."""

    def __init__(self, depth: int, ranks: Sequence[int]) -> None:
        super().__init__(99, gate=lambda: Shape(forwards=depth - 1, ranks=ranks))
        self.learned: list[tuple[list[float], list[bool]]] = []

    def learn_alternatives(self, source: str, odds: Sequence[float], hits: Sequence[bool]) -> None:
        self.learned.append((list(odds), list(hits)))


def answered(
    policy: Beside,
    rule: str = "greedy",
    off: float = 4.0,
    cap: int = 15,
    *,
    trees: bool = True,
    model: FakeModel | None = None,
    context_length: int = 100,
    stop_ids: frozenset[int] = frozenset(),
    max_tokens: int = TOKENS,
) -> Answer:
    own = start(model or FakeModel(can_branch=True), PROMPT, context_length)
    chooser = Chooser({**TEXT_RULES, "rejection": REJECTION}[rule])
    limits = LoopLimits(max_tokens=max_tokens, depth_cap=cap, vocabulary_size=VOCABULARY_SIZE, stop_ids=stop_ids)
    loop = DecodeLoop(
        own.sequence,
        state_of(policy, chooser, off, stop_ids),
        policy,
        chooser,
        own.history,
        limits,
        trees=trees,
    )
    return own.take(loop.steps())


def state_of(policy: Beside, chooser: Chooser, off: float, stop_ids: frozenset[int]) -> CombinationState:
    request = DraftRequest(chooser=chooser, vocabulary_size=VOCABULARY_SIZE, context_length=100, stop_ids=stop_ids)
    return Combination([ModelDrafter(lambda: drafting_model(off))], policy).start(request)


@pytest.mark.parametrize("rule", TEXT_RULES)
def test_alternatives_leave_plain_decodings_text_unchanged(rule: str) -> None:
    shapes = ((1, (3,)), (2, (2, 0)), (3, (0, 0, 3)), (4, (1, 1, 1, 1)), (5, (3, 3, 3, 3, 3)))
    for (depth, ranks), off, cap in itertools.product(shapes, (0.5, 4.0, 20.0), (1, 4, 15)):
        own = answered(Beside(depth, ranks), rule, off, cap)
        assert own.tokens == PLAIN[rule][:TOKENS]
        assert own.finish == "length"
        check_statistics(own)
        assert all(record.width <= cap + 1 for record in own.records)


def test_verifying_second_choices_saves_rounds() -> None:
    alone = answered(Beside(2, (0, 0)))
    beside = answered(Beside(2, (3, 3)))
    assert len(beside.records) < len(alone.records)
    assert sum(record.draft_forwards for record in beside.records) < sum(r.draft_forwards for r in alone.records)
    assert {record.alternative_count for record in alone.records} == {0}
    most = beside.records[0]
    assert (most.proposed, most.alternative_count, most.depth, most.width) == (8, 6, 2, 9)


def test_a_right_second_choice_adds_a_token_to_each_round() -> None:
    """The drafter's second choice is always the target's: one token more in each round."""

    def second_best(prefix: tuple[int, ...]) -> Any:
        scores = TARGET.scores(prefix).copy()
        scores[int(scores.argsort()[0])] = scores.max() + 1
        return scores

    policy = Beside(1, (1,))
    own = start(FakeModel(can_branch=True), PROMPT)
    chooser = Chooser(TEXT_RULES["greedy"])
    request = DraftRequest(chooser=chooser, vocabulary_size=VOCABULARY_SIZE, context_length=100)
    state = Combination([ModelDrafter(lambda: FakeModel(table=second_best))], policy).start(request)
    limits = LoopLimits(max_tokens=TOKENS, depth_cap=7, vocabulary_size=VOCABULARY_SIZE)
    own.take(DecodeLoop(own.sequence, state, policy, chooser, own.history, limits, trees=True).steps())
    assert own.tokens == PLAIN["greedy"][:TOKENS]
    assert {(r.emitted, r.accepted, r.evaluated, r.depth, r.alternative_count) for r in own.records[:-1]} == {
        (2, 1, 1, 1, 1)
    }
    assert own.guessed_by[:5] == [None, "model", None, "model", None]
    assert all(hits == [True, False, False] for _, hits in policy.learned)
    assert len(policy.learned) == len([record for record in own.records if record.proposed])


def test_the_policy_learns_which_alternative_was_the_targets_token() -> None:
    policy = Beside(3, (1, 1, 1))
    own = answered(policy)
    chain_hits = sum(any(hits) for _, hits in policy.learned)
    assert len(policy.learned) >= len([record for record in own.records if record.proposed])
    assert 0 < chain_hits < len(policy.learned)
    for odds, hits in policy.learned:
        assert len(odds) == len(hits)
        assert sum(hits) <= 1
        assert 0 < sum(odds) < 1


def test_without_permission_for_trees_proposals_are_chains() -> None:
    own = answered(Beside(2, (3, 3)), trees=False)
    assert own.tokens == PLAIN["greedy"][:TOKENS]
    assert {record.alternative_count for record in own.records} == {0}
    assert max(record.proposed for record in own.records) == 2
    assert sum(record.invalid for record in own.records) == 0


def test_trees_are_off_by_default() -> None:
    own = start(FakeModel(can_branch=True), PROMPT)
    policy, chooser = Beside(2, (3, 3)), Chooser(TEXT_RULES["greedy"])
    limits = LoopLimits(max_tokens=TOKENS, depth_cap=9, vocabulary_size=VOCABULARY_SIZE)
    state = state_of(policy, chooser, 4.0, frozenset())
    own.take(DecodeLoop(own.sequence, state, policy, chooser, own.history, limits).steps())
    assert {record.alternative_count for record in own.records} == {0}


def test_under_the_rejection_rule_proposals_have_no_alternatives() -> None:
    own = answered(Beside(2, (3, 3)), "rejection")
    assert {record.alternative_count for record in own.records} == {0}


@pytest.mark.parametrize("rule", TEXT_RULES)
def test_a_stop_token_ends_an_answer_with_alternatives_at_any_place(rule: str) -> None:
    plain = PLAIN[rule]
    for place, stop_id in enumerate(plain[:12]):
        if stop_id not in plain[:place]:
            own = answered(Beside(3, (2, 2, 2)), rule, stop_ids=frozenset({stop_id}))
            assert own.tokens == plain[: place + 1]
            assert own.finish == "stop"


@pytest.mark.parametrize("room", range(1, 7))
def test_rounds_with_alternatives_end_at_the_context_and_token_limits(room: int) -> None:
    for max_tokens in (1, 2, room, room + 3):
        own = answered(Beside(3, (2, 2, 2)), context_length=len(PROMPT) + room, max_tokens=max_tokens)
        assert own.tokens == PLAIN["greedy"][: min(room, max_tokens)]
        assert own.finish == "length"


def test_a_proposals_height_is_its_longest_path() -> None:
    assert height(Proposal()) == 0
    assert height(Proposal(tokens=(1, 2, 3))) == 3
    for parents, deep in (((-1, 0, 1, -1, 0), 3), ((-1, -1), 1), ((), 0), ((-1, -1, 1, 2), 3)):
        assert height(Proposal(tokens=tuple(range(len(parents))), parents=parents)) == deep


def test_a_round_record_counts_alternatives_as_proposed_but_not_in_the_depth() -> None:
    record = a_round(4, 1, evaluated=2, source="model", alternative_count=3)
    stats = DecodeStats()
    stats.add_round(record)
    assert (record.depth, stats.proposed) == (1, 4)


def test_guessing_time_is_whole_guessing_rounds_plus_other_drafting_time() -> None:
    """The whole time of rounds with guesses or a busy drafter; of other rounds only the drafting time."""
    plain = a_round(draft_s=0.01, verify_s=0.2, round_s=0.22)
    stats = DecodeStats()
    for record in (plain, replace(plain, width=3, round_s=0.5), replace(plain, overlapped=True, round_s=0.3)):
        stats.add_round(record)
    assert (stats.guessing_s, stats.guessing_rounds) == (pytest.approx(0.01 + 0.5 + 0.3), 2)
