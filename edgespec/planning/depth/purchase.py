"""What is spent on the chance of a gain: whether to buy drafting for an answer, and how long such answers are.

Buying is like renting skis (Karlin et al., 1988): whoever does not know how often he will ski buys when the rent paid
comes to the price, and never pays more than twice what was best. Here the rent is the time that drafting would have
saved. A bound on the loss itself is another rule, that of conservative bandits (Wu et al., 2016): nothing is tried
unless the answer so far could lose it and stay above a share of plain decoding's speed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

# The worst request loses this share of plain decoding's time: 1 / (1 + RISK) is 0.91 of plain, and what times are
# measured wrong by may take it to 0.89.
RISK = 0.10

# Answers whose lengths are remembered, and how many of them are enough to decide by.
_REMEMBERED = 32
_ENOUGH = 6


@dataclass(slots=True)
class Ledger:
    """One answer's seconds: what it took so far, and what plain decoding would have taken for the same tokens."""

    spent_s: float
    plain_s: float

    @property
    def saved_s(self) -> float:
        return self.plain_s - self.spent_s

    @property
    def room_s(self) -> float:
        """What may be lost from here on, if the answer ended after it."""
        return RISK * self.plain_s + self.plain_s - self.spent_s


class Lengths:
    """How long the answers of a session have been."""

    def __init__(self, known: Iterable[int] = ()) -> None:
        self._lengths: deque[int] = deque(known, maxlen=_REMEMBERED)

    @property
    def known(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    def add(self, tokens: int) -> None:
        self._lengths.append(tokens)

    def longer_than(self, tokens: int, most: int | None) -> list[int] | None:
        """Lengths that an answer of so many ``tokens`` may still come to, ascending; None where too few are known.

        ``most`` is the budget of this answer, which ends longer ones.
        """
        if len(self._lengths) < _ENOUGH:
            return None
        longer = sorted(length for length in self._lengths if length > tokens)
        return longer if most is None else [min(most, length) for length in longer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Drafting for the rest of an answer: ``price_s`` at once, and ``gain_s`` expected of each token.

    ``trial_s`` is what finding out that it does not pay is expected to take.
    """

    price_s: float
    gain_s: float
    trial_s: float

    def worth_s(self, tokens: float) -> float:
        """What is expected to be won if that many tokens are still to come."""
        return tokens * self.gain_s - self.price_s - self.trial_s


def worth_buying(offer: Offer, done: int, most: int | None, longer: list[int] | None, before: float) -> bool:
    """Whether to buy after ``done`` tokens.

    Where lengths are known: if it is expected to bring more than nothing and more than waiting until some of the
    answers have ended. Every answer counts alike, so what one wins is taken as a share of its plain time, in which
    reading the prompt is worth ``before`` tokens. Where nothing is known: as if as many tokens again came as there
    are.
    """
    if not longer:
        rest = done if most is None else min(done, most - done)
        return offer.worth_s(rest) > 0.0

    def share(after: int, first: int) -> float:
        return sum(offer.worth_s(length - after) / (before + length) for length in longer[first:])

    now = share(done, 0)
    if now <= 0.0:
        return False
    return all(share(length, place + 1) <= now for place, length in enumerate(longer) if length > done)
