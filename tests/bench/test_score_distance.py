"""The predicted text, its windows, and divergence and agreement of scores, against hand-computed values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.score_distance import agreements, kl_divergences, tokens_to_predict, windows
from tests.support.logits import logits, probabilities
from tests.support.tiny_models import TinyModels


def test_a_request_for_more_tokens_than_the_text_has_is_refused(tiny: TinyModels) -> None:
    assert len(tokens_to_predict(tiny.target, 4096)) == 4097
    with pytest.raises(RuntimeError, match="only"):
        tokens_to_predict(tiny.target, 10**7)


def test_kl_divergence_of_two_tokens_equals_the_hand_computed_value() -> None:
    # (1/2, 1/2) against (1/4, 3/4): half log 2 plus half log 2/3. With the arguments swapped the divergence differs.
    even, uneven = logits([0.0, 0.0]), logits([0.0, math.log(3)])
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert kl_divergences(even, uneven)[0] == pytest.approx(expected, rel=1e-7)
    expected = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    assert kl_divergences(uneven, even)[0] == pytest.approx(expected, rel=1e-7)


def test_kl_divergence_equals_that_of_a_plain_loop(random_rows: tuple[np.ndarray, np.ndarray]) -> None:
    found = kl_divergences(*random_rows)
    for own, left, right in zip(found, *(rows.tolist() for rows in random_rows), strict=True):
        pairs = zip(probabilities(left), probabilities(right), strict=True)
        assert own == pytest.approx(math.fsum(p * math.log(p / q) for p, q in pairs), rel=1e-9)


def test_kl_divergence_ignores_a_shift_of_scores_and_is_never_negative(
    random_rows: tuple[np.ndarray, np.ndarray],
) -> None:
    rows = random_rows[0]
    np.testing.assert_allclose(kl_divergences(rows, rows + np.float32(16)), 0, atol=1e-11)
    assert (kl_divergences(rows, rows) == 0).all()
    assert (kl_divergences(rows, np.nextafter(rows, np.float32(np.inf))) >= 0).all()


def test_kl_divergence_is_infinite_if_only_the_other_model_excludes_a_token() -> None:
    never = logits([0.0, 0.0, -math.inf])
    possible = logits([0.0, 0.0, 0.0])
    assert kl_divergences(never, possible)[0] == pytest.approx(math.log(3 / 2))
    assert kl_divergences(possible, never)[0] == math.inf
    assert kl_divergences(never, never)[0] == 0


def test_of_equal_scores_agreement_compares_the_lowest_token_id() -> None:
    left = logits([1.0, 2.0, 2.0], [3.0, 0.0, 0.0])
    right = logits([0.0, 5.0, 4.0], [0.0, 0.0, 1.0])
    assert agreements(left, right).tolist() == [True, False]


def test_scores_of_different_shapes_are_refused() -> None:
    for compare in (kl_divergences, agreements):
        with pytest.raises(ValueError, match="compared"):
            compare(logits([0.0, 1.0]), logits([0.0, 1.0, 2.0]))


@pytest.mark.parametrize(
    ("count", "length", "predicted"), [(9, 4, [4, 4]), (10, 4, [4, 4, 1]), (4, 8, [3]), (1, 4, [])]
)
def test_windows_predict_every_token_but_the_first_once(count: int, length: int, predicted: list[int]) -> None:
    found = list(windows(range(count), length))
    assert [len(window) - 1 for window in found] == predicted
    assert [token for window in found for token in window[1:]] == list(range(1, count))


def test_a_window_of_length_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        list(windows([1, 2, 3], 0))
