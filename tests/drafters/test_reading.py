"""How much of a text the drafter reads, in which slices, and how reading resumes after an interruption."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.drafters import model as reading
from edgespec.drafters.model import ModelDrafter, ModelDraftState
from edgespec.errors import CancelledError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import DraftRequest
from edgespec.interfaces.model import ModelFacts
from tests.support.fake_runtime import FakeModel, FakeSequence, Faults

LONG = [place % 9 for place in range(200)]


def started(model: FakeModel, context_length: int = 512) -> ModelDraftState:
    request = DraftRequest(
        chooser=Chooser(Sampling(seed=1)), vocabulary_size=model.facts.vocabulary_size, context_length=context_length
    )
    return ModelDrafter(lambda: model).start(request)


def told(tokens: list[int], window: int | None = None, patience_s: float = math.inf) -> Context:
    context = Context(tokens)
    context.window, context.patience_s = window, patience_s
    return context


def likeliest(model: FakeModel, tokens: list[int], count: int) -> list[int]:
    known = list(tokens)
    for _ in range(count):
        scores = list(model.scores(known))
        known.append(scores.index(max(scores)))
    return known[len(tokens) :]


def only(model: FakeModel) -> FakeSequence:
    (sequence,) = model.sequences
    return sequence


class Clock:
    """A clock that advances a second at each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(reading.time, "perf_counter", self.read)

    def read(self) -> float:
        self.now += 1.0
        return self.now


def test_the_drafter_reads_only_the_window_from_position_0_on() -> None:
    model = FakeModel(seed=1)
    state = started(model)
    assert state.lag(told(LONG)) == len(LONG) - 1
    found = list(state.propose(told(LONG, 32), 3).tokens)
    assert only(model).tokens == [*LONG[-33:], *found[:2]]
    assert found == likeliest(model, LONG[-33:], 3)
    assert state.lag(told([*LONG, *found, 5])) == 1, (
        "the last drafted token was not fed; the text's last token does not count"
    )


def test_a_cached_window_is_extended_for_any_later_window_size() -> None:
    model = FakeModel(seed=1)
    state = started(model)
    state.propose(told(LONG, 32), 1)
    longer = [*LONG, 3, 1, 4]
    for window in (None, 16, 35):
        assert list(state.propose(told(longer, window), 2).tokens) == likeliest(model, longer[-36:], 2)
    assert sum(only(model).log.widths) < 33 + 5 * 4


def test_the_drafter_reads_the_skipped_text_on_request() -> None:
    model = FakeModel(seed=1)
    state = started(model)
    state.propose(told(LONG, 32), 1)
    assert list(state.propose(told(LONG, len(LONG)), 2).tokens) == likeliest(model, LONG, 2)
    assert only(model).tokens[: len(LONG)] == LONG


def test_a_text_that_grew_by_more_than_the_window_is_read_from_scratch() -> None:
    model = FakeModel(seed=1)
    state = started(model)
    state.propose(told(LONG, 32), 1)
    much = [*LONG, *LONG]
    assert list(state.propose(told(much, 32), 1).tokens) == likeliest(model, much[-33:], 1)
    assert only(model).tokens == much[-33:]


def test_a_different_text_is_read_from_its_beginning() -> None:
    model = FakeModel(seed=1)
    state = started(model)
    state.propose(told(LONG, 32), 1)
    other = [7, 7, 2]
    assert state.lag(told(other)) == 2
    assert list(state.propose(told(other), 2).tokens) == likeliest(model, other, 2)


def test_a_text_longer_than_the_drafters_context_is_read_by_its_window() -> None:
    model = FakeModel(seed=1)
    state = started(model, context_length=64)
    assert list(state.propose(told(LONG, 32), 3).tokens) == likeliest(model, LONG[-33:], 3)
    assert started(model, context_length=64).propose(told(LONG), 3).tokens == ()


def test_reading_stops_when_patience_ends_and_resumes_at_the_next_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(seed=1)
    state = started(model)
    Clock(monkeypatch)
    left = []
    while not (proposal := state.propose(told(LONG, None, 1.5), 2)).tokens:
        assert (proposal.drafted_by, proposal.forwards) == ("model", 0)
        assert proposal.sync_s > 1.5
        left.append(state.lag(told(LONG)))
    assert left == [167, 135, 103, 71, 39, 7], "two slices of sixteen between two checks of the clock"
    assert list(proposal.tokens) == likeliest(model, LONG, 2)


@pytest.mark.parametrize(("tokens", "widths"), [(100, [16] * 6 + [4]), (400, [25] * 16), (2000, [64] * 31 + [16])])
def test_the_size_of_slices_grows_with_the_unread_text(tokens: int, widths: list[int]) -> None:
    model = FakeModel(seed=1)
    started(model, 4096).propose(told([place % 7 for place in range(tokens)], None, 100.0), 1)
    assert only(model).log.widths == widths


def test_without_a_time_limit_the_text_is_read_in_one_forward() -> None:
    model = FakeModel(seed=1)
    started(model).propose(told(LONG), 1)
    assert only(model).log.widths == [len(LONG)]


def test_a_cancel_between_two_slices_stops_the_reading() -> None:
    model = FakeModel(seed=1, faults=Faults(cancel_at=3))
    state = started(model)
    with pytest.raises(CancelledError):
        state.propose(told(LONG, None, 100.0), 1)
    assert state.lag(told(LONG)) == len(LONG) - 1 - 32, "tokens read before the cancel stay cached"
    state.reset_cancel()
    assert list(state.propose(told(LONG, None, 100.0), 2).tokens) == likeliest(model, LONG, 2)


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_after_any_requests_the_drafters_record_matches_its_cache(data: st.DataObject) -> None:
    """Texts that grow, change and shrink, with and windows: a chain continues the part of the text read."""
    model = FakeModel(seed=1)
    state = started(model)
    tokens = [data.draw(st.integers(0, 3)) for _ in range(5)]
    for _ in range(data.draw(st.integers(1, 6))):
        window = data.draw(st.none() | st.integers(1, 60))
        found = list(state.propose(told(tokens, window), data.draw(st.integers(1, 3))).tokens)
        cache = state._cache  # no public attribute exposes the cache
        assert cache is not None
        assert isinstance(cache.sequence, FakeSequence)
        assert cache.sequence.tokens == cache.known
        assert found == likeliest(model, tokens[cache.start :], len(found))
        assert window is None or cache.start <= max(0, len(tokens) - 1 - window)
        cut = data.draw(st.integers(1, len(tokens)))
        tokens = [*tokens[:cut], *(data.draw(st.integers(0, 3)) for _ in range(data.draw(st.integers(1, 40))))]


# ---------------------------------------------------------------------------------------------------- in hindsight


def looking_back(tokens: list[int], hindsight: int, window: int | None = None) -> Context:
    context = told(tokens, window)
    context.hindsight = hindsight
    return context


@pytest.mark.parametrize("patience_s", [math.inf, 1e9])
@pytest.mark.parametrize(("hindsight", "window"), [(5, None), (14, 20), (19, 20), (3, 90)])
def test_hindsight_tells_which_recent_tokens_the_drafter_would_have_guessed(
    hindsight: int, window: int | None, patience_s: float
) -> None:
    model = FakeModel(seed=1)
    written = likeliest(model, LONG[:60], 20)
    text = [*LONG[:60], *(token if place % 3 else (token + 1) % 9 for place, token in enumerate(written))]
    context = looking_back(text, hindsight, window)
    context.patience_s = patience_s
    proposal = started(model).propose(context, 2)
    begins = 0 if window is None else max(0, len(text) - 1 - window)
    places = range(len(text) - hindsight, len(text))
    assert list(proposal.hindsight) == [likeliest(model, text[begins:place], 1) == [text[place]] for place in places]
    assert list(proposal.tokens) == likeliest(model, text[begins:], 2)
    assert {True, False} <= set(proposal.hindsight) or hindsight < 4


def test_hindsight_excludes_tokens_that_were_read_before() -> None:
    model = FakeModel(seed=1)
    state = started(model)
    state.propose(told(LONG), 1)
    assert len(state.propose(looking_back([*LONG, 3, 1, 4], 14), 1).hindsight) == 2, (
        "the text's last token is the draft's start"
    )
    assert state.propose(told([*LONG, 3, 1, 4, 5]), 1).hindsight == ()


def test_the_drafter_reports_how_many_tokens_it_skipped() -> None:
    state = started(FakeModel(seed=1))
    assert state.unread(told(LONG)) == 0, "nothing is read yet, so nothing was skipped"
    state.propose(told(LONG, 32), 1)
    assert state.unread(told([*LONG, 5])) == len(LONG) - 33
    assert state.unread(told([7, 7, 2])) == 0, "another text"
    state.propose(told(LONG, len(LONG)), 1)
    assert state.unread(told(LONG)) == 0


# --------------------------------------------------------------------------------------------------- reading ahead


def test_text_that_was_read_ahead_is_not_read_again() -> None:
    model = FakeModel(seed=1)
    state = started(model)
    (reading,) = state.read_ahead(told(LONG))
    assert reading is not None
    reading.result(20.0)
    assert only(model).tokens == LONG
    assert max(only(model).log.widths) <= 16, "slices are short, so a request hardly waits"
    widths = len(only(model).log.widths)
    assert state.read_ahead(told(LONG)) == [], "nothing is left to read"
    assert state.lag(told([*LONG, 5])) == 0
    assert list(state.propose(told([*LONG, 5]), 2).tokens) == likeliest(model, [*LONG, 5], 2)
    assert only(model).log.widths[widths:] == [1, 1]


def test_reading_ahead_includes_the_skipped_text() -> None:
    model = FakeModel(seed=1)
    state = started(model)
    state.propose(told(LONG, 32), 1)
    (reading,) = state.read_ahead(told(LONG))
    assert reading is not None
    reading.result(20.0)
    assert (only(model).tokens, state.unread(told(LONG))) == (LONG, 0)


def test_stop_reading_takes_effect_after_the_current_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(seed=1)
    state = started(model)
    forward = FakeSequence.forward

    def told_meanwhile(own: FakeSequence, tokens: Sequence[int], rows: int) -> Any:
        state.stop_reading()
        return forward(own, tokens, rows)

    with monkeypatch.context() as patched:
        patched.setattr(FakeSequence, "forward", told_meanwhile)
        (reading,) = state.read_ahead(told(LONG))
    assert reading is not None
    assert reading.done()
    assert state.lag(told(LONG)) == len(LONG) - 1 - 16
    assert state.read_ahead(told(LONG))
    assert state.lag(told(LONG)) == 0
    state.close()
    assert state.read_ahead(told(LONG)) == []


def test_a_proposal_waits_for_the_one_reading_in_progress() -> None:
    state = started(FakeModel(seed=1))
    assert state.read_ahead(told(LONG))
    under_way: Future[None] = Future()
    state._reading = under_way
    assert state.read_ahead(told(LONG * 2)) == [under_way]
    threading.Timer(0.05, under_way.set_result, (None,)).start()
    assert state.lag(told(LONG)) == 0
    assert under_way.done()


def test_a_text_longer_than_the_drafters_context_is_not_read_ahead() -> None:
    state = started(FakeModel(seed=1), context_length=64)
    assert state.read_ahead(told(LONG)) == []
    assert state.read_ahead(told(LONG[:10])) == [], "drafting itself reads such a short text"


class ModelApart(FakeModel):
    """A model in another process."""

    @property
    def facts(self) -> ModelFacts:
        return replace(super().facts, settings={"process": True})


def test_reading_ahead_opens_no_cache_in_another_process() -> None:
    model = ModelApart(seed=1)
    state = started(model)
    assert state.read_ahead(told(LONG)) == []
    assert model.sequences == [], "opening one may take seconds, and a request would wait"
    state.propose(told(LONG, 32), 1)
    assert state.read_ahead(told(LONG))
