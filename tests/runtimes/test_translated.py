"""A model with another vocabulary in the target's tokens: lengths, rows, draws and limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgespec.errors import (
    CancelledError,
    ContextFullError,
    ForwardError,
    InvalidRequestError,
    NoneAllowedError,
    RewindError,
    StaleRowsError,
)
from edgespec.files.token_map import TokenMap
from edgespec.interfaces.drawing import DrawRequest, Measure, draw_from, noise_key
from edgespec.interfaces.model import ALONE, BatchedSequence, Company
from edgespec.interfaces.rows import IdArray, Rows
from edgespec.runtimes.sequence import TrimmedRows
from edgespec.runtimes.translated import TranslatedModel, TranslatedSequence
from tests.support.fake_runtime import FakeModel, FakeSequence, Faults

# The target has 6 tokens, the drafter 8. Token 2 is three of the drafter's, 4 two, and each of the others one.
MAP = TokenMap(
    starts=np.array([0, 1, 2, 5, 6, 8, 9], np.int32),
    pieces=np.array([7, 3, 1, 2, 1, 5, 0, 4, 6], np.int32),
    tokens=np.array([0, 1, 3, 5]),
    rows=np.array([7, 3, 5, 6]),
    firsts=np.array([4, 2, -1, 1, -1, 3, 5, 0], np.int32),
    coverage=0.9,
)
NOISE = DrawRequest(key=noise_key(3, 4, 0), wanted=3)


def opened(model: FakeModel | None = None, context_length: int = 400) -> TranslatedSequence:
    return TranslatedModel(model or FakeModel(8, seed=4), MAP).open(context_length)


def fed(tokens: list[int]) -> list[int]:
    """The drafter's tokens for the target's."""
    return [piece for token in tokens for piece in MAP.spelled(token)]


def expected(model: FakeModel, tokens: list[int]) -> list[float]:
    """The scores of the target's tokens after ``tokens``."""
    row = np.full(6, -np.inf, np.float32)
    row[MAP.tokens] = model.scores(tuple(fed(tokens)))[MAP.rows]
    return row.tolist()


def test_the_facts_are_those_of_a_model_with_the_targets_vocabulary() -> None:
    model = TranslatedModel(FakeModel(8, can_fork=True, can_branch=True, bit_equal_by_construction=True), MAP)
    facts = model.facts
    assert (facts.vocabulary_size, facts.can_fork, facts.can_branch) == (6, False, False)
    assert facts.bit_equal_by_construction, "guesses for the drafter still save forwards"
    assert model.waits_because is None
    assert model.wait()
    model.load()
    model.close()


def test_rows_score_the_targets_tokens_behind_all_of_their_pieces() -> None:
    model = FakeModel(8, seed=4)
    sequence = opened(model)
    rows = sequence.forward([0, 2, 4, 1], 3)
    assert sequence.length == 4
    assert model.sequences[0].tokens == fed([0, 2, 4, 1])
    for index, count in enumerate((2, 3, 4)):
        assert rows.logits(index).tolist() == expected(model, [0, 2, 4, 1][:count])
    ids, scores = rows.scored(2)
    assert ids is not None
    assert ids.tolist() == MAP.tokens.tolist()
    assert scores.tolist() == model.scores(tuple(fed([0, 2, 4, 1])))[MAP.rows].tolist()


def test_what_other_answers_were_in_its_forward_is_asked_of_the_drafter() -> None:
    class Batched(FakeSequence):
        company, waited_s = Company(answers=2, rows=5), 0.5

    batched = TranslatedSequence(Batched(FakeModel(8), 40), MAP)
    assert (batched.company, batched.waited_s) == (Company(answers=2, rows=5), 0.5)
    assert isinstance(batched, BatchedSequence)
    assert (opened().company, opened().waited_s) == (ALONE, 0.0)


def test_a_rewind_to_any_length_continues_as_if_nothing_had_followed() -> None:
    model = FakeModel(8, seed=4)
    sequence, text = opened(model), [2, 0, 4, 5, 2, 3]
    for length in (5, 4, 2, 1, 0):
        sequence.rewind(0)
        sequence.forward(text, 1)
        sequence.rewind(length)
        assert sequence.length == length
        assert model.sequences[0].tokens == fed(text[:length])
        assert sequence.forward([3], 1).logits(0).tolist() == expected(model, [*text[:length], 3])
        sequence.rewind(length)


@pytest.mark.parametrize("length", [-1, 4])
def test_a_rewind_beyond_the_length_raises_and_changes_nothing(length: int) -> None:
    sequence = opened()
    sequence.forward([0, 2, 4], 0)
    with pytest.raises(RewindError):
        sequence.rewind(length)
    assert sequence.length == 3


@pytest.mark.parametrize("rows", [21, 22, 40, 50])
def test_more_pieces_than_one_forward_scores_are_scored_in_several(rows: int) -> None:
    model = FakeModel(8, seed=4)
    text = [2, 1] * 25
    scored = opened(model).forward(text, rows)
    assert scored.count == rows
    for index in range(rows):
        assert scored.logits(index).tolist() == expected(model, text[: len(text) - rows + index + 1])
    assert max(model.sequences[0].log.rows) <= 64


def test_an_error_in_any_part_of_a_forward_leaves_the_length_unchanged() -> None:
    for call in (2, 3):
        model = FakeModel(8, faults=Faults(raise_at=call))
        sequence = opened(model)
        sequence.forward([0], 0)
        with pytest.raises(ForwardError):
            sequence.forward([2, 1] * 25, 50)
        assert sequence.length == 1
        assert model.sequences[0].tokens == fed([0])


@pytest.mark.parametrize(("tokens", "rows"), [([6], 0), ([-1], 0), ([0], 2), ([0], -1)])
def test_requests_outside_the_targets_vocabulary_or_text_are_refused(tokens: list[int], rows: int) -> None:
    sequence = opened()
    with pytest.raises(InvalidRequestError):
        sequence.forward(tokens, rows)
    assert sequence.length == 0


def test_the_room_is_the_drafters() -> None:
    sequence = opened(context_length=7)
    sequence.forward([2, 2], 0)
    with pytest.raises(ContextFullError):
        sequence.forward([4], 0)
    assert sequence.length == 2
    sequence.forward([0], 0)
    assert sequence.length == 3


def test_rows_are_stale_after_the_next_forward() -> None:
    sequence = opened()
    rows = sequence.forward([0], 1)
    sequence.forward([1], 1)
    for read in (lambda: rows.logits(0), lambda: rows.draw(0, NOISE), lambda: rows.argmax_row(0)):
        with pytest.raises(StaleRowsError):
            read()


def test_a_cancelled_forward_is_refused_until_the_cancel_is_reset() -> None:
    sequence = opened()
    sequence.cancel()
    with pytest.raises(CancelledError):
        sequence.forward([0], 1)
    sequence.reset_cancel()
    sequence.forward([0], 1)
    sequence.close()


@pytest.mark.parametrize(
    "request_",
    [
        NOISE,
        replace(NOISE, top_k=2, temperature=0.5),
        replace(NOISE, seen={0: 2, 5: 1}, repeat_penalty=1.3),
        DrawRequest(bias=((3, -np.inf),), wanted=2),
        DrawRequest(mask=np.array([0b101010], np.uint32)),
    ],
)
def test_draws_equal_those_from_the_scores_of_the_shared_tokens(request_: DrawRequest) -> None:
    rows = opened().forward([0, 2], 2)
    for index in range(2):
        ids, scores = rows.scored(index)
        assert rows.draw(index, request_) == draw_from(scores, request_, ids)


def row_of(scores: list[float], short: IdArray | None = None) -> Rows:
    """A row with these scores of the drafter's 8 tokens, or of the tokens of a short head."""
    row = np.array(scores, np.float32)
    model = FakeModel(8, table=lambda _prefix: row.tolist())
    sequence = TranslatedModel(model, MAP).open(16)
    if short is not None:
        head = FakeModel(len(short), table=lambda _prefix: row[short].tolist())
        own = TrimmedRows(head.open(4).forward([0], 1), short, 8)
        sequence._sequence.forward = lambda tokens, rows: own  # type: ignore[method-assign]
    return sequence.forward([0], 1)


def test_a_greedy_draw_takes_the_first_token_of_a_text_that_the_target_lacks() -> None:
    drawn = row_of([0, 5, 0, 4, 0, 3, 0, 0]).draw(0, DrawRequest(wanted=3, measure=Measure.MASS))
    assert drawn.tokens == (2, 1, 3)
    total = sum(np.exp([0, 5, 0, 4, 0, 3, 0, 0]))
    assert drawn.odds == pytest.approx([np.exp(5) / total, np.exp(4) / total, np.exp(3) / total], rel=1e-5)


def test_a_greedy_draw_of_a_token_without_a_counterpart_is_none() -> None:
    rows = row_of([0, 4, 5, 3, 0, 0, 0, 0])
    with pytest.raises(NoneAllowedError):
        rows.draw(0, DrawRequest())
    with pytest.raises(NoneAllowedError):
        rows.argmax_row(0)
    other = row_of([0, 5, 4, 3, 0, 0, 0, 0])
    assert other.argmax_row(0) == 2
    assert other.draw(0, DrawRequest(wanted=2)).tokens == (2, 1), "only the best decides"


def test_a_short_head_lacks_the_other_tokens() -> None:
    rows = row_of([0, 0, 0, 4, 0, 5, 1, 9], np.array([3, 5, 6]))
    assert rows.logits(0).tolist() == [-np.inf, 4, -np.inf, 5, -np.inf, 1]
    assert rows.draw(0, DrawRequest()).tokens == (3,)
