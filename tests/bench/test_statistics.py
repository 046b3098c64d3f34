"""Paired statistics against brute force and known answers, and their invariances."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edgespec.bench import LEAST_PASSES
from edgespec.bench.statistics import (
    NARROW_WITHIN,
    SAME_WITHIN,
    Speedup,
    abba,
    by_category,
    geomean,
    mbsu,
    regret,
    shuffled,
    speedup,
)

speeds = st.floats(min_value=0.01, max_value=10_000)
measured = st.dictionaries(
    st.text(min_size=1, max_size=4),
    st.lists(st.floats(min_value=0.05, max_value=20), min_size=1, max_size=5),
    min_size=1,
    max_size=8,
)


def lognormal(
    prompts: int, *, mean: float, spread: float, seed: int, passes: int = 3, noise: float = 0.05
) -> dict[str, list[float]]:
    """Prompts that differ by ``spread``, each measured several times with ``noise``."""
    generator = np.random.default_rng(seed)
    truths = generator.normal(mean, spread, size=prompts)
    logs = truths[:, None] + generator.normal(0, noise, size=(prompts, passes))
    return {f"p{number:03}": np.exp(own).tolist() for number, own in enumerate(logs)}


def made(
    value: float, low: float | None = None, high: float | None = None, prompts: int = 3, passes: int = 3
) -> Speedup:
    ends = (value if low is None else low, value if high is None else high)
    return Speedup(geomean=value, ci95=ends, prompts=prompts, passes=passes)


# --------------------------------------------------------------------------------------------- the order of runs


def test_abba_order_reverses_and_rotates_the_first_arm() -> None:
    assert abba(["a", "b"], 1, 0) == ["a", "b", "b", "a"]
    assert abba(["a", "b"], 1, 1) == ["b", "a", "a", "b"]
    assert abba(["a", "b"], 2, 0) == ["a", "b", "b", "a"] * 2


@given(count=st.integers(1, 6), passes=st.integers(1, 4), seed=st.integers(0, 100))
def test_abba_gives_every_arm_the_same_mean_position_and_count(count: int, passes: int, seed: int) -> None:
    arms = [f"arm{number}" for number in range(count)]
    order = abba(arms, passes, seed)
    positions = {arm: [place for place, name in enumerate(order) if name == arm] for arm in arms}
    assert {len(places) for places in positions.values()} == {2 * passes}
    assert {sum(places) for places in positions.values()} == {passes * (len(order) - 1)}
    # The n-th runs of two arms belong to the same half of a pass.
    for nth in range(2 * passes):
        assert {places[nth] // count for places in positions.values()} == {nth}


@given(count=st.integers(1, 6), rounds=st.integers(1, 3))
def test_abba_puts_each_arm_first_equally_often(count: int, rounds: int) -> None:
    arms = [f"arm{number}" for number in range(count)]
    firsts = Counter(abba(arms, 1, prompt)[0] for prompt in range(count * rounds))
    assert firsts == dict.fromkeys(arms, rounds)


@pytest.mark.parametrize(("arms", "passes"), [([], 1), (["a", "a"], 1), (["a"], 0)])
def test_abba_refuses_no_arms_duplicates_and_zero_passes(arms: Sequence[str], passes: int) -> None:
    with pytest.raises(ValueError, match=r"arm|pass"):
        abba(arms, passes, 0)


def test_the_prompt_order_depends_only_on_the_seed() -> None:
    items = list(range(40))
    assert shuffled(items, 1) == shuffled(items, 1)
    assert sorted(shuffled(items, 1)) == items
    assert len({tuple(shuffled(items, seed)) for seed in range(5)} | {tuple(items)}) == 6


# ---------------------------------------------------------------------------------------------------- speed-ups


def test_speedup_equals_a_hand_computed_value() -> None:
    # Medians: of 2, 9, 2 -> 2; of 1/2 -> 1/2; of 2 and 8 -> 4 (in logarithms).
    result = speedup({"a": [2.0, 9.0, 2.0], "b": [0.5], "c": [2.0, 8.0]})
    assert result.geomean == pytest.approx(4 ** (1 / 3))
    assert (result.prompts, result.passes) == (3, 1)


def test_the_interval_equals_that_of_all_pass_resamples() -> None:
    ratios = {"a": [0.9, 1.1, 1.5], "b": [2.0, 1.0, 1.6]}
    medians = [
        [statistics.median(sample) for sample in itertools.product(map(math.log, own), repeat=3)]
        for own in ratios.values()
    ]
    every = [math.exp(statistics.fmean(pair)) for pair in itertools.product(*medians)]
    result = speedup(ratios, resamples=40_000)
    wider = 2.776 / 1.96  # Student's t of four degrees of freedom, over the normal distribution
    ends = (result.geomean * (end / result.geomean) ** wider for end in np.percentile(every, [2.5, 97.5]))
    assert result.ci95 == pytest.approx(tuple(ends), rel=0.01)


@pytest.mark.parametrize(("passes", "cut"), [(3, 0), (6, 0), (8, 0), (9, 1), (12, 2), (1100, 517)])
def test_the_interval_of_one_prompt_is_between_two_of_its_passes(passes: int, cut: int) -> None:
    values = [1.0 + 0.01 * each for each in range(passes)]
    assert speedup({"a": values}).ci95 == pytest.approx((values[cut], values[-1 - cut]))


@pytest.mark.parametrize(
    ("prompts", "passes"), [(1, 3), (1, 5), (1, 6), (1, 9), (2, 3), (2, 5), (3, 3), (4, 3), (12, 3)]
)
def test_equal_arms_differ_in_at_most_one_of_twenty_comparisons(prompts: int, passes: int) -> None:
    apart = 0
    for seed in range(400):
        logs = np.random.default_rng(seed).normal(0, 0.02, size=(prompts, passes))
        ratios = {str(at): np.exp(own).tolist() for at, own in enumerate(logs)}
        apart += speedup(ratios, resamples=300, seed=seed).told_apart
    assert apart <= 400 / 20
    assert apart or prompts * passes < 9, "arms that differ by chance are there"


def test_the_interval_widens_with_passes_that_differ_not_with_prompts() -> None:
    """The prompts are fixed: the choice of other prompts is not part of the uncertainty."""
    apart = speedup({"a": [0.5] * 3, "b": [8.0] * 3})
    assert apart.geomean == pytest.approx(2)
    assert apart.ci95 == pytest.approx((2, 2))
    low, high = speedup({"a": [1.8, 2.0, 2.2], "b": [1.7, 2.0, 2.3]}).ci95
    assert low < 1.95 < 2.05 < high


def test_the_95_per_cent_interval_covers_a_repeated_run_about_as_often() -> None:
    # 12 prompts of 9 passes each. The truth is these prompts' value without noise.
    covered = []
    for seed in range(200):
        generator = np.random.default_rng(seed)
        truths = generator.normal(0.4, 0.5, size=12)
        logs = truths[:, None] + generator.normal(0, 0.05, size=(12, 9))
        result = speedup({str(n): np.exp(own).tolist() for n, own in enumerate(logs)}, resamples=400, seed=seed)
        low, high = result.ci95
        covered.append(low <= math.exp(truths.mean()) <= high)
    assert 0.90 <= statistics.fmean(covered) <= 1.0


@pytest.mark.slow
@given(ratios=measured)
@settings(max_examples=50)
def test_swapping_arm_and_baseline_inverts_speedup_and_interval(ratios: dict[str, list[float]]) -> None:
    swapped = {prompt: [1 / ratio for ratio in own] for prompt, own in ratios.items()}
    one, other = speedup(ratios, resamples=200), speedup(swapped, resamples=200)
    assert one.geomean * other.geomean == pytest.approx(1)
    assert one.ci95 == pytest.approx((1 / other.ci95[1], 1 / other.ci95[0]))


@given(ratios=measured)
@settings(max_examples=50)
def test_speedup_ignores_prompt_order_and_lies_in_its_interval(
    ratios: dict[str, list[float]],
) -> None:
    result = speedup(ratios, resamples=100)
    assert speedup(dict(reversed(ratios.items())), resamples=100) == result
    assert result.ci95[0] <= result.geomean <= result.ci95[1]


def test_with_one_pass_per_prompt_the_interval_is_a_point() -> None:
    result = speedup({"a": [1.5], "b": [0.7], "c": [1.1]})
    assert result.ci95 == (result.geomean, result.geomean)


def test_a_pass_slow_for_every_prompt_widens_the_interval_to_the_estimate() -> None:
    result = speedup({str(number): [1.2, 1.2, 1.1] for number in range(36)})
    assert result.geomean == pytest.approx(1.2)
    assert result.ci95[1] == result.geomean
    assert result.ci95[0] < 1.19


def test_speedup_defaults_to_2000_resamples_and_seed_0() -> None:
    ratios = lognormal(12, mean=0.3, spread=0.5, seed=1)
    assert speedup(ratios) == speedup(ratios, resamples=2000, seed=0)
    assert speedup(ratios).ci95 != speedup(ratios, resamples=1999).ci95
    assert speedup(ratios).ci95 != speedup(ratios, seed=1).ci95
    assert speedup(ratios).geomean == speedup(ratios, seed=1).geomean


def test_one_disturbed_pass_of_three_does_not_change_the_speedup() -> None:
    assert speedup({"a": [1.5, 1.5, 40.0]}).geomean == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("low", "high", "passes", "told_apart", "narrow"),
    [
        (1.19, 1.21, 3, True, True),
        (1.17, 1.21, 3, True, False),
        (1.19, 1.23, 9, True, False),
        (0.99, 1.3, 3, False, False),
        (1.0, 1.21, 3, False, False),
        (1.2, 1.2, 2, False, False),
    ],
)
def test_an_interval_tells_whether_arms_differ_and_whether_it_is_narrow(
    low: float, high: float, passes: int, told_apart: bool, narrow: bool
) -> None:
    found = made(1.2, low, high, passes=passes)
    assert (found.told_apart, found.narrow) == (told_apart, narrow)


def test_the_limits_of_a_valid_run_are_one_and_two_per_cent_and_three_passes() -> None:
    assert (SAME_WITHIN, NARROW_WITHIN, LEAST_PASSES) == (0.01, 0.02, 3)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_ratio_that_is_not_finite_and_positive_is_refused_with_its_prompt(value: float) -> None:
    with pytest.raises(ValueError, match='prompt "a"'):
        speedup({"a": [1.0, value]})
    with pytest.raises(ValueError, match="above 0"):
        geomean([1.0, value])


def test_statistics_without_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        speedup({})
    with pytest.raises(ValueError, match='"a" has no passes'):
        speedup({"a": []})
    with pytest.raises(ValueError, match="resample"):
        speedup({"a": [1.0]}, resamples=0)
    with pytest.raises(ValueError, match="at least one value"):
        geomean([])


def test_category_speedups_use_only_the_categorys_prompts() -> None:
    ratios = lognormal(9, mean=0.2, spread=0.3, seed=2)
    categories = {prompt: ("code", "chat", "qa")[number % 3] for number, prompt in enumerate(ratios)}
    result = by_category(ratios, categories)
    assert list(result) == ["code", "chat", "qa"]
    for category, value in result.items():
        assert value == speedup({prompt: ratios[prompt] for prompt in ratios if categories[prompt] == category})
    assert by_category(ratios, categories, resamples=50, seed=3)["qa"] != result["qa"]
    with pytest.raises(ValueError, match="p000"):
        by_category(ratios, {})


def test_a_speedups_json_has_the_reports_keys() -> None:
    assert made(1.5, 1.2, 1.8).as_json() == {
        "geomean": 1.5,
        "ci95": [1.2, 1.8],
        "told_apart": True,
        "narrow": False,
        "prompts": 3,
        "passes": 3,
    }


@given(values=st.lists(speeds, min_size=1, max_size=20))
def test_geomean_equals_the_standard_librarys(values: list[float]) -> None:
    assert geomean(values) == pytest.approx(statistics.geometric_mean(values))


# ------------------------------------------------------------------------------------------- derived figures


def test_mbsu_equals_hand_computed_values() -> None:
    # Three tokens a round, four drafter forwards of an eighth of the target: 3 / 1.5.
    assert mbsu(3, 4, 125, 1000) == pytest.approx(2)
    assert mbsu(2.5, 6, 0, 1000) == mbsu(2.5, 0, 500, 1000) == 2.5


@given(tokens=st.floats(1, 10), forwards=st.floats(0, 16), drafter=st.floats(0, 1e9), target=st.floats(1e9, 1e11))
def test_mbsu_is_the_ratio_of_bytes_read_for_the_same_tokens(
    tokens: float, forwards: float, drafter: float, target: float
) -> None:
    plain_bytes = tokens * target
    assert mbsu(tokens, forwards, drafter, target) == pytest.approx(plain_bytes / (target + forwards * drafter))


@pytest.mark.parametrize(
    "arguments", [(0, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, 0), (math.nan, 1, 1, 1), (1, math.inf, 1, 1)]
)
def test_mbsu_refuses_negative_and_non_finite_values(arguments: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        mbsu(*arguments)


def test_regret_is_measured_against_the_best_depth_of_each_category() -> None:
    fixed = {
        "depth-0": {"chat": made(1.0), "code": made(1.0)},
        "depth-2": {"chat": made(0.8), "code": made(1.6)},
        "depth-4": {"chat": made(0.6), "code": made(2.0)},
    }
    result = regret(fixed, {"chat": made(0.97), "code": made(2.1)})
    assert (result["chat"].best, result["code"].best) == ("depth-0", "depth-4")
    assert result["chat"].loss == pytest.approx(0.03)
    assert result["code"].loss == pytest.approx(-0.05)
    assert (result["code"].best_speedup, result["code"].planned_speedup) == (2.0, 2.1)


def test_regret_refuses_arms_measured_on_other_prompts() -> None:
    with pytest.raises(ValueError, match="at least one fixed arm"):
        regret({}, {"chat": made(1.0)})
    for speeds_of_arm in ({}, {"chat": made(1.0, prompts=2)}):
        with pytest.raises(ValueError, match='"depth-1" was not measured on the same prompts of "chat"'):
            regret({"depth-1": speeds_of_arm}, {"chat": made(1.0)})
