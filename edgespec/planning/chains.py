"""Over how many chains a proposal is spread, where the target scores a tree in one forward. Pure.

A drafter that is unsure of its next token may follow several ids at once (DuoDecoding: Lv et al., 2025). What it
drafts then takes it one forward a place for all of them together, and makes the target's forward that much wider. So
it is the target's T(w) that decides: where a further row is nearly free several chains win whenever the drafter is
unsure, where it is dear there is one chain or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.planning.cost.curve import Curve, expected_tokens

__all__ = ["ChainChoice", "choose_chains"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainChoice:
    """``chains`` of ``length`` tokens and what a round of them is expected to bring; none are plain decoding."""

    chains: int
    length: int
    tokens_per_round: float
    round_s: float

    @property
    def tokens_per_s(self) -> float:
        """Committed tokens a second."""
        return self.tokens_per_round / self.round_s


def choose_chains(
    target: Curve,
    drafter: Curve,
    odds: Sequence[float],
    acceptance: Sequence[float],
    depth_cap: int,
    *,
    at_once: bool = False,
) -> ChainChoice:
    """The chains of at most ``depth_cap`` tokens with the most expected tokens a second; of equal ones the smaller.

    ``target`` is T(w); ``drafter`` the seconds of one forward of the drafter by how many chains it continues.
    ``odds[j]`` is the probability that the drafter's j-th best id is the target's next token, best first; its sum is
    at most one. ``acceptance[i]`` is the probability that the token at place i + 1 of a chain stands if those before
    it do (its last entry goes on). k chains of L tokens then commit 1 + (o1 + ... + ok)(1 + a1 + a1 a2 + ...) tokens.
    In turns a round takes L t(k) + T(1 + kL); ``at_once`` only T(1 + kL), and the drafter has to be done by then: L
    t(k) <= T(1 + kL). Raises ValueError for odds that are none.
    """
    if any(not 0 <= own <= 1 for own in odds) or sum(odds) > 1 + 1e-6 or list(odds) != sorted(odds, reverse=True):
        raise ValueError("the odds of different tokens descend and sum to at most one")
    best = ChainChoice(chains=0, length=0, tokens_per_round=1.0, round_s=target.plain_s)
    for chains in range(1, min(depth_cap, len(odds)) + 1):
        hit = sum(odds[:chains])
        for length in range(1, depth_cap // chains + 1):
            rates = [acceptance[min(place, len(acceptance) - 1)] for place in range(length - 1)] if acceptance else []
            if len(rates) < length - 1:
                break  # nothing is known of further places
            draft_s, verify_s = length * drafter.seconds(chains), target.seconds(1 + chains * length)
            if at_once and draft_s > verify_s:
                continue
            choice = ChainChoice(
                chains=chains,
                length=length,
                tokens_per_round=1.0 + hit * expected_tokens(rates),
                round_s=verify_s if at_once else draft_s + verify_s,
            )
            if choice.tokens_per_s > best.tokens_per_s:
                best = choice
    return best
