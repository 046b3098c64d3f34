"""Calibrating tiny models in tests: quickly, and told apart from answering."""

from __future__ import annotations

import functools
from collections.abc import Generator
from pathlib import Path

import pytest

import edgespec.learning as learning_module
from edgespec.files.locations import Home
from edgespec.planning.calibration import measure_contention

KINDS = ("acceptance", "contention", "plain", "times", "widths")


def shorten_contention(patch: pytest.MonkeyPatch) -> None:
    """Run both sides at once for a moment instead of a second: no test looks at the numbers."""
    patch.setattr(learning_module, "measure_contention", functools.partial(measure_contention, seconds=0.02))


def fix_plain_ratio(patch: pytest.MonkeyPatch, ratio: float) -> None:
    """Let plain decoding take so many times as long in every other setting of the target."""

    def measure(*_models: object) -> Generator[float, None, float]:
        yield 1.0
        return ratio

    patch.setattr(learning_module, "measure_plain_ratio", measure)


def stored(home: Home) -> dict[str, int]:
    """How many files of each kind of measurement there are."""
    names = [path.name.partition("-")[0] for path in home.measurements.glob("*.json")]
    return {kind: names.count(kind) for kind in KINDS if kind in names}


def measured(home: Home) -> dict[str, int]:
    """``stored`` without acceptance: whether that is measured depends on whether drafting could pay, so on speed."""
    return {kind: count for kind, count in stored(home).items() if kind != "acceptance"}


def damage(home: Home, kind: str, data: bytes = b"{") -> list[Path]:
    """Overwrite every file of a kind."""
    paths = sorted(home.measurements.glob(f"{kind}-*.json"))
    assert paths
    for path in paths:
        path.write_bytes(data)
    return paths
