"""Lookup and its index against a brute-force search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.drafters import text_index
from edgespec.drafters.lookup import LookupDrafter, LookupDraftState, match_confidence
from edgespec.drafters.text_index import TextIndex
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, DraftRequest, DraftTree, Outcome, Proposal
from tests.support.gates import at_least


def started(stop_ids: frozenset[int] = frozenset()) -> LookupDraftState:
    request = DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=100, context_length=4096, stop_ids=stop_ids)
    return LookupDrafter().start(request)


def brute_force(tokens: list[int], tail: list[int], longest: int, candidates: int) -> list[tuple[int, int]]:
    """All earlier places of three matching tokens, most recent first; without any, those of one."""
    for size in (3, 1):
        found = [
            (end, max(n for n in range(size, min(end, longest, len(tail)) + 1) if tokens[end - n : end] == tail[-n:]))
            for end in range(len(tokens) - 1, size - 1, -1)
            if tail[-size:] == tokens[end - size : end]
        ]
        if found:
            return found[:candidates]
    return []


texts = st.lists(st.integers(0, 2), max_size=60)


@given(texts, st.lists(st.integers(0, 2), max_size=4), st.integers(4, 9), st.integers(1, 6))
@settings(max_examples=400)
def test_the_index_finds_the_places_that_end_as_the_text_does(
    tokens: list[int], guessed: list[int], longest: int, candidates: int
) -> None:
    index = TextIndex()
    index.follow(tokens)
    tail = [*tokens, *guessed]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_index, "LONGEST_MATCH_TOKENS", longest)
        patch.setattr(text_index, "_CANDIDATES", candidates)
        assert index.matches(tail) == brute_force(tokens, tail, longest, candidates)


@given(texts)
@settings(max_examples=200)
def test_lookup_copies_after_the_longest_then_most_recent_match(tokens: list[int]) -> None:
    proposal = started().propose(Context(tokens), 5)
    found = brute_force(tokens, tokens, 32, 64)
    if not found:
        assert proposal is NOTHING
        return
    end, matched = max(found, key=lambda match: (match[1], match[0]))
    assert list(proposal.tokens) == (tokens[end:] * 5)[:5], "a text that ends in a repetition keeps repeating"
    assert (proposal.drafted_by, proposal.draft_probs) == ("lookup", None)
    assert proposal.sources == ("lookup",) * len(proposal.tokens)
    assert proposal.confidences[0] == match_confidence(matched)


@given(st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 2), max_size=9)), max_size=8))
@settings(max_examples=200)
def test_an_index_of_a_changing_text_equals_a_fresh_index(edits: list[tuple[int, list[int]]]) -> None:
    index, tokens = TextIndex(), []
    for removed, added in edits:
        tokens = tokens[: max(0, len(tokens) - removed)] + added
        fresh = TextIndex()
        index.follow(tokens)
        fresh.follow(tokens)
        assert (index.tokens, index._ends) == (fresh.tokens, fresh._ends)
    index.clear()
    assert (index.tokens, index._ends) == ([], {})


def test_lookup_proposes_nothing_without_a_match_or_at_depth_zero() -> None:
    for tokens in ([], [1], [1, 2], [1, 2, 3]):
        assert started().propose(Context(tokens), 4) is NOTHING
    state = started()
    assert state.propose(Context([1, 1, 1]), 0) is NOTHING
    assert state.propose(Context([1, 1, 1]), 2).tokens == (1, 1)


def test_a_copy_ends_after_a_stop_token() -> None:
    tokens = [1, 2, 3, 9, 5, 6, 1, 2, 3]
    assert started().propose(Context(tokens), 6).tokens == (9, 5, 6, 1, 2, 3)
    assert started(frozenset({5})).propose(Context(tokens), 6).tokens == (9, 5)
    assert started(frozenset({9, 5})).propose(Context(tokens), 6).tokens == (9,)


def test_a_longer_match_has_a_higher_confidence() -> None:
    sure = [match_confidence(matched) for matched in range(1, 33)]
    assert sure == sorted(set(sure))
    assert all(0 < each < 1 for each in sure)
    measured = {1: 0.26, 2: 0.43, 3: 0.58, 4: 0.65, 6: 0.80}  # docs/results/drafting.md
    assert {matched: match_confidence(matched) for matched in measured} == pytest.approx(measured, abs=0.025)
    short = started().propose(Context([9, 1, 2, 3, 4, 8, 1, 2, 3]), 1)
    longer = started().propose(Context([9, 1, 2, 3, 4, 9, 1, 2, 3]), 1)
    assert (short.tokens, longer.tokens) == ((4,), (4,))
    assert (short.confidences, longer.confidences) == ((match_confidence(3),), (match_confidence(4),))


def test_a_gate_ends_a_copy() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    whole = started().propose(Context(tokens), 6)
    assert whole.confidences == tuple(match_confidence(matched) for matched in range(3, 9))
    state = started()
    gate = at_least(0.1)
    gate.rule = lambda confidence, entropy: confidence < match_confidence(6)
    cut = state.propose(Context(tokens), 6, gate)
    assert (cut.tokens, cut.sources, cut.drafted_by) == ((4, 5, 6), ("lookup",) * 3, "lookup")
    assert cut.confidences == whole.confidences[:3]
    assert [entropy for _, entropy in gate.asked] == [None] * 4, "a copy has no distribution"


# -------------------------------------------------------------------------------------------------------- trees


def grown(
    tokens: list[int], *chain: tuple[int, float], stop_ids: frozenset[int] = frozenset(), most_nodes: int = 7
) -> DraftTree:
    """The tree of a chain of (token, odds) and of what lookup adds, believed as it claims."""
    tree = DraftTree(most_nodes=most_nodes)
    for place, (token, odds) in enumerate(chain):
        tree.add(place - 1, token, odds, "model")
    started(stop_ids).grow(Context(tokens), tree, len(chain), float)
    return tree


def test_what_followed_the_text_is_guessed_by_its_share_of_the_places() -> None:
    apart = grown([1, 7, 1, 8, 1, 7, 4, 1])
    odds = [apart.odds[node] for node in range(len(apart)) if apart.parents[node] == -1]
    assert odds == pytest.approx([match_confidence(1) * 2 / 3, match_confidence(1) / 3])


def test_a_copy_continues_with_the_places_that_agree() -> None:
    tree = grown([5, 1, 2, 3, 9, 9, 1, 2, 4, 8, 7, 1])
    assert tree.tokens[:3] == [2, 4, 3] or tree.tokens[:3] == [2, 3, 4]
    assert tree.parents[:3] == [-1, 0, 0]
    assert tree.odds[0] == pytest.approx(match_confidence(1))
    assert tree.odds[1:3] == pytest.approx([match_confidence(2) / 2] * 2)


def test_copies_get_what_others_leave_over() -> None:
    tree = grown([1, 2, 3, 9, 1, 2, 3], (4, 0.75))
    assert (tree.tokens[:2], tree.parents[:2]) == ([4, 9], [-1, -1])
    assert tree.odds[1] == pytest.approx(match_confidence(3) * 0.25)
    agreeing = grown([1, 2, 3, 9, 5, 1, 2, 3], (9, 0.75))
    assert (agreeing.tokens[:2], agreeing.parents[:2]) == ([9, 5], [-1, 0])
    assert (agreeing.odds[0], agreeing.sources[0]) == (0.75, "model")
    assert agreeing.odds[1] == pytest.approx(match_confidence(4)), "the copy continues behind the chain"


def test_nothing_is_guessed_behind_a_stop_token() -> None:
    tree = grown([1, 9, 5, 6, 7, 1], stop_ids=frozenset({5}))
    assert tree.tokens == [9, 5]
    assert grown([1, 9, 5, 6, 7, 1], (9, 0.5), (5, 0.5), stop_ids=frozenset({5})).tokens == [9, 5]


def test_a_tree_grows_by_eleven_guesses_or_by_all_its_nodes_and_only_by_likely_ones() -> None:
    tree = grown(list(range(20)) * 2)
    assert (len(tree), tree.tokens) == (11, list(range(11)))
    assert min(tree.reach()) > 0.03
    periodic = [0, 1] * 40
    assert [len(grown(periodic, most_nodes=most)) for most in (11, 12, 40)] == [11, 12, 40]
    assert len(grown([1, 2, 3, 4, 1], (2, 1e-4), (3, 0.5))) == 2, "what follows an unlikely chain is unlikely"


@given(texts, st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1)), max_size=4))
@settings(max_examples=200)
def test_any_text_gives_a_well_formed_tree(tokens: list[int], chain: list[tuple[int, float]]) -> None:
    tree = grown(tokens, *chain)
    assert len(tree) <= len(chain) + 12
    assert all(-1 <= parent < node for node, parent in enumerate(tree.parents))
    assert all(0 <= odds <= 1 for odds in tree.odds)
    assert len({*zip(tree.parents, tree.tokens, strict=True)}) == len(tree)


def test_lookup_is_free_and_has_no_lag() -> None:
    state = started()
    assert state.free
    assert state.lag(Context(list(range(1000)))) == 0
    assert state.propose(Context([1, 2, 3, 4, 1, 2, 3]), 1).forwards == 0


def test_a_context_that_has_grown_is_looked_up_again() -> None:
    state, tokens = started(), [1, 2, 3, 9, 1, 2]
    context = Context(tokens)
    assert state.propose(context, 1).tokens == (3,)
    tokens += [3]
    assert state.propose(context, 1).tokens == (9,)
    state.close()
    assert state.propose(context, 1).tokens == (9,)


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
    assert state._index.tokens == []
    assert LookupDrafter().kind == "lookup"
