"""From scores to a token: one path for plain and speculative decoding, for the target and its drafters.

Random numbers are keyed by (seed, position, purpose, token id) instead of drawn from a running generator. The
token at a position is the argmax of log probability + Gumbel noise (the Gumbel-max trick), so with one seed it
depends on the target's distribution alone, and nothing has to be rolled back after a rejection.
"""

from __future__ import annotations

import math
from collections import Counter, abc
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import InvalidRequestError, NonFiniteLogitsError
from edgespec.interfaces.drafting import ChainGate, Draft
from edgespec.interfaces.rows import Distribution, FloatArray, IdArray, LogitsArray, Rows

Rule = Literal["keyed", "rejection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0 is greedy; 0 for ``top_k`` and ``min_p``, 1 for ``top_p`` are off.

    Scores are penalised (``repeat_penalty`` divides positive and multiplies negative scores of tokens seen;
    ``presence_penalty`` and ``frequency_penalty`` are subtracted once and per occurrence), divided by the
    temperature, then cut to the top k, to the smallest set of mass ``top_p``, and to probabilities of at least
    ``min_p`` times the highest. Raises InvalidRequestError for a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    rule: Rule = "keyed"

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0 <= self.temperature <= 100, "0 to 100"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            ("repeat_penalty", 0 < self.repeat_penalty <= 10, "above 0, at most 10"),
            ("presence_penalty", -10 <= self.presence_penalty <= 10, "-10 to 10"),
            ("frequency_penalty", -10 <= self.frequency_penalty <= 10, "-10 to 10"),
            ("seed", 0 <= self.seed < 2**64, "0 to 2^64 - 1"),
            ("rule", self.rule in ("keyed", "rejection"), "keyed or rejection"),
        )
        for name, fits, allowed in checks:
            if not fits:
                raise InvalidRequestError(f"{name} cannot be {getattr(self, name)}", hint=f"allowed: {allowed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        return (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


class Purpose(IntEnum):
    """Streams of noise that must be independent of each other at one position."""

    TOKEN = 0  # the target's choice; under the keyed rule the drafter shares it
    DRAFT = 1  # the drafter's choice under the rejection rule
    ACCEPT = 2  # the uniform number of the acceptance test
    CORRECTION = 3  # the draw from the residual, or of the bonus


# SplitMix64 (Steele, Lea, Flood, 2014): the increment and the two multipliers of its finaliser.
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)

UintArray = NDArray[np.uint64]


def _mix(state: UintArray) -> UintArray:
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLIER_2
    mixed: UintArray = state ^ (state >> np.uint64(31))
    return mixed


def uniforms(seed: int, position: int, purpose: Purpose, ids: IdArray) -> FloatArray:
    """One number in (0, 1) per id, a pure function of all four arguments: float64, the shape of ``ids``."""
    key = np.array([seed], dtype=np.uint64)
    for part in (position, int(purpose)):
        # An array, because numpy warns when a product of scalars wraps around.
        key = _mix(key + _INCREMENT + np.array([part], dtype=np.uint64) * _MULTIPLIER_2)
    # Mixed twice: ids are consecutive, and one pass leaves weak low-order correlations between neighbours.
    hashed = _mix(_mix(key + (ids.astype(np.uint64) + np.uint64(1)) * _INCREMENT))
    return ((hashed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def gumbel(seed: int, position: int, purpose: Purpose, ids: IdArray) -> FloatArray:
    """Standard Gumbel noise per id: float64, the shape of ``ids``."""
    noise: FloatArray = -np.log(-np.log(uniforms(seed, position, purpose, ids)))
    return noise


def draw(distribution: Distribution, seed: int, position: int, purpose: Purpose) -> int:
    """The token of ``distribution`` that the keyed noise selects; ties go to the lowest id."""
    ids = distribution.ids
    if len(ids) == 1:
        return int(ids[0])
    return int(ids[int(np.argmax(_perturbed(distribution, seed, position, purpose)))])


def _perturbed(distribution: Distribution, seed: int, position: int, purpose: Purpose) -> FloatArray:
    """Log probability plus noise per id: the highest is drawn."""
    scores: FloatArray = np.log(distribution.probs) + gumbel(seed, position, purpose, distribution.ids)
    return scores


def penalise(logits: FloatArray, sampling: Sampling, context: abc.Sequence[int]) -> None:
    """Apply the penalties for tokens of ``context`` to ``logits`` (vocabulary,) in place."""
    counts = Counter(context)
    ids = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
    occurrences = np.fromiter(counts.values(), dtype=np.float64, count=len(counts))
    scores = logits[ids]
    scores = np.where(scores > 0, scores / sampling.repeat_penalty, scores * sampling.repeat_penalty)
    logits[ids] = scores - sampling.presence_penalty - sampling.frequency_penalty * occurrences


def distribution(logits: LogitsArray, sampling: Sampling, context: abc.Sequence[int] = ()) -> Distribution:
    """The truncated distribution of the next token. ``logits``: float32 (vocabulary,).

    Raises NonFiniteLogitsError if the best score is NaN or infinite.
    """
    scores = logits.astype(np.float64)
    if sampling.penalises and len(context):
        penalise(scores, sampling, context)
    best = int(np.argmax(scores))
    if not np.isfinite(scores[best]):
        raise NonFiniteLogitsError(f"the logits hold {scores[best]} at token id {best}")
    if sampling.greedy:
        return Distribution(np.array([best], dtype=np.int64), np.ones(1))
    scores -= scores[best]
    scores /= sampling.temperature
    ids = np.arange(len(scores), dtype=np.int64)
    if 0 < sampling.top_k < len(ids):
        ids = _highest(scores, sampling.top_k)
        scores = scores[ids]
    weights = np.exp(scores)
    if sampling.top_p < 1:
        kept = _nucleus(weights, sampling.top_p)
        ids, weights = ids[kept], weights[kept]
    if sampling.min_p > 0:
        kept = np.flatnonzero(weights >= sampling.min_p * weights.max())
        ids, weights = ids[kept], weights[kept]
    positive = weights > 0  # a score too far below the best underflows to nothing
    if not positive.all():
        ids, weights = ids[positive], weights[positive]
    return Distribution(ids, weights / weights.sum())


def _highest(scores: FloatArray, count: int) -> IdArray:
    """Ids of the ``count`` highest scores, ascending; a tie at the border goes to the lowest ids."""
    border = np.partition(scores, len(scores) - count)[len(scores) - count]
    candidates = np.flatnonzero(scores >= border)
    best = candidates[np.argsort(-scores[candidates], kind="stable")][:count]
    return np.sort(best)


# Candidates looked at first when cutting to top_p. Text of the models tried keeps a nucleus of 0.95 within a few
# hundred tokens; sorting a whole vocabulary of 150 000 instead costs about 10 ms a token.
_NUCLEUS_GUESS = 1024


def _nucleus(weights: FloatArray, mass: float) -> IdArray:
    """Indices, ascending, of the smallest set of highest weights that holds ``mass`` of their total."""
    wanted = mass * weights.sum()
    for count in (_NUCLEUS_GUESS, len(weights)):
        candidates = _highest(weights, count) if count < len(weights) else np.arange(len(weights))
        order = candidates[np.argsort(-weights[candidates], kind="stable")]
        running = np.cumsum(weights[order])
        if running[-1] >= wanted or count >= len(weights):
            break
    return np.sort(order[: int(np.searchsorted(running, wanted)) + 1])


def confidence_and_entropy(logits: LogitsArray, *, entropy: bool) -> tuple[float, float | None]:
    """The highest probability of softmax(logits) and, if wanted, its entropy in nats.

    float32 precision is enough to compare with a threshold. Raises NonFiniteLogitsError if the best score is NaN or
    infinite.
    """
    best = logits.max()  # NaN if there is one
    if not np.isfinite(best):
        raise NonFiniteLogitsError(f"the logits hold {best} at token id {int(np.argmax(logits))}")
    shifted = logits - best
    weights = np.exp(shifted)
    total = float(weights.sum())
    if not entropy:
        return 1.0 / total, None
    return 1.0 / total, float(np.log(total) - np.dot(weights, np.where(weights > 0, shifted, 0.0)) / total)


class Chooser:
    """A session's way of choosing tokens: implements TokenChooser and the target's side of both rules."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        # Which noise drafts are drawn from under the rejection rule. Whoever may draft a place anew because of what
        # came of an earlier draft for it changes this in between: the old noise would be a biased one by then.
        self.draft_stream = 0

    @property
    def uses_rejection(self) -> bool:
        """Under greedy decoding both rules are the same: accept iff equal to the argmax."""
        return self.sampling.rule == "rejection" and not self.sampling.greedy

    @property
    def _argmax_decides(self) -> bool:
        return self.sampling.greedy and not self.sampling.penalises

    def distribution(self, rows: Rows, index: int, context: abc.Sequence[int]) -> Distribution:
        """The distribution of the token that follows ``context``, from row ``index``."""
        return distribution(rows.logits(index), self.sampling, context)

    def target_token(self, rows: Rows, index: int, context: abc.Sequence[int]) -> int:
        """What the target emits after ``context``: the argmax, or the keyed draw at position len(context)."""
        if self._argmax_decides:
            return rows.argmax_row(index)
        purpose = Purpose.CORRECTION if self.uses_rejection else Purpose.TOKEN
        return draw(self.distribution(rows, index, context), self.sampling.seed, len(context), purpose)

    def draft(
        self,
        rows: Rows,
        index: int,
        context: abc.Sequence[int],
        gate: ChainGate | None,
        *,
        runner_up: bool = False,
        alternatives: int = 0,
    ) -> Draft | None:
        if self._argmax_decides:
            return _best_draft(rows, index, gate, runner_up, alternatives)
        own = self.distribution(rows, index, context)
        if gate is not None and not gate.admits(own.peak, own.entropy if gate.needs_entropy else None):
            return None
        if not self.uses_rejection:
            others = max(alternatives, int(runner_up))
            if others < 1:
                return Draft(draw(own, self.sampling.seed, len(context), Purpose.TOKEN), None, own.peak)
            # The target shares the noise, so its other choice is the one that comes next with the same noise.
            (token, _), *rest = self._drawn(own, len(context), 1 + others)
            other = rest[0][0] if runner_up and rest else None
            return Draft(token, None, own.peak, other, tuple(rest[:alternatives]))
        seed = (self.sampling.seed + self.draft_stream * int(_INCREMENT)) % 2**64
        token = draw(own, seed, len(context), Purpose.DRAFT)
        left = own.without(token) if runner_up else None
        return Draft(token, own, own.peak, None if left is None else left.likeliest)

    def _drawn(self, own: Distribution, position: int, count: int) -> list[tuple[int, float]]:
        """What the shared noise draws, what it would draw if that did not exist, and so on, with the odds of each.

        The odds are the softmax of the scores that decide, with the noise: a target whose scores are off by about one
        chooses otherwise that often.
        """
        if len(own.ids) == 1:
            return [(int(own.ids[0]), 1.0)]
        return _best(own.ids, _perturbed(own, self.sampling.seed, position, Purpose.TOKEN), count)

    def accept_uniform(self, position: int) -> float:
        """The uniform number of the acceptance test at ``position``."""
        return float(uniforms(self.sampling.seed, position, Purpose.ACCEPT, np.zeros(1, dtype=np.int64))[0])

    def draw_dense(self, probs: FloatArray, position: int) -> int:
        """A token from full-vocabulary ``probs``, from the noise kept for corrections and bonuses."""
        ids = np.flatnonzero(probs > 0)
        return draw(Distribution(ids, probs[ids]), self.sampling.seed, position, Purpose.CORRECTION)


def _best(ids: IdArray, scores: FloatArray, count: int) -> list[tuple[int, float]]:
    """At most ``count`` ids with the highest scores, best first, ties by lowest id, and the softmax of each."""
    best = _highest(scores, min(count, len(scores)))
    best = best[np.argsort(-scores[best], kind="stable")]
    weights = np.exp(scores - scores[best[0]])
    total = weights.sum()
    return [(int(ids[place]), float(weights[place] / total)) for place in best]


def _best_draft(rows: Rows, index: int, gate: ChainGate | None, runner_up: bool, alternatives: int) -> Draft | None:
    """What greedy decoding drafts from these scores."""
    wanted = max(alternatives, int(runner_up))
    sure: float | None = None
    if gate is not None or wanted > 0:
        # Of a head that lacks most tokens only what it scores is looked at.
        ids, scores = rows.scored(index)
        odds, entropy = confidence_and_entropy(scores, entropy=gate is not None and gate.needs_entropy)
        if gate is not None:
            if not gate.admits(odds, entropy):
                return None
            sure = odds
    best = rows.argmax_row(index)
    others: list[tuple[int, float]] = []
    if wanted > 0:
        # Looked for in turn: that takes a vocabulary of 150 000 a tenth of the time in which all are partitioned.
        place = int(np.argmax(scores))
        highest = float(scores[place])
        for _ in range(min(wanted, len(scores) - 1)):
            scores[place] = -np.inf
            place = int(np.argmax(scores))
            if not np.isfinite(scores[place]):
                break
            others.append(
                (place if ids is None else int(ids[place]), odds * math.exp(float(scores[place]) - highest))
            )
    other = others[0][0] if runner_up and others else None
    return Draft(best, None, sure, other, tuple(each for each in others[:alternatives] if each[1] > 0))
