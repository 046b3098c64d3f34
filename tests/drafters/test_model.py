"""The model drafter: its chain, and its cache under any change of the text."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from edgespec.decoding.sampling import Chooser, Purpose, Sampling, distribution, draw
from edgespec.drafters import model as module
from edgespec.drafters.model import ModelDrafter, ModelDraftState
from edgespec.errors import CancelledError, ClosedError, ForwardError, MemoryLimitError, NonFiniteLogitsError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, DraftRequest, Outcome, Proposal
from edgespec.interfaces.drawing import INCREMENT
from edgespec.interfaces.model import Company
from tests.support.fake_runtime import FakeModel, FakeSequence, Faults
from tests.support.gates import Gate, at_least, at_most_nats

PROMPT = [3, 1, 4, 1, 5]
GREEDY = Sampling()


def started(
    model: FakeModel,
    sampling: Sampling = GREEDY,
    *,
    context_length: int = 64,
    stop_ids: frozenset[int] = frozenset(),
) -> ModelDraftState:
    request = DraftRequest(
        chooser=Chooser(sampling),
        vocabulary_size=model.vocabulary_size,
        context_length=context_length,
        stop_ids=stop_ids,
    )
    return ModelDrafter(lambda: model).start(request)


def chain(model: FakeModel, tokens: list[int], depth: int, sampling: Sampling = GREEDY) -> list[int]:
    """The model's text, scored from scratch for each token."""
    so_far = list(tokens)
    for _ in range(depth):
        own = distribution(model.scores(so_far), sampling, so_far)
        so_far.append(draw(own, sampling.noise_seed, len(so_far), Purpose.TOKEN))
    return so_far[len(tokens) :]


def check_synced(state: ModelDraftState) -> FakeSequence:
    cache = state._cache  # no public attribute exposes the cache
    assert cache is not None
    assert isinstance(cache.sequence, FakeSequence)
    assert cache.sequence.tokens == cache.known, "the recorded tokens are those in the cache"
    return cache.sequence


# ------------------------------------------------------------------------------------------------ the chain


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=3), Sampling(repeat_penalty=1.5)])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_model_drafters_chain_is_the_models_own_text(depth: int, sampling: Sampling) -> None:
    model = FakeModel(seed=1)
    proposal = started(model, sampling).propose(Context(PROMPT), depth)
    assert list(proposal.tokens) == chain(model, PROMPT, depth, sampling)
    assert proposal.sources == ("model",) * depth
    assert (proposal.drafted_by, proposal.draft_probs, proposal.parents) == ("model", None, None)
    assert model.sequences[0].log.widths == [len(PROMPT), *[1] * (depth - 1)], "the last draft token is not fed"
    assert model.sequences[0].jobs == 1, "one job on the worker thread for the whole chain"


def test_under_the_rejection_rule_a_chain_carries_its_distributions() -> None:
    model, sampling = FakeModel(seed=1), Sampling(temperature=1.0, top_k=5, seed=3, rule="rejection")
    proposal = started(model, sampling).propose(Context(PROMPT), 3)
    assert proposal.draft_probs is not None
    so_far, noise = list(PROMPT), (3 + len(PROMPT) * INCREMENT) % 2**64
    for token, carried in zip(proposal.tokens, proposal.draft_probs, strict=True):
        own = distribution(model.scores(so_far), sampling, so_far)
        assert carried is not None
        assert carried.ids.tolist() == own.ids.tolist()
        assert carried.probs.tolist() == own.probs.tolist()
        assert token == draw(own, noise, len(so_far), Purpose.DRAFT)
        so_far.append(token)


def test_a_drafter_with_a_shorter_context_drafts_until_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(seed=1)
    monkeypatch.setattr(FakeModel, "facts", replace(model.facts, trained_context_length=8))
    state = started(model, context_length=64)
    assert len(state.propose(Context(PROMPT), 2).tokens) == 2
    assert check_synced(state).context_length == 8
    assert len(state.propose(Context([*PROMPT, 7, 7]), 5).tokens) == 2
    assert state.propose(Context([*PROMPT, *[7] * 4]), 5) is NOTHING
    assert len(state.propose(Context(PROMPT), 5).tokens) == 4


def test_a_chain_ends_after_a_stop_token() -> None:
    model = FakeModel(seed=1)
    free = chain(model, PROMPT, 8)
    place = next(i for i, token in enumerate(free) if i > 0 and token not in free[:i])
    state = started(model, stop_ids=frozenset({free[place]}))
    assert list(state.propose(Context(PROMPT), 8).tokens) == free[: place + 1]
    assert len(check_synced(state).log.widths) == place + 1, "nothing is computed after the stop"


def peaked(peaks: list[float]) -> FakeModel:
    """Two ids; after n tokens id 0 has probability ``peaks[n]``, the higher one."""
    return FakeModel(2, table=lambda prefix: [math.log(peaks[len(prefix)]), math.log(1 - peaks[len(prefix)])])


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, rule="rejection")])
def test_low_confidence_ends_a_chain_before_the_token_is_drawn(sampling: Sampling) -> None:
    peaks = [0.9, 0.9, 0.8, 0.7, 0.55, 0.9, 0.9]
    for confidence, length in [(0.0, 5), (0.5, 5), (0.6, 2), (0.75, 1), (0.85, 0)]:
        state = started(peaked(peaks), sampling)
        gate = at_least(confidence)
        proposal = state.propose(Context([0, 1]), 5 if length == 5 else 4, gate)
        assert len(proposal.tokens) == min(length, 5)
        assert proposal.confidences == pytest.approx(peaks[2 : 2 + length])
        assert [sure for sure, _ in gate.asked] == pytest.approx(peaks[2 : 3 + min(length, 4)])
        assert proposal.forwards == len(gate.asked), "the forward that gave a token's confidence counts"
        assert proposal.drafted_by == "model", "also for an empty proposal: it took time"
        assert len(proposal.sources) == len(proposal.tokens)


def test_a_gate_is_asked_before_the_token_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it were asked afterwards, the decision to propose a token could depend on the token, which is biased."""
    drawn: list[int] = []
    original = draw

    def spy(own: object, seed: int, position: int, purpose: Purpose) -> int:
        drawn.append(position)
        return original(own, seed, position, purpose)  # type: ignore[arg-type]

    monkeypatch.setattr("edgespec.decoding.sampling.draw", spy)
    state = started(peaked([0.9, 0.9, 0.8, 0.55, 0.9]), Sampling(temperature=1.0, rule="rejection"))
    assert len(state.propose(Context([0, 1]), 3, at_least(0.6)).tokens) == 1
    assert drawn == [2]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=1)])
def test_high_entropy_ends_a_chain_of_drafts(sampling: Sampling) -> None:
    def nats(peak: float) -> float:
        return -peak * math.log(peak) - (1 - peak) * math.log(1 - peak)

    peaks = [0.9, 0.9, 0.95, 0.8, 0.6, 0.9]
    gate = at_most_nats(nats(0.7))
    proposal = started(peaked(peaks), sampling).propose(Context([0, 1]), 4, gate)
    assert len(proposal.tokens) == 2
    assert [entropy for _, entropy in gate.asked] == pytest.approx([nats(peak) for peak in peaks[2:5]], rel=1e-5)


@pytest.mark.parametrize("forwards", range(4))
def test_a_gate_may_end_a_chain_before_the_next_forward(forwards: int) -> None:
    model = FakeModel(seed=1)
    proposal = started(model).propose(Context(PROMPT), 5, Gate(forwards=forwards))
    assert list(proposal.tokens) == chain(model, PROMPT, forwards + 1)
    assert proposal.forwards == len(model.sequences[0].log.widths) == forwards + 1


def test_a_proposal_says_how_long_it_waited_for_other_answers_and_how_many_shared_its_forwards() -> None:
    class Batched(FakeSequence):
        waited_s = 5.0

        @property
        def company(self) -> Company:
            return Company(answers=self.length % 2)

    class BatchedModel(FakeModel):
        def open(self, context_length: int) -> FakeSequence:
            return Batched(self, context_length)

    state = started(BatchedModel(seed=1))
    proposal = state.propose(Context([1, 2] * 10), 3)
    assert proposal.forwards == 3
    assert proposal.companions == pytest.approx(1 / 3), "at 20, 21 and 22 tokens"
    assert proposal.waited_s == 15.0
    assert -5.0 <= proposal.sync_s < 0.0, "reading leaves the wait out"
    long = Context([1, 2] * 99)
    long.patience_s = 60.0
    read = started(BatchedModel(seed=1), context_length=400).propose(long, 1)
    assert (read.companions, read.waited_s > 5.0) == (0.0, True), "slices that are only read draft nothing"
    alone = started(FakeModel(seed=1)).propose(Context([1, 2] * 10), 3)
    assert (alone.companions, alone.waited_s) == (0.0, 0.0)
    assert proposal.cut(1).companions == proposal.companions
    assert proposal.cut(1).waited_s == 15.0


def test_without_a_gate_a_chain_reaches_the_full_depth() -> None:
    model = FakeModel(3, table=lambda prefix: [0.0, math.log(0.9), math.log(0.2)])  # the peak is 1 / 2.1
    proposal = started(model).propose(Context([0]), 2)
    assert (proposal.tokens, proposal.forwards, proposal.confidences) == ((0, 0), 2, ())


def test_a_gate_is_not_asked_after_the_last_token_or_a_stop() -> None:
    model = FakeModel(seed=1)
    gate = Gate(forwards=0)
    assert len(started(model).propose(Context(PROMPT), 1, gate).tokens) == 1
    (first,) = chain(model, PROMPT, 1)
    assert started(model, stop_ids=frozenset({first})).propose(Context(PROMPT), 5, gate).tokens == (first,)
    assert gate.forwards == 0


# ------------------------------------------------------------------------------------------------- the sync


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_drafters_cache_follows_any_change_of_the_text(data: st.DataObject) -> None:
    model = FakeModel(4, seed=2)
    state = started(model, context_length=40)
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    for _ in range(data.draw(st.integers(1, 6))):
        depth = data.draw(st.integers(1, 4))
        proposal = state.propose(Context(tokens), depth)
        assert list(proposal.tokens) == chain(model, tokens, len(proposal.tokens))
        check_synced(state)
        # Some of the draft is accepted and other tokens follow, or the text is cut back and continues differently.
        keep = data.draw(st.integers(0, len(proposal.tokens)))
        back = data.draw(st.sampled_from([0, 0, 1, 3]))
        tokens = (tokens + list(proposal.tokens[:keep]))[: max(1, len(tokens) + keep - back)]
        tokens = (tokens + data.draw(st.lists(st.integers(0, 3), max_size=3)))[:40]


def test_cached_tokens_are_not_fed_to_the_drafter_again() -> None:
    model = FakeModel(seed=1)
    state = started(model)
    first = list(state.propose(Context(PROMPT), 3).tokens)
    log = model.sequences[0].log
    # All three accepted and a bonus follows: the last draft token and the bonus are new.
    tokens = [*PROMPT, *first, 2]
    second = list(state.propose(Context(tokens), 3).tokens)
    assert log.fed[3] == (first[-1], 2)
    # The first is rejected: the correction alone is new.
    tokens = [*tokens, (second[0] + 1) % 12]
    state.propose(Context(tokens), 1)
    assert log.fed[6] == (tokens[-1],)
    # Nothing changed: the last token once more, for its scores.
    state.propose(Context(tokens), 1)
    assert log.fed[7] == (tokens[-1],)
    # The text was cut back to the prompt and continues differently.
    state.propose(Context([*PROMPT, 0, 0]), 1)
    assert log.fed[8][-1] == 0
    assert check_synced(state).tokens == [*PROMPT, 0, 0]


def test_a_drafters_lag_counts_unread_tokens_except_the_last() -> None:
    state = started(FakeModel(seed=1))
    assert not state.free
    assert state.lag(Context([])) == 0
    assert state.lag(Context(PROMPT)) == len(PROMPT) - 1
    first = list(state.propose(Context(PROMPT), 3).tokens)
    assert state.lag(Context(PROMPT)) == 0
    assert state.lag(Context([*PROMPT, *first, 2])) == 1, "the last draft token was not fed"
    assert state.lag(Context([*PROMPT, (first[0] + 1) % 12])) == 0
    assert state.lag(Context([*PROMPT, *first, 2, 2, 2, 2])) == 4
    assert state.lag(Context([7, *PROMPT])) == len(PROMPT)


def test_only_more_than_an_ordinary_rounds_lag_counts_as_catching_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(ticks)))
    state = started(FakeModel(seed=1))
    first = state.propose(Context(PROMPT), 2)
    assert first.sync_s == 1.0
    tokens = [*PROMPT, *first.tokens, 2]
    assert state.propose(Context(tokens), 2).sync_s == 0.0, "two tokens of lag are an ordinary round"
    assert state.propose(Context([*tokens, 0, 1, 0, 1]), 2).sync_s == 1.0


def test_the_drafters_sequence_opens_at_the_first_proposal() -> None:
    model = FakeModel(seed=1)
    state = started(model, context_length=33)
    assert state.propose(Context(PROMPT), 0) is NOTHING
    assert state.propose(Context([]), 4) is NOTHING
    assert model.sequences == []
    state.propose(Context(PROMPT), 1)
    state.propose(Context(PROMPT), 1)
    (sequence,) = model.sequences
    assert sequence.context_length == 33


@pytest.mark.parametrize("room", range(-1, 6))
def test_a_chain_ends_at_the_drafters_context_length(room: int) -> None:
    model = FakeModel(seed=1)
    state = started(model, context_length=len(PROMPT) + room)
    proposal = state.propose(Context(PROMPT), 4)
    assert list(proposal.tokens) == chain(model, PROMPT, max(0, min(4, room + 1)))
    assert (proposal is NOTHING) is (room < 0)


# -------------------------------------------------------------------------------------- cancel and failures


@pytest.mark.parametrize("call", range(1, 5))
@pytest.mark.parametrize("kind", ["cancel", "raise"])
def test_a_model_drafter_continues_after_a_failure_at_any_forward(call: int, kind: str) -> None:
    faults = Faults(cancel_at=call) if kind == "cancel" else Faults(raise_at=call)
    model = FakeModel(seed=1, faults=faults)
    state = started(model)
    with pytest.raises(CancelledError if kind == "cancel" else ForwardError):
        state.propose(Context(PROMPT), 4)
    sequence = check_synced(state)
    assert sequence.tokens == [*PROMPT, *chain(model, PROMPT, 4)][: sequence.length]
    state.reset_cancel()
    assert list(state.propose(Context(PROMPT), 4).tokens) == chain(model, PROMPT, 4)
    check_synced(state)


def test_scores_that_are_not_finite_raise_and_leave_the_cache_consistent() -> None:
    model = FakeModel(seed=1, faults=Faults(nan_at=2))
    state = started(model)
    with pytest.raises(NonFiniteLogitsError):
        state.propose(Context(PROMPT), 3)
    check_synced(state)
    assert list(state.propose(Context(PROMPT), 3).tokens) == chain(model, PROMPT, 3)


def test_a_drafter_can_be_cancelled_before_during_and_after_opening() -> None:
    state = started(FakeModel(seed=1))
    state.cancel()
    for _ in range(2):
        with pytest.raises(CancelledError):
            state.propose(Context(PROMPT), 2)
    state.reset_cancel()
    assert len(state.propose(Context(PROMPT), 2).tokens) == 2
    state.cancel()
    with pytest.raises(CancelledError):
        state.propose(Context(PROMPT), 2)
    state.reset_cancel()
    assert len(state.propose(Context(PROMPT), 2).tokens) == 2


def test_a_drafter_model_that_cannot_open_raises_at_each_proposal() -> None:
    class Large(FakeModel):
        attempts = 0

        def open(self, context_length: int) -> FakeSequence:
            self.attempts += 1
            if self.attempts < 3:
                raise MemoryLimitError("too large", needed_bytes=2, available_bytes=1)
            return super().open(context_length)

    request = DraftRequest(chooser=Chooser(GREEDY), vocabulary_size=12, context_length=64)
    state = ModelDrafter(lambda: Large(seed=1)).start(request)
    for _ in range(2):
        with pytest.raises(MemoryLimitError):
            state.propose(Context(PROMPT), 2)
    assert len(state.propose(Context(PROMPT), 2).tokens) == 2
    state.close()
    with pytest.raises(ClosedError):
        state.propose(Context(PROMPT), 2)


def test_closing_a_drafter_state_is_idempotent_and_leaves_the_model_open() -> None:
    model = FakeModel(seed=1)
    state = started(model)
    state.close()
    state = started(model)
    state.propose(Context(PROMPT), 1)
    state.close()
    state.close()
    assert model.sequences[-1].closed
    assert not model.closed


def test_sessions_have_separate_drafter_caches_and_observe_changes_nothing() -> None:
    model = FakeModel(seed=1)
    asked_for: list[FakeModel] = []

    def named() -> FakeModel:
        asked_for.append(model)
        return model

    drafter = ModelDrafter(named)
    assert drafter.kind == "model"
    request = DraftRequest(chooser=Chooser(GREEDY), vocabulary_size=12, context_length=64)
    first, second = drafter.start(request), drafter.start(request)
    other = [7, 7, 2]
    for _ in range(3):
        assert list(first.propose(Context(PROMPT), 3).tokens) == chain(model, PROMPT, 3)
        assert list(second.propose(Context(other), 3).tokens) == chain(model, other, 3)
        known = list(check_synced(first).tokens)
        first.observe(Outcome(proposal=Proposal(tokens=(1,)), evaluated=1, accepted=0, committed=(4,)))
        assert check_synced(first).tokens == known
    assert len(model.sequences) == 2
    assert len(asked_for) == 2, "once a session"
    drafter.close()
    assert not model.closed, "the caller owns the model"
