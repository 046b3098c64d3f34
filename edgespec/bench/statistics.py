"""Paired statistics: the order of measurements, speed-ups with their intervals, and what is derived from them.

Every ratio compares two measurements of one prompt made right after one another, so that heat, drift and the prompt
itself cancel. Prompts, not measurements, are the sample: the interval says what other prompts would have given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Pairs = Mapping[str, Sequence[tuple[float, float]]]
"""Prompt id -> (the arm's, the baseline's) tokens per second, one pair for each time the two ran side by side."""

# The bounds of a 95 % interval, in per cent.
CI95 = (2.5, 97.5)
# Efron and Tibshirani 1993 ask for at least 1,000 for percentiles; with 2,000 the standard error of either end is
# under 2 % of the interval's width, for a normal distribution.
RESAMPLES = 2000
# A run in which a thing compared with itself is off by more is not fit to tell gains of a few per cent.
NOISE_LIMIT = 0.03
# Resampled values held at a time: 32 MB, however many prompts there are.
_BLOCK_VALUES = 1 << 22

T = TypeVar("T")


# ---------------------------------------------------------------------------------------------- the order of runs


def shuffled(items: Sequence[T], seed: int) -> list[T]:
    """The prompts in the order in which they are measured: one order for each seed."""
    return [items[index] for index in np.random.default_rng(seed).permutation(len(items))]


def abba(arms: Sequence[str], passes: int, seed: int) -> list[str]:
    """The order in which the arms run on one prompt: in each pass forwards and then backwards (A B B A).

    A drift that is linear in time then costs every arm the same. ``seed`` is the prompt's place in the run; it
    rotates the arms, so that each of them is the first equally often. The n-th run of one arm pairs with the n-th of
    another.
    Raises ValueError for no arms, an arm named twice, or no passes.
    """
    if not arms or len(set(arms)) != len(arms):
        raise ValueError(f"arms must be named, and each once, got {list(arms)}")
    if passes < 1:
        raise ValueError(f"at least one pass is needed, got {passes}")
    first = seed % len(arms)
    forwards = [*arms[first:], *arms[:first]]
    return [*forwards, *reversed(forwards)] * passes


# --------------------------------------------------------------------------------------------------- speed-ups


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """How many times as fast as the baseline. The geometric mean and the median are taken over prompts.

    Each interval is a percentile bootstrap over prompts (Efron 1979). Of a single prompt both are points: they then
    say nothing about other prompts. Of few prompts (fewer than about ten) they are too narrow.
    """

    geomean: float
    median: float
    ci95: tuple[float, float]
    median_ci95: tuple[float, float]
    prompts: int

    def as_json(self) -> dict[str, Any]:
        """The shape of a speed-up in CLI.md's ``bench`` object."""
        return {
            "geomean": self.geomean,
            "ci95": list(self.ci95),
            "median": self.median,
            "median_ci95": list(self.median_ci95),
            "prompts": self.prompts,
        }


def speedup(pairs: Pairs, *, resamples: int = RESAMPLES, seed: int = 0) -> Speedup:
    """The arm's speed-up over the baseline.

    A prompt's value is the median of its pairs' log-ratios, which one disturbed run does not move. The result depends
    on ``seed`` but not on the order of the prompts. Raises ValueError for no prompts, a prompt without pairs, a value
    that is not finite and above 0, or no resamples.
    """
    if not pairs:
        raise ValueError("a speed-up needs at least one prompt")
    if resamples < 1:
        raise ValueError(f"at least one resample is needed, got {resamples}")
    logs = np.array([_log_ratio(prompt, pairs[prompt]) for prompt in sorted(pairs)])
    means, medians = _resampled(logs, resamples, seed)
    return Speedup(
        geomean=math.exp(logs.mean()),
        median=math.exp(np.median(logs)),
        ci95=_interval(means),
        median_ci95=_interval(medians),
        prompts=len(logs),
    )


def by_category(
    pairs: Pairs, categories: Mapping[str, str], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Speedup]:
    """The speed-up within each category, in the order in which the prompts first name it.

    ``categories``: prompt id -> category. Raises what ``speedup`` raises, and ValueError for a prompt without one.
    """
    groups: dict[str, dict[str, Sequence[tuple[float, float]]]] = {}
    for prompt, values in pairs.items():
        if prompt not in categories:
            raise ValueError(f'the prompt "{prompt}" has no category')
        groups.setdefault(categories[prompt], {})[prompt] = values
    return {category: speedup(group, resamples=resamples, seed=seed) for category, group in groups.items()}


def geomean(values: Iterable[float]) -> float:
    """The geometric mean. Raises ValueError for no values, or one that is not finite and above 0."""
    logs = [math.log(_positive(value, "a value of a geometric mean")) for value in values]
    if not logs:
        raise ValueError("a geometric mean needs at least one value")
    return math.exp(math.fsum(logs) / len(logs))


def noise(aa: Speedup, limit: float = NOISE_LIMIT) -> bool:
    """Whether a run is too noisy to be believed, by its A/A arm: the baseline measured as if it were another arm.

    True if the 95 % interval of that speed-up, which ought to be 1, reaches outside 1 +- ``limit``: be it wide, or
    narrow around something else. With a single prompt only the second can be seen.
    """
    low, high = aa.ci95
    return not (1 - limit <= low and high <= 1 + limit)


# ------------------------------------------------------------------------------------------------ derived figures


def mbsu(
    tokens_per_round: float, drafter_forwards_per_round: float, drafter_bytes: float, target_bytes: float
) -> float:
    """The memory-bound speed-up: what these tokens per round would gain if time were bytes read and nothing else.

    ``tokens_per_round / (1 + drafter_forwards_per_round * drafter_bytes / target_bytes)``, with bytes as the weights
    read in one forward (the figure of RSD, Jeon et al. 2024, and VocabTrim, Goel et al. 2025, there in parameters).
    A drafter without a model has 0 bytes. Raises ValueError for anything negative or not finite, and for a target or
    a round of 0.
    """
    _positive(tokens_per_round, "tokens per round")
    _positive(target_bytes, "the target's bytes")
    for name, value in (("drafter forwards", drafter_forwards_per_round), ("the drafter's bytes", drafter_bytes)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and not negative, got {value}")
    return tokens_per_round / (1 + drafter_forwards_per_round * drafter_bytes / target_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """``loss``: the share of the best fixed arm's speed that the planned arm gives away; below 0 if it is faster."""

    best: str
    best_speedup: float
    planned_speedup: float
    loss: float


def regret(best_fixed: Mapping[str, Mapping[str, Speedup]], planned: Mapping[str, Speedup]) -> dict[str, Regret]:
    """What planning the depth costs against having known the best fixed one, for each category of ``planned``.

    ``best_fixed``: arm -> category -> speed-up, for every fixed depth (plain decoding too: depth 0, speed-up 1). Both
    are ratios over the same baseline on the same prompts, which therefore cancels. The best is picked after the fact
    and by noisy figures, so the loss is rather over- than understated. Raises ValueError if there are no fixed arms,
    or one of them was not measured on the same prompts of a category.
    """
    if not best_fixed:
        raise ValueError("a regret needs at least one fixed arm")
    losses = {}
    for category, own in planned.items():
        for arm, speeds in best_fixed.items():
            if category not in speeds or speeds[category].prompts != own.prompts:
                raise ValueError(f'the arm "{arm}" was not measured on the same prompts of "{category}"')
        best = max(best_fixed, key=lambda arm: best_fixed[arm][category].geomean)
        fastest = best_fixed[best][category].geomean
        losses[category] = Regret(
            best=best, best_speedup=fastest, planned_speedup=own.geomean, loss=1 - own.geomean / fastest
        )
    return losses


# ----------------------------------------------------------------------------------------------------- internals


def _positive(value: float, name: str) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and above 0, got {value}")
    return value


def _log_ratio(prompt: str, pairs: Sequence[tuple[float, float]]) -> float:
    if not pairs:
        raise ValueError(f'the prompt "{prompt}" has no pairs')
    name = f'a speed of the prompt "{prompt}"'
    # A difference of logarithms: exactly the negative when arm and baseline change places.
    return float(np.median([math.log(_positive(arm, name)) - math.log(_positive(base, name)) for arm, base in pairs]))


def _resampled(logs: NDArray[np.float64], resamples: int, seed: int) -> tuple[NDArray[np.float64], ...]:
    """(means, medians) of ``resamples`` samples of the prompts, each as large as the original, with replacement."""
    generator = np.random.default_rng(seed)
    means, medians = np.empty(resamples), np.empty(resamples)
    rows = max(1, _BLOCK_VALUES // len(logs))
    for start in range(0, resamples, rows):
        block = slice(start, min(start + rows, resamples))
        sample = logs[generator.integers(len(logs), size=(block.stop - block.start, len(logs)))]
        means[block] = sample.mean(axis=1)
        medians[block] = np.median(sample, axis=1)
    return means, medians


def _interval(logs: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(logs, CI95)
    return math.exp(low), math.exp(high)
