"""Measuring models with known times, on a clock that only forwards advance."""

from __future__ import annotations

import json
from collections import abc
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import edgespec.calibration.timing as module
from edgespec.calibration.kinds import TIMES
from edgespec.calibration.timing import (
    CONTENTION_S,
    DRAFTER_WIDTHS,
    FULL,
    FULL_REPETITIONS,
    PLAIN_REPETITIONS,
    QUICK,
    QUICK_REPETITIONS,
    WIDTHS,
    ModelTimes,
    Scope,
    measure_agreement,
    measure_contention,
    measure_drafter,
    measure_plain_ratio,
    measure_prompt_ratio,
    measure_target,
)
from edgespec.errors import ForwardError
from edgespec.files.checked import kind_of
from edgespec.interfaces.model import Mixture, ModelFacts
from edgespec.interfaces.rows import Rows
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.curve import FREE, ContextCurves, Curve
from edgespec.planning.cost.live_times import LiveTimes
from edgespec.planning.cost.widths import MOST_CONTEXT, POSITIONS, WIDEST, WidthProbe, exact_length, probe_starts
from edgespec.runtimes.native.model import NativeSettings
from edgespec.runtimes.native.sequence import NativeSequence
from tests.support.fake_runtime import FakeModel, FakeSequence, Faults
from tests.support.loading import load_native
from tests.support.timed_model import Machine, Price, TimedModel, TimedSequence, by_width
from tests.support.tiny_gguf import write_tiny_gguf

T = TypeVar("T")


def finish(steps: Generator[float, None, T]) -> tuple[T, list[float]]:
    """The result of the steps, and the fractions that they yielded."""
    told = []
    while True:
        try:
            told.append(next(steps))
        except StopIteration as done:
            return done.value, told


def target(model: TimedModel, context_length: int = 4096, scope: Scope = QUICK) -> tuple[ModelTimes, WidthProbe]:
    return finish(measure_target(model, context_length, scope, clock=model.clock))[0]


# --------------------------------------------------------------------------------------------------- target


def test_every_width_is_timed_separately() -> None:
    times, probe = target(TimedModel())
    assert times.widths == WIDTHS
    assert times.contexts == (96, 1018)
    for row in times.forward_s:
        assert row == pytest.approx([by_width(width, 0, 0) for width in WIDTHS])
    assert times.repetitions == QUICK_REPETITIONS
    assert times.prompt_token_s == pytest.approx((0.010 + 0.063) / 64)
    assert probe.widths == tuple(range(1, WIDEST + 1))
    assert probe.context_range == (96, 1030)
    assert probe.covers(4096)
    assert not probe.complete


def test_a_target_is_timed_at_several_context_lengths() -> None:
    times, _ = target(TimedModel(lambda width, length, _: 0.01 * width + 1e-5 * length))
    first, last = times.forward_s
    assert first[0] == pytest.approx(0.01 + 96e-5)
    assert last[0] == pytest.approx(0.01 + 1018e-5)


def test_a_full_scope_times_every_context_and_completes_the_probe() -> None:
    times, probe = target(TimedModel(), scope=FULL)
    assert times.contexts == tuple(probe_starts(4096, to_end=True))
    assert len(times.forward_s) == len(times.contexts)
    assert times.repetitions == FULL_REPETITIONS
    assert probe.complete


@pytest.mark.parametrize("by_construction", [False, True])
def test_a_full_scope_compares_widths_to_the_end_if_length_may_matter(by_construction: bool) -> None:
    model = TimedModel(bit_equal_by_construction=by_construction)
    _, probe = target(model, scope=FULL)
    assert probe.context_range[1] == (POSITIONS if by_construction else 4096)
    assert exact_length(probe, model.facts) == (None if by_construction else 4096)
    assert exact_length(target(model)[1], model.facts) == (None if by_construction else 1030)


@pytest.mark.parametrize(("context_length", "contexts"), [(4096, (96, 1018)), (300, (96, 250)), (120, (96,))])
def test_no_context_beyond_the_requested_length_is_timed(context_length: int, contexts: tuple[int, ...]) -> None:
    times, probe = target(TimedModel(), context_length)
    assert times.contexts == contexts
    assert probe.covers(context_length)


@pytest.mark.parametrize(("context_length", "widths"), [(20, WIDTHS[:11]), (5, (1, 2, 3, 4, 5)), (1, (1,))])
def test_timed_widths_stay_within_the_context(context_length: int, widths: tuple[int, ...]) -> None:
    times, _ = target(TimedModel(), context_length)
    assert times.widths == widths
    assert times.contexts == (0,)


def test_no_measurement_reads_more_than_8192_tokens() -> None:
    assert MOST_CONTEXT == 8192
    model = TimedModel()
    times, probe = target(model, 32_768, FULL)
    assert times.contexts == tuple(probe_starts(MOST_CONTEXT, to_end=True))
    assert probe.context_range[1] == exact_length(probe, model.facts) == MOST_CONTEXT
    assert probe.covers(32_768), "longer texts are decoded plainly"


@pytest.mark.parametrize(
    ("context_length", "last"), [(32_768, 8160), (4096, 4064), (300, 268), (282, 250), (128, 96), (120, 96)]
)
def test_the_kernels_are_timed_in_a_long_context_that_is_not_read(
    tmp_path: Path, context_length: int, last: int
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", quant="Q8_0", width=128, context_length=context_length)
    reads = list[int]()
    with load_native(path, NativeSettings(threads=1)) as model:
        opened = model.open

        def watched(length: int) -> NativeSequence:
            sequence = opened(length)
            forward = sequence.forward

            def counted(tokens: abc.Sequence[int], rows: int) -> Rows:
                reads.append(len(tokens) if rows == 0 else 0)
                return forward(tokens, rows)

            sequence.forward = counted  # type: ignore[method-assign]
            return sequence

        model.open = watched  # type: ignore[assignment,method-assign]
        (times, probe), told = finish(measure_target(model, context_length))
        assert times.contexts == tuple(sorted({96, last}))
        assert times.curves.contexts == times.contexts
        assert exact_length(probe, model.facts) is None
        assert sum(reads) < 1100, "96 tokens, and the prompt that is timed three times"
        assert told == sorted(told)
        whole, _ = finish(measure_target(model, context_length, replace(FULL, repetitions=1)))
        assert whole[0].contexts == tuple(sorted({*probe_starts(context_length), max(last, 96)}))
        drafting, _ = finish(measure_drafter(model, context_length))
        far = min(context_length, MOST_CONTEXT) - max(DRAFTER_WIDTHS)
        assert drafting.contexts == ((96, far) if far > 96 else (96,))


def test_a_drafters_token_costs_more_in_a_longer_context() -> None:
    times = ModelTimes(
        contexts=(100, 1100),
        widths=(1,),
        forward_s=((0.02,), (0.03,)),
        prompt_token_s=0.001,
        repetitions=5,
    )
    cost = times.draft_cost
    assert cost.position_s == pytest.approx(1e-5)
    assert [cost.at(length).token_s for length in (100, 1100, 10_100)] == pytest.approx([0.02, 0.03, 0.12])
    assert cost.at(1100).seconds(3) == pytest.approx(0.09)
    assert cost.scaled(2.0).at(1100).token_s == pytest.approx(0.06)
    assert FREE.at(5000) is FREE
    falling = replace(times, forward_s=((0.03,), (0.02,))).draft_cost
    assert (falling.position_s, falling.token_s) == (0.0, 0.02), "a longer context is never faster"


def test_a_curve_is_a_line_over_the_context() -> None:
    low, high = (Curve(widths=(1, 2), forward_s=seconds) for seconds in ((0.1, 0.2), (0.2, 0.4)))
    curves = ContextCurves(contexts=(100, 1100), curves=(low, high))
    assert curves.at(50) == curves.at(100) == low
    assert curves.at(1100) == high
    assert curves.at(600).forward_s == pytest.approx((0.15, 0.3))
    assert curves.at(2100).forward_s == pytest.approx((0.3, 0.6)), "beyond the last, too"
    assert curves.position_s == pytest.approx(1e-4)
    alone = ContextCurves(contexts=(100,), curves=(low,))
    assert (alone.at(9000), alone.position_s) == (low, 0.0)


def test_occasional_interruptions_do_not_change_the_measured_times() -> None:
    """Two of each five repetitions are interrupted: the lower quartile is that of the other three."""

    def price(width: int, length: int, count: int) -> float:
        return by_width(width, length, count) * (7 if count % 5 in (1, 3) else 1)

    often = Scope(widths=(1, 2, 3, 4))  # four a turn: each width is hit at another turn
    times, _ = target(TimedModel(price), scope=often)
    for row in times.forward_s:
        assert row == pytest.approx([by_width(width, 0, 0) for width in often.widths])


def test_widths_are_timed_alternately() -> None:
    """A machine that slows down half-way slows all widths, not only the last ones."""
    model = TimedModel()
    scope = Scope(widths=(1, 2, 3), repetitions=4)
    target(model, 120, scope)
    widths = model.sequences[-1].log.widths
    turns = [1, 2, 3] * (1 + 4)
    assert any(widths[at : at + len(turns)] == turns for at in range(len(widths)))


def test_wide_forwards_are_timed_less_often_after_an_uncounted_turn() -> None:
    model = TimedModel(lambda width, length, count: by_width(width, length, count) * (1 + 100 * (count < 200)))
    sequence_before = len(model.sequences)
    times, _ = target(model, 120, Scope(widths=(1, 32), repetitions=5))
    assert times.widths == (1, 32)
    widths = model.sequences[sequence_before].log.widths
    assert widths[-3 - 8 : -3] == [1, 1, 32, 1, 32, 1, 1, 1]  # then the prompt, three times
    assert widths[-3:] == [64, 64, 64]


def test_measurement_progress_never_falls_and_ends_at_one() -> None:
    model = TimedModel()
    for steps in (
        measure_target(model, 4096, FULL, clock=model.clock),
        measure_target(model, 20, clock=model.clock),
        measure_drafter(model, 4096, clock=model.clock),
        measure_drafter(model, 20, clock=model.clock),
        measure_contention(model, model, seconds=0.05, clock=model.clock),
    ):
        _, told = finish(steps)  # type: ignore[misc]
        assert told == sorted(told)
        assert told[0] >= 0
        assert told[-1] == 1


def test_measurements_use_the_quick_scope_by_default() -> None:
    assert (Scope(), QUICK.every_context, QUICK.complete, QUICK.widths) == (QUICK, False, False, WIDTHS)
    assert (QUICK.to_end, FULL.to_end) == (False, True)
    model = TimedModel()
    (times, probe), _ = finish(measure_target(model, 120, clock=model.clock))
    assert (times.repetitions, probe.complete) == (QUICK_REPETITIONS, False)


# -------------------------------------------------------------------------------------- drafter, plain, both


def test_a_drafters_cost_has_forward_and_prompt_times() -> None:
    model = TimedModel()
    times, _ = finish(measure_drafter(model, 4096, clock=model.clock))
    assert (times.contexts, times.widths) == ((96,), (1, 2, 4))
    assert times.forward_s[0] == pytest.approx([0.010, 0.011, 0.013])
    assert times.draft_cost.token_s == pytest.approx(0.010)
    assert times.draft_cost.lag_token_s == pytest.approx(0.073 / 64)
    assert times.repetitions == QUICK_REPETITIONS
    many, _ = finish(measure_drafter(model, 4096, FULL, clock=model.clock))
    assert many.repetitions == FULL_REPETITIONS


@pytest.mark.parametrize(("context_length", "widths"), [(98, (1, 2, 4)), (109, (1, 2, 4)), (2, (1, 2)), (1, (1,))])
def test_a_drafters_widths_stay_within_the_context(context_length: int, widths: tuple[int, ...]) -> None:
    model = TimedModel()
    times, _ = finish(measure_drafter(model, context_length, clock=model.clock))
    assert times.widths == widths


class OnePass(TimedModel):
    """Has a mask token."""

    @property
    def facts(self) -> ModelFacts:
        return replace(super().facts, mask_id=3)


def test_a_one_pass_drafter_is_timed_at_the_widths_of_its_forward() -> None:
    model = OnePass()
    times, told = finish(measure_drafter(model, 4096, clock=model.clock))
    assert times.widths == tuple(range(1, 13))
    assert times.forward_s[0] == pytest.approx([by_width(width, 0, 0) for width in times.widths])
    cost = times.cost_for(model.facts)
    assert cost.one_pass == times.curves.curves[0]
    assert (cost.token_s, cost.lag_token_s) == (0.0, pytest.approx(0.073 / 64))
    assert cost.seconds(5, 3) == pytest.approx(by_width(8, 0, 0))
    assert times.cost_for(TimedModel().facts) == times.draft_cost
    assert told == sorted(told)
    assert told[-1] == 1
    few, _ = finish(measure_drafter(model, 5, clock=model.clock))
    assert few.widths == (1, 2, 3, 4, 5)


def test_a_one_pass_drafters_agreement_counts_what_it_guesses_in_one_forward() -> None:
    mask, depth = 11, module.AGREEMENT_DEPTH
    target_model = FakeModel(mask, seed=4)
    prompt = [3, 1]
    text = list(prompt)
    for _ in range(12):
        text.append(int(np.argmax(target_model.scores(text))))

    def scores(prefix: tuple[int, ...]) -> list[float]:
        """Right about the next two tokens, wrong about those after them."""
        masks = next(n for n, token in enumerate(reversed(prefix)) if token != mask)
        end = len(prefix) - masks
        right = text[end + masks] if end + masks < len(text) else 0
        return [4.0 * (token == (right if masks < 2 else (right + 1) % mask)) for token in range(mask + 1)]

    drafter = FakeModel(mask + 1, table=scores, mask_id=mask)
    acceptance, _ = finish(measure_agreement(target_model, drafter, [prompt], tokens=12))
    by_position = acceptance.as_prior().by_position
    places = 12 - depth + 1
    assert acceptance.seen == 3 * places, "two right guesses and the first wrong one"
    assert by_position[0] == by_position[1]
    assert by_position[1] is not None
    assert by_position[1] > 0.75
    assert by_position[2] is not None
    assert by_position[2] < 0.4
    assert drafter.sequences[0].log.fed[0] == (3,)
    assert drafter.sequences[0].log.fed[1:] == [(text[1 + place], *[mask] * (depth - 1)) for place in range(places)]


class OneClock:
    """A clock that several models advance."""

    def __init__(self) -> None:
        self.models: list[TimedModel] = []

    def __call__(self) -> float:
        return sum(model.now_s for model in self.models)

    def model(self, price: Price = by_width) -> TimedModel:
        self.models.append(TimedModel(price))
        return self.models[-1]


def test_two_settings_are_timed_alternately() -> None:
    clock = OneClock()
    own, other = clock.model(), clock.model(lambda width, length, count: 0.013 + 0.001 * length / 96)
    ratio, told = finish(measure_plain_ratio(own, other, 4096, clock=clock))
    assert ratio == pytest.approx(1.4)
    assert told == sorted(told)
    assert told[-1] == 1
    for model in (own, other):
        assert model.sequences[0].log.widths == [96, *[1] * (1 + PLAIN_REPETITIONS)]
        assert model.open_sequences == 0


def test_a_slowing_machine_does_not_change_the_ratio_of_two_settings() -> None:
    """Timed one after the other, the second would seem to be slower."""
    clock = OneClock()
    own, other = (clock.model(lambda _width, _length, count: 0.01 * (1 + count)) for _ in range(2))
    assert finish(measure_plain_ratio(own, other, 4096, clock=clock))[0] == pytest.approx(1.0)


def test_two_settings_read_a_prompt_in_turn() -> None:
    clock = OneClock()
    own, other = clock.model(), clock.model(lambda width, _length, count: 0.02 * width / count)
    ratio, told = finish(measure_prompt_ratio(own, other, clock=clock))
    assert set(own.sequences[0].log.widths) == set(other.sequences[0].log.widths) == {64}
    assert len(own.sequences[0].log.widths) == len(told) == 4
    assert ratio == pytest.approx(0.02 * 64 / 3 / by_width(64, 0, 3), rel=0.5)
    assert (own.open_sequences, other.open_sequences, told[-1]) == (0, 0, 1.0)


def test_two_settings_are_compared_in_a_context_too_short_for_a_probe() -> None:
    clock = OneClock()
    own, other = clock.model(), clock.model(lambda *_: 0.005)
    assert finish(measure_plain_ratio(own, other, 20, clock=clock))[0] == pytest.approx(0.5)
    assert set(own.sequences[0].log.widths) == {1}


@pytest.mark.parametrize("factor", [1.0, 1.5, 3.0])
def test_contention_is_the_ratio_of_together_and_alone(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[FakeModel, float]] = []

    def decode_for(sequence: FakeSequence, _size: int, seconds: float, *_: object) -> Future[list[float]]:
        asked.append((sequence.model, seconds))
        place, turn = (len(asked) - 1) % 4, (len(asked) - 1) // 4
        busy = 2.0**turn  # with another program, which slows all of a turn equally
        done: Future[list[float]] = Future()
        done.set_result([0.01 * busy * (factor if place == 2 else 1.0)] * 3)
        return done

    monkeypatch.setattr(module, "_decode_for", decode_for)
    big, small = TimedModel(), TimedModel()
    both, told = finish(measure_contention(big, small))
    assert both.target_factor == pytest.approx(factor)
    assert both.drafter_factor == pytest.approx(1.0)
    assert asked[:4] == [(big, 0.125), (small, 0.125), (big, 0.25), (small, 0.25)]
    assert sum(seconds for model, seconds in asked if model is big) == 1.5 * CONTENTION_S == 1.5
    assert told == sorted(told)
    assert told[-1] == 1
    assert big.open_sequences == small.open_sequences == 0


@pytest.mark.parametrize(("alone_s", "factor"), [(0.03, 1.5), (0.2, 1.5), (0.25, 1.5), (3.0, 1.5), (1.0, 1.0)])
def test_contention_of_a_slow_target_is_that_of_forwards_while_the_drafter_runs(
    alone_s: float, factor: float
) -> None:
    """A turn ends when both sides have a forward during the other's, however long one takes."""
    machine = Machine()
    big, small = (
        TimedModel(lambda *_, price=price: price * (factor if machine.jobs > 1 else 1.0), machine)
        for price in (alone_s, 0.01)
    )
    both, _ = finish(measure_contention(big, small, clock=big.clock))
    assert (both.target_factor, both.drafter_factor) == pytest.approx((factor, factor))
    assert big.count >= 16, "in each of four turns, one to warm up and one timed, alone and together"


def test_contention_measured_below_one_is_reported_as_one() -> None:
    model = TimedModel(lambda _width, _length, count: 0.005 + 0.005 / count)
    both, _ = finish(measure_contention(model, model, seconds=0.02, clock=model.clock))
    assert both == Contention(target_factor=1.0, drafter_factor=1.0)


# ------------------------------------------------------------------------------------------------- the curve


def times_of(*rows: tuple[float, ...]) -> ModelTimes:
    return ModelTimes(
        contexts=tuple(range(0, 100 * len(rows), 100)),
        widths=(1, 2, 4),
        forward_s=rows,
        prompt_token_s=0.01,
        repetitions=5,
    )


def test_a_curve_never_falls_with_the_width_or_the_context() -> None:
    curves = times_of((0.3, 0.2, 0.25), (0.3, 0.4, 0.22)).curves.curves
    assert curves[0].forward_s == (0.2, 0.2, 0.22)
    assert curves[1].forward_s == (0.22, 0.22, 0.22)
    assert times_of((0.3, 0.2, 0.25)).draft_cost.token_s == 0.2
    rising = ((0.1, 0.2, 0.3), (0.2, 0.3, 0.4))
    assert tuple(curve.forward_s for curve in times_of(*rising).curves.curves) == rising


# ---------------------------------------------------------------------------------------------- interruption

MEASURES: dict[str, Callable[[TimedModel], Generator[float, None, Any]]] = {
    "target": lambda model: measure_target(model, 300, clock=model.clock),
    "drafter": lambda model: measure_drafter(model, 300, clock=model.clock),
    "plain": lambda model: measure_plain_ratio(model, model, 300, clock=model.clock),
    "prompt": lambda model: measure_prompt_ratio(model, model, clock=model.clock),
    "contention": lambda model: measure_contention(model, model, seconds=0.05, clock=model.clock),
}


@pytest.mark.parametrize("name", MEASURES)
def test_stopping_a_measurement_at_any_step_closes_its_sequences(name: str) -> None:
    steps = len(finish(MEASURES[name](TimedModel()))[1])
    for stop_after in range(steps + 1):
        model = TimedModel()
        measuring = MEASURES[name](model)
        for _ in range(stop_after):
            next(measuring)
        measuring.close()
        assert model.open_sequences == 0, stop_after
    assert model.sequences
    assert not model.closed


@pytest.mark.parametrize("name", MEASURES)
def test_a_pause_between_two_steps_is_not_measured(name: str) -> None:
    expected, _ = finish(MEASURES[name](TimedModel()))
    model = TimedModel()
    measuring = MEASURES[name](model)
    while True:
        try:
            next(measuring)
        except StopIteration as done:
            found = done.value
            break
        model.now_s += 100.0
    if name in ("plain", "prompt"):
        assert found == pytest.approx(expected)
    elif name == "contention":
        assert (found.target_factor, found.drafter_factor) == pytest.approx((1.0, 1.0))
    else:
        times, wanted = (found[0], expected[0]) if name == "target" else (found, expected)
        for row, known in zip(times.forward_s, wanted.forward_s, strict=True):
            assert row == pytest.approx(known)
        assert times.prompt_token_s == pytest.approx(wanted.prompt_token_s)


@pytest.mark.parametrize("name", MEASURES)
def test_a_failing_forward_is_raised_and_the_timed_sequences_closed(name: str) -> None:
    model = TimedModel(faults=Faults(raise_at=4))
    with pytest.raises(ForwardError):
        finish(MEASURES[name](model))
    assert model.open_sequences == 0


def test_a_measurement_step_is_at_most_a_few_forwards() -> None:
    """A chat that wants to answer waits for one step."""
    model = TimedModel()
    measuring, before, longest = measure_target(model, 4096, clock=model.clock), 0.0, 0.0
    for _ in measuring:
        longest, before = max(longest, model.now_s - before), model.now_s
    assert longest < 40 * by_width(1, 0, 0)


# ------------------------------------------------------------------------------------------------ experts

LAYERS, USED, OF = 3, 2, 16
EXPERT_S = 0.0005


class MixtureModel(TimedModel):
    """A mixture that routes by the token alone; each expert takes EXPERT_S, each row 1 ms, and a forward 10 ms."""

    def __init__(self) -> None:
        super().__init__(vocabulary_size=64)

    @property
    def facts(self) -> ModelFacts:
        return replace(super().facts, mixture=Mixture(used=LAYERS * USED, count=LAYERS * OF, share=0.2))

    def open(self, context_length: int) -> FakeSequence:
        sequence = MixtureSequenceOfTokens(self, context_length)
        self.sequences.append(sequence)
        return sequence


def timed_mixture(text: abc.Sequence[int] = ()) -> ModelTimes:
    model = MixtureModel()
    return finish(measure_target(model, 300, text=text, clock=model.clock))[0][0]


def experts_of(token: int) -> set[tuple[int, int]]:
    return {(layer, (5 * token + 3 * layer + slot) % OF) for layer in range(LAYERS) for slot in range(USED)}


class MixtureSequenceOfTokens(TimedSequence):
    experts_read = 0

    def forward(self, tokens: abc.Sequence[int], rows: int) -> Rows:
        self.experts_read = len(set[tuple[int, int]]().union(*map(experts_of, tokens)))
        self._timed.now_s += EXPERT_S * self.experts_read
        return super().forward(tokens, rows)


def test_a_mixture_is_timed_on_text_and_each_of_its_experts() -> None:
    text = [token for token in range(60) for _ in range(2)]  # each second row shares all experts of the one before it
    times = timed_mixture(text)
    assert times.expert_s == pytest.approx(EXPERT_S)
    assert times.experts[0] == LAYERS * USED
    assert times.experts[1] < 1.6 * LAYERS * USED
    for row in times.forward_s:
        dense = [by_width(width, 0, 0) for width in WIDTHS]
        assert row == pytest.approx([a + EXPERT_S * read for a, read in zip(dense, times.experts, strict=True)])
    assert timed_mixture().experts[1] > times.experts[1], "random tokens share fewer experts"


def test_the_experts_of_other_texts_are_predicted_within_a_tenth() -> None:
    model, times = MixtureModel(), timed_mixture([*range(40)] * 3)
    for texts in ([3] * 9 + [*range(9)], [5 * token % 13 for token in range(18)]):
        live = LiveTimes(times.curves, 8)
        sequence = model.open(40)
        assert isinstance(sequence, MixtureSequenceOfTokens)
        for start in range(10):
            for width in (1, 4, 8):
                sequence.rewind(0)
                before = model.now_s
                sequence.forward(texts[start : start + width], width)
                shown = live.record(width, 0, model.now_s - before, experts=sequence.experts_read)
                assert shown == pytest.approx(1.0, rel=0.1)


def test_a_dense_models_stored_times_have_no_experts_and_a_mixtures_come_back() -> None:
    dense, mixture = target(TimedModel())[0], timed_mixture()
    assert not {"experts", "expert_s", "busy"} & set(TIMES.stored(dense))
    for times in (dense, mixture):
        assert kind_of(TIMES.hint).read(json.loads(json.dumps(TIMES.stored(times)))) == times
    assert mixture.curves.experts is not None
