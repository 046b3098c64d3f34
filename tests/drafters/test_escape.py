"""Whether the trimmed or the whole drafter drafts, by how much of the text the trimmed head covers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.drafters.head_coverage import ESCAPE_MISSED, MOST_MORE, RETURN_MISSED, WINDOW_TOKENS, HeadCoverage
from edgespec.drafters.lookup import LookupDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.trimmed import TrimmedHeadDrafter, TrimmedHeadState
from edgespec.errors import CancelledError, ClosedError, EdgespecError, MemoryLimitError
from edgespec.export.trim.vocabtrim import lost_allowed
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import MODEL, NOTHING, DraftRequest, DraftState, Outcome, Proposal
from tests.support.fake_runtime import FakeModel
from tests.support.gates import Gate
from tests.support.scripted_drafters import Raising, Scripted

# The share that a head may lack if the whole head covers 72 % of it, as in the default pair.
LOST_ALLOWED = lost_allowed(0.72)
KEPT = range(10)
SAID, UNSAID = 3, 77
REQUEST = DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=100, context_length=4096)


class Source:
    """A drafter with one prepared state, which counts its starts."""

    kind = "model"

    def __init__(self, state: DraftState | Callable[[], DraftState]) -> None:
        self._state = state
        self.started = 0
        self.closed = 0

    def start(self, request: DraftRequest) -> DraftState:
        assert request is REQUEST
        self.started += 1
        return self._state() if callable(self._state) else self._state

    def close(self) -> None:
        self.closed += 1


def says(token: int, **more: int) -> Scripted:
    return Scripted(lambda tokens, depth: [token] * depth, **more)  # type: ignore[arg-type]


def started(trimmed: DraftState, whole: DraftState | None) -> TrimmedHeadState:
    return TrimmedHeadDrafter(Source(trimmed), None if whole is None else Source(whole), KEPT).start(REQUEST)


def text(missed: int, length: int = WINDOW_TOKENS, before: int = 0) -> Context:
    """``length`` tokens, ``missed`` of them outside the head, after ``before`` more outside it."""
    return Context([UNSAID] * before + [SAID] * (length - missed) + [UNSAID] * missed)


def speaker(state: TrimmedHeadState, context: Context) -> int | None:
    """Which drafter proposes, by the token that it proposes; None if there is no proposal."""
    tokens = state.propose(context, 1).tokens
    return tokens[0] if tokens else None


def reason(state: TrimmedHeadState) -> str:
    """What is wrong with the untrimmed drafter."""
    return (state.silent_because or "").rpartition("the untrimmed drafter ")[2]


# -------------------------------------------------------------------------------------------- the constants


def test_the_limits_of_head_coverage_follow_from_their_derivation() -> None:
    margin = 3 * math.sqrt(LOST_ALLOWED * (1 - LOST_ALLOWED) / WINDOW_TOKENS)
    assert math.floor(WINDOW_TOKENS * (LOST_ALLOWED + margin)) + 1 == ESCAPE_MISSED
    assert math.floor(WINDOW_TOKENS * LOST_ALLOWED) == RETURN_MISSED
    assert RETURN_MISSED < ESCAPE_MISSED


def by_chance(loss: float) -> float:
    """The probability that a window of text with this loss exceeds the limit by chance."""
    return sum(
        math.comb(WINDOW_TOKENS, missed) * loss**missed * (1 - loss) ** (WINDOW_TOKENS - missed)
        for missed in range(ESCAPE_MISSED, WINDOW_TOKENS + 1)
    )


def test_chance_rarely_disables_a_trimmed_head_on_its_own_kind_of_text() -> None:
    assert by_chance(LOST_ALLOWED) < 1 / 150
    assert by_chance(0.02) < 1e-5


# -------------------------------------------------------------------------------------- what the text has had


def test_every_missing_token_counts_if_the_head_cannot_be_extended() -> None:
    watch = HeadCoverage(KEPT)
    assert watch.look(text(missed=ESCAPE_MISSED))
    assert not watch.more


def test_only_the_first_occurrence_counts_if_the_head_can_be_extended() -> None:
    watch = HeadCoverage(KEPT, MOST_MORE)
    assert not watch.look(text(missed=WINDOW_TOKENS))
    assert list(watch.more) == [UNSAID]
    assert watch.look(Context(list(range(100, 100 + WINDOW_TOKENS))))
    assert set(watch.more) == {UNSAID, *range(100, 100 + WINDOW_TOKENS)}


def test_only_the_latest_missing_tokens_are_remembered() -> None:
    watch = HeadCoverage(KEPT, 2)
    for token, kept in ((50, [50]), (51, [50, 51]), (50, [51, 50]), (52, [50, 52]), (SAID, [50, 52])):
        watch.look(Context([*range(5), token]))
        assert list(watch.more) == kept


def test_head_coverage_reads_only_new_tokens() -> None:
    """The text grows, shrinks or is replaced: the count is that of its last window."""
    watch = HeadCoverage(KEPT)
    long = text(missed=ESCAPE_MISSED, before=7)
    for _ in range(2):
        assert watch.look(long)
    assert not watch.look(Context([*long.tokens, *[SAID] * WINDOW_TOKENS]))
    assert watch.look(long)
    assert not watch.look(text(missed=0))
    assert not watch.look(Context([])), "an empty text changes nothing"


# ---------------------------------------------------------------------------------------------- who drafts


def test_the_trimmed_drafter_drafts_until_its_head_lacks_too_many_tokens() -> None:
    state = started(says(1), says(2))
    assert speaker(state, text(missed=ESCAPE_MISSED - 1)) == 1
    assert speaker(state, text(missed=ESCAPE_MISSED)) == 2
    assert state.escaped


def test_between_the_two_limits_the_current_drafter_stays() -> None:
    state = started(says(1), says(2))
    between = text(missed=ESCAPE_MISSED - 1)
    assert speaker(state, between) == 1
    assert speaker(state, text(missed=WINDOW_TOKENS)) == 2
    assert speaker(state, between) == 2
    assert speaker(state, text(missed=RETURN_MISSED + 1)) == 2
    assert speaker(state, text(missed=RETURN_MISSED)) == 1
    assert speaker(state, between) == 1


def test_only_the_last_window_of_the_text_decides_between_drafters() -> None:
    state = started(says(1), says(2))
    assert speaker(state, text(missed=0, before=500)) == 1
    assert speaker(state, text(missed=RETURN_MISSED, before=500)) == 1


@pytest.mark.parametrize("length", [0, 1, WINDOW_TOKENS - 1])
def test_less_than_a_window_of_text_never_changes_the_drafter(length: int) -> None:
    state = started(says(1), says(2))
    assert speaker(state, text(missed=length, length=length)) == 1


def test_assumed_tokens_do_not_count_as_missing() -> None:
    state = started(says(1), says(2))
    assumed = Context([SAID] * WINDOW_TOKENS + [UNSAID] * 40, committed_length=WINDOW_TOKENS)
    assert speaker(state, assumed) == 1
    assert speaker(state, Context(assumed.tokens)) == 2
    few = Context([UNSAID] * WINDOW_TOKENS, committed_length=WINDOW_TOKENS - 1)
    assert speaker(started(says(1), says(2)), few) == 1


def test_without_a_whole_drafter_proposals_stop_until_the_head_covers_the_text() -> None:
    trimmed = says(1)
    state = started(trimmed, None)
    assert state.propose(text(missed=30), 4) is NOTHING
    assert state.lag(text(missed=30)) == 0
    assert trimmed.asked == []
    assert state.propose(text(missed=0), 4).tokens == (1,) * 4


@given(st.lists(st.integers(0, WINDOW_TOKENS), max_size=30))
def test_the_last_window_beyond_a_limit_decides_the_drafter(course: list[int]) -> None:
    state = started(says(1), says(2))
    expected = 1
    for missed in course:
        expected = 2 if missed >= ESCAPE_MISSED else 1 if missed <= RETURN_MISSED else expected
        assert speaker(state, text(missed)) == expected


# ------------------------------------------------------------------------------------- as a drafter among others


def test_trimmed_and_whole_drafter_count_as_one_source() -> None:
    drafter = TrimmedHeadDrafter(Source(says(1)), Source(says(2)), KEPT)
    assert drafter.kind == MODEL != LookupDrafter.kind
    assert drafter.start(REQUEST).free is False


def test_depth_and_gate_reach_the_current_drafter_and_lag_is_its_own() -> None:
    trimmed, whole = says(1, behind=5), says(2, behind=70)
    state, gate = started(trimmed, whole), Gate()
    state.propose(text(0), 3, gate)
    state.propose(text(20), 2, gate)
    assert (trimmed.asked, whole.asked) == ([(WINDOW_TOKENS, 3)], [(WINDOW_TOKENS, 2)])
    assert (trimmed.gates, whole.gates) == ([gate], [gate])
    assert state.lag(text(20)) == 70
    assert state.lag(text(0)) == 5


def test_the_whole_drafter_starts_only_when_needed() -> None:
    whole = Source(says(2))
    state = TrimmedHeadDrafter(Source(says(1)), whole, KEPT).start(REQUEST)
    state.propose(text(0), 3)
    assert whole.started == 0
    for _ in range(3):
        state.propose(text(20), 3)
    assert whole.started == 1


def test_outcomes_go_to_the_trimmed_or_whole_drafter_that_proposed() -> None:
    trimmed, whole = says(1), says(2)
    state = started(trimmed, whole)

    def outcome(proposal: Proposal) -> Outcome:
        return Outcome(proposal=proposal, evaluated=1, accepted=1, committed=(1,))

    first = outcome(state.propose(text(0), 1))
    state.observe(first)
    second = outcome(state.propose(text(20), 1))
    state.observe(second)
    assert (trimmed.outcomes, whole.outcomes) == ([first], [second])


def test_both_model_drafters_read_the_whole_text() -> None:
    """Two model drafters over one fake model: either one proposes what that model would write."""
    model, few = FakeModel(100, seed=4), FakeModel(100, seed=5)
    drafter = TrimmedHeadDrafter(ModelDrafter(lambda: few), ModelDrafter(lambda: model), KEPT)
    state = drafter.start(REQUEST)
    for context, own in ((text(0), few), (text(20), model), (text(0, length=80), few)):
        expected: list[int] = []
        for _ in range(3):
            expected.append(int(own.scores([*context.tokens, *expected]).argmax()))
        assert list(state.propose(context, 3).tokens) == expected
        assert state.lag(context) == 0
    state.close()
    assert all(sequence.closed for each in (model, few) for sequence in each.sequences)


# --------------------------------------------------------------------------------------------- what goes wrong


def memory_error() -> EdgespecError:
    return MemoryLimitError("whole needs too much", needed_bytes=2, available_bytes=1)


def test_after_a_failed_whole_drafter_the_trimmed_one_continues() -> None:
    failing = Raising(memory_error(), at=1)
    state = started(says(1), failing)
    for _ in range(3):
        assert state.propose(text(20), 2) is NOTHING
    assert len(failing.asked) == 1
    assert failing.closed == 1
    assert reason(state) == "failed: whole needs too much"
    state.observe(Outcome(proposal=NOTHING, evaluated=0, accepted=0, committed=(1,)))
    assert speaker(state, text(0)) == 1


def test_a_whole_drafter_that_fails_to_start_is_given_up() -> None:
    def fail() -> DraftState:
        raise memory_error()

    whole = Source(fail)
    state = TrimmedHeadDrafter(Source(says(1)), whole, KEPT).start(REQUEST)
    for _ in range(3):
        assert state.propose(text(20), 2) is NOTHING
    assert whole.started == 1
    assert reason(state) == "failed: whole needs too much"


def test_an_error_of_the_trimmed_drafter_is_raised() -> None:
    state = started(Raising(memory_error(), at=1), says(2))
    with pytest.raises(MemoryLimitError):
        state.propose(text(0), 2)
    assert state.silent_because is None


def test_a_cancel_does_not_count_as_a_failure_of_the_whole_drafter() -> None:
    state = started(says(1), Raising(CancelledError("cancelled"), at=1))
    with pytest.raises(CancelledError):
        state.propose(text(20), 2)
    assert state.silent_because is None


def test_the_reason_is_reported_when_neither_drafter_can_draft() -> None:
    alone = started(says(1), None)
    assert alone.silent_because is None
    alone.propose(text(20), 1)
    assert reason(alone) == "is not in the store"
    alone.propose(text(0), 1)
    assert alone.silent_because is None
    both = started(says(1), says(2))
    both.propose(text(20), 1)
    assert both.silent_because is None
    failing = started(says(1), Raising(MemoryLimitError("no room", needed_bytes=None, available_bytes=None)))
    failing.propose(text(20), 1)
    assert reason(failing) == "failed: no room"


def test_cancel_and_close_reach_each_started_drafter() -> None:
    trimmed, whole = says(1), says(2)
    state = started(trimmed, whole)
    state.cancel()
    assert (trimmed.cancelled, whole.cancelled) == (True, False)
    state.propose(text(20), 1)
    assert whole.cancelled, "cancelled before it was started"
    state.reset_cancel()
    assert (trimmed.cancelled, whole.cancelled) == (False, False)
    state.cancel()
    assert (trimmed.cancelled, whole.cancelled) == (True, True)
    state.close()
    assert (trimmed.closed, whole.closed) == (1, 1)
    with pytest.raises(ClosedError):
        state.propose(text(0), 1)
    never = says(2)
    started(says(1), never).close()
    assert never.closed == 0


def test_closing_a_trimmed_head_drafter_closes_both_drafters() -> None:
    trimmed, whole = Source(says(1)), Source(says(2))
    TrimmedHeadDrafter(trimmed, whole, KEPT).close()
    TrimmedHeadDrafter(trimmed, None, KEPT).close()
    assert (trimmed.closed, whole.closed) == (2, 1)
