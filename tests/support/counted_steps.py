"""Steps of work: calls of functions in Python and in C, and characters counted against a budget; lines of Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from edgespec.text.request_budget import RequestBudget

__all__ = ["counted_lines", "counted_steps"]

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


@contextmanager
def counted_lines() -> Iterator[list[int]]:
    """Counts the lines of Python that run."""
    steps = [0]

    def trace(_frame: FrameType, event: str, _value: object) -> Any:
        steps[0] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield steps
    finally:
        sys.settrace(before)
