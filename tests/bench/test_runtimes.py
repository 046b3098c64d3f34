"""Models timed alternately, on fakes with invented times: their input, the counted forwards, the report."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import time
from typing import Any

import pytest

from edgespec.bench.runtimes import (
    PLAIN_PER_TURN,
    REST_S,
    TURNS,
    WARMING_UP,
    NamedModel,
    RuntimeTimes,
    arm_names,
    measure_runtimes,
    runtime_lines,
)
from edgespec.calibration.timing import WIDTHS
from edgespec.errors import ForwardError, InvalidRequestError
from tests.support.fake_runtime import Faults
from tests.support.timed_model import Price, TimedModel, by_width

START = 96
OFTEN = [width for width in WIDTHS if 1 < width <= 8]
SELDOM = [width for width in WIDTHS if width > 8]


def constant(seconds: float) -> Price:
    return lambda _width, _length, _count: seconds


def measured(models: list[TimedModel], context_length: int = 2048) -> tuple[RuntimeTimes, ...]:
    """The models' times on one clock that all of them advance."""
    named = [NamedModel(name=str(number), arm=None, model=model) for number, model in enumerate(models)]

    def clock() -> float:
        return sum(model.now_s for model in models)

    steps = measure_runtimes(named, context_length, clock=clock, rest=lambda _: None)
    fractions = []
    while True:
        try:
            fractions.append(next(steps))
        except StopIteration as done:
            assert fractions == sorted(fractions)
            assert 0 <= fractions[0] <= fractions[-1] == 1
            found: tuple[RuntimeTimes, ...] = done.value
            return found


# ------------------------------------------------------------------------------------------------- names


def test_an_arm_name_is_runtime_colon_model() -> None:
    assert arm_names([("llama", "smol"), ("onnx", "smol")]) == ("llama:smol", "onnx:smol")


def test_arm_names_are_unique_printable_and_short() -> None:
    found = arm_names([*[("onnx", "a")] * 3, ("llama", "\x1b[31m\n"), *[("llama", "x" * 90)] * 2])
    long = f"llama:{'x' * 33}…"
    assert found == ("onnx:a", "onnx:a (2)", "onnx:a (3)", "llama:\\x1b[31m\\n", long, f"{long} (2)")
    assert len(found[4]) == 40


def test_an_arm_name_that_looks_numbered_stays_unique() -> None:
    found = arm_names([("onnx", "a"), ("onnx", "a (2)"), ("onnx", "a")])
    assert len(set(found)) == 3


# ------------------------------------------------------------------------------------------------- times


def test_each_model_has_its_curve_and_its_ratio_to_the_first() -> None:
    twice: Price = lambda width, length, count: 2 * by_width(width, length, count)  # noqa: E731
    first, second = measured([TimedModel(), TimedModel(twice)])
    assert first.widths == second.widths == WIDTHS
    assert first.context == START
    assert first.forward_s == pytest.approx([0.010 + 0.001 * (width - 1) for width in WIDTHS])
    assert second.forward_s == pytest.approx([2 * seconds for seconds in first.forward_s])
    assert (first.t1_ratio, first.t1_ratio_range) == (1.0, (1.0, 1.0))
    assert second.t1_ratio == pytest.approx(2.0)
    assert second.t1_ratio_range == pytest.approx((2.0, 2.0))


def test_all_timed_models_read_the_same_tokens_and_are_closed() -> None:
    models = [TimedModel(), TimedModel(vocabulary_size=7)]
    measured(models)
    logs = [model.sequences[0].log for model in models]
    assert logs[0].fed == logs[1].fed
    assert max(token for tokens in logs[0].fed for token in tokens) < 7, "tokens of both vocabularies"
    turn = [*[1] * (WARMING_UP + PLAIN_PER_TURN), *OFTEN]
    wide = [*turn, *SELDOM]
    assert logs[0].widths == [START, *turn, *wide, *wide, *turn * (TURNS - 2)]
    assert logs[0].rows == [0, *logs[0].widths[1:]]
    assert set(logs[0].rewinds) == {START}
    assert [model.open_sequences for model in models] == [0, 0]


def test_the_order_of_models_is_reversed_each_turn() -> None:
    order: list[str] = []

    def price(name: str) -> Price:
        def own(_width: int, length: int, _count: int) -> float:
            if length == START and order[-1:] != [name]:
                order.append(name)
            return 0.01

        return own

    measured([TimedModel(price("a")), TimedModel(price("b"))])
    # The model that ends a turn begins the next.
    assert "".join(order) == "ab" + "ab" * ((TURNS - 1) // 2) + "a"


def test_the_first_forwards_of_a_turn_are_not_counted() -> None:
    """Another runtime's threads may still be spinning."""
    others = {"a": 0, "b": 0}

    def price(name: str, other: str) -> Price:
        def own(_width: int, _length: int, _count: int) -> float:
            after_other, others[name], others[other] = others[other] > 0, others[name] + 1, 0
            return 1.0 if after_other else 0.01

        return own

    found = measured([TimedModel(price("a", "b")), TimedModel(price("b", "a"))])
    assert all(each.forward_s == pytest.approx([0.01] * len(WIDTHS)) for each in found)


def test_the_first_turn_and_interruptions_do_not_change_the_times() -> None:
    def price(_width: int, _length: int, count: int) -> float:
        return 5.0 if count <= 1 + WARMING_UP + PLAIN_PER_TURN + len(OFTEN) else 0.5 if count % 7 == 0 else 0.010

    found = measured([TimedModel(price), TimedModel(constant(0.02))])
    assert found[0].forward_s[0] == pytest.approx(0.010)
    assert found[1].t1_ratio == pytest.approx(2.0)


def test_a_change_of_speed_between_turns_cancels_in_the_ratio() -> None:
    models: list[TimedModel] = []

    def slower(seconds: float) -> Price:
        # A machine that slows down with every forward.
        return lambda _width, _length, _count: seconds * (1 + sum(model.count for model in models) // 60)

    models += [TimedModel(slower(0.010)), TimedModel(slower(0.015))]
    first, second = measured(models)
    assert second.t1_ratio == pytest.approx(1.5, rel=0.15)
    low, high = second.t1_ratio_range
    assert low <= second.t1_ratio <= high
    assert first.t1_ratio_range == (1.0, 1.0)


def test_a_short_context_is_timed_at_fewer_widths() -> None:
    (found,) = measured([TimedModel()], context_length=112)
    assert found.context == START
    assert found.widths == tuple(width for width in WIDTHS if width <= 16)
    (tiny,) = measured([TimedModel()], context_length=6)
    assert (tiny.context, tiny.widths) == (0, (1, 2, 3, 4, 5, 6))


def test_timing_a_model_that_cannot_take_tokens_back_is_refused() -> None:
    model = TimedModel(faults=Faults(refuse_rewind_at=1))
    with pytest.raises(InvalidRequestError, match="0 cannot take tokens back"):
        measured([model])
    assert model.sequences == []


def test_an_error_while_timing_closes_the_sequences() -> None:
    models = [TimedModel(), TimedModel(faults=Faults(raise_at=5))]
    with pytest.raises(ForwardError):
        measured(models)
    assert [model.open_sequences for model in models] == [0, 0]


def test_abandoning_the_timing_closes_the_sequences() -> None:
    model = TimedModel()
    steps = measure_runtimes([NamedModel(name="a", arm=None, model=model)], 2048, rest=lambda _: None)
    next(steps)
    steps.close()
    assert model.open_sequences == 0


def test_the_process_pauses_before_each_models_turn() -> None:
    models = [TimedModel(), TimedModel()]
    rested: list[tuple[float, int]] = []

    def rest(seconds: float) -> None:
        rested.append((seconds, sum(model.count for model in models)))

    named = [NamedModel(name="a", arm=None, model=model) for model in models]
    clock = itertools.count(1)
    for _ in measure_runtimes(named, 2048, clock=lambda: next(clock), rest=rest):
        pass
    assert [seconds for seconds, _ in rested] == [REST_S] * 2 * (TURNS + 1)
    counts = [count for _, count in rested]
    assert counts[0] == 2, "after both models read the context"
    assert len(set(counts)) == len(counts)


def test_timing_uses_the_real_clock_and_sleep_by_default() -> None:
    assert inspect.signature(measure_runtimes).parameters["rest"].default is time.sleep
    steps = measure_runtimes([NamedModel(name="a", arm="b", model=TimedModel())], 2048)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            (found,) = done.value
            break
    assert all(seconds > 0 for seconds in found.forward_s)
    assert (found.name, found.arm) == ("a", "b")


# ----------------------------------------------------------------------------------------------- reports


def times(label: str, plain_s: float, ratio: float, **facts: Any) -> RuntimeTimes:
    return RuntimeTimes(
        name=label,
        arm=label if label != "llama:big" else "plain",
        facts=dataclasses.replace(TimedModel().facts, **facts),
        context=96,
        widths=(1, 2),
        forward_s=(plain_s, 1.5 * plain_s),
        t1_ratio=ratio,
        t1_ratio_range=(0.9 * ratio, 1.1 * ratio),
    )


PAIR = (
    times("llama:big", 0.040, 1.0, bytes_per_forward=400_000_000, runtime="llama", name="big"),
    times("onnx:big-onnx", 0.030, 0.75, bytes_per_forward=300_000_000, weight_bytes=5, runtime="onnx", threads=2),
)


def test_the_runtimes_json_has_the_documented_keys() -> None:
    first, second = (each.as_json() for each in PAIR)
    assert first == {
        "name": "llama:big", "arm": "plain", "model": "big", "runtime": "llama", "device": "cpu", "threads": 1,
        "settings": {"kv_type": "f32"}, "context": 96, "width": [1, 2], "forward_s": [0.040, 0.060],
        "weight_bytes": 1, "bytes_per_forward": 400_000_000, "t1_ratio": 1.0, "t1_ratio_range": [0.9, 1.1],
    }  # fmt: skip
    assert (second["threads"], second["weight_bytes"], second["t1_ratio"]) == (2, 5, 0.75)


def test_the_printed_runtimes_show_times_and_bytes() -> None:
    assert runtime_lines(()) == ()
    assert runtime_lines([each.as_json() for each in PAIR]) == (
        "a forward of one token after 96, measured alternately",
        "  llama:big      T(1)   40.00 ms, 400 MB read",
        "  onnx:big-onnx  T(1)   30.00 ms, 300 MB read; 0.75x (0.68-0.83) of llama:big's time, 0.75x of its bytes",
    )


def test_unknown_bytes_have_no_ratio_in_the_printed_runtimes() -> None:
    unknown = (times("llama:big", 0.040, 1.0, bytes_per_forward=0), PAIR[1])
    assert runtime_lines([each.as_json() for each in unknown])[2].endswith("of llama:big's time")
