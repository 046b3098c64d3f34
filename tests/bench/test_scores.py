"""Perplexity, divergence and agreement against hand-computed values and plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgespec.decoding import scores
from edgespec.runtimes.sequence import MAX_SCORED_ROWS
from tests.support.fake_runtime import FakeModel
from tests.support.logits import logits, probabilities

# ------------------------------------------------------------------------------------------- log-softmax


def test_log_softmax_equals_a_plain_loop(random_rows: tuple[np.ndarray, np.ndarray]) -> None:
    found = scores.log_softmax(random_rows[0])
    assert found.dtype == np.float64
    for row, own in zip(random_rows[0].tolist(), found, strict=True):
        np.testing.assert_allclose(np.exp(own), probabilities(row), rtol=1e-12)


def test_log_softmax_handles_large_and_minus_infinity_scores() -> None:
    found = scores.log_softmax(logits([1e30, 1e30, -1e30], [2e4, -math.inf, 2e4]))
    np.testing.assert_allclose(found[:, [0, 2]], [[-math.log(2), -2e30], [-math.log(2)] * 2], rtol=1e-6)
    assert found[1, 1] == -math.inf


def test_log_softmax_computes_in_float64() -> None:
    # 150 000 equal scores and one larger: in float32 the sum is wrong in the sixth digit.
    row = np.zeros((1, 150_001), dtype=np.float32)
    row[0, 0] = 10.0
    expected = 10 - math.log(math.exp(10) + 150_000)
    assert scores.log_softmax(row)[0, 0] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("broken", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_log_softmax_refuses_rows_without_a_finite_maximum(broken: list[float]) -> None:
    with pytest.raises(ValueError, match="no finite largest score"):
        scores.log_softmax(logits([0.0, 0.0], broken))


# ------------------------------------------------------------------------------------ losses and perplexity


def test_token_losses_equal_hand_computed_values() -> None:
    # exp: 1, 3 | 1, 1, so the tokens have the probabilities 3/4 and 1/2.
    rows = logits([0.0, math.log(3)], [5.0, 5.0])
    np.testing.assert_allclose(scores.token_losses(rows, [1, 0]), [math.log(4 / 3), math.log(2)], rtol=1e-7)


@pytest.mark.parametrize("tokens", [[0], [0, 1, 0], [0, 2], [0, -1]])
def test_token_losses_refuse_wrong_counts_and_ids(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token"):
        scores.token_losses(logits([0.0, 1.0], [0.0, 1.0]), tokens)


def test_token_losses_of_zero_rows_are_empty() -> None:
    assert scores.token_losses(np.empty((0, 4), dtype=np.float32), []).shape == (0,)


def test_perplexity_equals_hand_computed_values() -> None:
    # Probabilities 1/2 and 1/8: the geometric mean is 1/4.
    assert scores.perplexity([math.log(2), math.log(8)]) == pytest.approx(4.0)
    assert scores.perplexity([0.0]) == 1.0
    guess = scores.token_losses(np.zeros((3, 17), dtype=np.float32), [0, 5, 16])
    assert scores.perplexity(guess) == pytest.approx(17.0)
    with pytest.raises(ValueError, match="zero tokens"):
        scores.perplexity([])


# -------------------------------------------------------------------------------------------- the text


def test_teacher_forced_rows_come_in_order_and_can_be_kept() -> None:
    model = FakeModel(seed=4)
    tokens = [number % model.vocabulary_size for number in range(150)]
    with_default, one_by_one = model.open(150), model.open(150)
    chunks = list(scores.teacher_forced_rows(with_default, tokens))
    assert [len(chunk) for chunk in chunks] == [64, 64, 22]
    assert {chunk.dtype for chunk in chunks} == {np.dtype(np.float32)}
    alone = [one_by_one.forward([token], 1).logits(0) for token in tokens]
    np.testing.assert_array_equal(np.concatenate(chunks), alone)
    again = model.open(150)
    assert [len(chunk) for chunk in scores.teacher_forced_rows(again, tokens[:5], rows_at_once=2)] == [2, 2, 1]


def test_the_number_of_rows_per_forward_equals_the_runtimes_limit() -> None:
    assert scores.ROWS_AT_ONCE == MAX_SCORED_ROWS
