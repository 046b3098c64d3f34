"""The rows of docs/results/faults.md: what goes wrong, and the tests that hold what happens then."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "faults.md"

_ROW = re.compile(r"^\| (\d+) \| [^|]+ \| [^|]+ \| (real|fake) \| ([^|]+) \|$", re.MULTILINE)

_TEST = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, slots=True)
class Fault:
    """A row. ``real``: its tests make it happen, without a fake."""

    number: int
    real: bool
    tests: tuple[str, ...]


def faults() -> tuple[Fault, ...]:
    """The rows of the page, in order."""
    text = PAGE.read_text(encoding="utf-8")
    return tuple(
        Fault(int(row), how == "real", tuple(_TEST.findall(named))) for row, how, named in _ROW.findall(text)
    )
