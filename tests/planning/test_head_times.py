from __future__ import annotations

import pytest

from edgespec.errors import ForwardError
from edgespec.planning.head_times import CONTEXT_TOKENS, REPETITIONS, measure_heads
from tests.support.fake_runtime import Faults
from tests.support.timed_model import Price, TimedModel


def constant(seconds: float) -> Price:
    return lambda _width, _length, _count: seconds


def timed(prices: list[Price], **settings: object) -> tuple[tuple[float, ...], list[TimedModel]]:
    """The medians of models with those prices, and the models; they share one clock."""
    models = [TimedModel(price) for price in prices]
    steps = measure_heads(models, clock=lambda: sum(model.now_s for model in models), **settings)  # type: ignore[arg-type]
    fractions = []
    while True:
        try:
            fractions.append(next(steps))
        except StopIteration as done:
            assert fractions == sorted(fractions)
            assert 0 <= fractions[0] <= fractions[-1] == 1
            return done.value, models


def test_each_model_is_timed_by_itself() -> None:
    found, models = timed([constant(0.010), constant(0.016)])
    assert found == pytest.approx((0.010, 0.016))
    for model in models:
        (sequence,) = model.sequences
        assert sequence.closed


def test_forwards_of_width_one_after_some_context_in_turns() -> None:
    _, models = timed([constant(0.010), constant(0.016)])
    for model in models:
        log = model.sequences[0].log
        assert log.widths == [CONTEXT_TOKENS, *[1] * (REPETITIONS + 1)]
        assert log.rows == [0, *[1] * (REPETITIONS + 1)]
        assert log.rewinds == [CONTEXT_TOKENS] * (REPETITIONS + 1)
    assert models[0].sequences[0].log.fed == models[1].sequences[0].log.fed
    assert (CONTEXT_TOKENS, REPETITIONS) == (64, 21)


def test_a_warm_up_and_interruptions_do_not_count() -> None:
    def price(_width: int, _length: int, count: int) -> float:
        # The context is the first forward, the warm-up the second; then a tenth of a second now and then.
        return 5.0 if count <= 2 else 0.1 if count % 3 == 0 else 0.010

    found, _ = timed([price, constant(0.016)])
    assert found == pytest.approx((0.010, 0.016))


def test_other_settings() -> None:
    found, models = timed([constant(0.010), constant(0.016)], context_tokens=0, repetitions=3)
    assert found == pytest.approx((0.010, 0.016))
    assert models[0].sequences[0].log.widths == [1] * 4


def test_a_forward_that_fails_is_told_and_nothing_stays_open() -> None:
    models = [TimedModel(constant(0.01)), TimedModel(constant(0.01), faults=Faults(raise_at=3))]
    with pytest.raises(ForwardError):
        list(measure_heads(models))
    assert [model.open_sequences for model in models] == [0, 0]


def test_real_seconds_unless_told_otherwise() -> None:
    steps = measure_heads([TimedModel(constant(0.01))], repetitions=1)
    seconds = None
    while seconds is None:
        try:
            next(steps)
        except StopIteration as done:
            (seconds,) = done.value
    assert 0 < seconds < 10
