"""The drafters that know the answer: one says it, the other never does."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from edgespec.bench.controls import ReplayDrafter, ReplayState, Script
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.interfaces.drafting import NOTHING, Context, DraftRequest, Outcome

VOCABULARY = 20
KNOWN = [3, 5, 7, 9, 11, 19]


def state(tokens: list[int], *, wrong: bool = False) -> ReplayState:
    script = Script()
    drafter = ReplayDrafter(script, wrong=wrong)
    started = drafter.start(DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=VOCABULARY, context_length=64))
    script.tokens = tokens  # exchanged after the session began, as a benchmark does from prompt to prompt
    return started


def test_a_script_knows_nothing_at_first() -> None:
    assert tuple(Script().tokens) == ()


def test_they_are_named_for_what_they_are() -> None:
    assert ReplayDrafter(Script()).kind == "oracle", "right unless told otherwise"
    assert ReplayDrafter(Script(), wrong=True).kind == "worst"


def test_the_oracle_says_what_comes_next_and_no_more() -> None:
    oracle = state(KNOWN)
    proposal = oracle.propose(Context(KNOWN[:2]), 3)
    assert proposal.tokens == (7, 9, 11)
    assert proposal.sources == ("oracle",) * 3
    assert proposal.drafted_by == "oracle"
    assert (proposal.forwards, proposal.sync_s) == (0, 0.0)
    assert oracle.propose(Context(KNOWN[:4]), 9).tokens == (11, 19)
    for length in (6, 7, 40):
        assert oracle.propose(Context([0] * length), 4) == NOTHING


def test_a_depth_of_nothing_is_nothing() -> None:
    assert state(KNOWN).propose(Context(KNOWN[:2]), 0) == NOTHING
    assert state(KNOWN, wrong=True).propose(Context(KNOWN[:2]), 0) == NOTHING


@given(
    known=st.lists(st.integers(0, VOCABULARY - 1), max_size=12), length=st.integers(1, 14), depth=st.integers(1, 6)
)
def test_the_worst_is_wrong_everywhere_and_always_valid(known: list[int], length: int, depth: int) -> None:
    proposal = state(known, wrong=True).propose(Context([0] * length), depth)
    assert len(proposal.tokens) == depth == len(proposal.sources), "as deep as asked, also past the end"
    assert proposal.drafted_by == "worst"
    assert all(0 <= token < VOCABULARY for token in proposal.tokens)
    truth = known[length : length + depth]
    assert all(own != right for own, right in zip(proposal.tokens, truth, strict=False))


def test_the_worst_of_the_last_id_wraps_around() -> None:
    assert state(KNOWN, wrong=True).propose(Context(KNOWN[:5]), 1).tokens == (0,)


@pytest.mark.parametrize("wrong", [False, True])
def test_it_is_free_and_learns_and_holds_nothing(wrong: bool) -> None:
    replay = state(KNOWN, wrong=wrong)
    context = Context(KNOWN[:2])
    assert replay.free
    assert replay.lag(context) == 0
    before = replay.propose(context, 2)
    replay.observe(Outcome(proposal=before, evaluated=2, accepted=0, committed=(1,)))
    replay.cancel()
    replay.reset_cancel()
    replay.close()
    replay.close()
    assert replay.propose(context, 2) == before
    drafter = ReplayDrafter(Script(), wrong=wrong)
    drafter.close()
    drafter.close()


def test_two_sessions_of_one_script_do_not_disturb_each_other() -> None:
    script = Script()
    drafter = ReplayDrafter(script)
    request = DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=VOCABULARY, context_length=64)
    first, second = drafter.start(request), drafter.start(request)
    script.tokens = KNOWN
    assert first.propose(Context(KNOWN[:1]), 2).tokens == (5, 7)
    assert second.propose(Context(KNOWN[:3]), 2).tokens == (9, 11)
    assert first.propose(Context(KNOWN[:1]), 2).tokens == (5, 7)
