"""Paired statistics: the order of measurements, speed-ups with their intervals, and what is derived from them.

Every ratio compares two measurements of one prompt made right after one another, so that heat, drift and the prompt
itself cancel. The prompts are those that are named, not a sample of others: an interval says what another run over
the same prompts would have given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Ratios = Mapping[str, Sequence[float]]
"""Prompt id -> how many times as fast the arm was as the baseline, once for each ABBA pass."""

# The bounds of a 95 % interval, in per cent.
CI95 = (2.5, 97.5)
# Efron and Tibshirani 1993 ask for at least 1,000 for percentiles; with 2,000 the standard error of either end is
# under 2 % of the interval's width, for a normal distribution.
RESAMPLES = 2000
# What a run has to reach to tell gains of a few per cent: a thing compared with itself comes to 1 within 1 %, and an
# interval ends within 2 % of its estimate.
SAME_WITHIN, NARROW_WITHIN = 0.01, 0.02
# The fewest passes of which a median leaves out a disturbed one; of fewer an interval says nothing either.
LEAST_PASSES = 3

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
    """How many times as fast as the baseline: the geometric mean over prompts.

    The interval is a percentile bootstrap (Efron 1979) over the passes within each prompt, widened to its estimate
    where it lies beside that: where the same pass of all prompts was slow, say. ``passes`` are those of the prompt
    that has the fewest; below ``LEAST_PASSES`` the interval says nothing.
    """

    geomean: float
    ci95: tuple[float, float]
    prompts: int
    passes: int

    @property
    def told_apart(self) -> bool:
        """Whether it is known which of the two is faster."""
        low, high = self.ci95
        return self.passes >= LEAST_PASSES and not low <= 1 <= high

    @property
    def narrow(self) -> bool:
        """Whether the interval is narrow enough for a run to count."""
        low, high = self.ci95
        ends = self.geomean * (1 - NARROW_WITHIN), self.geomean * (1 + NARROW_WITHIN)
        return self.passes >= LEAST_PASSES and ends[0] <= low and high <= ends[1]

    def as_json(self) -> dict[str, Any]:
        """The shape of a speed-up in CLI.md's ``bench`` object."""
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

    A prompt's value is the median of its passes, which one disturbed pass of three does not move. The result depends
    on ``seed`` but not on the order of the prompts. Raises ValueError for no prompts, a prompt without passes, a
    ratio that is not finite and above 0, or no resamples.
    """
    if not ratios:
        raise ValueError("a speed-up needs at least one prompt")
    if resamples < 1:
        raise ValueError(f"at least one resample is needed, got {resamples}")
    logs = [_logs(prompt, ratios[prompt]) for prompt in sorted(ratios)]
    mean = sum(float(np.median(own)) for own in logs) / len(logs)
    low, high = np.percentile(_resampled(logs, resamples, seed), CI95)
    return Speedup(
        geomean=math.exp(mean),
        ci95=(math.exp(min(low, mean)), math.exp(max(high, mean))),
        prompts=len(logs),
        passes=min(map(len, logs)),
    )


def by_category(
    ratios: Ratios, categories: Mapping[str, str], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Speedup]:
    """The speed-up within each category, in the order in which the prompts first name it.

    ``categories``: prompt id -> category. Raises what ``speedup`` raises, and ValueError for a prompt without one.
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


def _logs(prompt: str, ratios: Sequence[float]) -> NDArray[np.float64]:
    if not ratios:
        raise ValueError(f'the prompt "{prompt}" has no passes')
    name = f'a ratio of the prompt "{prompt}"'
    return np.array([math.log(_positive(ratio, name)) for ratio in ratios])


def _resampled(logs: Sequence[NDArray[np.float64]], resamples: int, seed: int) -> NDArray[np.float64]:
    """Means over the prompts, each of which is the median of as many of its passes, drawn with replacement."""
    generator = np.random.default_rng(seed)
    total = np.zeros(resamples)
    for own in logs:
        total += np.median(own[generator.integers(len(own), size=(resamples, len(own)))], axis=1)
    means: NDArray[np.float64] = total / len(logs)
    return means
