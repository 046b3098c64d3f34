"""Paired statistics: the order of measurements, speed-ups with intervals, and derived figures.

Every ratio compares two consecutive measurements of one prompt, so that heat, drift and the prompt itself cancel. The
prompts are fixed, not a sample: an interval tells what another run over the same prompts would give.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.bench import enough
from edgespec.planning.cost.margins import NORMAL_95, t_95

Ratios = Mapping[str, Sequence[float]]
"""Prompt id -> the arm's speed as a multiple of the baseline's, once for each ABBA pass."""

# The bounds of a 95 % interval, in per cent.
CI95 = (2.5, 97.5)
# Efron and Tibshirani 1993 recommend at least 1,000 for percentiles; with 2,000 the standard error of either end is
# under 2 % of the interval's width, for a normal distribution.
RESAMPLES = 2000
# A run must meet these limits to show gains of a few per cent: an arm compared with itself is within 1 % of 1, and an
# interval ends within 2 % of its estimate.
SAME_WITHIN, NARROW_WITHIN = 0.01, 0.02

T = TypeVar("T")


# ---------------------------------------------------------------------------------------------- the order of runs


def shuffled(items: Sequence[T], seed: int) -> list[T]:
    """The prompts in the order in which they are measured, which depends on the seed."""
    return [items[index] for index in np.random.default_rng(seed).permutation(len(items))]


def abba(arms: Sequence[str], passes: int, seed: int) -> list[str]:
    """The order in which the arms run on one prompt: in each pass forwards and then backwards (A B B A).

    A linear drift then affects every arm equally. ``seed``, the prompt's position in the run, rotates the arms, so
    that each arm comes first equally often. The n-th run of one arm pairs with the n-th run of another. Raises
    ValueError for no arms, an arm named twice, or no passes.
    """
    if not arms or len(set(arms)) != len(arms):
        raise ValueError(f"each arm must be named exactly once, got {list(arms)}")
    if passes < 1:
        raise ValueError(f"at least one pass is needed, got {passes}")
    first = seed % len(arms)
    forwards = [*arms[first:], *arms[:first]]
    return [*forwards, *reversed(forwards)] * passes


# --------------------------------------------------------------------------------------------------- speed-ups


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """The speed as a multiple of the baseline's: the geometric mean over prompts.

    The interval is a percentile bootstrap (Efron 1979) over the passes within each prompt. It is as much wider as
    Student's t is than a normal distribution, and includes its estimate, for example if the same pass of all prompts
    was slow. Of one prompt it is between two of its passes, by how many are above the median (binomial). ``passes``:
    the fewest passes of any prompt; without ``enough`` of them the interval is meaningless.
    """

    geomean: float
    ci95: tuple[float, float]
    prompts: int
    passes: int

    @property
    def told_apart(self) -> bool:
        """Whether the interval shows which of the two is faster."""
        low, high = self.ci95
        return enough(self.prompts, self.passes) and not low <= 1 <= high

    @property
    def wide(self) -> bool:
        """Whether the passes differ too much for a run to count: errors of both signs cancel only in the mean."""
        low, high = self.ci95
        most = self.geomean * NARROW_WITHIN
        return self.geomean - low > most or high - self.geomean > most

    @property
    def narrow(self) -> bool:
        """Whether the interval is narrow enough for a run to count."""
        return enough(self.prompts, self.passes) and not self.wide

    def as_json(self) -> dict[str, Any]:
        """A speed-up in the form of ``bench --json``."""
        return {
            "geomean": self.geomean,
            "ci95": list(self.ci95),
            "told_apart": self.told_apart,
            "narrow": self.narrow,
            "prompts": self.prompts,
            "passes": self.passes,
        }


def speedup(ratios: Ratios, *, resamples: int = RESAMPLES, seed: int = 0) -> Speedup:
    """The arm's speed-up over the baseline.

    A prompt's value is the median of its passes, so one disturbed pass of three has no effect. The result depends on
    ``seed`` but not on the order of the prompts. Raises ValueError for no prompts, a prompt without passes, a ratio
    that is not finite and above 0, or no resamples.
    """
    if not ratios:
        raise ValueError("a speed-up needs at least one prompt")
    if resamples < 1:
        raise ValueError(f"at least one resample is needed, got {resamples}")
    logs = [_logs(prompt, ratios[prompt]) for prompt in sorted(ratios)]
    mean = sum(float(np.median(own)) for own in logs) / len(logs)
    if len(logs) == 1:
        low, high = _around_median(logs[0])
    else:
        wider = t_95(max(1, sum(map(len, logs)) - len(logs))) / NORMAL_95
        low, high = mean + wider * (np.percentile(_resampled(logs, resamples, seed), CI95) - mean)
    return Speedup(
        geomean=math.exp(mean),
        ci95=(math.exp(min(low, mean)), math.exp(max(high, mean))),
        prompts=len(logs),
        passes=min(map(len, logs)),
    )


def by_category(
    ratios: Ratios, categories: Mapping[str, str], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Speedup]:
    """The speed-up within each category, in the order in which the prompts first name the categories.

    ``categories``: prompt id -> category. Raises what ``speedup`` raises, and ValueError for a prompt without a
    category.
    """
    groups: dict[str, dict[str, Sequence[float]]] = {}
    for prompt, values in ratios.items():
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


# ------------------------------------------------------------------------------------------------ derived figures


def mbsu(
    tokens_per_round: float, drafter_forwards_per_round: float, drafter_bytes: float, target_bytes: float
) -> float:
    """The memory-bound speed-up: the gain of these tokens per round if time depended only on the bytes read.

    ``tokens_per_round / (1 + drafter_forwards_per_round * drafter_bytes / target_bytes)``, where bytes are the
    weights read in one forward (the figure of RSD, Jeon et al. 2024, and VocabTrim, Goel et al. 2025, there in
    parameters). A drafter without a model has 0 bytes. Raises ValueError for a negative or non-finite value, and for
    a target or a round of 0.
    """
    _positive(tokens_per_round, "tokens per round")
    _positive(target_bytes, "the target's bytes")
    for name, value in (("drafter forwards", drafter_forwards_per_round), ("the drafter's bytes", drafter_bytes)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and not negative, got {value}")
    return tokens_per_round / (1 + drafter_forwards_per_round * drafter_bytes / target_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """``loss``: the planned arm's loss as a share of the best fixed arm's speed; below 0 if the plan is faster."""

    best: str
    best_speedup: float
    planned_speedup: float
    loss: float


def regret(best_fixed: Mapping[str, Mapping[str, Speedup]], planned: Mapping[str, Speedup]) -> dict[str, Regret]:
    """The loss from planning the depth, against the best fixed depth, for each category of ``planned``.

    ``best_fixed``: arm -> category -> speed-up, for every fixed depth (plain decoding too: depth 0, speed-up 1). Both
    have the same baseline on the same prompts, which cancels. The best arm is chosen afterwards and from noisy
    figures, so the loss is rather over- than understated. Raises ValueError if there are no fixed arms, or if one was
    not measured on the same prompts of a category.
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


def _logs(prompt: str, ratios: Sequence[float]) -> NDArray[np.float64]:
    if not ratios:
        raise ValueError(f'the prompt "{prompt}" has no passes')
    name = f'a ratio of the prompt "{prompt}"'
    return np.array([math.log(_positive(ratio, name)) for ratio in ratios])


def _around_median(own: NDArray[np.float64]) -> tuple[float, float]:
    """The narrowest interval between two passes, each as far from its end, that holds the median 95 % of times.

    From the first to the last where there are too few passes for that.
    """
    ordered, cut, all_ways = np.sort(own), 0, 2 ** (len(own) - 1)
    outside = 1 + len(own)
    while 20 * outside <= all_ways:
        cut += 1
        outside += math.comb(len(own), cut + 1)
    return float(ordered[cut]), float(ordered[-1 - cut])


def _resampled(logs: Sequence[NDArray[np.float64]], resamples: int, seed: int) -> NDArray[np.float64]:
    """Means over the prompts of medians, each over as many of the prompt's passes drawn with replacement."""
    generator = np.random.default_rng(seed)
    total = np.zeros(resamples)
    for own in logs:
        total += np.median(own[generator.integers(len(own), size=(resamples, len(own)))], axis=1)
    means: NDArray[np.float64] = total / len(logs)
    return means
