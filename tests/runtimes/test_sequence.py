"""Which requests a forward accepts, and how a forward is divided into native calls."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.errors import ContextFullError, InvalidRequestError
from edgespec.interfaces.model import PREFILL_CHUNK_TOKENS
from edgespec.runtimes.sequence import MAX_SCORED_ROWS, checked_ids, chunk_sizes

CHUNK = PREFILL_CHUNK_TOKENS


def checked(tokens: object, rows: int = 0, *, length: int = 0, context_length: int = 100) -> object:
    return checked_ids(tokens, rows, length=length, context_length=context_length, vocabulary_size=50)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [0, 1, 2, 7, MAX_SCORED_ROWS])
@pytest.mark.parametrize("count", [1, 5, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 6, 3 * CHUNK - 2, 3 * CHUNK + 5])
def test_chunks_cover_all_tokens_and_never_end_inside_the_scored_rows(count: int, rows: int) -> None:
    rows = min(rows, count)
    sizes = list(chunk_sizes(count, rows))
    assert sum(sizes) == count
    assert all(0 < size <= CHUNK for size in sizes)
    assert sizes[-1] >= rows
    assert len(sizes) <= -(-count // CHUNK) + 1


def test_no_tokens_need_no_native_call() -> None:
    assert list(chunk_sizes(0, 0)) == []


def test_tokens_are_divided_into_as_few_native_calls_as_possible() -> None:
    assert list(chunk_sizes(2 * CHUNK, 1)) == [CHUNK, CHUNK]
    assert list(chunk_sizes(CHUNK + 3, 3)) == [CHUNK, 3]
    assert list(chunk_sizes(CHUNK + 3, 5)) == [CHUNK - 2, 5]


@pytest.mark.parametrize("tokens", [[0, 49], (0, 49), np.array([0, 49], dtype=np.uint8)])
def test_checked_token_ids_are_int64(tokens: object) -> None:
    ids = checked(tokens, 2)
    assert isinstance(ids, np.ndarray)
    assert (ids.dtype, ids.tolist()) == (np.dtype(np.int64), [0, 49])


@pytest.mark.parametrize("bad", [-1, 50, 2**32, -(2**63), 2**70, "x"], ids=str)
def test_token_ids_outside_the_vocabulary_are_refused(bad: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"0\.\.49"):
        checked([3, bad])


@pytest.mark.parametrize(("count", "rows"), [(3, 4), (3, -1), (MAX_SCORED_ROWS + 1, MAX_SCORED_ROWS + 1)])
def test_impossible_numbers_of_scored_rows_are_refused(count: int, rows: int) -> None:
    with pytest.raises(InvalidRequestError, match="rows"):
        checked([1] * count, rows)


def test_tokens_may_fill_the_context_but_not_exceed_it() -> None:
    checked([1, 2], length=98)
    with pytest.raises(ContextFullError, match="98 of 100") as raised:
        checked([1, 2, 3], length=98)
    assert raised.value.hint
