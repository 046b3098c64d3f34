"""How far a gate lets a finished draft through, and how often it is asked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edgespec.drafters.gates import admitted
from tests.support.gates import at_least


@pytest.mark.parametrize(
    ("confidences", "kept", "asked"),
    [
        ((), 0, 0),
        ((0.4, 0.9), 0, 1),
        ((0.9, 0.4, 0.9), 1, 2),
        ([0.9, 0.5, 0.4], 2, 3),
        ((0.9, 0.8, 0.7), 3, 3),
    ],
)
def test_a_draft_ends_before_the_first_token_the_gate_stops(
    confidences: Sequence[float], kept: int, asked: int
) -> None:
    gate = at_least(0.5)
    assert admitted(gate, confidences) == kept
    assert gate.asked == [(own, None) for own in confidences[:asked]], "in order, without entropy, not beyond the end"
