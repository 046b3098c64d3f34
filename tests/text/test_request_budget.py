"""What one request may cost."""

from __future__ import annotations

import math

import pytest

from edgespec.errors import CancelledError, InvalidRequestError
from edgespec.text.request_budget import RequestBudget


def test_the_limits_grow_with_the_context() -> None:
    small, large = RequestBudget(4096), RequestBudget(32_768)
    assert (small.body_bytes, large.body_bytes) == (518_144, 2_353_152)
    assert (small.values, large.values) == (28_192, 85_536)


def test_a_request_from_python_has_no_limits() -> None:
    budget = RequestBudget()
    budget.read(10**15)
    assert budget.body_bytes == budget.values == budget.left_s == math.inf


def test_a_body_is_read_a_limited_number_of_times() -> None:
    budget = RequestBudget(100)
    for _ in range(128):
        budget.read(262_400)
    with pytest.raises(InvalidRequestError, match="too much work for a context of 100 tokens"):
        budget.read(1)


def test_a_cancelled_request_and_one_whose_time_is_over_may_do_nothing_more() -> None:
    budget = RequestBudget(100)
    budget.check()
    budget.cancel()
    assert budget.cancelled
    for spend in (budget.check, lambda: budget.read(1)):
        with pytest.raises(CancelledError):
            spend()
    with pytest.raises(CancelledError):
        RequestBudget(100, seconds=-1.0).check()
