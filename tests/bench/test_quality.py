"""Perplexity, divergence and agreement against values worked out by hand, and against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgespec.bench import quality
from edgespec.runtimes.sequence import MAX_SCORED_ROWS
from tests.support.fake_runtime import FakeModel


def logits(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def probabilities(row: list[float]) -> list[float]:
    total = math.fsum(math.exp(each) for each in row)
    return [math.exp(each) / total for each in row]


@pytest.fixture
def random_rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    first = random.normal(0, 3, (5, 40)).astype(np.float32)
    return first, first + random.normal(0, 0.3, first.shape).astype(np.float32)


# ------------------------------------------------------------------------------------------- log-softmax


def test_log_probabilities_are_those_of_a_plain_loop(random_rows: tuple[np.ndarray, np.ndarray]) -> None:
    found = quality.log_softmax(random_rows[0])
    assert found.dtype == np.float64
    for row, own in zip(random_rows[0].tolist(), found, strict=True):
        np.testing.assert_allclose(np.exp(own), probabilities(row), rtol=1e-12)


def test_large_scores_and_ruled_out_tokens() -> None:
    found = quality.log_softmax(logits([1e30, 1e30, -1e30], [2e4, -math.inf, 2e4]))
    np.testing.assert_allclose(found[:, [0, 2]], [[-math.log(2), -2e30], [-math.log(2)] * 2], rtol=1e-6)
    assert found[1, 1] == -math.inf


def test_float64_keeps_what_float32_would_lose() -> None:
    # 150 000 equal scores beside one: in float32 their sum is off in the sixth digit.
    row = np.zeros((1, 150_001), dtype=np.float32)
    row[0, 0] = 10.0
    expected = 10 - math.log(math.exp(10) + 150_000)
    assert quality.log_softmax(row)[0, 0] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("broken", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_rows_that_are_no_distribution_are_refused(broken: list[float]) -> None:
    with pytest.raises(ValueError, match="no finite largest score"):
        quality.log_softmax(logits([0.0, 0.0], broken))


# ------------------------------------------------------------------------------------ losses and perplexity


def test_losses_by_hand() -> None:
    # exp: 1, 3 | 1, 1, so that the tokens have the probabilities 3/4 and 1/2.
    rows = logits([0.0, math.log(3)], [5.0, 5.0])
    np.testing.assert_allclose(quality.token_losses(rows, [1, 0]), [math.log(4 / 3), math.log(2)], rtol=1e-7)


@pytest.mark.parametrize("tokens", [[0], [0, 1, 0], [0, 2], [0, -1]])
def test_tokens_that_do_not_belong_to_the_rows(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token"):
        quality.token_losses(logits([0.0, 1.0], [0.0, 1.0]), tokens)


def test_no_rows_have_no_losses() -> None:
    assert quality.token_losses(np.empty((0, 4), dtype=np.float32), []).shape == (0,)


def test_perplexity_by_hand() -> None:
    # Probabilities 1/2 and 1/8: the geometric mean is 1/4.
    assert quality.perplexity([math.log(2), math.log(8)]) == pytest.approx(4.0)
    assert quality.perplexity([0.0]) == 1.0
    guess = quality.token_losses(np.zeros((3, 17), dtype=np.float32), [0, 5, 16])
    assert quality.perplexity(guess) == pytest.approx(17.0)
    with pytest.raises(ValueError, match="zero tokens"):
        quality.perplexity([])


# -------------------------------------------------------------------------------------------- the text


def test_rows_come_in_order_and_are_kept() -> None:
    model = FakeModel(seed=4)
    tokens = [number % model.vocabulary_size for number in range(150)]
    with_default, one_by_one = model.open(150), model.open(150)
    chunks = list(quality.teacher_forced_rows(with_default, tokens))
    assert [len(chunk) for chunk in chunks] == [64, 64, 22]
    assert {chunk.dtype for chunk in chunks} == {np.dtype(np.float32)}
    alone = [one_by_one.forward([token], 1).logits(0) for token in tokens]
    np.testing.assert_array_equal(np.concatenate(chunks), alone)
    again = model.open(150)
    assert [len(chunk) for chunk in quality.teacher_forced_rows(again, tokens[:5], rows_at_once=2)] == [2, 2, 1]


def test_every_runtime_scores_that_many_rows_at_once() -> None:
    assert quality.ROWS_AT_ONCE == MAX_SCORED_ROWS
