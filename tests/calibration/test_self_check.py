"""The self-check of rows that are bit-equal by construction: twelve tokens, nine forwards, mixed widths."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from edgespec.calibration.kinds import WIDTHS
from edgespec.calibration.self_check import PASSES, SelfCheck, self_check
from edgespec.errors import ForwardError
from edgespec.files.checked import kind_of, to_json
from edgespec.hardware.neighbours import Neighbours, Used
from edgespec.planning.cost.widths import POSITIONS, WIDEST, WidthProbe, holds_for
from tests.support.fake_runtime import FakeModel, FakeSequence, Faults
from tests.support.noisy_model import NoisyModel


def drained(steps: Generator[float, None, WidthProbe]) -> tuple[list[float], WidthProbe]:
    told: list[float] = []
    while True:
        try:
            told.append(next(steps))
        except StopIteration as end:
            return told, end.value


def test_a_self_check_takes_nine_forwards_in_passes_of_twelve_rows() -> None:
    sequence = FakeModel().open(POSITIONS)
    told, probe = drained(self_check(sequence, 12))
    assert sequence.log.widths == [12, 8, 4, 7, 5, 6, 3, 2, 1]
    assert sequence.log.rows == sequence.log.widths
    assert told == pytest.approx([done / 9 for done in range(1, 10)])
    assert probe.widths == tuple(range(1, WIDEST + 1))
    assert (probe.complete, probe.max_abs_diff) == (True, 0.0)
    assert kind_of(WIDTHS.hint).read(to_json(probe)) == probe


def test_every_pass_of_a_self_check_compares_the_same_rows() -> None:
    assert {sum(widths) for widths in PASSES} == {POSITIONS}
    assert {width for widths in PASSES for width in widths} >= {*range(1, 9), WIDEST}


@pytest.mark.parametrize("width", sorted({width for widths in PASSES for width in widths}))
def test_a_self_check_that_finds_a_difference_leaves_only_width_one(width: int) -> None:
    model = NoisyModel(lambda own, _position, _written: 0.5 * (own == width))
    _, probe = drained(self_check(model.open(POSITIONS), 8))  # type: ignore[arg-type]
    assert probe.widths == (1,)
    assert probe.depth_cap == 0
    assert not probe.complete
    assert kind_of(WIDTHS.hint).read(to_json(probe)) == probe


@pytest.mark.parametrize(("others", "plain_s"), [(0.05, 0.25), (0.5, None)])
def test_a_self_check_gives_the_last_forwards_time_as_plain_time_unless_others_ran(
    others: float, plain_s: float | None
) -> None:
    class Clock:
        now = 0.0

    class Timed(FakeSequence):
        def forward(self, tokens: Any, rows: int) -> Any:
            Clock.now += 10.0 if len(tokens) > 1 else 0.25
            return super().forward(tokens, rows)

    neighbours = Neighbours(lambda: Used(own_s=0.0, busy_s=others * Clock.now, total_s=Clock.now))
    sequence = Timed(FakeModel(), POSITIONS)
    _, probe = drained(self_check(sequence, 12, clock=lambda: Clock.now, neighbours=neighbours))
    assert (probe.plain_forward_s, probe.depth_cap) == (plain_s, WIDEST - 1)
    assert kind_of(WIDTHS.hint).read(to_json(probe)) == probe


def test_a_self_check_runs_in_parallel_and_closes_its_sequence() -> None:
    model = FakeModel()
    check = SelfCheck(model)
    assert check.result().depth_cap == WIDEST - 1
    assert model.sequences[0].jobs == 1
    assert model.sequences[0].closed


def test_a_failing_self_check_raises_and_closes_its_sequence() -> None:
    model = FakeModel(faults=Faults(raise_at=3, error=lambda: ForwardError("the device went away", code=-3)))
    with pytest.raises(ForwardError, match="the device went away"):
        SelfCheck(model).result()
    assert model.sequences[0].closed


def test_a_self_check_applies_to_any_context_if_length_does_not_matter() -> None:
    by_construction, other = FakeModel(bit_equal_by_construction=True), FakeModel()
    probe = SelfCheck(by_construction).result()
    assert holds_for(probe, by_construction.facts, 32768)
    assert not holds_for(probe, other.facts, 32768)
