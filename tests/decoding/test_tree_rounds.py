"""Trees in the serial loop: one forward scores a whole tree, and text and distribution stay plain decoding's."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest

from edgespec.decoding import serial as module
from edgespec.decoding.round_base import LoopLimits, first_chain, valid_length
from edgespec.decoding.sampling import Chooser
from edgespec.decoding.serial import DecodeLoop
from edgespec.decoding.verify import TreeVerdict
from edgespec.errors import CancelledError, ForwardError, NonFiniteLogitsError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import ChainGate, Proposal
from edgespec.interfaces.model import TreeSequence
from edgespec.planning.depth.base import FixedDepth
from tests.decoding.exact_runs import PROMPT as ONE, SIZE, Decisions, Drawing, ExactChooser, positive
from tests.decoding.law import Conditional, Law, plain_law, random_conditional
from tests.decoding.test_loop import (
    GREEDY,
    KNOWN,
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
from tests.support import scripted_drafters as scripted
from tests.support.fake_runtime import FakeModel, Faults


class Trees(scripted.Scripted):
    """Several chains in one tree: ``script(tokens, depth)`` returns them, each continuing the text."""

    def __init__(self, script: Callable[[list[int], int], Sequence[Sequence[int]]]) -> None:
        super().__init__(lambda tokens, depth: [])
        self._chains = script

    def _proposal(self, tokens: list[int], depth: int) -> Proposal:
        said: list[int] = []
        parents: list[int] = []
        for chain in self._chains(tokens, depth):
            for place, token in enumerate(chain):
                parents.append(len(said) - 1 if place else -1)
                said.append(token)
        return Proposal(tokens=tuple(said), parents=tuple(parents), drafted_by=scripted.KIND)


def second_guess(known: Sequence[int], *, length: int = 2) -> Trees:
    """A drafter that is wrong in its first chain and right in its second."""

    def script(tokens: list[int], depth: int) -> list[list[int]]:
        right = list(known[len(tokens) : len(tokens) + min(length, depth // 2)])
        return [[(token + 1) % VOCABULARY_SIZE for token in right], right]

    return Trees(script)


def random_trees(known: Sequence[int], seed: int = 0) -> scripted.Scripted:
    """Trees of any shape, often with a path of the target's tokens."""
    source = random.Random(seed)

    class Random(scripted.Scripted):
        def _proposal(self, tokens: list[int], depth: int) -> Proposal:
            said: list[int] = []
            parents: list[int] = []
            places: list[int] = []  # how deep each node is
            for index in range(source.randrange(depth + 1)):
                parent = source.randrange(-1, index)
                place = 0 if parent < 0 else places[parent] + 1
                at = len(tokens) + place
                right = known[at] if at < len(known) else 0
                said.append(right if source.random() < 0.7 else source.randrange(VOCABULARY_SIZE))
                parents.append(parent)
                places.append(place)
            return Proposal(tokens=tuple(said), parents=tuple(parents), drafted_by=scripted.KIND)

    return Random(lambda tokens, depth: [])


def loop_of(answer: Answer, drafter: Any, depth: int, rule: str = "greedy", **limits: Any) -> DecodeLoop:
    settings = {"max_tokens": TOKENS, **limits}
    return DecodeLoop(
        answer.sequence,
        drafter,
        FixedDepth(depth),
        Chooser(TEXT_RULES[rule]),
        answer.history,
        LoopLimits(depth_cap=depth, vocabulary_size=VOCABULARY_SIZE, **settings),
        trees=True,
    )


def tree_model(**options: Any) -> FakeModel:
    return FakeModel(can_branch=True, **options)


def test_an_accepted_alternative_keeps_its_source() -> None:
    """The second child of each place is right: accepted tokens carry its source, not the first chain's."""

    class Beside(scripted.Scripted):
        def _proposal(self, tokens: list[int], depth: int) -> Proposal:
            right = list(KNOWN["greedy"][len(tokens) :][:2])
            wrong = [(token + 1) % VOCABULARY_SIZE for token in right]
            said = tuple(token for pair in zip(wrong, right, strict=True) for token in pair)
            return Proposal(
                tokens=said,
                sources=("chain", "alternative", "chain", "alternative below")[: len(said)],
                parents=(-1, -1, 1, 1)[: len(said)],
                drafted_by="chain",
            )

    own = start(tree_model(), PROMPT)
    own.take(loop_of(own, Beside(lambda tokens, depth: []), 4, max_tokens=13).steps())
    assert own.guessed_by[:10] == [None, *["alternative", "alternative below", None] * 3]
    assert own.tokens == PLAIN["greedy"][:13]


# ------------------------------------------------------------------------------------------------------ same text


@pytest.mark.parametrize("rule", TEXT_RULES)
def test_trees_leave_plain_decodings_text_unchanged(rule: str) -> None:
    drafters = (second_guess, random_trees, lambda known: random_trees(known, seed=1), scripted.oracle)
    for depth, make in itertools.product((1, 2, 4, 7), drafters):
        own = start(tree_model(), PROMPT)
        assert isinstance(own.sequence, TreeSequence)
        own.take(loop_of(own, make(KNOWN[rule]), depth, rule).steps())
        assert own.tokens == PLAIN[rule][:TOKENS]
        check_statistics(own)


def test_a_trees_second_chain_is_accepted_if_the_first_is_wrong() -> None:
    own, state = start(tree_model(), PROMPT), second_guess(KNOWN["greedy"])
    own.take(loop_of(own, state, 4).steps())
    assert {(record.width, record.accepted, record.emitted) for record in own.records[:-3]} == {(5, 2, 3)}
    assert own.sequence.log.parents[0] == (-1, 0, 1, 0, 3), "the last committed token is the root"
    for outcome in state.outcomes:
        assert outcome.proposal.parents is None
        assert (outcome.evaluated, outcome.accepted) in {(1, 0), (0, 0)}, "the first chain was wrong from the start"


def test_the_drafters_outcome_counts_only_the_trees_first_chain() -> None:
    known = KNOWN["greedy"]

    def run(script: Callable[[list[int]], tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[int, int, int]:
        class Once(scripted.Scripted):
            def _proposal(self, tokens: list[int], depth: int) -> Proposal:
                said, parents = script(known[len(tokens) :])
                return Proposal(tokens=said, parents=parents, drafted_by=scripted.KIND)

        own, state = start(tree_model(), PROMPT), Once(lambda tokens, depth: [])
        own.take(loop_of(own, state, 9, max_tokens=12).steps())
        first = state.outcomes[0]
        return len(first.proposal.tokens), first.evaluated, first.accepted

    wrong = [(token + 1) % VOCABULARY_SIZE for token in known]
    at = len(PROMPT) + 1
    assert run(lambda right: ((right[0], right[1], wrong[at]), (-1, 0, -1))) == (2, 2, 2)
    assert run(lambda right: ((right[0], wrong[at + 1], right[1]), (-1, 0, 0))) == (2, 2, 1)
    assert run(lambda right: ((right[0], wrong[at + 1], wrong[at]), (-1, 0, -1))) == (2, 2, 1)
    assert run(lambda right: ((wrong[at], right[0], right[1]), (-1, -1, 1))) == (1, 1, 0)
    assert run(lambda right: ((right[0], right[1], right[2]), (-1, 0, 1))) == (3, 3, 3)


@pytest.mark.parametrize("room", range(1, 7))
def test_rounds_with_trees_end_at_the_context_and_token_limits(room: int) -> None:
    for depth, max_tokens in itertools.product((1, 4, 7), (None, 1, 2, room, room + 3)):
        own = start(tree_model(), PROMPT, len(PROMPT) + room)
        own.take(loop_of(own, random_trees(KNOWN["greedy"]), depth, max_tokens=max_tokens).steps())
        wanted = room if max_tokens is None else min(room, max_tokens)
        assert own.tokens == PLAIN["greedy"][:wanted]
        assert own.finish == "length"


@pytest.mark.parametrize("rule", TEXT_RULES)
def test_a_stop_token_ends_an_answer_with_trees_at_any_place(rule: str) -> None:
    plain = PLAIN[rule]
    for place, stop_id in enumerate(plain[:12]):
        if stop_id in plain[:place]:
            continue
        for make in (second_guess, random_trees):
            own = start(tree_model(), PROMPT)
            own.take(loop_of(own, make(KNOWN[rule]), 6, rule, stop_ids=frozenset({stop_id})).steps())
            assert own.tokens == plain[: place + 1]
            assert own.finish == "stop"


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("fault", ["raise_at", "cancel_at", "nan_at"])
def test_a_failed_tree_round_rolls_back_to_the_last_committed_token(fault: str, at: int) -> None:
    own = start(tree_model(faults=Faults(**{fault: at})), PROMPT)
    # A fault at a call that never happens, or whose scores are never read, has no effect.
    with contextlib.suppress(ForwardError, CancelledError, NonFiniteLogitsError):
        own.take(loop_of(own, random_trees(KNOWN["greedy"]), 3).steps())
    assert own.sequence.tokens == own.history[: own.sequence.length]
    assert own.sequence.tree == []
    own.sequence.reset_cancel()
    again = Answer(own.history, own.sequence)
    again.take(loop_of(again, second_guess(KNOWN["greedy"]), 4, max_tokens=5).steps())
    assert own.history[len(PROMPT) :] == PLAIN["greedy"][: len(own.history) - len(PROMPT)]


def test_trees_are_refused_unless_the_target_declares_them_exact() -> None:
    for model, trees in ((tree_model(), False), (FakeModel(), False)):
        own = start(model, PROMPT)
        loop = DecodeLoop(
            own.sequence,
            second_guess(KNOWN["greedy"]),
            FixedDepth(4),
            Chooser(GREEDY),
            own.history,
            LoopLimits(max_tokens=TOKENS, depth_cap=4, vocabulary_size=VOCABULARY_SIZE),
            trees=trees,
        )
        own.take(loop.steps())
        assert own.tokens == PLAIN["greedy"][:TOKENS]
        assert {record.width for record in own.records} == {1}
        assert sum(record.invalid for record in own.records) > 0


# ------------------------------------------------------------------------------------------------------ well-formed


@pytest.mark.parametrize(
    ("tokens", "parents", "length"),
    [
        ((1, 2, 3), (-1, 0, 1), 3),
        ((1, 2, 3), (-1, -1, 0), 3),
        ((1, 2, 3), (-1, 1, 0), 1),
        ((1, 2, 3), (0, 0, 0), 0),
        ((1, 2, 3), (-1, -2, 0), 1),
        ((1, 2, 3), (-1, 0, 2), 2),
        ((1, 2, 3), (-1, True, 0), 1),
        ((1, 2, 3), (-1, 0.0, 0), 1),
        ((1, 12, 3), (-1, 0, 0), 1),
        ((1, 2, 3), (-1, 0), 0),
        ((), (), 0),
    ],
)
def test_a_trees_token_is_invalid_unless_its_parent_comes_earlier(tokens: Any, parents: Any, length: int) -> None:
    proposal = Proposal(tokens=tokens, parents=parents)
    assert valid_length(proposal, 12, needs_probs=True, most_depth=9) == length
    assert valid_length(proposal, 12, needs_probs=False) == 0


def test_the_first_chain_is_the_leading_run_of_a_tree() -> None:
    def chain(*parents: int) -> tuple[int, ...]:
        tokens = tuple(range(len(parents)))
        found = first_chain(Proposal(tokens=tokens, parents=parents, confidences=(0.5,) * len(tokens)))
        assert found.parents is None
        assert len(found.confidences) == len(found.tokens)
        return found.tokens

    assert chain() == ()
    assert chain(-1, 0, 1) == (0, 1, 2)
    assert chain(-1, 0, -1, 2) == (0, 1)
    assert chain(-1, -1) == (0,)
    whole = Proposal(tokens=(4, 5))
    assert first_chain(whole) is whole


# ------------------------------------------------------------------------------------------------------- the law


class Likely(Drawing):
    """The two likeliest first tokens, each followed by its likeliest continuation."""

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        before = tuple(context.tokens[len(ONE) :])
        said: list[int] = []
        parents: list[int] = []
        first = sorted(range(SIZE), key=lambda token: -self._draft(before)[token])[:2]
        for token in first:
            after = self._draft((*before, token))
            said += [token, max(range(SIZE), key=after.__getitem__)]
            parents += [-1, len(said) - 2]
        return Proposal(tokens=tuple(said), parents=tuple(parents), drafted_by="likely").cut(depth)


def law_of(target: Conditional, draft: Conditional, *, rejection: bool, tokens: int) -> Law:
    decisions, law = Decisions(), defaultdict[tuple[int, ...], Fraction](Fraction)
    begun = False
    while not begun or decisions.start_next():
        begun = True
        model, history = FakeModel(SIZE, can_branch=True), list(ONE)
        loop = DecodeLoop(
            model.open(32),
            Likely(decisions, draft, copies=True, lengths=(9,)),
            FixedDepth(4),
            ExactChooser(decisions, target, rejection=rejection),
            history,
            LoopLimits(max_tokens=tokens, depth_cap=4, vocabulary_size=SIZE),
            trees=True,
        )
        for _ in loop.steps():
            pass
        law[tuple(history[len(ONE) :])] += decisions.weight
    return positive(dict(law))


@pytest.mark.parametrize("rejection", [False, True], ids=["keyed", "rejection"])
def test_the_law_over_two_trees_is_the_targets(rejection: bool) -> None:
    for seed in (5, 6):
        target, draft = random_conditional(seed, SIZE), random_conditional(seed + 26, SIZE)
        assert law_of(target, draft, rejection=rejection, tokens=6) == plain_law(target, 6)


def test_drawing_the_target_again_for_each_child_is_detected_as_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    def unlawful(tokens: Sequence[int], parents: Sequence[int], target_token: Callable[[int], int]) -> TreeVerdict:
        path: list[int] = []
        while True:
            here = path[-1] if path else -1
            for index, parent in enumerate(parents):
                if parent == here and target_token(here) == tokens[index]:
                    path.append(index)
                    break
            else:
                return TreeVerdict(tuple(path), target_token(here), "correction")

    monkeypatch.setattr(module, "verify_tree", unlawful)
    target, draft = random_conditional(5, SIZE), random_conditional(31, SIZE)
    assert law_of(target, draft, rejection=True, tokens=4) != plain_law(target, 4)


def test_a_tree_under_the_rejection_rule_uses_the_noise_of_corrections() -> None:
    """A tree does not depend on that noise, so the text under the rejection rule equals plain decoding's here."""
    texts = []
    for drafter in (scripted.empty(), second_guess(KNOWN["greedy"]), random_trees(KNOWN["greedy"])):
        own = start(tree_model(), PROMPT)
        limits = LoopLimits(max_tokens=TOKENS, depth_cap=5, vocabulary_size=VOCABULARY_SIZE)
        own.take(
            DecodeLoop(
                own.sequence, drafter, FixedDepth(5), Chooser(REJECTION), own.history, limits, trees=True
            ).steps()
        )
        texts.append(own.tokens)
    assert texts[0] == texts[1] == texts[2]
