"""What a target and a drafter come to, plain, in turns and at once: what a benchmark is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.curve import Curve, DraftCost
from edgespec.planning.cost.round_simulation import (
    SimulatedPair,
    SimulatedRounds,
    WindowRule,
    expected_pipelined,
    expected_serial,
)

__all__ = ["PredictedRates", "predicted_rates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRates:
    """Tokens a second to expect: plain, in turns at the best depth from 1 to the cap, and at once at the cap."""

    plain_tokens_per_s: float
    serial_tokens_per_s: float
    serial_depth: int
    pipelined_tokens_per_s: float
    pipelined: SimulatedRounds

    @property
    def gain_over_serial(self) -> float:
        """How many times as fast at once is as in turns."""
        return self.pipelined_tokens_per_s / self.serial_tokens_per_s


def predicted_rates(
    curve: Curve,
    draft_token_s: float,
    acceptance: float | Sequence[float],
    depth_cap: int,
    *,
    hand_over_s: float = 0.0,
    contention: Contention | None = None,
    window: WindowRule = "best",
) -> PredictedRates:
    """What a target of ``curve`` and a drafter of ``draft_token_s`` a token come to, up to ``depth_cap`` deep.

    ``acceptance`` is one probability, or one for each place behind a token of the target's own. ``hand_over_s`` is
    counted once a round in both modes, ``contention`` while both are at work. Raises ValueError for a cap below 1 and
    for values out of bounds.
    """
    rates = (acceptance,) if isinstance(acceptance, int | float) else tuple(acceptance)
    pair = SimulatedPair(
        curve=curve,
        draft=DraftCost(token_s=draft_token_s),
        acceptance=rates,
        hand_over_s=hand_over_s,
        contention=contention or Contention(),
    )
    at_once = expected_pipelined(pair, depth_cap, window=window)
    in_turns = {depth: expected_serial(pair, depth).tokens_per_s for depth in range(1, depth_cap + 1)}
    best = max(in_turns, key=in_turns.__getitem__)
    return PredictedRates(
        plain_tokens_per_s=1.0 / curve.plain_s,
        serial_tokens_per_s=in_turns[best],
        serial_depth=best,
        pipelined_tokens_per_s=at_once.tokens_per_s,
        pipelined=at_once,
    )
