"""Free drafters are watched: the policy learns which guesses would have been right, once each, used or not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edgespec.drafters.combination import CombinationState
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, Outcome, Proposal
from tests.drafters.test_combination import Depths
from tests.support.gates import Gate, at_least
from tests.support.scripted_drafters import Scripted


class Guess(Scripted):
    """Proposes the given tokens with the given confidences."""

    def __init__(self, *tokens: int, confidences: Sequence[float] = (), free: bool = True, behind: int = 0) -> None:
        super().__init__(lambda context, depth: self.tokens[:depth], free=free, behind=behind)
        self.tokens: tuple[int, ...] = tokens
        self.confidences = tuple(confidences)

    def _proposal(self, tokens: list[int], depth: int) -> Proposal:
        proposed = tuple(self._script(tokens, depth))
        kind = "free" if self.free else "costly"
        return Proposal(tokens=proposed, drafted_by=kind, confidences=self.confidences[: len(proposed)])


PROMPT = [1, 2, 3, 4, 5]


def watching(guess: Guess, gate: Gate | None = None, depth: int = 0) -> tuple[CombinationState, Depths]:
    policy = Depths(gate, free=depth)
    return CombinationState([("free", guess)], policy), policy


def test_a_free_drafter_is_asked_even_if_the_policy_allows_nothing() -> None:
    guess = Guess(6, 7, 8)
    state, policy = watching(guess)
    assert state.propose(Context(PROMPT), 3) is NOTHING
    assert guess.asked == [(5, 3)]
    assert guess.gates == [None], "the whole guess is requested without the gate"
    assert policy.learned == [], "the text has not continued yet"


@pytest.mark.parametrize(
    ("followed", "learned"),
    [
        ([9], [(0.5,), [False]]),
        ([6], None),
        ([6, 7], None),
        ([6, 9], [(0.5, 0.6), [True, False]]),
        ([6, 7, 8], [(0.5, 0.6, 0.7), [True, True, True]]),
        ([6, 7, 9, 9], [(0.5, 0.6, 0.7), [True, True, False]]),
        ([6, 9, 8], [(0.5, 0.6), [True, False]]),
    ],
)
def test_a_watched_guess_is_compared_up_to_its_first_wrong_token(
    followed: list[int], learned: list[object] | None
) -> None:
    guess = Guess(6, 7, 8, confidences=(0.5, 0.6, 0.7))
    state, policy = watching(guess)
    state.propose(Context(PROMPT), 3)
    guess.tokens = ()
    for _ in range(3):  # learned once, although the same text is seen again
        state.propose(Context(PROMPT + followed), 3)
    assert policy.learned == ([("free", *learned)] if learned else [])


def test_a_watched_guess_teaches_the_same_if_the_text_grows_token_by_token() -> None:
    guess = Guess(6, 7, 8, confidences=(0.5, 0.6, 0.7))
    state, policy = watching(guess)
    state.propose(Context(PROMPT), 3)
    guess.tokens = ()
    for length in range(1, 5):
        state.propose(Context([*PROMPT, 6, 7, 8, 9][: 5 + length]), 3)
    assert policy.learned == [("free", (0.5, 0.6, 0.7), [True, True, True])]


def test_each_round_with_a_watched_guess_is_learned_from() -> None:
    guess = Guess(6, 7)
    state, policy = watching(guess)
    text = [*PROMPT, 6, 7, 8]
    for length in range(5, 9):
        guess.tokens = tuple(text[length : length + 2]) if length < 7 else ()
        state.propose(Context(text[:length]), 2)
    assert [hits for _, _, hits in policy.learned] == [[True, True], [True, True]]


def test_a_watched_guess_without_confidences_counts_as_one_half() -> None:
    guess = Guess(6, 7)
    state, policy = watching(guess)
    state.propose(Context(PROMPT), 2)
    state.propose(Context([*PROMPT, 6, 9]), 2)
    assert policy.learned == [("free", (0.5, 0.5), [True, False])]


@pytest.mark.parametrize("other", [[9, 9, 9, 9, 9, 6, 7, 8], [1, 2, 3, 4, 9, 6, 7, 8], [1, 2], []])
def test_a_watched_guess_is_dropped_if_its_text_was_replaced(other: list[int]) -> None:
    guess = Guess(6, 7)
    state, policy = watching(guess)
    state.propose(Context(PROMPT), 2)
    guess.tokens = ()
    state.propose(Context(other), 2)
    state.propose(Context([*PROMPT, 6, 7]), 2)
    assert policy.learned == []


def test_a_guess_that_was_used_and_watched_is_counted_once() -> None:
    guess = Guess(6, 7, confidences=(0.5, 0.6))
    state, policy = watching(guess, depth=2)
    proposal = state.propose(Context(PROMPT), 2)
    assert proposal.tokens == (6, 7)
    state.observe(Outcome(proposal=proposal, evaluated=2, accepted=1, committed=(6, 9)))
    assert policy.learned == []
    guess.tokens = ()
    for _ in range(2):
        state.propose(Context([*PROMPT, 6, 9]), 2)
    assert policy.learned == [("free", (0.5, 0.6), [True, False])]
    assert [outcome.accepted for outcome in guess.outcomes] == [1], "the drafter itself receives the outcome too"


@pytest.mark.parametrize(("limit", "kept"), [(0.0, 4), (0.55, 0), (0.5, 1), (1.0, 0)])
def test_the_gate_cuts_the_used_guess_but_not_the_watched_one(limit: float, kept: int) -> None:
    guess = Guess(6, 7, 8, 9, confidences=(0.5, 0.4, 0.9, 0.9))
    gate = at_least(limit)
    state, policy = watching(guess, gate, depth=4)
    proposal = state.propose(Context(PROMPT), 4)
    assert proposal.tokens == (6, 7, 8, 9)[:kept]
    assert (proposal is NOTHING) is (kept == 0)
    assert len(gate.asked) == min(kept + 1, 4), "in order, up to the first token it refuses"
    guess.tokens = ()
    state.propose(Context([*PROMPT, 6, 7, 8, 9]), 4)
    assert policy.learned == [("free", (0.5, 0.4, 0.9, 0.9), [True] * 4)]


def test_a_gate_sees_confidence_one_half_if_the_drafter_reports_none() -> None:
    gate = Gate()
    state, _ = watching(Guess(6, 7), gate, depth=2)
    assert state.propose(Context(PROMPT), 2).tokens == (6, 7)
    assert gate.asked == [(0.5, None), (0.5, None)]


def test_a_free_guess_is_cut_to_the_depth_before_the_gate_is_asked() -> None:
    gate = Gate()
    state, _ = watching(Guess(6, 7, 8), gate, depth=2)
    assert state.propose(Context(PROMPT), 5).tokens == (6, 7)
    assert len(gate.asked) == 2


def test_a_costly_drafter_is_judged_by_its_verified_tokens_only() -> None:
    costly = Guess(6, 7, 8, confidences=(0.9, 0.8, 0.7), free=False, behind=17)
    policy = Depths(Gate(), costly=3)
    state = CombinationState([("costly", costly)], policy)
    proposal = state.propose(Context(PROMPT), 3)
    assert policy.asked == [("costly", 17)]
    assert costly.gates == [policy.gate], "a costly drafter asks the gate itself, before each token"
    state.observe(Outcome(proposal=proposal, evaluated=2, accepted=1, committed=(6, 9)))
    assert policy.learned == [("costly", (0.9, 0.8), [True, False])]
    state.propose(Context([*PROMPT, 6, 9]), 3)
    assert len(policy.learned) == 1, "a costly drafter is not watched"


def test_a_costly_drafter_is_not_asked_while_the_policy_has_it_off() -> None:
    costly = Guess(6, free=False, behind=3)
    policy = Depths(costly=0)
    assert CombinationState([("costly", costly)], policy).propose(Context(PROMPT), 3) is NOTHING
    assert (costly.asked, policy.asked) == ([], [("costly", 3)])


def test_a_free_drafter_is_watched_while_a_costly_one_drafts() -> None:
    free, costly = Guess(6, 7), Guess(6, 9, free=False)
    policy = Depths(free=0, costly=2)
    state = CombinationState([("free", free), ("costly", costly)], policy)
    proposal = state.propose(Context(PROMPT), 2)
    assert (proposal.tokens, proposal.drafted_by) == ((6, 9), "costly")
    state.observe(Outcome(proposal=proposal, evaluated=2, accepted=2, committed=(6, 9, 5)))
    free.tokens = costly.tokens = ()
    state.propose(Context([*PROMPT, 6, 9, 5]), 2)
    assert policy.learned == [("costly", (), [True, True]), ("free", (0.5, 0.5), [True, False])]


def test_the_number_of_watched_guesses_is_limited() -> None:
    guess = Guess(6, 7)
    state, policy = watching(guess)
    for _ in range(40):
        state.propose(Context(PROMPT), 2)
    state.propose(Context([*PROMPT, 9]), 2)
    assert len(policy.learned) == 16


def test_a_combination_of_free_drafters_is_not_free() -> None:
    assert not CombinationState([("a", Guess())], Depths()).free
