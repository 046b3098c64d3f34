"""Which drafter of a combination is used, and what happens to one that fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.drafters.combination import Combination, CombinationState
from edgespec.errors import CancelledError, ForwardError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, ChainGate, DraftRequest, DraftState, Outcome, Proposal
from edgespec.interfaces.policy import Allowance, RoundRecord
from edgespec.planning.depth.base import FixedDepth
from tests.support.scripted_drafters import Raising, Scripted

CONTEXT = Context([1, 2, 3])
REQUEST = DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=10, context_length=64)


class Part(Scripted):
    """Proposes ``token`` as often as allowed, or nothing, or an empty proposal that took time."""

    def __init__(self, kind: str, token: int | None, *, tried: bool = True) -> None:
        super().__init__(lambda tokens, depth: [] if token is None else [token] * depth)
        self.kind = kind
        self._tried = tried

    def _proposal(self, tokens: list[int], depth: int) -> Proposal:
        proposed = tuple(self._script(tokens, depth))
        return Proposal(tokens=proposed, drafted_by=self.kind) if proposed or self._tried else NOTHING


class Depths:
    """A policy with a depth for each source, which records its calls."""

    plain_tokens_per_s = None

    def __init__(self, gate: ChainGate | None = None, **depths: int) -> None:
        self.depths = depths
        self.gate = gate
        self.asked: list[tuple[str, int]] = []
        self.learned: list[tuple[str, tuple[float, ...], list[bool]]] = []
        self.alternatives: list[tuple[str, list[float], list[bool]]] = []
        self.unread: list[int] = []
        self.hindsight = 0
        self.looked_back: list[tuple[str, tuple[bool, ...]]] = []

    def allow(self, source: str, lag: int = 0, unread: int = 0) -> Allowance:
        self.asked.append((source, lag))
        self.unread.append(unread)
        return Allowance(self.depths[source], self.gate, hindsight=self.hindsight)

    def allow_free(self, source: str) -> Allowance:
        return self.allow(source)

    def prefers(self, source: str, free_gain: float) -> bool:
        return not free_gain

    def learn_hindsight(self, source: str, hits: Sequence[bool]) -> None:
        self.looked_back.append((source, tuple(hits)))

    def learn(self, source: str, confidences: Sequence[float], hits: Sequence[bool]) -> None:
        self.learned.append((source, tuple(confidences), list(hits)))

    def learn_alternatives(self, source: str, odds: Sequence[float], hits: Sequence[bool]) -> None:
        self.alternatives.append((source, list(odds), list(hits)))

    def record(self, record: RoundRecord) -> None:
        raise AssertionError("the loop calls record, not the combination")

    def why_off(self, source: str) -> str | None:
        return None


def combined(*parts: tuple[str, DraftState], **depths: int) -> CombinationState:
    return CombinationState(parts, Depths(None, **depths))


def test_a_combination_uses_the_first_drafter_with_a_proposal() -> None:
    silent, first, second = Part("a", None, tried=False), Part("b", 5), Part("c", 6)
    state = combined(("a", silent), ("b", first), ("c", second), a=9, b=9, c=9)
    assert state.propose(CONTEXT, 3).tokens == (5, 5, 5)
    assert (silent.asked, first.asked, second.asked) == ([(3, 3)], [(3, 3)], [])


def test_after_an_empty_proposal_that_took_time_no_further_drafter_is_asked() -> None:
    tried, second = Part("a", None), Part("b", 6)
    proposal = combined(("a", tried), ("b", second), a=9, b=9).propose(CONTEXT, 3)
    assert (proposal.tokens, proposal.drafted_by, second.asked) == ((), "a", [])


def test_each_drafter_drafts_up_to_the_policys_depth_for_it() -> None:
    parts = [(kind, Part(kind, None, tried=False)) for kind in "abc"]
    assert combined(*parts, a=2, b=0, c=7).propose(CONTEXT, 5) is NOTHING
    assert [part.asked for _, part in parts] == [[(3, 2)], [], [(3, 5)]]


def test_a_combination_without_drafters_proposes_nothing() -> None:
    state = CombinationState([], FixedDepth(4))
    assert state.propose(CONTEXT, 4) is NOTHING
    state.observe(Outcome(proposal=NOTHING, evaluated=0, accepted=0, committed=()))
    state.close()


def test_a_combination_uses_a_replaced_policy() -> None:
    part = Part("a", 5)
    state = combined(("a", part), a=1)
    assert len(state.propose(CONTEXT, 4).tokens) == 1
    state.depth = FixedDepth(3)
    assert len(state.propose(CONTEXT, 4).tokens) == 3


def test_a_failing_drafter_is_turned_off_and_the_next_is_used() -> None:
    failing, second = Raising(ForwardError("the driver is gone"), at=1), Part("b", 6)
    state = combined(("a", failing), ("b", second), a=9, b=9)
    for _ in range(3):
        assert state.propose(CONTEXT, 2).tokens == (6, 6)
    assert len(failing.asked) == 1
    assert state.failures == {"a": "the driver is gone"}


def test_a_drafter_that_fails_in_observe_does_not_end_the_answer() -> None:
    failing, second = Raising(ForwardError("the driver is gone"), when_observing=True), Part("b", 6)
    state = combined(("scripted", failing), ("b", second), scripted=9, b=9)
    proposal = state.propose(CONTEXT, 2)
    assert proposal.drafted_by == "scripted"
    outcome = Outcome(proposal=proposal, evaluated=1, accepted=0, committed=(4,))
    state.observe(outcome)
    state.observe(outcome)
    assert len(failing.outcomes) == 1
    assert state.failures == {"scripted": "the driver is gone"}
    assert state.propose(CONTEXT, 2).tokens == (6, 6)


def test_a_cancel_is_raised_and_turns_no_drafter_off() -> None:
    cancelled = Raising(CancelledError("stop"), at=2)
    state = combined(("a", cancelled), ("b", Part("b", 6)), a=9, b=9)
    assert state.propose(CONTEXT, 2).tokens == (0,)
    for _ in range(2):
        with pytest.raises(CancelledError):
            state.propose(CONTEXT, 2)
    assert state.failures == {}


def test_a_combination_reports_why_a_drafter_proposes_nothing() -> None:
    class Silent(Part):
        silent_because: str | None = "not my language"

    silent = Silent("model", None)
    state = combined(("lookup", Part("lookup", 1)), ("model", silent), lookup=1, model=1)
    assert state.silences == {"model": "not my language"}
    silent.silent_because = None
    assert state.silences == {}
    assert state.failures == {}


def test_an_unexpected_exception_of_a_drafter_is_raised() -> None:
    def broken(tokens: list[int], depth: int) -> list[int]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        combined(("a", Scripted(broken)), a=9).propose(CONTEXT, 2)


def test_only_the_drafter_of_a_proposal_observes_its_outcome() -> None:
    first, second = Part("a", 5), Part("b", 6)
    state = combined(("a", first), ("b", second), a=9, b=9)
    outcome = Outcome(proposal=Proposal(tokens=(6,), drafted_by="b"), evaluated=1, accepted=1, committed=(6, 7))
    state.observe(outcome)
    assert (first.outcomes, second.outcomes) == ([], [outcome])


def test_cancel_and_close_reach_every_drafter_of_a_combination() -> None:
    parts = [Part("a", 5), Part("b", 6)]
    state = combined(*((part.kind, part) for part in parts), a=9, b=9)
    state.cancel()
    assert [part.cancelled for part in parts] == [True, True]
    state.reset_cancel()
    assert [part.cancelled for part in parts] == [False, False]
    state.close()
    state.close()
    assert all(part.closed for part in parts)


def test_a_combination_starts_and_closes_its_drafters_in_order() -> None:
    events: list[str] = []

    class Kind:
        def __init__(self, kind: str) -> None:
            self.kind = kind

        def start(self, request: DraftRequest) -> DraftState:
            assert request is REQUEST
            events.append(f"start {self.kind}")
            return Part(self.kind, 5 if self.kind == "a" else 6)

        def close(self) -> None:
            events.append(f"close {self.kind}")

    drafter = Combination([Kind("a"), Kind("b")], FixedDepth(2))
    assert drafter.kind == "combination"
    assert drafter.start(REQUEST).propose(CONTEXT, 4).tokens == (5, 5)
    drafter.close()
    assert events == ["start a", "start b", "close a", "close b"]


class Skipping(Part):
    """A drafter that skipped two tokens, and reports the requested hindsight."""

    def unread(self, context: Context) -> int:
        return 2

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        proposal = super().propose(context, depth, gate)
        return replace(proposal, hindsight=(True,) * context.hindsight)


def test_the_policy_receives_skipped_tokens_and_hindsight() -> None:
    policy = Depths(None, a=3, b=3)
    state = CombinationState([("a", Part("a", None, tried=False)), ("b", Skipping("b", 5))], policy)
    state.propose(CONTEXT, 3)
    assert (policy.unread, policy.looked_back) == ([0, 2], [])
    policy.hindsight = 4
    state.propose(CONTEXT, 3)
    assert policy.looked_back == [("b", (True,) * 4)]
