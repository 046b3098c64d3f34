"""The width probe against a model whose unequal widths are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edgespec.calibration.width_probe import STEP_TOKENS, probe_tokens, probe_widths
from edgespec.errors import ForwardError
from edgespec.planning.cost.widths import BORDERS, POSITIONS, WIDEST, ContextProbe, WidthProbe, probe_starts
from edgespec.runtimes.llama.context import LlamaSettings
from tests.support.loading import load_model
from tests.support.noisy_model import NoisyModel, Rule
from tests.support.tiny_gguf import write_tiny_gguf

ALL = tuple(range(1, WIDEST + 1))
FIRST = 96
STARTS = (FIRST, *(border - POSITIONS // 2 for border in BORDERS))
END = STARTS[-1] + POSITIONS


def noise_of(*widths: int, at: range = range(10**6), by: float = 0.25) -> Rule:
    def rule(width: int, position: int, _written: Sequence[int]) -> float:
        return by if width in widths and position in at else 0.0

    return rule


def differing(probe: WidthProbe) -> list[list[int]]:
    return [sorted(context.max_abs_diff) for context in probe.contexts]


# ------------------------------------------------------------------------------------------- equal and unequal widths


def test_without_noise_every_width_is_bit_equal() -> None:
    probe = probe_widths(NoisyModel())
    assert probe.widths == ALL
    assert probe.depth_cap == WIDEST - 1
    assert probe.max_abs_diff == 0
    assert differing(probe) == [[], [], [], []]
    assert tuple(context.start for context in probe.contexts) == STARTS
    assert probe.context_range == (FIRST, END)
    assert not probe.complete


@pytest.mark.parametrize("width", ALL[1:])
def test_only_the_noisy_width_is_left_out(width: int) -> None:
    probe = probe_widths(NoisyModel(noise_of(width)))
    assert probe.widths == tuple(w for w in ALL if w != width)
    assert probe.depth_cap == width - 2
    assert differing(probe) == [[width], [], [], []]  # and not measured again


def test_the_smallest_possible_difference_is_detected() -> None:
    def rule(width: int, _position: int, _written: Sequence[int]) -> float:
        return 1e-6 if width == 6 else 0.0

    assert 6 not in probe_widths(NoisyModel(rule)).widths


@pytest.mark.parametrize("number", range(4))
def test_noise_beyond_a_border_is_detected_there(number: int) -> None:
    start = STARTS[number]
    border = 96 if number == 0 else BORDERS[number - 1]
    probe = probe_widths(NoisyModel(noise_of(4, 9, at=range(border, 10**6))))
    assert probe.widths == tuple(w for w in ALL if w not in (4, 9))
    assert differing(probe) == [[4, 9] if each == start else [] for each in STARTS]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("offset", [0, POSITIONS - 1], ids=["first", "last"])
def test_noise_in_one_position_of_a_probe_is_detected(start: int, offset: int) -> None:
    position = start + offset
    probe = probe_widths(NoisyModel(noise_of(*ALL[1:], at=range(position, position + 1))))
    assert probe.widths == (1,)
    assert probe.depth_cap == 0


@settings(max_examples=40, deadline=None)
@given(noisy=st.dictionaries(st.integers(2, WIDEST), st.sampled_from(STARTS), max_size=WIDEST - 1))
def test_any_set_of_noisy_widths_is_detected_exactly(noisy: dict[int, int]) -> None:
    def rule(width: int, position: int, _written: Sequence[int]) -> float:
        return 0.5 if noisy.get(width, 10**6) <= position else 0.0

    probe = probe_widths(NoisyModel(rule))
    assert probe.widths == tuple(w for w in ALL if w not in noisy)
    assert differing(probe) == [sorted(w for w, at in noisy.items() if at == start) for start in STARTS]


def test_widths_equal_alone_but_not_in_a_mixture_are_left_out() -> None:
    def rule(_width: int, _position: int, written: Sequence[int]) -> float:
        recent = {width for width in written[-POSITIONS:] if width <= WIDEST}
        return 0.125 if len(recent) > 1 else 0.0

    probe = probe_widths(NoisyModel(rule))
    assert probe.widths == (1,)
    assert probe.depth_cap == 0
    assert differing(probe) == [[0], [], [], []]
    assert probe.max_abs_diff == pytest.approx(0.125, rel=1e-4)


def test_the_mixture_uses_equal_widths_only() -> None:
    def rule(width: int, _position: int, written: Sequence[int]) -> float:
        return 1.0 if width != 5 and 5 in written else float(width == 5)

    probe = probe_widths(NoisyModel(rule))
    assert 5 not in probe.widths
    assert len(probe.widths) == len(ALL) - 1


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_a_width_with_wrong_scores_is_never_bit_equal(garbage: float) -> None:
    probe = probe_widths(NoisyModel(noise_of(7, by=garbage)), complete=True)
    assert probe.widths == tuple(w for w in ALL if w != 7)
    assert probe.max_abs_diff == math.inf


def test_nan_scores_are_not_bit_equal() -> None:
    probe = probe_widths(NoisyModel(noise_of(*ALL, by=math.nan)))
    assert probe.widths == (1,)
    assert probe.max_abs_diff == math.inf


# ------------------------------------------------------------------------------------------------- the bound


def growing(width: int, position: int, _written: Sequence[int]) -> float:
    """Width 3 differs more at each context, width 5 from 512 on, the other widths never."""
    return {3: position / 1024, 5: 0.25 * (position >= 512)}.get(width, 0.0)


def test_a_complete_probe_bounds_every_unequal_width_at_every_context() -> None:
    probe = probe_widths(NoisyModel(growing), complete=True)
    assert probe.complete
    assert probe.widths == tuple(w for w in ALL if w not in (3, 5))
    assert differing(probe) == [[3], [3], [3, 5], [3, 5]]
    for context in probe.contexts:
        # The last row of the probe has the largest difference; it is measured although the first differed already.
        assert context.max_abs_diff[3] == pytest.approx((context.start + POSITIONS - 1) / 1024, rel=1e-4)
    assert probe.max_abs_diff == pytest.approx((END - 1) / 1024, rel=1e-4)


def test_an_ordinary_probe_stops_at_the_first_difference() -> None:
    probe = probe_widths(NoisyModel(growing))
    assert differing(probe) == [[3], [], [5], []]
    assert probe.contexts[0].max_abs_diff[3] == pytest.approx(FIRST / 1024, rel=1e-4)


def test_an_ordinary_probe_takes_fewer_forwards_than_a_complete_one() -> None:
    quick, thorough = NoisyModel(noise_of(*ALL[1:])), NoisyModel(noise_of(*ALL[1:]))
    probe_widths(quick)
    probe_widths(thorough, complete=True)
    assert len(quick.opened[0].widths) < len(thorough.opened[0].widths) / 2


# ------------------------------------------------------------------------------------------- how it measures


def test_every_forward_of_a_probe_has_the_full_width() -> None:
    model = NoisyModel()
    probe_widths(model, widest=5, context_length=200)
    widths = model.opened[0].widths
    way = [STEP_TOKENS, FIRST - STEP_TOKENS]  # to the first probe
    assert widths[:2] == way
    assert widths[2 : 2 + POSITIONS] == [1] * POSITIONS
    rest = widths[2 + POSITIONS :]
    for width in (2, 3, 4, 5):
        count = math.ceil(POSITIONS / width)  # the last one padded to the full width
        assert rest[:count] == [width] * count
        del rest[:count]
    assert len(set(rest)) > 1  # the mixture


def test_only_widths_up_to_the_widest_are_probed() -> None:
    model = NoisyModel()
    assert probe_widths(model, widest=4).widths == (1, 2, 3, 4)
    assert probe_widths(model, widest=1).widths == (1,)
    sequence = model.opened[0]
    compared = [width for width, scored in zip(sequence.widths, sequence.rows, strict=True) if scored]
    assert set(compared) == {1, 2, 3, 4}


def test_probe_progress_grows_to_one() -> None:
    for length in (20, 300, 2000):
        seen: list[float] = []
        probe_widths(NoisyModel(), context_length=length, progress=seen.append)
        assert seen == sorted(set(seen))
        assert seen[0] > 0
        assert seen[-1] == 1


@pytest.mark.parametrize(
    ("length", "starts"),
    [
        (1, [0]),
        (FIRST + POSITIONS - 1, [0]),
        (FIRST + POSITIONS, list(STARTS[:1])),
        (STARTS[1] + POSITIONS - 1, list(STARTS[:1])),
        (STARTS[1] + POSITIONS, list(STARTS[:2])),
        (STARTS[2] + POSITIONS - 1, list(STARTS[:2])),
        (STARTS[2] + POSITIONS, list(STARTS[:3])),
        (END - 1, list(STARTS[:3])),
        (END, list(STARTS)),
        (100_000, list(STARTS)),
    ],
)
def test_probes_stay_within_the_context(length: int, starts: list[int]) -> None:
    assert probe_starts(length) == starts
    model = NoisyModel()
    probe = probe_widths(model, context_length=length)
    assert [context.start for context in probe.contexts] == starts
    assert probe.context_range == (starts[0], starts[-1] + POSITIONS)
    assert model.opened[0].context_length <= max(length, POSITIONS) + WIDEST


@pytest.mark.parametrize(
    ("length", "more"),
    [
        (50, [38]),
        (END, []),
        (END + 1, [END + 1 - POSITIONS]),
        (2048, [2036]),
        (4096, [2042, 4084]),
        (5000, [2042, 4090, 4988]),
    ],
)
def test_probes_to_the_end_cross_every_power_of_two_and_the_context_end(length: int, more: list[int]) -> None:
    assert probe_starts(length, to_end=True) == [*probe_starts(length), *more]
    assert probe_starts(length, to_end=False) == probe_starts(length)


def test_probes_cross_every_border() -> None:
    for border in BORDERS:
        assert any(start < border < start + POSITIONS for start in probe_starts(10_000)), border


def test_a_probe_covers_only_the_contexts_that_it_reached() -> None:
    short, long = probe_widths(NoisyModel(), context_length=300), probe_widths(NoisyModel())
    beyond = STARTS[2] + POSITIONS
    assert [short.covers(length) for length in (108, 300, beyond - 1, beyond, 4096)] == [True] * 3 + [False] * 2
    assert all(long.covers(length) for length in (1, 108, 300, END, 10**6))
    # A context too short for any border is probed from its first token, unlike a longer one.
    tiny = probe_widths(NoisyModel(), context_length=50)
    assert tiny.covers(20)
    assert not tiny.covers(200)
    assert not WidthProbe(widths=(1, 2)).covers(1)


def test_a_probe_closes_its_sequence_but_not_the_model() -> None:
    model = NoisyModel()
    probe_widths(model, widest=2)
    assert [sequence.closed for sequence in model.opened] == [True]
    assert not model.closed


def test_a_failing_probe_raises_and_closes_its_sequence() -> None:
    def fail(_width: int, position: int, _written: Sequence[int]) -> float:
        if position > 255:
            raise ForwardError("out of luck", code=-3)
        return 0.0

    model = NoisyModel(fail)
    with pytest.raises(ForwardError):
        probe_widths(model)
    assert model.opened[0].closed


def test_probe_tokens_are_always_the_same_and_in_range() -> None:
    assert probe_tokens(50, 1000) == probe_tokens(60, 1000)[:50]
    assert set(probe_tokens(500, 3)) == {0, 1, 2}


# ------------------------------------------------------------------------------------------------ the record


@pytest.mark.parametrize(
    ("widths", "cap"),
    [((1,), 0), ((1, 2), 1), ((1, 2, 3, 5, 6), 2), ((1, 3, 4), 0), (ALL, WIDEST - 1), ((), 0)],
)
def test_the_depth_cap_needs_every_smaller_width(widths: tuple[int, ...], cap: int) -> None:
    assert WidthProbe(widths=widths).depth_cap == cap


def test_an_empty_probe_has_no_context_range() -> None:
    assert WidthProbe(widths=(1,)).context_range == (0, 0)
    assert WidthProbe(widths=(1,)).max_abs_diff == 0


def test_the_largest_difference_covers_all_contexts() -> None:
    contexts = (
        ContextProbe(start=0, positions=12, max_abs_diff={2: 0.5, 3: 0.1}),
        ContextProbe(start=50, positions=12, max_abs_diff={3: 0.75}),
    )
    assert WidthProbe(widths=(1,), contexts=contexts).max_abs_diff == 0.75


# -------------------------------------------------------------------------------------------------- with a real model


def test_a_real_models_width_class_holds_for_other_tokens_and_contexts(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", quant="Q8_0", width=128)
    with load_model(path, LlamaSettings()) as model:
        probe = probe_widths(model, context_length=300)
        again = probe_widths(model, context_length=300)
        assert (again.widths, again.contexts) == (probe.widths, probe.contexts)
        assert probe.plain_forward_s is not None
        assert 0 < probe.plain_forward_s < 1
        assert probe.widths[0] == 1
        tokens = np.random.default_rng(5).integers(0, model.facts.vocabulary_size, 300).tolist()
        with closing(model.open(400)) as sequence:
            sequence.forward(tokens[:230], 0)
            plain = [sequence.forward([token], 1).logits(0) for token in tokens[230:262]]
            for width in probe.widths:
                sequence.rewind(230)
                for at in range(230, 262 - width, width):
                    rows = sequence.forward(tokens[at : at + width], width)
                    for index in range(width):
                        assert np.array_equal(rows.logits(index), plain[at - 230 + index]), (width, at, index)
