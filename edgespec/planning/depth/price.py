"""What is spent on the chance of a gain: whether to buy drafting for an answer, and where a chain ends.

Buying is like renting skis (Karlin et al., 1988): whoever does not know how often he will ski buys when the rent paid
comes to the price, and never pays more than twice what was best. Here the rent is the time that drafting would have
saved. A bound on the loss itself is another rule, that of conservative bandits (Wu et al., 2016): nothing is tried
unless the answer so far could lose it and stay above a share of plain decoding's speed.

A drafter that reads tokens which the target has written says on the way which of them it would have guessed. So one
short forward tells whether it knows this text, without a token put forward.

A chain, and what is put forward beside it, grows by the rule of fractional programming (Dinkelbach, 1967): add what
brings more tokens than its time would bring elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.planning.cost.acceptance import Acceptance, choose_siblings
from edgespec.planning.cost.margins import DRAFT_MARGIN

# The worst request loses this share of plain decoding's time: 1 / (1 + RISK) is 0.91 of plain, and what times are
# measured wrong by may take it to 0.89.
RISK = 0.10

# Plain steps that a trial may lose before drafting rests, and the most that a change of text may cost. Simulated:
# between 4 and 10 steps of trust nothing changes.
TRIAL = 2.0
MOST_TRUST = 6.0

# Plain tokens before another trial in the same answer, doubled by each one that failed.
FIRST_REST = 48

# What a share of the text is worth. The 0.5B for the 1.5B, at 168 places of Spec-Bench answers, was right in 0.81 of
# them with all of the text, 0.80 with four fifths of it, 0.68 with two fifths, 0.62 with a half of long prompts and
# 0.33 to 0.54 with a tenth or less. That share to this power is close to all of these.
_POWER = 0.25

# The fewest tokens of a longer text that drafting begins with: one slice (drafters/model.py).
LEAST_READ = 16

# Tokens of the answer that are guessed in hindsight, and those that are read where that is all the reading is for.
# Fourteen tell a text of which three tokens in four are guessed from one of which one in three is. Simulated: between
# 12 and 16, and 20 and 24, nothing changes.
HINDSIGHT = 14
LOOK = 20

# Tokens guessed in hindsight that what was known before is worth.
KNOWN_BEFORE = 4.0

_LEAST_GAIN = DRAFT_MARGIN - 1.0


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
        return RISK * self.plain_s + self.saved_s


@dataclass(slots=True)
class Trust:
    """What an answer's drafted rounds have earned, in plain steps, and how long drafting rests once that is lost."""

    on: bool = False
    failed: int = 0
    rests_until: int = 0  # tokens of the answer
    _left: float = 0.0
    _rest: int = FIRST_REST

    def begin(self) -> None:
        """Draft, until a trial's steps are lost."""
        self.on, self._left = True, TRIAL

    def add(self, saved: float) -> bool:
        """What a round saved; whether drafting goes on, or rested anyway."""
        self._left = min(MOST_TRUST, self._left + saved)
        if self._left >= MOST_TRUST:
            self._rest = FIRST_REST
        return not self.on or self._left >= 0.0

    def end(self, done: int) -> int:
        """Rest after ``done`` tokens; how many there are when it ends."""
        self.on, self.failed, self.rests_until = False, self.failed + 1, done + self._rest
        self._rest *= 2
        return self.rests_until


def worth_buying(
    price_s: float, gain_s: float, done: int, most: int | None, longer: Sequence[int] | None, before: float
) -> bool:
    """Whether to spend ``price_s`` after ``done`` tokens on an expected ``gain_s`` of each that is still to come.

    Where lengths are known: if it is expected to bring more than nothing and more than waiting until some of the
    answers have ended. Every answer counts alike, so what one wins is taken as a share of its plain time, in which
    reading the prompt is worth ``before`` tokens. Where nothing is known: as if as many tokens again came as there
    are.
    """
    if not longer:
        return (done if most is None else min(done, most - done)) * gain_s > price_s

    def share(after: int, first: int) -> float:
        return sum(((length - after) * gain_s - price_s) / (before + length) for length in longer[first:])

    now = share(done, 0)
    if now <= 0.0:
        return False
    return all(share(length, place + 1) <= now for place, length in enumerate(longer) if length > done)


def worth_of(skipped: int, context: int) -> float:
    """How often a drafter that skipped so many tokens of the text is right, for each time that it would be."""
    return math.pow(1.0 - min(skipped, context) / context, _POWER)


def readings(lag: int, unread: int, context: int) -> list[int]:
    """How many tokens may be read before drafting begins: all that the drafter lacks, a half of it or a quarter.

    A drafter that skipped ``unread`` tokens of the ``context`` begins anew, unless it goes on with what it has.
    """
    if not unread:
        return [lag, *(part for part in (lag // 2, lag // 4) if part >= LEAST_READ)]
    return [context, *(part for part in (context // 2, context // 4) if part > context - unread), lag]


def rate_in_hindsight(hits: Sequence[bool], worth: float, before: float, known: float = KNOWN_BEFORE) -> float:
    """How often a drafter that had read all of the text would have been right.

    ``before`` is what was believed, by so many tokens as ``known`` says.
    """
    return min(1.0, (sum(hits) / worth + known * before) / (len(hits) + known))


class PricedGate:
    """A gate for one chain of at most ``most`` tokens.

    ``forward_s[d]`` are the seconds of a target's forward with d drafted tokens, ``token_s`` those of a drafted one.
    Time is worth ``tokens_per_s``. The odds of alternatives are worth ``odds_factor`` times what they say.
    """

    needs_entropy = False

    def __init__(
        self,
        forward_s: Sequence[float],
        token_s: float,
        acceptance: Acceptance,
        most: int,
        tokens_per_s: float,
        odds_factor: float = 1.0,
    ) -> None:
        self._forward_s, self._token_s, self._acceptance = forward_s, token_s, acceptance
        self._most, self._tokens_per_s, self._odds_factor = most, tokens_per_s, odds_factor
        self._survives = 1.0
        self._reach: list[float] = []  # how likely each token of the chain is to be compared at all
        self._next = acceptance.overall

    def admits(self, confidence: float, entropy: float | None) -> bool:
        probability = self._acceptance.given(confidence)
        if not self._worth(probability, 0.0):  # the forward that told the confidence is paid already
            return False
        self._reach.append(self._survives)
        self._survives *= probability
        return True

    def goes_on(self) -> bool:
        return self._worth(self._next, self._token_s)

    def siblings(self, odds: Sequence[Sequence[float]], most: int) -> list[tuple[int, int]]:
        believed = [[min(1.0, self._odds_factor * own) for own in place] for place in odds]
        room = min(most, self._most - len(self._reach))
        return choose_siblings(self._forward_s, self._reach, believed, room, self._tokens_per_s, _LEAST_GAIN)

    def _worth(self, probability: float, drafted_s: float) -> bool:
        """Whether the chain should grow by a token of that probability, ``drafted_s`` of drafting away.

        It looks ahead, because T(w) may rise in steps; those further tokens are taken to be accepted as often as any.
        """
        length = len(self._reach)
        before_s, survives, gained = self._forward_s[length], self._survives * probability, 0.0
        for depth in range(length + 1, self._most + 1):
            gained += survives
            if gained > self._tokens_per_s * (self._forward_s[depth] - before_s + drafted_s) + _LEAST_GAIN:
                return True
            survives *= self._next
            drafted_s += self._token_s
        return False
