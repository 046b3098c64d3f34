"""Comparisons of the native kernels with llama.cpp: which variant counts, and the ratios."""

from __future__ import annotations

import random

import numpy as np
import pytest

import benchmarks.native_quality as module
from benchmarks.native_rows import WIDEST_ROW, random_widths


def test_divergences_are_compared_token_by_token() -> None:
    theirs = np.array([1.0, 2.0, 3.0, 4.0])
    kl = {"native": theirs + np.array([0.5, -0.5, 0.5, 0.5]), "llama": theirs, "llama_flash": theirs * 2}
    found = module.compared(kl, "llama")
    assert found["kl_tokens"] == 4
    assert found["mean_kl_nats"] == {"native": 2.75, "llama": 2.5, "llama_flash": 5.0}
    assert found["kl_ratio"] == pytest.approx(1.1)
    assert found["kl_excess_in_standard_errors"] == pytest.approx(1.0)
    assert module.compared(kl, "llama_flash")["kl_ratio"] == pytest.approx(0.55)


@pytest.mark.parametrize("truest", ["llama", "llama_flash"])
def test_kl_is_compared_with_the_llama_cpp_variant_of_the_least_kl(truest: str) -> None:
    kl = {"native": np.zeros(2), "llama": np.array([2.0, 2.0]), "llama_flash": np.array([2.0, 2.0])}
    assert module.least_divergent(kl | {truest: np.array([3.0, 0.9])}) == truest


@pytest.mark.parametrize(
    ("without", "flash", "nearest"), [(10.3, 10.1, "llama_flash"), (10.3, 9.6, "llama"), (9.9, 10.2, "llama")]
)
def test_perplexity_is_compared_with_the_llama_cpp_variant_nearest_to_float32(
    without: float, flash: float, nearest: str
) -> None:
    perplexity = {"float32": 10.0, "native": 10.05, "llama": without, "llama_flash": flash}
    found = module.perplexities_compared(perplexity)
    assert found["perplexity"] == perplexity
    assert found["perplexity_held_against"] == nearest
    assert found["perplexity_ratio"] == pytest.approx(10.05 / perplexity[nearest])


def test_random_widths_add_up_to_the_number_of_positions() -> None:
    widths = list(random_widths(random.Random(1), 500))
    assert sum(widths) == 500
    assert set(widths) <= set(range(1, WIDEST_ROW + 1))
    assert len(set(widths)) > 10
