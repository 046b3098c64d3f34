"""What recent answers taught: how often each source is right, whether drafting paid, and how long answers are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.planning.cost.acceptance import NO_PRIOR, Acceptance, AcceptancePrior, SiblingOdds

# Before anything is known of a pair: drafting pays in three answers of four, and there as much as at an acceptance of
# 0.8 (coding 0.91, translation 0.45: a 0.5B drafter for a 1.5B target, depth 3). With both prompts read each of 13
# categories of Spec-Bench gained (docs/results/promises.md).
PAYS = 0.75
GOOD_RATE = 0.8

# What older answers count for beside the next: twenty or so. Untried ones fade half as fast, so that it is tried
# again. What is known before any answer counts for half of one. Simulated: with a whole one texts that the drafter
# hardly knows run at 0.985 of plain in the mean, with less than half code is found late after twenty translations.
_ANSWER_DECAY = 0.95
_UNTRIED_DECAY = 0.975
_BROAD = 0.5

# An answer says all that it can about whether drafting pays after so many drafted rounds.
_ENOUGH_ROUNDS = 6

# What tells a source's acceptance in sampled answers from that in greedy ones, behind its name.
SAMPLED = ":sampled"

# Answers whose lengths are remembered, and how many of them are enough to decide by.
_REMEMBERED = 32
_ENOUGH = 6

Sums = tuple[float, float, float]
NO_SUMS: Sums = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What one process hands on to the next: lengths of answers, and ``Experience.sums`` greedily and sampled."""

    lengths: tuple[int, ...] = ()
    greedy: Sums = NO_SUMS
    sampled: Sums = NO_SUMS

    def __post_init__(self) -> None:
        if not all(0 <= each < float("inf") for each in (*self.lengths, *self.greedy, *self.sampled)):
            raise ValueError("lengths and sums are numbers from 0 on")

    def as_json(self) -> dict[str, Any]:
        return {"lengths": list(self.lengths), "greedy": list(self.greedy), "sampled": list(self.sampled)}

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> History:
        """Raises ValueError, KeyError or TypeError for anything that ``as_json`` would not have written."""
        return History(
            lengths=tuple(int(length) for length in stored["lengths"]),
            greedy=_sums(stored["greedy"]),
            sampled=_sums(stored["sampled"]),
        )


def _sums(stored: Sequence[Any]) -> Sums:
    answers, tokens, saved = (float(each) for each in stored[:3])
    return answers, tokens, saved


class Lengths:
    """How long the answers of a session have been."""

    def __init__(self, known: Iterable[int] = ()) -> None:
        self.known = deque(known, maxlen=_REMEMBERED)

    def longer_than(self, tokens: int, most: int | None) -> Sequence[int] | None:
        """Lengths that an answer of so many ``tokens`` may still come to, ascending; None where too few are known.

        ``most`` is the budget of this answer, which ends longer ones.
        """
        if len(self.known) < _ENOUGH:
            return None
        longer = sorted(length for length in self.known if length > tokens)
        return longer if most is None else [min(most, length) for length in longer]


@dataclass(slots=True)
class Experience:
    """Of answers drawn greedily, or of sampled ones. Everything is in plain steps.

    Faded sums over answers: how many, their tokens after drafting was bought, and what was saved where it paid.
    ``sources`` and ``siblings`` say how often drafted tokens are right.
    """

    answers: float = 0.0
    tokens: float = 0.0
    saved: float = 0.0
    sources: dict[str, Acceptance] = field(default_factory=dict)
    siblings: SiblingOdds = field(default_factory=SiblingOdds)

    @property
    def sums(self) -> Sums:
        return self.answers, self.tokens, self.saved

    def gain(self, usual: float) -> float:
        """What drafting is expected to save of each token of the next answer; where it does not pay it stops.

        ``usual`` is what it saves of each where it pays.
        """
        broad = _BROAD * (self.tokens / self.answers if self.answers else 1.0)
        return (self.saved + broad * PAYS * usual) / (self.tokens + broad)

    def acceptance(self, source: str, priors: Mapping[str, AcceptancePrior], *, sampled: bool) -> Acceptance:
        """How often ``source`` is right; at first as ``priors`` say, those of greedy answers if there are no more."""
        if source not in self.sources:
            prior = priors.get(source, NO_PRIOR)
            self.sources[source] = Acceptance(priors.get(source + SAMPLED, prior) if sampled else prior)
        return self.sources[source]

    def learn(self, saved: float, tokens: int, rounds: int) -> None:
        """An answer ended: its drafted ``rounds`` saved so many steps, in ``tokens`` since drafting was bought."""
        decay = _ANSWER_DECAY if rounds else _UNTRIED_DECAY
        weight = min(1.0, rounds / _ENOUGH_ROUNDS)
        self.answers = decay * self.answers + weight
        self.tokens = decay * self.tokens + weight * max(1, tokens)
        self.saved = decay * self.saved + max(0.0, saved)
