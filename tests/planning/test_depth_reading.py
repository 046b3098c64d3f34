"""How much a drafter reads before it drafts, and how its hits in hindsight count."""

from __future__ import annotations

import pytest

from edgespec.planning.depth.price import (
    HINDSIGHT,
    LEAST_READ,
    rate_in_hindsight,
    readings,
    worth_of,
)


def test_a_drafter_that_skipped_text_is_right_less_often() -> None:
    assert worth_of(0, 100) == 1.0
    assert worth_of(100, 100) == worth_of(200, 100) == 0.0
    # As measured: relative to the whole text 0.84 with two fifths of it, 0.4 to 0.66 with a tenth or less.
    assert worth_of(60, 100) == pytest.approx(0.84, abs=0.05)
    assert 0.4 < worth_of(92, 100) < 0.66


def test_all_half_or_a_quarter_of_the_text_may_be_read() -> None:
    assert readings(400, 0, 400) == [400, 200, 100]
    assert readings(40, 0, 400) == [40, 20]
    assert readings(2 * LEAST_READ, 0, 40) == [2 * LEAST_READ, LEAST_READ]
    assert readings(3, 0, 3) == [3]
    assert readings(8, 380, 400) == [400, 200, 100, 8], "from scratch, or only the lag"
    assert readings(8, 250, 400) == [400, 200, 8], "a quarter is less than it has"


def test_hits_in_hindsight_outweigh_the_earlier_rate() -> None:
    every, none = [True] * HINDSIGHT, [False] * HINDSIGHT
    assert rate_in_hindsight(every, 1.0, 0.5) > 0.85
    assert rate_in_hindsight(none, 1.0, 0.75) < 0.2
    assert rate_in_hindsight([], 1.0, 0.75) == 0.75
    assert rate_in_hindsight([True, False] * 7, 0.6, 0.75) > 0.75, "it had read little"
    assert rate_in_hindsight(every, 0.5, 1.0) == 1.0
