"""From scores to a token, against slow and obvious references."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from edgespec.decoding.sampling import Chooser, Purpose, Sampling, distribution, draw, request_of
from edgespec.errors import InvalidRequestError, NonFiniteLogitsError
from edgespec.interfaces import drawing as module
from edgespec.interfaces.drawing import Measure, noise_key, penalised
from edgespec.interfaces.rows import Distribution, Rows
from tests.support.gates import at_least

INFINITY = float("inf")


def logits(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def as_dict(own: Distribution) -> dict[int, float]:
    return dict(zip(own.ids.tolist(), own.probs.tolist(), strict=True))


def reference(
    scores: Sequence[float], options: Sampling, context: Sequence[int] = (), begins: int = 0
) -> dict[int, float]:
    """The documented order of cuts, applied to one id after another."""
    bias = dict(options.logit_bias)
    values = [float(score) + bias.get(token, 0.0) for token, score in enumerate(scores)]
    last = options.repeat_last_n if options.repeat_last_n >= 0 else len(context)
    first = max(0, len(context) - last)
    for token in set(context[first:]):
        factor = options.repeat_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        if count := list(context[max(first, begins) :]).count(token):
            values[token] -= options.presence_penalty + options.frequency_penalty * count
    by_score = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if options.temperature == 0:
        return {by_score[0]: 1.0}
    best = values[by_score[0]]
    weights = {i: math.exp((values[i] - best) / options.temperature) for i in range(len(values))}
    kept = by_score[: options.top_k] if options.top_k else by_score
    if options.top_p < 1:
        wanted, running, nucleus = options.top_p * math.fsum(weights[i] for i in kept), 0.0, []
        for i in kept:
            nucleus.append(i)
            running += weights[i]
            if running >= wanted:
                break
        kept = nucleus
    if options.min_p > 0:
        highest = max(weights[i] for i in kept)
        kept = [i for i in kept if weights[i] >= options.min_p * highest]
    kept = [i for i in kept if weights[i] >= 2.0**-40]
    total = math.fsum(weights[i] for i in kept)
    return {i: weights[i] / total for i in sorted(kept)}


def agree(own: Distribution, wanted: dict[int, float]) -> None:
    """Equal up to the rounding of weights to float32; tests/interfaces/test_drawing.py checks the bits."""
    assert own.ids.tolist() == list(wanted)
    assert own.probs.tolist() == pytest.approx(list(wanted.values()), rel=2e-6)


# ------------------------------------------------------------------------------------------ one option each


SCORES = logits(1.0, 3.0, -2.0, 3.0, 0.5, 2.0)


@pytest.mark.parametrize(
    "options",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.3),
        Sampling(temperature=7.0),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=1.0, top_k=6),
        Sampling(temperature=1.0, top_k=99),
        Sampling(temperature=1.0, top_p=0.1),
        Sampling(temperature=1.0, top_p=0.75),
        Sampling(temperature=1.0, top_p=0.999),
        Sampling(temperature=1.0, min_p=0.2),
        Sampling(temperature=1.0, min_p=1.0),
        Sampling(temperature=1.0, top_k=4, top_p=0.8, min_p=0.05),
        Sampling(temperature=1.0, repeat_penalty=1.5),
        Sampling(temperature=1.0, repeat_penalty=0.5),
        Sampling(temperature=1.0, presence_penalty=1.25),
        Sampling(temperature=1.0, frequency_penalty=-0.75),
        Sampling(temperature=1.0, repeat_penalty=1.5, repeat_last_n=2),
        Sampling(temperature=1.0, frequency_penalty=0.75, repeat_last_n=4),
        Sampling(temperature=1.0, presence_penalty=0.75, repeat_last_n=0),
        Sampling(temperature=0.6, top_k=5, top_p=0.9, min_p=0.01, repeat_penalty=1.1, frequency_penalty=0.5),
        Sampling(repeat_penalty=2.0),
        Sampling(logit_bias={1: -4.0, 2: 100}),
        Sampling(temperature=1.0, logit_bias={1: 0.5, 4: -100}, top_k=4, repeat_penalty=1.5),
    ],
)
def test_each_sampling_option_matches_the_reference(options: Sampling) -> None:
    context = [1, 1, 2, 5, 1]
    for begins in (0, 2, 5):
        own = distribution(SCORES, options, context, begins=begins)
        agree(own, reference(SCORES.tolist(), options, context, begins))


def test_top_k_top_p_and_min_p_match_values_computed_by_hand() -> None:
    doubling = logits(*np.log([8, 4, 2, 1, 1]))
    at_one = Sampling(temperature=1.0)
    assert distribution(doubling, at_one).probs == pytest.approx([0.5, 0.25, 0.125, 0.0625, 0.0625], rel=1e-6)
    halved = distribution(doubling, Sampling(temperature=0.5))
    assert halved.probs == pytest.approx(np.array([64, 16, 4, 1, 1]) / 86, rel=1e-6)
    assert as_dict(distribution(doubling, Sampling(temperature=1.0, top_k=2))) == pytest.approx({0: 2 / 3, 1: 1 / 3})
    # 0.5 + 0.25 = 0.75 does not hold 0.8 of the mass, 0.875 does.
    assert distribution(doubling, Sampling(temperature=1.0, top_p=0.8)).ids.tolist() == [0, 1, 2]
    assert distribution(doubling, Sampling(temperature=1.0, top_p=0.49)).ids.tolist() == [0]
    # A quarter of the highest probability is 0.125: just above and just below it.
    assert distribution(doubling, Sampling(temperature=1.0, min_p=0.26)).ids.tolist() == [0, 1]
    assert distribution(doubling, Sampling(temperature=1.0, min_p=0.24)).ids.tolist() == [0, 1, 2]


def test_top_p_is_a_share_of_the_mass_that_top_k_keeps() -> None:
    own = distribution(logits(*np.log([4, 3, 2, 1])), Sampling(temperature=1.0, top_k=2, top_p=0.55))
    assert own.ids.tolist() == [0], "4/7 of the top k, though only 4/10 of all tokens"


def test_penalties_match_values_computed_by_hand() -> None:
    scores = logits(2.0, -2.0, 0.0, 2.0, -2.0)
    options = Sampling(repeat_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    own = penalised(scores, request_of(options, [0, 1, 1, 2, 0, 0]))
    assert own.tolist() == [1.0 - 0.5 - 0.75, -4.0 - 0.5 - 0.5, -0.5 - 0.25, 2.0, -2.0]
    own = penalised(scores, request_of(options, [0, 1, 1, 2, 0, 0], begins=4))
    assert own.tolist() == [1.0 - 0.5 - 0.5, -4.0, 0.0, 2.0, -2.0], "presence and frequency are those of the answer"
    own = penalised(scores, request_of(replace(options, repeat_last_n=3), [0, 1, 1, 2, 0, 0]))
    assert own.tolist() == [1.0 - 0.5 - 0.5, -2.0, -0.5 - 0.25, 2.0, -2.0], "the last three tokens"
    assert scores.tolist() == [2.0, -2.0, 0.0, 2.0, -2.0]


def test_penalties_move_the_greedy_choice_and_leave_the_scores_alone() -> None:
    scores = logits(1.0, 2.0, 1.9)
    options = Sampling(presence_penalty=1.0)
    assert distribution(scores, options, [1]).ids.tolist() == [2]
    assert distribution(scores, options, []).ids.tolist() == [1]
    assert scores.tolist() == logits(1.0, 2.0, 1.9).tolist()


# ------------------------------------------------------------------------------------- ties and extreme scores


def test_truncation_keeps_the_lowest_ids_on_a_tie() -> None:
    tied = logits(1, 5, 5, 5, 1)
    assert distribution(tied, Sampling()).ids.tolist() == [1]
    assert distribution(tied, Sampling(temperature=1.0, top_k=2)).ids.tolist() == [1, 2]
    assert distribution(tied, Sampling(temperature=1.0, top_k=4)).ids.tolist() == [0, 1, 2, 3]
    assert distribution(tied, Sampling(temperature=1.0, top_p=0.5)).ids.tolist() == [1, 2]
    assert distribution(logits(0, 0, 0, 0), Sampling(temperature=1.0, top_p=0.5)).ids.tolist() == [0, 1]
    assert distribution(tied, Sampling(temperature=1.0, min_p=1.0)).ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize("options", [Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=4, top_p=0.999)])
def test_a_score_of_minus_infinity_has_probability_zero(options: Sampling) -> None:
    own = distribution(logits(-INFINITY, 1.0, -INFINITY, 1.0, -INFINITY), options)
    assert as_dict(own) == {1: 0.5, 3: 0.5}


def test_a_score_of_minus_infinity_stays_so_under_penalties() -> None:
    options = Sampling(temperature=1.0, repeat_penalty=2.0, presence_penalty=1.0)
    assert distribution(logits(-INFINITY, 1.0), options, [0, 0]).ids.tolist() == [1]


def test_scores_far_below_the_best_have_probability_zero() -> None:
    own = distribution(logits(0.0, -1e5, 3e38, -3e38), Sampling(temperature=1e-3))
    assert as_dict(own) == {2: 1.0}


@pytest.mark.parametrize("options", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=1)])
@pytest.mark.parametrize(
    "spoilt", [logits(float("nan"), 1), logits(9, float("nan")), logits(1, INFINITY), logits(-INFINITY, -INFINITY)]
)
def test_sampling_from_scores_that_are_not_finite_raises(options: Sampling, spoilt: np.ndarray) -> None:
    with pytest.raises(NonFiniteLogitsError):
        distribution(spoilt, options)
    rows = Rows(1, lambda _: spoilt)
    with pytest.raises(NonFiniteLogitsError):
        Chooser(options).target_token(rows, 0, [0])
    with pytest.raises(NonFiniteLogitsError), np.errstate(all="ignore"):
        Chooser(options).draft(rows, 0, [0], at_least(0.5))


# ----------------------------------------------------------------------------------------- by hypothesis


finite = st.floats(-30, 30, width=32)
any_options = st.builds(
    Sampling,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    repeat_last_n=st.sampled_from([-1, -1, 0, 3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.2]),
)


@given(st.lists(finite, min_size=1, max_size=10), any_options, st.data())
@settings(max_examples=300, deadline=None)
def test_a_sampling_distribution_sums_to_one_over_ascending_ids(
    scores: list[float], options: Sampling, data: st.DataObject
) -> None:
    context = data.draw(st.lists(st.integers(0, len(scores) - 1), max_size=8))
    own = distribution(logits(*scores), options, context)
    assert own.ids.dtype == np.int64
    assert own.probs.dtype == np.float64
    assert (np.diff(own.ids) > 0).all()
    assert ((own.probs > 0) & (own.probs <= 1)).all()
    assert own.probs.sum() == pytest.approx(1, abs=1e-12)
    if options.top_k:
        assert len(own.ids) <= options.top_k
    dense = own.dense(len(scores))
    assert dense.shape == (len(scores),)
    assert dense.sum() == pytest.approx(1, abs=1e-12)
    assert own.peak == dense.max()
    token = draw(own, 1, 2, Purpose.TOKEN)
    assert token in own.ids


@given(st.lists(st.integers(-8, 8), min_size=1, max_size=10), any_options, st.data())
@settings(max_examples=300, deadline=None)
def test_any_combination_of_sampling_options_matches_the_reference(
    scores: list[int], options: Sampling, data: st.DataObject
) -> None:
    context = data.draw(st.lists(st.integers(0, len(scores) - 1), max_size=8))
    begins = data.draw(st.integers(0, len(context)))
    wanted = reference(scores, options, context, begins)
    own = as_dict(distribution(logits(*scores), options, context, begins=begins))
    if options.top_p < 1 and own.keys() != wanted.keys():
        # The two round differently, so a nucleus that ends exactly at the mass may differ by its last id.
        last = set(own) ^ set(wanted)
        untouched = reference(scores, replace(options, top_p=1.0, min_p=0.0), context, begins)
        assert len(last) == 1
        assert untouched.keys() >= last
        return
    assert own == pytest.approx(wanted, rel=1e-5)


@given(st.lists(st.integers(-6, 6), min_size=1, max_size=300), st.floats(0.01, 0.999), st.integers(1, 40))
@example(list(range(-6, 7)) * 20, 0.95, 3)
@example([0] * 300, 0.5, 7)
@settings(max_examples=200, deadline=None)
def test_the_top_p_shortcut_keeps_the_same_ids_as_a_full_sort(scores: list[int], mass: float, guess: int) -> None:
    options = Sampling(temperature=1.0, top_p=mass)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_NUCLEUS_GUESS", 10**9)
        full = distribution(logits(*scores), options)
        patch.setattr(module, "_NUCLEUS_GUESS", guess)
        short = distribution(logits(*scores), options)
    assert short.ids.tolist() == full.ids.tolist()
    assert short.probs.tolist() == full.probs.tolist()


@pytest.mark.parametrize(("spread", "beyond_guess"), [(0.001, True), (8.0, False)])
def test_top_p_of_a_large_vocabulary_matches_a_full_sort(spread: float, beyond_guess: bool) -> None:
    scores = (np.random.default_rng(3).standard_normal(5000) * spread).astype(np.float32)
    own = distribution(scores, Sampling(temperature=1.0, top_p=0.9))
    assert (len(own.ids) > module._NUCLEUS_GUESS) is beyond_guess
    agree(own, reference(scores.tolist(), Sampling(temperature=1.0, top_p=0.9)))


# --------------------------------------------------------------------------------------------- keyed draws


def test_the_noise_key_of_a_draw_depends_on_seed_position_and_purpose() -> None:
    options = Sampling(temperature=0.7, top_k=4, top_p=0.9, min_p=0.1, seed=9)
    own = request_of(options, [5, 5, 6])
    assert own.key == noise_key(9, 3, Purpose.TOKEN)
    assert (own.temperature, own.top_k, own.top_p, own.min_p) == (0.7, 4, 0.9, 0.1)
    assert (own.wanted, own.measure, own.seen) == (1, Measure.NOTHING, {})
    other = request_of(options, [5], Purpose.CORRECTION, wanted=4, measure=Measure.MASS)
    assert other.key == noise_key(9, 1, Purpose.CORRECTION)
    assert (other.wanted, other.measure) == (4, Measure.MASS)


def test_a_greedy_request_has_no_noise_and_truncates_nothing() -> None:
    own = request_of(Sampling(top_k=1, top_p=0.5, min_p=0.5, repeat_penalty=1.5, presence_penalty=1), [5, 5, 6])
    assert (own.key, own.top_k, own.top_p, own.min_p, own.temperature) == (None, 0, 1.0, 0.0, 1.0)
    assert (own.repeat_penalty, own.presence_penalty, own.frequency_penalty) == (1.5, 1, 0.0)
    assert own.seen == {5: 2, 6: 1}
    assert request_of(Sampling(), [5, 5, 6]).seen == {}
    of_the_answer = Sampling(frequency_penalty=0.5)
    assert request_of(of_the_answer, [5, 5, 6], begins=1).seen == {5: 1, 6: 1}
    assert request_of(of_the_answer, [5, 5, 6], begins=3).seen == {}


def test_a_draw_from_a_single_token_returns_that_token() -> None:
    assert draw(Distribution(np.array([9]), np.ones(1)), 0, 0, Purpose.TOKEN) == 9


def test_a_distribution_of_some_ids_equals_a_row_with_the_rest_at_minus_infinity() -> None:
    ids = np.array([3, 9, 10, 40])
    every = np.full(50, -INFINITY, dtype=np.float32)
    every[ids] = logits(1, 4, 4, 2)
    for options in (
        Sampling(),
        Sampling(temperature=0.8, top_k=3),
        Sampling(temperature=0.8, top_p=0.9, repeat_penalty=1.3),
    ):
        own, wanted = distribution(every[ids], options, [9, 11], ids), distribution(every, options, [9, 11])
        assert as_dict(own) == as_dict(wanted)


def test_truncation_does_not_change_the_noise_of_the_kept_ids() -> None:
    """The noise of an id is independent of the truncation, so drafter and target share it with different cuts."""
    wide = distribution(SCORES, Sampling(temperature=1.0))
    narrow = distribution(SCORES, Sampling(temperature=1.0, top_k=3))
    for position in range(200):
        token = draw(wide, 9, position, Purpose.TOKEN)
        if token in narrow.ids:
            assert draw(narrow, 9, position, Purpose.TOKEN) == token


# ------------------------------------------------------------------------------------ defaults and ranges


def test_default_sampling_is_greedy_and_untruncated() -> None:
    own = Sampling()
    assert (own.temperature, own.top_k, own.top_p, own.min_p) == (0.0, 0, 1.0, 0.0)
    assert (own.repeat_penalty, own.presence_penalty, own.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (own.seed, own.noise_seed, own.rule, own.logit_bias) == (None, 0, "keyed", ())
    assert own.greedy
    assert not own.penalises
    assert distribution(SCORES, own).ids.tolist() == [1]
    assert distribution(SCORES, Sampling(repeat_penalty=9.0)).ids.tolist() == [1], "no context by default"


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("temperature", [0, 100, 0.001], [-0.001, 100.5, float("nan"), INFINITY]),
        ("top_k", [0, 1, 10**6], [-1]),
        ("top_p", [1, 1e-9, 0.5], [0, -0.1, 1.0001, float("nan")]),
        ("min_p", [0, 1, 0.5], [-0.1, 1.1, float("nan")]),
        ("repeat_penalty", [0.1, 10], [0, -1, 10.1, float("nan")]),
        ("repeat_last_n", [-1, 0, 64, 10**6], [-2]),
        ("presence_penalty", [-10, 10], [-10.1, 10.1, float("nan")]),
        ("frequency_penalty", [-10, 10], [-10.1, 10.1, float("nan")]),
        ("seed", [0, 2**64 - 1], [-1, 2**64]),
        ("rule", ["keyed", "rejection"], ["", "Keyed"]),
    ],
)
def test_sampling_options_outside_their_ranges_are_refused(
    name: str, inside: list[object], outside: list[object]
) -> None:
    for value in inside:
        assert getattr(Sampling(**{name: value}), name) == value  # type: ignore[arg-type]
    for value in outside:
        with pytest.raises(InvalidRequestError) as caught:
            Sampling(**{name: value})  # type: ignore[arg-type]
        assert name in caught.value.message
        assert caught.value.hint
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", "1", "temperature is a number, not str '1'"),
        ("temperature", None, "temperature is a number, not NoneType None"),
        ("top_k", 1.5, "top_k is a whole number, not float 1.5"),
        ("top_k", True, "top_k is a whole number, not bool True"),
        ("repeat_last_n", 64.5, "repeat_last_n is a whole number, not float 64.5"),
        ("top_p", [0.5], r"top_p is a number, not list \[0.5\]"),
        ("seed", "5", "seed is a whole number, not str '5'"),
        ("rule", None, "rule cannot be None"),
        ("rule", ["keyed"], "rule cannot be"),
    ],
)
def test_sampling_options_of_the_wrong_type_are_refused(name: str, value: object, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        Sampling(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Sampling(), "greedy"),
        (Sampling(seed=3, top_k=5), "greedy"),
        (Sampling(repeat_penalty=1.1, seed=3), "greedy, repeat-penalty 1.1"),
        (Sampling(repeat_penalty=1.1, repeat_last_n=64), "greedy, repeat-penalty 1.1, repeat-last-n 64"),
        (Sampling(temperature=0.7, top_p=0.95, seed=0), "temperature 0.7, top-p 0.95, seed 0"),
        (Sampling(temperature=1.0, rule="rejection"), "temperature 1.0, rule rejection"),
        (Sampling(logit_bias={4: -1, 2: 1}), "greedy, logit-bias of 2 tokens"),
    ],
)
def test_the_text_form_of_sampling_lists_the_options_that_are_on(options: Sampling, words: str) -> None:
    assert str(options) == words


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        ("1", "logit_bias maps tokens to numbers, not str '1'"),
        ([1, 2], "logit_bias maps tokens to numbers, not list"),
        ({"1": 2.0}, "logit_bias names tokens by id, not by str '1'"),
        ({True: 2.0}, "logit_bias names tokens by id, not by bool True"),
        ({-1: 2.0}, "logit_bias names tokens by id, not by int -1"),
        ({2**31: 2.0}, "logit_bias names tokens by id, not by int 2147483648"),
        ({1: "2"}, "logit_bias of token 1 cannot be '2'"),
        ({1: True}, "logit_bias of token 1 cannot be True"),
        ({1: 100.5}, "logit_bias of token 1 cannot be 100.5"),
        ({1: -101}, "logit_bias of token 1 cannot be -101"),
        ({1: float("nan")}, "logit_bias of token 1 cannot be nan"),
        ([(1, 1.0), (1, 2.0)], "logit_bias names token 1 twice"),
        (dict.fromkeys(range(301), 1.0), "logit_bias names 301 tokens"),
    ],
)
def test_a_wrong_bias_is_refused(bias: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Sampling(logit_bias=bias)
    assert caught.value.message.startswith(words)
    assert caught.value.param == "logit_bias"


def test_a_bias_is_kept_as_pairs_by_ascending_token() -> None:
    own = Sampling(logit_bias={np.int64(7): np.float32(0.5), 2: -100, 5: 100})  # type: ignore[dict-item]
    assert own.logit_bias == ((2, -100.0), (5, 100.0), (7, 0.5))
    assert hash(own) == hash(Sampling(logit_bias=[[7, 0.5], [5, 100], [2, -100]]))  # type: ignore[arg-type]
    assert request_of(own, []).bias == ((2, -INFINITY), (5, 100.0), (7, 0.5)), "the least bias bans a token"
    assert len(Sampling(logit_bias=dict.fromkeys(range(300), 0.0)).logit_bias) == 300


def test_numpy_numbers_are_valid_sampling_options() -> None:
    own = Sampling(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(2**63))  # type: ignore[arg-type]
    assert (own.temperature, own.top_k, own.seed) == (0.5, 3, 2**63)
    assert [type(value) for value in (own.temperature, own.top_k, own.seed)] == [float, int, int]
    same = Sampling(temperature=0.5, top_k=3, seed=2**63)
    assert own == same
    assert request_of(own, [1, 2]) == request_of(same, [1, 2])


@pytest.mark.parametrize(
    ("options", "penalises"),
    [
        ({"repeat_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"repeat_penalty": 1.1, "repeat_last_n": 1}, True),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, False),
        ({}, False),
    ],
)
def test_sampling_penalises_if_any_penalty_differs_from_its_neutral_value(
    options: dict[str, float], penalises: bool
) -> None:
    assert Sampling(**options).penalises is penalises  # type: ignore[arg-type]
