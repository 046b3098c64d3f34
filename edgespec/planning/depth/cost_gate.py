"""Gates that end a chain by what its next token costs and is likely to save."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.planning.cost.acceptance import Acceptance
from edgespec.planning.cost.curve import Curve
from edgespec.planning.cost.margins import DRAFT_MARGIN
from edgespec.planning.cost.tree_width import choose_siblings


class CostGate:
    """Ends a chain where the next token costs more time than it is likely to save.

    The same weighs what may be put forward beside it, with odds that are worth ``odds_factor`` times what they say.
    """

    needs_entropy = False

    def __init__(
        self,
        curve: Curve,
        token_s: float,
        acceptance: Acceptance,
        depth_cap: int,
        tokens_per_s: float,
        odds_factor: float = 1.0,
    ) -> None:
        self._curve, self._token_s, self._acceptance = curve, token_s, acceptance
        self._depth_cap, self._tokens_per_s = depth_cap, tokens_per_s
        self._odds_factor = odds_factor
        self._survives = 1.0
        self._reach: list[float] = []  # how likely each token of the chain is to be compared at all
        self._rates = acceptance.by_position(depth_cap)

    def admits(self, confidence: float, entropy: float | None) -> bool:
        probability = self._acceptance.given(confidence)
        # The forward that told the confidence is paid already.
        if not self._worth(probability, 0.0):
            return False
        self._reach.append(self._survives)
        self._survives *= probability
        return True

    def siblings(self, odds: Sequence[Sequence[float]], most: int) -> list[tuple[int, int]]:
        believed = [[min(1.0, self._odds_factor * own) for own in place] for place in odds]
        return choose_siblings(self._curve, self._reach, believed, most, self._tokens_per_s, DRAFT_MARGIN - 1.0)

    def goes_on(self) -> bool:
        probability = self._rates[min(len(self._reach), self._depth_cap - 1)]
        return self._worth(probability, self._token_s)

    def _worth(self, probability: float, drafted_s: float) -> bool:
        """Whether the chain should grow by a token of that probability, ``drafted_s`` of drafting away.

        The rule is that of fractional programming (Dinkelbach, 1967): add what brings more tokens than its time would
        bring elsewhere. It looks ahead, because a curve may rise in steps; those further tokens are taken to be
        accepted as often as such tokens are, however sure this one is.
        """
        before_s, survives, gained = self._curve.seconds(len(self._reach) + 1), self._survives * probability, 0.0
        for depth in range(len(self._reach) + 1, self._depth_cap + 1):
            gained += survives
            price_s = self._curve.seconds(depth + 1) - before_s + drafted_s
            if gained > self._tokens_per_s * price_s + DRAFT_MARGIN - 1.0:
                return True
            survives *= self._rates[min(depth, self._depth_cap - 1)]
            drafted_s += self._token_s
        return False


class ProbeGate:
    """Lets the first token through, and notes whether it would have been put forward otherwise."""

    needs_entropy = False

    def __init__(self, usual: CostGate) -> None:
        self._usual = usual
        self.wanted: bool | None = None

    def admits(self, confidence: float, entropy: float | None) -> bool:
        self.wanted = self._usual.admits(confidence, entropy)
        return True

    def goes_on(self) -> bool:
        return False
