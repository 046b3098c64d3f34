"""What the acceptance of our own kernels makes of its figures."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import acceptance_native as steps

GOOD: dict[str, Any] = {
    "perplexity_ratio": 1.004,
    "kl_ratio": 0.99,
    "agreement_with_llama_at_1": 0.961,
    "agreement_of_llama_at_1_and_8": 0.97,
}


def test_as_true_as_llama_cpp() -> None:
    assert steps.quality_holds(GOOD)


@pytest.mark.parametrize(
    "worse",
    [
        {"perplexity_ratio": 1.006},
        {"perplexity_ratio": 0.994},
        {"kl_ratio": 1.01},
        {"agreement_with_llama_at_1": 0.959},
    ],
)
def test_less_true_does_not_hold(worse: dict[str, float]) -> None:
    assert not steps.quality_holds(GOOD | worse)


def test_mixtures_of_widths_cover_every_position() -> None:
    widths = list(steps.random_widths(random.Random(1), 500))
    assert sum(widths) == 500
    assert set(widths) <= set(range(1, steps.WIDEST_ROW + 1))
    assert len(set(widths)) > 10


def test_gains_are_held_against_llama_cpp_by_category() -> None:
    def arm(**categories: float) -> dict[str, Any]:
        return {"speedup": {"by_category": {name: {"geomean": gain} for name, gain in categories.items()}}}

    report = {"arms": {"planned": arm(code=1.5, qa=1.0), "llama:m": arm(code=0.5, qa=0.8)}}
    assert steps.over_llama(report, "planned", "llama:m") == {"code": 3.0, "qa": 1.25}


@pytest.mark.parametrize(
    ("peak", "first_s", "next_s", "holds"),
    [(0.86, 2.8, 0.1, True), (1.01, 2.8, 0.1, False), (0.86, 6.1, 0.1, False), (0.86, 2.8, 1.1, False)],
)
def test_memory_and_loading(peak: float, first_s: float, next_s: float, holds: bool) -> None:
    runs = {"sidecar_written": {"load_s": first_s}, "sidecar_mapped": {"load_s": next_s}}
    assert steps.memory_holds({"peak_over_limit": peak, "runs": runs}) is holds
