"""How many tokens of a finished draft a gate admits, and how often it is asked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edgespec.drafters.combination import both
from edgespec.interfaces.drafting import admitted
from tests.support.gates import Gate, at_least, at_most_nats


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
    assert gate.asked == [(own, None) for own in confidences[:asked]], "in order, without entropy, never past the end"


def test_two_combined_gates_admit_what_both_admit() -> None:
    sure, calm = at_least(0.5), at_most_nats(1.0)
    gate = both(sure, calm)
    assert gate is not None
    assert gate.needs_entropy
    assert [gate.admits(*each) for each in ((0.6, 0.9), (0.4, 0.9), (0.6, 1.1))] == [True, False, False]
    assert calm.asked == [(0.6, 0.9), (0.6, 1.1)], "the second gate does not see what the first one stops"
    one, other = Gate(forwards=1), Gate(forwards=2)
    together = both(one, other)
    assert together is not None
    assert not together.needs_entropy
    assert [together.goes_on() for _ in range(3)] == [True, False, False]


def test_combining_with_no_gate_returns_the_other_gate() -> None:
    gate = Gate()
    assert both(gate, None) is gate
    assert both(None, gate) is gate
    assert both(None, None) is None
