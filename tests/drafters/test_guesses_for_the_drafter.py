"""A drafter's forward takes guesses of the tokens that it will draft: the same chain in fewer forwards."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from edgespec.decoding.sampling import Sampling
from edgespec.drafters import model as module
from edgespec.drafters.model import ModelDraftState
from edgespec.errors import ForwardError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import Proposal
from tests.drafters.test_model import GREEDY, check_synced, started
from tests.support.fake_runtime import FakeModel, Faults
from tests.support.gates import Gate

RULES = (GREEDY, Sampling(temperature=1.0, seed=3), Sampling(temperature=1.0, seed=3, rule="rejection"))


def drafter(
    *, guesses: bool, order: int = 2, sampling: Sampling = GREEDY, faults: Faults | None = None
) -> ModelDraftState:
    return started(FakeModel(order=order, bit_equal_by_construction=guesses, faults=faults), sampling)


def same(one: Proposal, other: Proposal) -> bool:
    return repr(replace(one, forwards=0, sync_s=0.0)) == repr(replace(other, forwards=0, sync_s=0.0))


def admitting(tokens: int) -> Gate:
    """Admits the first ``tokens`` tokens of a chain."""
    gate = Gate(lambda confidence, entropy: len(gate.asked) <= tokens)
    return gate


@pytest.mark.parametrize("sampling", RULES)
@given(data=st.data())
@settings(max_examples=60)
def test_guesses_change_the_number_of_forwards_and_nothing_else(sampling: Sampling, data: st.DataObject) -> None:
    guessing, alone = drafter(guesses=True, sampling=sampling), drafter(guesses=False, sampling=sampling)
    text = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=12))
    for _ in range(4):
        depth = data.draw(st.integers(1, 7))
        limit = data.draw(st.integers(0, 6))
        proposals = [state.propose(Context(list(text)), depth, admitting(limit)) for state in (guessing, alone)]
        assert same(*proposals)
        assert proposals[0].forwards <= proposals[1].forwards
        check_synced(guessing)
        kept = data.draw(st.integers(0, len(proposals[0].tokens)))
        text += [*proposals[0].tokens[:kept], data.draw(st.integers(0, 11))]


def test_right_guesses_save_forwards() -> None:
    guessing, alone = drafter(guesses=True, order=1), drafter(guesses=False, order=1)
    text = [3]
    for _ in range(3):  # a text that repeats itself: the next token depends on the last one only
        text += alone.propose(Context(list(text)), 7).tokens
    one, other = guessing.propose(Context(text), 8), alone.propose(Context(text), 8)
    assert same(one, other)
    assert (one.forwards, other.forwards) == (2, 8), "a forward says four tokens: three guesses are right"


def test_a_guess_of_a_drafted_token_needs_no_leave_of_the_gate() -> None:
    text = [1, 2, 1, 2, 1, 2, 1, 2, 1]
    model = FakeModel(table=lambda prefix: [5.0 * (token == 3 - prefix[-1]) for token in range(12)])
    model._bit_equal = True
    gate = Gate(forwards=0)
    assert started(model).propose(Context(text), 8, gate).tokens == (2, 1, 2, 1), "three guesses were right"


def test_models_whose_rows_depend_on_each_other_get_no_guesses() -> None:
    model = FakeModel(order=1)
    state = started(model)
    text = [3]
    for _ in range(3):
        proposal = state.propose(Context(list(text)), 5)
        assert proposal.forwards == 5
        text += proposal.tokens
    assert state._index is None


@pytest.mark.parametrize("call", range(1, 8))
def test_a_failed_forward_with_guesses_leaves_the_cache_consistent(call: int) -> None:
    state = drafter(guesses=True, order=1, faults=Faults(raise_at=call))
    text = [3, 4, 3, 4, 3, 4, 3]
    for _ in range(4):
        with contextlib.suppress(ForwardError):
            text += state.propose(Context(list(text)), 4).tokens
        check_synced(state)
    assert same(state.propose(Context(text), 4), drafter(guesses=False, order=1).propose(Context(text), 4))


def test_in_a_long_text_only_guesses_after_three_matching_tokens_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    text = [1, 2, 9, 3, 2, 9, 4, 2]
    state = drafter(guesses=True)
    state.propose(Context(list(text)), 2)
    assert state._guesses(text, 3) == [9, 4, 2]
    monkeypatch.setattr(module, "_LONG_TEXT_TOKENS", 7)
    assert state._guesses(text, 3) == []
    repeated = [*text, 5, 2, 9, 4, 2]
    state.propose(Context(list(repeated)), 2)
    assert state._guesses(repeated, 1) == [5]
