"""Paired statistics against brute force, known answers and what must not change them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edgespec.bench import statistics as own
from edgespec.bench.statistics import Speedup, abba, by_category, geomean, mbsu, noise, regret, shuffled, speedup

ratios = st.floats(min_value=0.05, max_value=20)
speeds = st.floats(min_value=0.01, max_value=10_000)
measured = st.dictionaries(
    st.text(min_size=1, max_size=4),
    st.lists(st.tuples(speeds, speeds), min_size=1, max_size=5),
    min_size=1,
    max_size=8,
)


def lognormal(prompts: int, *, mean: float, spread: float, seed: int) -> dict[str, list[tuple[float, float]]]:
    draws = np.random.default_rng(seed).normal(mean, spread, size=prompts)
    return {f"p{number:03}": [(10 * math.exp(draw), 10.0)] for number, draw in enumerate(draws)}


def made(value: float, low: float | None = None, high: float | None = None, prompts: int = 3) -> Speedup:
    ends = (value if low is None else low, value if high is None else high)
    return Speedup(geomean=value, median=value, ci95=ends, median_ci95=ends, prompts=prompts)


# --------------------------------------------------------------------------------------------- the order of runs


def test_two_arms_go_there_and_back_and_the_next_prompt_begins_with_the_other() -> None:
    assert abba(["a", "b"], 1, 0) == ["a", "b", "b", "a"]
    assert abba(["a", "b"], 1, 1) == ["b", "a", "a", "b"]
    assert abba(["a", "b"], 2, 0) == ["a", "b", "b", "a"] * 2


@given(count=st.integers(1, 6), passes=st.integers(1, 4), seed=st.integers(0, 100))
def test_every_arm_has_the_same_mean_position_and_number_of_runs(count: int, passes: int, seed: int) -> None:
    arms = [f"arm{number}" for number in range(count)]
    order = abba(arms, passes, seed)
    positions = {arm: [place for place, name in enumerate(order) if name == arm] for arm in arms}
    assert {len(places) for places in positions.values()} == {2 * passes}
    assert {sum(places) for places in positions.values()} == {passes * (len(order) - 1)}
    # The n-th run of one arm and the n-th of another belong to the same there or back.
    for nth in range(2 * passes):
        assert {places[nth] // count for places in positions.values()} == {nth}


@given(count=st.integers(1, 6), rounds=st.integers(1, 3))
def test_no_arm_is_the_first_more_often_than_another(count: int, rounds: int) -> None:
    arms = [f"arm{number}" for number in range(count)]
    firsts = Counter(abba(arms, 1, prompt)[0] for prompt in range(count * rounds))
    assert firsts == dict.fromkeys(arms, rounds)


@pytest.mark.parametrize(("arms", "passes"), [([], 1), (["a", "a"], 1), (["a"], 0)])
def test_an_order_that_makes_no_sense_is_refused(arms: Sequence[str], passes: int) -> None:
    with pytest.raises(ValueError, match=r"arms|pass"):
        abba(arms, passes, 0)


def test_prompts_are_shuffled_by_the_seed_alone() -> None:
    items = list(range(40))
    assert shuffled(items, 1) == shuffled(items, 1)
    assert sorted(shuffled(items, 1)) == items
    assert len({tuple(shuffled(items, seed)) for seed in range(5)} | {tuple(items)}) == 6


# ---------------------------------------------------------------------------------------------------- speed-ups


def test_a_speedup_with_a_known_answer() -> None:
    # Per prompt: the medians of 2, 9, 2 -> 2; of 1/2 -> 1/2; of 2 and 8 -> 4 (in logarithms).
    pairs = {"a": [(20.0, 10.0), (90.0, 10.0), (4.0, 2.0)], "b": [(5.0, 10.0)], "c": [(2.0, 1.0), (8.0, 1.0)]}
    result = speedup(pairs)
    assert result.geomean == pytest.approx(4 ** (1 / 3))
    assert result.median == pytest.approx(2)
    assert result.prompts == 3
    # 27 equally likely resamples: the lowest and the highest have probability 1/27 each, more than 2.5 %.
    assert result.ci95 == pytest.approx((0.5, 4))
    assert result.median_ci95 == pytest.approx((0.5, 4))


def test_the_interval_is_that_of_all_resamples() -> None:
    logs = [math.log(value) for value in (0.9, 1.1, 1.5, 1.6, 2.5)]
    every = list(itertools.product(logs, repeat=5))
    pairs = {str(number): [(math.exp(value), 1.0)] for number, value in enumerate(logs)}
    result = speedup(pairs, resamples=40_000)
    means = np.exp(np.percentile([statistics.fmean(sample) for sample in every], [2.5, 97.5]))
    medians = np.exp(np.percentile([statistics.median(sample) for sample in every], [2.5, 97.5]))
    assert result.ci95 == pytest.approx(tuple(means), rel=0.01)
    assert result.median_ci95 == pytest.approx(tuple(medians), rel=1e-9)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    # 30 prompts, true geometric mean 1.5: the percentile bootstrap is known to fall a little short of 95 %.
    results = [
        speedup(lognormal(30, mean=math.log(1.5), spread=0.4, seed=seed), resamples=400, seed=seed)
        for seed in range(300)
    ]
    assert 0.88 <= statistics.fmean(low <= 1.5 <= high for low, high in (r.ci95 for r in results)) <= 0.98
    assert 0.85 <= statistics.fmean(low <= 1.5 <= high for low, high in (r.median_ci95 for r in results)) <= 0.99


@pytest.mark.slow
@given(pairs=measured)
@settings(max_examples=50)
def test_swapping_arm_and_baseline_inverts_everything(pairs: dict[str, list[tuple[float, float]]]) -> None:
    swapped = {prompt: [(base, arm) for arm, base in values] for prompt, values in pairs.items()}
    one, other = speedup(pairs, resamples=200), speedup(swapped, resamples=200)
    assert one.geomean * other.geomean == pytest.approx(1)
    assert one.median * other.median == pytest.approx(1)
    for ends, inverted in ((one.ci95, other.ci95), (one.median_ci95, other.median_ci95)):
        assert ends == pytest.approx((1 / inverted[1], 1 / inverted[0]))


@given(pairs=measured, scale=ratios)
@settings(max_examples=50)
def test_units_and_the_order_of_prompts_do_not_matter(
    pairs: dict[str, list[tuple[float, float]]], scale: float
) -> None:
    result = speedup(pairs, resamples=100)
    assert speedup(dict(reversed(pairs.items())), resamples=100) == result
    scaled = {prompt: [(scale * arm, scale * base) for arm, base in values] for prompt, values in pairs.items()}
    assert speedup(scaled, resamples=100).ci95 == pytest.approx(result.ci95)


def test_the_defaults_are_2000_resamples_and_seed_0_and_the_seed_matters() -> None:
    pairs = lognormal(12, mean=0.3, spread=0.5, seed=1)
    assert speedup(pairs) == speedup(pairs, resamples=2000, seed=0)
    assert speedup(pairs).ci95 != speedup(pairs, resamples=1999).ci95
    assert speedup(pairs).ci95 != speedup(pairs, seed=1).ci95
    assert speedup(pairs).geomean == speedup(pairs, seed=1).geomean


def test_many_prompts_are_resampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = lognormal(50, mean=0.3, spread=0.5, seed=1)
    whole = speedup(pairs, resamples=3001)
    monkeypatch.setattr(own, "_BLOCK_VALUES", 200)
    assert speedup(pairs, resamples=3001).ci95 == pytest.approx(whole.ci95, rel=0.02)


def test_of_a_single_prompt_the_interval_is_a_point() -> None:
    result = speedup({"a": [(3.0, 2.0)]})
    assert result.ci95 == result.median_ci95 == (result.geomean, result.geomean)
    assert result.geomean == pytest.approx(1.5)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_speed_that_is_none_is_refused_with_its_prompt(value: float) -> None:
    for pair in ((value, 1.0), (1.0, value)):
        with pytest.raises(ValueError, match='prompt "a"'):
            speedup({"a": [pair]})
    with pytest.raises(ValueError, match="above 0"):
        geomean([1.0, value])


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        speedup({})
    with pytest.raises(ValueError, match='"a" has no pairs'):
        speedup({"a": []})
    with pytest.raises(ValueError, match="resample"):
        speedup({"a": [(1.0, 1.0)]}, resamples=0)
    with pytest.raises(ValueError, match="at least one value"):
        geomean([])


def test_categories_are_speedups_of_their_own_prompts() -> None:
    pairs = lognormal(9, mean=0.2, spread=0.3, seed=2)
    categories = {prompt: ("code", "chat", "qa")[number % 3] for number, prompt in enumerate(pairs)}
    result = by_category(pairs, categories)
    assert list(result) == ["code", "chat", "qa"]
    for category, value in result.items():
        assert value == speedup({prompt: pairs[prompt] for prompt in pairs if categories[prompt] == category})
    assert by_category(pairs, categories, resamples=50, seed=3)["qa"] != result["qa"]
    with pytest.raises(ValueError, match="p000"):
        by_category(pairs, {})


def test_a_speedup_as_json_has_the_names_of_the_report() -> None:
    assert made(1.5, 1.2, 1.8).as_json() == {
        "geomean": 1.5,
        "ci95": [1.2, 1.8],
        "median": 1.5,
        "median_ci95": [1.2, 1.8],
        "prompts": 3,
    }


@given(values=st.lists(speeds, min_size=1, max_size=20))
def test_the_geometric_mean_is_the_one_of_the_standard_library(values: list[float]) -> None:
    assert geomean(values) == pytest.approx(statistics.geometric_mean(values))


# -------------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize(
    ("low", "high", "noisy"),
    [(0.98, 1.02, False), (0.97, 1.03, False), (0.96, 1.0, True), (1.0, 1.031, True), (1.05, 1.06, True)],
)
def test_a_run_is_noisy_where_a_thing_is_not_itself_within_three_per_cent(
    low: float, high: float, noisy: bool
) -> None:
    assert noise(made(1.0, low, high)) is noisy
    assert noise(made(1.0, low, high), limit=0.1) is False


# ------------------------------------------------------------------------------------------- derived figures


def test_mbsu_with_known_answers() -> None:
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
def test_mbsu_of_nonsense_is_refused(arguments: tuple[float, float, float, float]) -> None:
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


def test_regret_compares_only_what_was_measured_on_the_same_prompts() -> None:
    with pytest.raises(ValueError, match="at least one fixed arm"):
        regret({}, {"chat": made(1.0)})
    for speeds_of_arm in ({}, {"chat": made(1.0, prompts=2)}):
        with pytest.raises(ValueError, match='"depth-1" was not measured on the same prompts of "chat"'):
            regret({"depth-1": speeds_of_arm}, {"chat": made(1.0)})
