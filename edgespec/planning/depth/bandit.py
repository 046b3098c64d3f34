"""Choosing among depth policies by what they earn: a bandit over policies (BanditSpec, Hou et al., 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgespec.interfaces.policy import Allowance, DepthPolicy, RoundRecord
from edgespec.planning.cost.acceptance import AcceptancePrior
from edgespec.planning.cost.costs import Costs
from edgespec.planning.depth.base import TimedPolicy
from edgespec.planning.depth.cost_model import CostDepth

# Rounds that one choice lasts: a drafter that is turned on for a single round would pay for catching up and earn
# nothing of it.
ROUNDS_PER_PULL = 4

# Width of the confidence bound, in units of plain decoding's speed. UCB1 (Auer et al., 2002) takes the range of the
# rewards; those of one text lie within about half of plain speed.
EXPLORATION = 0.5


@dataclass(slots=True)
class _Arm:
    pulls: float = 0.0
    reward: float = 0.0  # sum over pulls of speed relative to plain


class BanditDepth(TimedPolicy):
    """UCB1 over policies; the reward of a pull is tokens a second relative to plain decoding."""

    def __init__(self, arms: Mapping[str, DepthPolicy]) -> None:
        super().__init__()
        if not arms:
            raise ValueError("a bandit needs at least one arm")
        self._policies = dict(arms)
        self._arms = {name: _Arm() for name in arms}
        self._current = next(iter(arms))
        self._rounds = self._tokens = 0
        self._seconds = 0.0

    @property
    def current(self) -> str:
        """Name of the policy that decides now."""
        with self._lock:
            return self._current

    def allow(self, source: str, lag: int = 0) -> Allowance:
        with self._lock:
            return self._policies[self._current].allow(source, lag)

    def learn(self, source: str, confidences: Sequence[float], hits: Sequence[bool]) -> None:
        for policy in self._policies.values():
            policy.learn(source, confidences, hits)

    def learn_siblings(self, source: str, odds: Sequence[float], hits: Sequence[bool]) -> None:
        for policy in self._policies.values():
            policy.learn_siblings(source, odds, hits)

    def record(self, record: RoundRecord) -> None:
        with self._lock:
            super().record(record)
            for policy in self._policies.values():
                policy.record(record)
            self._rounds += 1
            # Otherwise the clock jumped, and the round says nothing.
            if record.round_s > 0 and math.isfinite(record.round_s):
                self._tokens += record.emitted
                self._seconds += record.round_s
            if self._rounds >= ROUNDS_PER_PULL:
                self._end_pull()

    def _end_pull(self) -> None:
        plain_s = self._live_curve.plain_s
        arm = self._arms[self._current]
        if self._seconds > 0:
            # Before plain decoding was timed every arm is taken to be as fast as it.
            arm.reward += 1.0 if plain_s is None else self._tokens * plain_s / self._seconds
            arm.pulls += 1
        self._rounds = self._tokens = 0
        self._seconds = 0.0
        self._current = max(self._arms, key=self._bound)

    def _bound(self, name: str) -> float:
        arm = self._arms[name]
        if not arm.pulls:
            return math.inf  # ties go to the arm named first
        total = sum(other.pulls for other in self._arms.values())
        return arm.reward / arm.pulls + EXPLORATION * math.sqrt(2 * math.log(max(total, 1.0)) / arm.pulls)

    def priors(self) -> dict[str, AcceptancePrior]:
        """What the arms have learned about each source's acceptance."""
        known: dict[str, AcceptancePrior] = {}
        for policy in self._policies.values():
            if isinstance(policy, CostDepth):
                known |= policy.priors()
        return known

    def calibrate(self, costs: Costs, depth_cap: int, priors: Mapping[str, AcceptancePrior] | None = None) -> None:
        """Hand new measurements to the arms that use them."""
        for policy in self._policies.values():
            if isinstance(policy, CostDepth):
                policy.calibrate(costs, depth_cap, priors)

    def why_off(self, source: str) -> str | None:
        with self._lock:
            return self._policies[self._current].why_off(source)
