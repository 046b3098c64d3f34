"""Which tokens beside a chain are worth verifying, and what a drafter's odds of them are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.planning.cost.acceptance import DECAY, PRIOR_STRENGTH
from edgespec.planning.cost.curve import Curve


@dataclass(slots=True)
class SiblingOdds:
    """How often alternatives were the target's token, against how often their odds said they would be.

    At first odds are taken at their word, and that is close: of 1796 places (0.5B drafting for 1.5B, Q4_K_M, greedy,
    five kinds of text) those of the second choice came to 178 and it was the target's 189 times, those of the third
    to 67 (75) and of the fourth to 37 (32), each bin of them within chance of its odds.
    """

    claimed: float = 0.0
    right: float = 0.0

    def learn(self, odds: Sequence[float], hits: Sequence[bool]) -> None:
        """The alternatives of one place."""
        self.claimed = DECAY * self.claimed + sum(odds)
        self.right = DECAY * self.right + any(hits)

    @property
    def worth(self) -> float:
        """What odds are to be multiplied by."""
        return (self.right + PRIOR_STRENGTH) / (self.claimed + PRIOR_STRENGTH)


def choose_siblings(
    curve: Curve,
    reach: Sequence[float],
    odds: Sequence[Sequence[float]],
    most: int,
    tokens_per_s: float,
    least_gain: float = 0.0,
) -> list[tuple[int, int]]:
    """The (place, rank) of at most ``most`` alternatives to put forward beside a chain, ascending.

    The chain has ``len(reach)`` tokens; ``reach[i]`` is the probability that those before token i stand, and
    ``odds[i][j]`` that its j-th alternative is the target's if they do. A sibling brings one token if it is the
    target's, for what the forward then takes longer by ``curve``. Added are the likeliest as long as they bring more
    than that time is worth at ``tokens_per_s``, by ``least_gain`` tokens (Dinkelbach, 1967): where the curve rises in
    steps, several at once.
    """
    chances = sorted(
        (-before * own, place, rank)
        for place, (before, each) in enumerate(zip(reach, odds, strict=False))
        for rank, own in enumerate(each)
    )[: max(0, most)]
    width, taken, gained = len(reach) + 1, 0, 0.0
    before_s = curve.seconds(width)
    for count, (loss, _, _) in enumerate(chances, start=1):
        gained -= loss
        after_s = curve.seconds(width + count)
        if gained > tokens_per_s * (after_s - before_s) + least_gain:
            taken, gained, before_s = count, 0.0, after_s
    return sorted((place, rank) for _, place, rank in chances[:taken])
