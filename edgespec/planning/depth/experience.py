"""What recent answers taught: how often each source is right, whether drafting paid, and how long answers are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from edgespec.files.checked import From, Length, Range
from edgespec.planning.cost.acceptance import NO_PRIOR, Acceptance, AcceptancePrior, AlternativeOdds

# Before a pair has any experience: drafting pays in three of four answers, with an acceptance of 0.8 in those
# (0.5B for 1.5B, depth 3: coding 0.91, translation 0.45). With the prompt read, all 13 Spec-Bench categories gained
# (docs/results/promises.md).
PAYS = 0.75
GOOD_RATE = 0.8

# Weight of older answers: about the last twenty count. Untried answers fade half as fast, so that drafting is tried
# again. The prior counts for half an answer. Simulated: a prior of one whole answer runs unsuitable texts at 0.985 of
# plain; with less than half, code is detected late after twenty translations.
_ANSWER_DECAY = 0.95
_UNTRIED_DECAY = 0.975
_BROAD = 0.5

# Drafted rounds after which an answer has full weight.
_ENOUGH_ROUNDS = 6

# Suffix of a source's name for its acceptance in sampled answers; without the suffix: greedy answers.
SAMPLED = ":sampled"

# Answers whose lengths are remembered, and how many lengths are enough to decide by.
_REMEMBERED = 32
_ENOUGH = 6

Sums: TypeAlias = tuple[float, float, float]
NO_SUMS: Sums = (0.0, 0.0, 0.0)

# Files of earlier versions have a fourth sum.
_Numbers: TypeAlias = Annotated[tuple[Annotated[float, Range(0)], ...], Length(3)]
_StoredSums: TypeAlias = Annotated[Sums, From(_Numbers, lambda sums: sums[:3])]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What one process passes to the next: answer lengths, and ``Experience.sums`` for greedy and sampled answers."""

    lengths: tuple[Annotated[int, Range(0)], ...]
    greedy: _StoredSums
    sampled: _StoredSums


NO_HISTORY = History(lengths=(), greedy=NO_SUMS, sampled=NO_SUMS)


class Lengths:
    """The lengths of recent answers, in tokens."""

    def __init__(self, known: Iterable[int] = ()) -> None:
        self.known = deque(known, maxlen=_REMEMBERED)

    def longer_than(self, tokens: int, most: int | None) -> Sequence[int] | None:
        """Known lengths above ``tokens``, ascending, cut to ``most``; None if too few lengths are known.

        ``most`` is the token budget of this answer.
        """
        if len(self.known) < _ENOUGH:
            return None
        longer = sorted(length for length in self.known if length > tokens)
        return longer if most is None else [min(most, length) for length in longer]


@dataclass(slots=True)
class Experience:
    """Experience with either greedy or sampled answers, in plain steps.

    The sums over answers fade: their number, their tokens after drafting was bought, and the steps saved where
    drafting paid. ``sources`` say how often drafted tokens are right, ``odds`` how often their
    alternatives are.
    """

    answers: float = 0.0
    tokens: float = 0.0
    saved: float = 0.0
    sources: dict[str, Acceptance] = field(default_factory=dict)
    odds: AlternativeOdds = field(default_factory=AlternativeOdds)

    @property
    def sums(self) -> Sums:
        return self.answers, self.tokens, self.saved

    def gain(self, usual: float) -> float:
        """Share of a token's time that drafting should save in the next answer; drafting that loses is stopped.

        ``usual`` is the share that drafting saves in an answer where it gains.
        """
        broad = _BROAD * (self.tokens / self.answers if self.answers else 1.0)
        return (self.saved + broad * PAYS * usual) / (self.tokens + broad)

    def acceptance(self, source: str, priors: Mapping[str, AcceptancePrior], *, sampled: bool) -> Acceptance:
        """Acceptance of ``source``, starting from ``priors``; sampled answers fall back to the greedy prior."""
        if source not in self.sources:
            prior = priors.get(source, NO_PRIOR)
            self.sources[source] = Acceptance(priors.get(source + SAMPLED, prior) if sampled else prior)
        return self.sources[source]

    def learn(self, saved: float, tokens: int, rounds: int) -> None:
        """Record an ended answer: its ``rounds`` saved ``saved`` steps in ``tokens`` since drafting was bought."""
        decay = _ANSWER_DECAY if rounds else _UNTRIED_DECAY
        weight = min(1.0, rounds / _ENOUGH_ROUNDS)
        self.answers = decay * self.answers + weight
        self.tokens = decay * self.tokens + weight * max(1, tokens)
        self.saved = decay * self.saved + weight * max(0.0, saved)
