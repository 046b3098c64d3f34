"""The drafters that know the answer: the oracle proposes it, the worst drafter never does."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from edgespec.bench.controls import ReplayDrafter, ReplayState, Script
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, DraftRequest, Outcome

VOCABULARY = 20
KNOWN = [3, 5, 7, 9, 11, 19]


def state(tokens: list[int], *, wrong: bool = False) -> ReplayState:
    script = Script()
    drafter = ReplayDrafter(script, wrong=wrong)
    started = drafter.start(DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=VOCABULARY, context_length=64))
    script.tokens = tokens  # replaced after the session began, as a benchmark does for each prompt
    return started


def test_a_new_script_has_no_tokens() -> None:
    assert tuple(Script().tokens) == ()


def test_the_replay_drafters_kind_is_oracle_or_worst() -> None:
    assert ReplayDrafter(Script()).kind == "oracle", "right by default"
    assert ReplayDrafter(Script(), wrong=True).kind == "worst"


def test_the_oracle_proposes_the_next_tokens_up_to_the_depth() -> None:
    oracle = state(KNOWN)
    proposal = oracle.propose(Context(KNOWN[:2]), 3)
    assert proposal.tokens == (7, 9, 11)
    assert proposal.sources == ("oracle",) * 3
    assert proposal.drafted_by == "oracle"
    assert (proposal.forwards, proposal.sync_s) == (0, 0.0)
    assert oracle.propose(Context(KNOWN[:4]), 9).tokens == (11, 19)
    for length in (6, 7, 40):
        assert oracle.propose(Context([0] * length), 4) == NOTHING


def test_a_replay_drafter_at_depth_zero_proposes_nothing() -> None:
    assert state(KNOWN).propose(Context(KNOWN[:2]), 0) == NOTHING
    assert state(KNOWN, wrong=True).propose(Context(KNOWN[:2]), 0) == NOTHING


@given(
    known=st.lists(st.integers(0, VOCABULARY - 1), max_size=12), length=st.integers(1, 14), depth=st.integers(1, 6)
)
def test_the_worst_drafter_proposes_valid_but_wrong_tokens_only(known: list[int], length: int, depth: int) -> None:
    proposal = state(known, wrong=True).propose(Context([0] * length), depth)
    assert len(proposal.tokens) == depth == len(proposal.sources), "to the requested depth, also past the end"
    assert proposal.drafted_by == "worst"
    assert all(0 <= token < VOCABULARY for token in proposal.tokens)
    truth = known[length : length + depth]
    assert all(own != right for own, right in zip(proposal.tokens, truth, strict=False))


def test_the_worst_drafters_token_after_the_last_id_wraps_to_zero() -> None:
    assert state(KNOWN, wrong=True).propose(Context(KNOWN[:5]), 1).tokens == (0,)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_replay_drafter_is_free_and_keeps_no_state(wrong: bool) -> None:
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


def test_two_sessions_of_one_script_are_independent() -> None:
    script = Script()
    drafter = ReplayDrafter(script)
    request = DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=VOCABULARY, context_length=64)
    first, second = drafter.start(request), drafter.start(request)
    script.tokens = KNOWN
    assert first.propose(Context(KNOWN[:1]), 2).tokens == (5, 7)
    assert second.propose(Context(KNOWN[:3]), 2).tokens == (9, 11)
    assert first.propose(Context(KNOWN[:1]), 2).tokens == (5, 7)
