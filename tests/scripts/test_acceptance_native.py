"""What the acceptance of our own kernels makes of its figures."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
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


def test_divergences_are_compared_token_by_token() -> None:
    theirs = np.array([1.0, 2.0, 3.0, 4.0])
    kl = {"native": theirs + np.array([0.5, -0.5, 0.5, 0.5]), "llama": theirs, "llama_flash": theirs * 2}
    found = steps.compared(kl, "llama")
    assert found["kl_tokens"] == 4
    assert found["mean_kl_nats"] == {"native": 2.75, "llama": 2.5, "llama_flash": 5.0}
    assert found["kl_ratio"] == pytest.approx(1.1)
    assert found["kl_excess_in_standard_errors"] == pytest.approx(1.0)
    assert steps.compared(kl, "llama_flash")["kl_ratio"] == pytest.approx(0.55)


@pytest.mark.parametrize("truest", ["llama", "llama_flash"])
def test_divergence_is_held_against_llama_cpp_where_it_is_least(truest: str) -> None:
    kl = {"native": np.zeros(2), "llama": np.array([2.0, 2.0]), "llama_flash": np.array([2.0, 2.0])}
    assert steps.least_divergent(kl | {truest: np.array([3.0, 0.9])}) == truest


@pytest.mark.parametrize(
    ("without", "flash", "nearest"), [(10.3, 10.1, "llama_flash"), (10.3, 9.6, "llama"), (9.9, 10.2, "llama")]
)
def test_perplexity_is_held_against_llama_cpp_where_it_is_nearest(without: float, flash: float, nearest: str) -> None:
    perplexity = {"float32": 10.0, "native": 10.05, "llama": without, "llama_flash": flash}
    found = steps.perplexities_compared(perplexity)
    assert found["perplexity"] == perplexity
    assert found["perplexity_held_against"] == nearest
    assert found["perplexity_ratio"] == pytest.approx(10.05 / perplexity[nearest])


def test_mixtures_of_widths_cover_every_position() -> None:
    widths = list(steps.random_widths(random.Random(1), 500))
    assert sum(widths) == 500
    assert set(widths) <= set(range(1, steps.WIDEST_ROW + 1))
    assert len(set(widths)) > 10


def arm(**categories: float) -> dict[str, Any]:
    return {"speedup": {"by_category": {name: {"geomean": gain} for name, gain in categories.items()}}}


def test_gains_are_held_against_llama_cpp_by_category() -> None:
    report = {"arms": {"planned": arm(code=1.5, qa=1.0), "llama:m": arm(code=0.5, qa=0.8)}}
    assert steps.over_llama(report, "planned", "llama:m") == {"code": 3.0, "qa": 1.25}


def test_depths_are_told_by_category() -> None:
    def answer(arm: str, category: str, *by_depth: int) -> dict[str, Any]:
        return {"arm": arm, "category": category, "rounds_by_depth": list(by_depth)}

    pairs = [
        answer("planned", "code", 0, 2, 0, 6),
        answer("planned", "code", 1, 1),
        answer("planned", "qa", 9),
        answer("planned", "chat"),  # one token: no round
        answer("plain", "code", 95),
    ]
    report = {"pairs": pairs}
    assert steps.mean_depths(report, "planned") == {"code": 2.1, "qa": 0.0}
    assert steps.shallow_shares(report, "planned") == {"code": 0.4, "qa": 1.0}


def suite_report(code: float, qa: float, identical: float = 1.0) -> dict[str, Any]:
    return {
        "arms": {"planned": arm(code=code, qa=qa), "llama:m": arm(code=1.0, qa=1.0)},
        "identical_fraction": identical,
        "pairs": [],
        "plan": {"reasons": []},
    }


@pytest.mark.parametrize(
    ("report", "stock", "trimmed"),
    [
        (suite_report(2.0, 1.1), True, True),
        (suite_report(1.8, 0.97), True, False),  # 1.32 in the mean
        (suite_report(1.7, 1.5), False, False),  # code is not 1.8
        (suite_report(2.5, 0.96), False, False),  # one category lost
        (suite_report(1.8, 0.93), False, False),
        (suite_report(2.0, 1.1, identical=0.99), False, False),
    ],
)
def test_the_suite_holds_only_if_every_line_does(
    monkeypatch: pytest.MonkeyPatch, report: dict[str, Any], stock: bool, trimmed: bool
) -> None:
    asked: list[tuple[str, ...]] = []
    exported: list[tuple[object, ...]] = []
    saved: dict[str, Any] = {}

    def fake_bench(*arguments: str) -> dict[str, Any]:
        asked.append(arguments)
        return report

    def fake_export(*arguments: object) -> dict[str, Any]:
        exported.append(arguments)
        return {"trim": {"rows": 40960}, "bytes_per_token": 1}

    class Results:
        def save(self, _name: str, **values: Any) -> None:
            saved.update(values)

    monkeypatch.setattr(steps, "edgespec", fake_bench)
    monkeypatch.setattr(steps, "export", fake_export)
    assert steps.stock_suite(Results(), "s") == stock
    assert "--draft" not in asked[0]
    assert not exported
    assert steps.trimmed_suite(Results(), "t") == trimmed
    assert asked[1][asked[1].index("--draft") + 1] == str(exported[0][-1])
    assert saved["trim"] == {"rows": 40960}


@pytest.mark.parametrize(
    ("peak", "first_s", "next_s", "holds"),
    [(0.86, 2.8, 0.1, True), (1.01, 2.8, 0.1, False), (0.86, 6.1, 0.1, False), (0.86, 2.8, 1.1, False)],
)
def test_memory_and_loading(peak: float, first_s: float, next_s: float, holds: bool) -> None:
    runs = {"sidecar_written": {"load_s": first_s}, "sidecar_mapped": {"load_s": next_s}}
    assert steps.memory_holds({"peak_over_limit": peak, "runs": runs}) is holds
