"""Lookup against a brute-force search, and the content of its index."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.drafters import lookup
from edgespec.drafters.lookup import LookupDrafter, LookupDraftState, match_confidence
from edgespec.interfaces.drafting import NOTHING, Context, DraftRequest, Outcome, Proposal
from tests.support.gates import at_least


def started(minimum: int = 3, stop_ids: frozenset[int] = frozenset()) -> LookupDraftState:
    request = DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=100, context_length=4096, stop_ids=stop_ids)
    return LookupDrafter(minimum_match_tokens=minimum).start(request)


def brute_force(tokens: list[int], depth: int, minimum: int, longest: int, candidates: int) -> list[int]:
    """All earlier places, most recent first; the longest match wins, the more recent one on a tie."""
    best_end, best_length, seen = None, 0, 0
    for end in range(len(tokens) - 1, minimum - 1, -1):
        if tokens[end - minimum : end] != tokens[len(tokens) - minimum :]:
            continue
        seen += 1
        if seen > candidates:
            break
        length = max(n for n in range(minimum, end + 1) if tokens[end - n : end] == tokens[len(tokens) - n :])
        if min(length, longest) > best_length:
            best_end, best_length = end, min(length, longest)
    return [] if best_end is None else tokens[best_end : best_end + depth]


@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(4, 9),
    st.integers(1, 6),
)
@settings(max_examples=400, deadline=None)
def test_lookup_copies_after_the_longest_then_most_recent_match(
    tokens: list[int], minimum: int, depth: int, longest: int, candidates: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "_LONGEST_MATCH_TOKENS", longest)
        patch.setattr(lookup, "_CANDIDATES", candidates)
        proposal = started(minimum).propose(Context(tokens), depth)
    assert list(proposal.tokens) == brute_force(tokens, depth, minimum, longest, candidates)
    if proposal.tokens:
        assert (proposal.drafted_by, proposal.draft_probs) == ("lookup", None)
        assert proposal.sources == ("lookup",) * len(proposal.tokens)
    else:
        assert proposal is NOTHING


@given(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=8), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_an_index_grown_with_the_text_equals_a_fresh_index(pieces: list[list[int]], minimum: int) -> None:
    state, tokens = started(minimum), []
    for piece in pieces:
        tokens += piece
        assert state.propose(Context(tokens), 4) == started(minimum).propose(Context(tokens), 4)
        ends = [end for found in state._ends.values() for end in found]
        assert sorted(ends) == list(range(minimum, len(tokens))), "each run once, unless nothing follows it"
        for run, found in state._ends.items():
            assert found == sorted(found)
            assert all(tuple(tokens[end - minimum : end]) == run for end in found)


@given(st.lists(st.integers(0, 2), min_size=5, max_size=30), st.data())
@settings(max_examples=200, deadline=None)
def test_changed_or_shortened_text_is_indexed_again(tokens: list[int], data: st.DataObject) -> None:
    state = started(2)
    state.propose(Context(tokens), 4)
    keep = data.draw(st.integers(0, len(tokens)))
    other = tokens[:keep] + data.draw(st.lists(st.integers(0, 2), max_size=10))
    assert state.propose(Context(other), 4) == started(2).propose(Context(other), 4)


def test_lookup_proposes_nothing_for_short_texts_or_depth_zero() -> None:
    for tokens in ([], [1], [1, 1], [1, 1, 1]):
        assert started().propose(Context(tokens), 4) is NOTHING
    state = started()
    assert state.propose(Context([1, 1, 1, 1, 1]), 0) is NOTHING
    assert state.propose(Context([1, 1, 1, 1, 1]), 2).tokens == (1,)


def test_lookup_needs_a_match_of_three_tokens_by_default() -> None:
    request = DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=100, context_length=64)
    state = LookupDrafter().start(request)
    assert state.propose(Context([7, 8, 5, 6, 7, 8]), 4) is NOTHING
    assert state.propose(Context([6, 7, 8, 5, 4, 6, 7, 8]), 2).tokens == (5, 4)


def test_a_copy_ends_after_a_stop_token() -> None:
    tokens = [1, 2, 3, 9, 5, 6, 1, 2, 3]
    assert started().propose(Context(tokens), 6).tokens == (9, 5, 6, 1, 2, 3)
    assert started(stop_ids=frozenset({5})).propose(Context(tokens), 6).tokens == (9, 5)
    assert started(stop_ids=frozenset({9, 5})).propose(Context(tokens), 6).tokens == (9,)


@given(st.lists(st.integers(0, 2), min_size=8, max_size=60), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_lookup_confidence_grows_with_the_match_and_along_the_copy(tokens: list[int], minimum: int) -> None:
    proposal = started(minimum).propose(Context(tokens), 6)
    assert len(proposal.confidences) == len(proposal.tokens)
    assert all(0 <= sure < 1 for sure in proposal.confidences)
    assert list(proposal.confidences) == sorted(set(proposal.confidences)), "strictly ascending"
    if proposal.tokens:
        longest = max(
            next((n for n in range(end, 0, -1) if tokens[end - n : end] == tokens[len(tokens) - n :]), 0)
            for end in range(minimum, len(tokens))
        )
        assert proposal.confidences[0] == match_confidence(min(longest, 32))


def test_a_longer_match_has_a_higher_confidence() -> None:
    sure = [match_confidence(matched) for matched in range(1, 33)]
    assert sure == sorted(set(sure))
    assert (sure[0], sure[2]) == (0.0, 0.5)
    short = started().propose(Context([9, 1, 2, 3, 4, 8, 1, 2, 3]), 1)
    longer = started().propose(Context([9, 1, 2, 3, 4, 9, 1, 2, 3]), 1)
    assert (short.tokens, longer.tokens) == ((4,), (4,))
    assert (short.confidences, longer.confidences) == ((0.5,), (pytest.approx(0.6),))


def test_a_gate_ends_a_copy() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    whole = started().propose(Context(tokens), 6)
    assert whole.confidences == pytest.approx((1 / 2, 3 / 5, 2 / 3, 5 / 7, 3 / 4, 7 / 9))
    state = started()
    gate = at_least(0.1)
    gate.rule = lambda confidence, entropy: confidence < 0.7
    cut = state.propose(Context(tokens), 6, gate)
    assert (cut.tokens, cut.sources, cut.drafted_by) == ((4, 5, 6), ("lookup",) * 3, "lookup")
    assert cut.confidences == whole.confidences[:3]
    assert [entropy for _, entropy in gate.asked] == [None] * 4, "a copy has no distribution"


def test_lookup_is_free_and_has_no_lag() -> None:
    state = started()
    assert state.free
    assert state.lag(Context(list(range(1000)))) == 0
    assert state.propose(Context([1, 2, 3, 4, 1, 2, 3]), 1).forwards == 0


def test_observe_and_cancel_do_not_change_lookup_proposals() -> None:
    tokens = [1, 2, 3, 4, 1, 2, 3]
    state = started()
    before = state.propose(Context(tokens), 2)
    state.observe(Outcome(proposal=Proposal(tokens=(1,)), evaluated=1, accepted=0, committed=(4,)))
    state.cancel()
    state.reset_cancel()
    assert state.propose(Context(tokens), 2) == before
    state.close()
    state.close()
    assert not state._ends
    assert LookupDrafter().kind == "lookup"
