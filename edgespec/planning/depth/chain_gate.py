"""Where a chain ends: at the first token that costs more time than it is likely to save."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.planning.cost.acceptance import Acceptance
from edgespec.planning.cost.margins import DRAFT_MARGIN

_LEAST_GAIN = DRAFT_MARGIN - 1.0


class PricedGate:
    """A gate for one chain of at most ``most`` tokens.

    ``forward_s[d]`` are the seconds of a target's forward with d drafted tokens, ``token_s`` those of a drafted one.
    Time is worth ``tokens_per_s``. The rule is that of fractional programming (Dinkelbach, 1967): add what brings
    more tokens than its time would bring elsewhere. It looks ahead, because T(w) may rise in steps.
    """

    needs_entropy = False
    __slots__ = ("_acceptance", "_forward_s", "_most", "_next", "_survives", "_token_s", "_tokens_per_s", "length")

    def __init__(
        self,
        forward_s: Sequence[float],
        token_s: float,
        acceptance: Acceptance,
        most: int,
        tokens_per_s: float,
    ) -> None:
        self._forward_s, self._token_s, self._acceptance = forward_s, token_s, acceptance
        self._most, self._tokens_per_s = most, tokens_per_s
        self._survives = 1.0
        self._next = acceptance.overall
        self.length = 0

    def admits(self, confidence: float, entropy: float | None) -> bool:
        probability = self._acceptance.given(confidence)
        if not self._worth(probability, 0.0):  # the forward that told the confidence is paid already
            return False
        self.length += 1
        self._survives *= probability
        return True

    def goes_on(self) -> bool:
        return self._worth(self._next, self._token_s)

    def _worth(self, probability: float, drafted_s: float) -> bool:
        before_s, survives, gained = self._forward_s[self.length], self._survives * probability, 0.0
        for depth in range(self.length + 1, self._most + 1):
            gained += survives
            if gained > self._tokens_per_s * (self._forward_s[depth] - before_s + drafted_s) + _LEAST_GAIN:
                return True
            survives *= self._next
            drafted_s += self._token_s
        return False
