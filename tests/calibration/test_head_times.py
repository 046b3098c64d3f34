from __future__ import annotations

import numpy as np
import pytest

from edgespec.calibration.head_times import CONTEXT_TOKENS, ENOUGH_LOST, REPETITIONS, measure_heads, right_of_lost
from edgespec.errors import ForwardError
from tests.support.fake_runtime import FakeModel, Faults
from tests.support.timed_model import Price, TimedModel


def constant(seconds: float) -> Price:
    return lambda _width, _length, _count: seconds


def timed(prices: list[Price], **settings: object) -> tuple[tuple[float, ...], list[TimedModel]]:
    """The medians of models with those times, and the models; they share one clock."""
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


def test_heads_are_timed_separately_and_their_sequences_closed() -> None:
    found, models = timed([constant(0.010), constant(0.016)])
    assert found == pytest.approx((0.010, 0.016))
    for model in models:
        (sequence,) = model.sequences
        assert sequence.closed


def test_heads_are_timed_alternately_at_width_one_after_some_context() -> None:
    _, models = timed([constant(0.010), constant(0.016)])
    for model in models:
        log = model.sequences[0].log
        assert log.widths == [CONTEXT_TOKENS, *[1] * (REPETITIONS + 1)]
        assert log.rows == [0, *[1] * (REPETITIONS + 1)]
        assert log.rewinds == [CONTEXT_TOKENS] * (REPETITIONS + 1)
    assert models[0].sequences[0].log.fed == models[1].sequences[0].log.fed
    assert (CONTEXT_TOKENS, REPETITIONS) == (64, 21)


def test_warm_up_and_interruptions_do_not_change_a_heads_time() -> None:
    def price(_width: int, _length: int, count: int) -> float:
        # The context is the first forward, the warm-up the second; then a tenth of a second occasionally.
        return 5.0 if count <= 2 else 0.1 if count % 3 == 0 else 0.010

    found, _ = timed([price, constant(0.016)])
    assert found == pytest.approx((0.010, 0.016))


def test_context_and_repetitions_of_head_times_can_be_set() -> None:
    found, models = timed([constant(0.010), constant(0.016)], context_tokens=0, repetitions=3)
    assert found == pytest.approx((0.010, 0.016))
    assert models[0].sequences[0].log.widths == [1] * 4


def test_a_failing_forward_is_raised_and_every_head_closed() -> None:
    models = [TimedModel(constant(0.01)), TimedModel(constant(0.01), faults=Faults(raise_at=3))]
    with pytest.raises(ForwardError):
        list(measure_heads(models))
    assert [model.open_sequences for model in models] == [0, 0]


def test_head_times_use_the_real_clock_by_default() -> None:
    steps = measure_heads([TimedModel(constant(0.01))], repetitions=1)
    seconds = None
    while seconds is None:
        try:
            next(steps)
        except StopIteration as done:
            (seconds,) = done.value
    assert 0 < seconds < 10


# ------------------------------------------------------------------------------------------ the worth of rows


def worth(texts: list[tuple[list[int], list[int]]], kept: range, model: FakeModel) -> float | None:
    steps, share = right_of_lost(model, texts, kept), None
    told = []
    while True:
        try:
            told.append(next(steps))
        except StopIteration as done:
            share = done.value
            break
    assert told == [number / len(texts) for number in range(len(texts))]
    assert model.sequences == [] or all(sequence.closed for sequence in model.sequences)
    return share


def greedy(model: FakeModel, before: list[int], count: int) -> list[int]:
    text: list[int] = []
    for _ in range(count):
        text.append(int(np.argmax(model.scores([*before, *text]))))
    return text


def test_right_of_lost_is_the_share_of_lost_tokens_the_model_predicts() -> None:
    model = FakeModel(40, seed=3)
    right = greedy(model, [1, 2, 3], 150)
    lost = sum(token >= 20 for token in right)
    assert lost > ENOUGH_LOST
    assert worth([([1, 2, 3], right)], range(20), model) == 1.0
    assert worth([([1, 2, 3], right)], range(40), model) is None, "no token is lost"
    spoilt = [token if place % 2 else (token + 7) % 40 for place, token in enumerate(right)]
    said = [int(np.argmax(model.scores([1, 2, 3, *spoilt[:place]]))) for place in range(len(spoilt))]
    missing = [place for place, token in enumerate(spoilt) if token >= 20]
    expected = sum(said[place] == spoilt[place] for place in missing) / len(missing)
    assert worth([([1, 2, 3], spoilt)], range(20), model) == pytest.approx(expected)
    assert expected < 1


def test_a_text_without_context_is_predicted_from_its_second_token() -> None:
    model = FakeModel(40, seed=3)
    text = [7, *greedy(model, [7], 150)]
    assert worth([([], text), ([], []), ([], [3])], range(20), model) == 1.0


def test_right_of_lost_is_none_if_too_few_tokens_are_outside_the_head() -> None:
    model = FakeModel(40, seed=3)
    assert worth([([1], greedy(model, [1], ENOUGH_LOST - 1))], range(0), model) is None
    assert worth([([1], greedy(model, [1], ENOUGH_LOST))], range(0), model) == 1.0
    assert worth([], range(0), model) is None
