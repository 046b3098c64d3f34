"""How likely draft tokens are to be accepted, by position in the chain and by confidence; the same for alternatives.

A drafter's confidence (0 to 1) is not a probability. Counting how often tokens of about that confidence were accepted
turns it into one without a trained head: the training-free form of SpecDec++ (Huang et al., 2024) and DISCO (Mamou et
al., 2024).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias

from edgespec.files.checked import Length, Range
from edgespec.planning.cost.margins import NORMAL_95

# Bins of equal width over [0, 1]. Ten separate a sure copy from a guess and still fill within a paragraph.
BINS = 10

# Positions with separate counts; later positions share the last count. Deeper drafts paid on no measured consumer
# CPU.
POSITIONS = 8

# Decay of a count for each observation: about the last thirty matter, two or three paragraphs of one kind of text.
DECAY = 0.97

# Decay for noticing that the text has changed: about the last seven tokens.
QUICK_DECAY = 0.85

# The quick counts are used below this share of the expectation; above it the difference is chance.
DISAPPOINTING = 0.8

# Weight of a guess, in observations: few, so that a dozen tokens of the current text outweigh the guess.
PRIOR_STRENGTH = 4.0

# Weight of what earlier conversations taught about a position. Simulated: with 4, bad luck in the first tokens parked
# a 1.13x drafter in half of the answers; with 8 seldom, and a slower drafter was parked a round or two later.
TAUGHT_STRENGTH = 8.0

# Largest weight of a rate in the next conversation: it should outlast an answer of another kind, or a drafter that
# did not pay at the end of one conversation would never be tried again.
HANDED_ON_STRENGTH = 256.0

# Before a pair has any experience: the middle of 0.1 (translation, short questions) to 0.9 (code), accepted by a 1.5B
# target from a 0.5B drafter of its family (greedy, depth 3, 16 Spec-Bench prompts).
UNKNOWN = 0.6


@dataclass(slots=True)
class _Count:
    """Accepted and tried tokens: recent (decayed) and total."""

    accepted: float = 0.0
    tried: float = 0.0
    accepted_ever: int = 0
    tried_ever: int = 0

    def add(self, hit: bool) -> None:
        self.accepted = DECAY * self.accepted + hit
        self.tried = DECAY * self.tried + 1
        self.accepted_ever += hit
        self.tried_ever += 1

    def fade(self, worth: float) -> None:
        if self.tried > worth:
            self.accepted, self.tried = self.accepted * worth / self.tried, worth

    def rate(self, prior: float, strength: float = PRIOR_STRENGTH) -> float:
        return (self.accepted + strength * prior) / (self.tried + strength)

    def ever(self, prior: float, strength: float) -> float:
        """The rate over all tokens."""
        return (self.accepted_ever + strength * prior) / (self.tried_ever + strength)


_Rate: TypeAlias = Annotated[float, Range(0, 1)] | None
_Tokens: TypeAlias = Annotated[float, Range(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptancePrior:
    """What earlier conversations of a pair taught: a rate for every position and every bin, None if unknown.

    ``position_tokens`` and ``confidence_tokens`` are the numbers of tokens behind each rate, at most
    HANDED_ON_STRENGTH.
    """

    by_position: Annotated[tuple[_Rate, ...], Length(POSITIONS, POSITIONS)] = (None,) * POSITIONS
    by_confidence: Annotated[tuple[_Rate, ...], Length(BINS, BINS)] = (None,) * BINS
    position_tokens: Annotated[tuple[_Tokens, ...], Length(POSITIONS, POSITIONS)] = (0.0,) * POSITIONS
    confidence_tokens: Annotated[tuple[_Tokens, ...], Length(BINS, BINS)] = (0.0,) * BINS

    def of_at_most(self, tokens: float) -> AcceptancePrior:
        """The same rates, each of at most that many tokens."""
        return replace(
            self,
            position_tokens=tuple(min(tokens, own) for own in self.position_tokens),
            confidence_tokens=tuple(min(tokens, own) for own in self.confidence_tokens),
        )

    @property
    def at_least(self) -> AcceptancePrior:
        """The lower ends of 95 % intervals around the rates of so few tokens."""

        def low(rate: float | None, tokens: float) -> float | None:
            if rate is None:
                return None
            return max(0.0, rate - NORMAL_95 * math.sqrt(rate * (1.0 - rate) / max(1.0, tokens)))

        return replace(
            self,
            by_position=tuple(map(low, self.by_position, self.position_tokens)),
            by_confidence=tuple(map(low, self.by_confidence, self.confidence_tokens)),
        )


NO_PRIOR = AcceptancePrior()


class Acceptance:
    """Acceptance counts of one drafter for one target. Not thread-safe; the depth policy guards it."""

    def __init__(self, prior: AcceptancePrior = NO_PRIOR) -> None:
        self._prior = prior
        self._all = _Count()
        self._positions = [_Count() for _ in range(POSITIONS)]
        self._bins = [_Count() for _ in range(BINS)]
        self._claimed = self._kept = 0.0  # decayed sums of confidences, and of right tokens
        self._expected = self._came = 0.0  # decayed sums of expected probabilities, and of right tokens

    def learn(self, confidences: Sequence[float], hits: Sequence[bool]) -> None:
        """Learn from a proposal's tokens in order, up to the first wrong one; ``confidences`` may be empty."""
        for position, (hit, sure) in enumerate(itertools.zip_longest(hits, confidences[: len(hits)])):
            self._all.add(hit)
            self._positions[min(position, POSITIONS - 1)].add(hit)
            if sure is not None:
                self._claimed = DECAY * self._claimed + sure
                self._kept = DECAY * self._kept + hit
                self._expected = QUICK_DECAY * self._expected + self._usually(sure)
                self._came = QUICK_DECAY * self._came + hit
                self._bins[_bin(sure)].add(hit)

    def fade(self, worth: float) -> None:
        """Limit earlier counts to a weight of ``worth`` tokens, since text went by unseen.

        What confidences are worth depends on the drafter, and is kept.
        """
        for count in (self._all, *self._positions):
            count.fade(worth)
        self._expected = self._came = 0.0

    @property
    def overall(self) -> float:
        """Probability that a token is accepted, without regard to position or confidence."""
        return self._all.rate(self._usual)

    @property
    def _usual(self) -> float:
        """The same probability before any token of this conversation."""
        known = [rate for rate in self._prior.by_position if rate is not None]
        return sum(known) / len(known) if known else UNKNOWN

    @property
    def seen(self) -> int:
        """Number of tokens compared in this process."""
        return self._all.tried_ever

    def by_position(self, depth: int) -> tuple[float, ...]:
        """Probability of acceptance at each of the first ``depth`` positions, if all earlier tokens were accepted."""
        overall = self.overall
        rates = [
            count.rate(overall) if prior is None else count.rate(prior, TAUGHT_STRENGTH)
            for count, prior in zip(self._positions, self._prior.by_position, strict=True)
        ]
        return tuple(rates[min(position, POSITIONS - 1)] for position in range(depth))

    def given(self, confidence: float) -> float:
        """Probability that a token of that confidence is accepted, lowered if recent tokens disappointed."""
        lately = (self._came + PRIOR_STRENGTH) / (self._expected + PRIOR_STRENGTH)
        return self._usually(confidence) * (lately if lately < DISAPPOINTING else 1.0)

    def _usually(self, confidence: float) -> float:
        index = _bin(confidence)
        prior = self._prior.by_confidence[index]
        return self._bins[index].rate(min(1.0, confidence * self._honesty) if prior is None else prior)

    @property
    def _honesty(self) -> float:
        """Factor for a confidence in a bin without counts: near 1 at first, then from the drafter's other bins."""
        return (self._kept + PRIOR_STRENGTH * UNKNOWN) / (self._claimed + PRIOR_STRENGTH * UNKNOWN)

    def as_prior(self) -> AcceptancePrior:
        """What is known now, for the next conversation; the old prior while too few tokens were seen.

        With a of n tokens accepted at a position or in a bin, its rate becomes (a + w * r) / (n + w). Where the prior
        has a rate, it is r, and w the tokens behind it, at least PRIOR_STRENGTH; elsewhere r is a guess of weight
        w = PRIOR_STRENGTH.
        """
        prior = self._prior
        if prior == NO_PRIOR and self.seen < PRIOR_STRENGTH:
            return prior
        overall = self._all.ever(self._usual, PRIOR_STRENGTH)

        def rate(count: _Count, known: float | None, tokens: float, guess: float) -> float | None:
            if not count.tried_ever:
                return known
            return count.ever(*((guess, PRIOR_STRENGTH) if known is None else (known, max(PRIOR_STRENGTH, tokens))))

        return AcceptancePrior(
            by_position=tuple(
                rate(*each, overall)
                for each in zip(self._positions, prior.by_position, prior.position_tokens, strict=True)
            ),
            by_confidence=tuple(
                rate(*each, min(1.0, (index + 0.5) / BINS * self._honesty))
                for index, each in enumerate(
                    zip(self._bins, prior.by_confidence, prior.confidence_tokens, strict=True)
                )
            ),
            position_tokens=_together(prior.position_tokens, self._positions),
            confidence_tokens=_together(prior.confidence_tokens, self._bins),
        ).of_at_most(HANDED_ON_STRENGTH)


def _together(before: Sequence[float], counts: Sequence[_Count]) -> tuple[float, ...]:
    return tuple(tokens + count.tried_ever for tokens, count in zip(before, counts, strict=True))


def _bin(confidence: float) -> int:
    return min(BINS - 1, max(0, int(confidence * BINS)))


@dataclass(slots=True)
class AlternativeOdds:
    """How often alternatives were the target's token, against how often their odds said they would be.

    Odds are taken as probabilities at first. At 1796 positions (0.5B for 1.5B, Q4_K_M, greedy, five kinds of text)
    they predicted 178 hits of the second choice (189 seen), 67 of the third (75) and 37 of the fourth (32).
    """

    claimed: float = 0.0
    right: float = 0.0

    def learn(self, odds: Sequence[float], hits: Sequence[bool]) -> None:
        """Learn from the alternatives of one position."""
        self.claimed = DECAY * self.claimed + sum(odds)
        self.right = DECAY * self.right + any(hits)

    @property
    def worth(self) -> float:
        """The factor by which odds are multiplied."""
        return (self.right + PRIOR_STRENGTH) / (self.claimed + PRIOR_STRENGTH)
