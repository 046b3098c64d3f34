"""Rows of scores: ties, copies and staleness; and the common prefix of two token lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edgespec.errors import NonFiniteLogitsError, StaleRowsError
from edgespec.interfaces.counted_text import common_prefix
from edgespec.interfaces.rows import Rows
from tests.support.fake_runtime import FakeModel, FakeSequence


def rows_of(*rows: list[float]) -> Rows:
    arrays = [np.array(row, dtype=np.float32) for row in rows]
    return Rows(len(arrays), arrays.__getitem__)


def test_argmax_ties_go_to_the_lowest_id() -> None:
    rows = rows_of([1, 3, 3, 2], [0, 0, 0, 0], [-5, -4, -4, -4])
    assert rows.argmax().tolist() == [1, 0, 1]
    assert rows.argmax().dtype == np.int64
    assert [rows.argmax_row(i) for i in range(3)] == [1, 0, 1]


@pytest.mark.parametrize("spoilt", [[1, float("nan"), 9], [1, float("inf"), 9], [float("-inf")] * 3])
def test_argmax_of_scores_that_are_not_finite_raises(spoilt: list[float]) -> None:
    rows = rows_of([1, 2, 3], spoilt)
    assert rows.argmax_row(0) == 2
    with pytest.raises(NonFiniteLogitsError):
        rows.argmax_row(1)
    with pytest.raises(NonFiniteLogitsError):
        rows.argmax()


def test_argmax_accepts_scores_of_minus_infinity() -> None:
    assert rows_of([float("-inf"), -1e30, float("-inf")]).argmax_row(0) == 1


@given(st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), min_size=1, max_size=3), st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_top_k_is_a_sort_by_score_then_id(scores: list[list[int]], k: int) -> None:
    ids, values = rows_of(*scores).top_k(k)
    assert ids.shape == values.shape == (len(scores), k)
    assert (ids.dtype, values.dtype) == (np.int64, np.float32)
    for row, own_ids, own_values in zip(scores, ids.tolist(), values.tolist(), strict=True):
        assert own_ids == sorted(range(6), key=lambda i: (-row[i], i))[:k]
        assert own_values == [row[i] for i in own_ids]


def filled() -> tuple[FakeModel, FakeSequence, Rows]:
    model = FakeModel()
    sequence = model.open(20)
    return model, sequence, sequence.forward([1, 2, 3], 2)


def test_a_forward_returns_its_last_rows_in_order() -> None:
    model, _, rows = filled()
    assert rows.count == 2
    assert rows.logits(0).tolist() == model.scores([1, 2]).tolist()
    assert rows.logits(1).tolist() == model.scores([1, 2, 3]).tolist()
    for index in (-1, 2):
        with pytest.raises(IndexError):
            rows.logits(index)
        with pytest.raises(IndexError):
            rows.argmax_row(index)


@pytest.mark.parametrize("ends", ["forward", "rewind", "close"])
def test_rows_raise_after_a_later_forward_and_copies_stay_valid(ends: str) -> None:
    model, sequence, rows = filled()
    copy, kept = rows.copy(), rows.logits(0)
    {"forward": lambda: sequence.forward([4, 5], 2), "rewind": lambda: sequence.rewind(2), "close": sequence.close}[
        ends
    ]()
    for read in (lambda: rows.logits(0), lambda: rows.argmax_row(0), rows.argmax, lambda: rows.top_k(2), rows.copy):
        with pytest.raises(StaleRowsError):
            read()
    assert kept.tolist() == model.scores([1, 2]).tolist()
    assert copy.count == 2
    assert copy.logits(1).tolist() == model.scores([1, 2, 3]).tolist()
    assert copy.argmax_row(1) == int(np.argmax(model.scores([1, 2, 3])))


def test_logits_are_a_copy_that_the_caller_may_change() -> None:
    model, _, rows = filled()
    own = rows.logits(0)
    own[:] = 7
    assert rows.logits(0).tolist() == model.scores([1, 2]).tolist()


short_lists = st.lists(st.integers(0, 1), max_size=12)


@given(short_lists, short_lists, short_lists)
@settings(max_examples=300, deadline=None)
def test_common_prefix_counts_the_leading_equal_tokens(shared: list[int], left: list[int], right: list[int]) -> None:
    left, right = shared + left, shared + right
    wanted = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    assert common_prefix(left, right) == wanted
    assert common_prefix(right, left) == wanted
