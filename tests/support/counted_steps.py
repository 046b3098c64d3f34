"""Steps of work: calls of functions in Python and in C, and characters counted against a budget."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from edgespec.text.request_budget import RequestBudget

__all__ = ["counted_steps"]

# As in the budget of a rendering: reading them takes the time of a call.
_CHARACTERS_PER_STEP = 64


def counted_steps(work: Callable[[RequestBudget], object]) -> float:
    """The steps of ``work`` on this thread, which gets a budget to spend."""
    budget, calls = RequestBudget(100_000), 0
    before = budget._characters

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work(budget)
    finally:
        sys.setprofile(None)
    return calls + (before - budget._characters) / _CHARACTERS_PER_STEP
