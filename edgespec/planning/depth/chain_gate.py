"""Where a chain ends, and what is put forward beside it: what costs less time than it is likely to save.

The rule is that of fractional programming (Dinkelbach, 1967): add what brings more tokens than its time would bring
elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.planning.cost.acceptance import Acceptance, choose_siblings
from edgespec.planning.cost.margins import DRAFT_MARGIN

_LEAST_GAIN = DRAFT_MARGIN - 1.0


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
