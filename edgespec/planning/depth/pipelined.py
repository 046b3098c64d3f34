"""The default depth policy where target and drafter work at once: draft as long as the pipe is expected to pay.

Drafting takes no time of the target's own, so there is no chain to end early: the loop ends it when the target is
done. What drafting costs is that both sides run slower while both run, which calibration measured and every round
corrects.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from edgespec.interfaces.drafting import ChainGate
from edgespec.interfaces.policy import Allowance, RoundRecord
from edgespec.planning.cost.acceptance import AcceptancePrior
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import Curve, DraftCost, choose_window
from edgespec.planning.cost.margins import DRAFT_MARGIN
from edgespec.planning.depth.cost_model import HORIZON_TOKENS, CostDepth, SourceState

# Rounds whose times say how much slower the target is than calibration had it, both at work: a sentence or two.
_RECENT_ROUNDS = 25
_ENOUGH_ROUNDS = 9


class PipelinedDepth(CostDepth):
    """Drafts one token more than ``depth_cap``: a window's forward scores the first token of the next one as well."""

    def __init__(
        self,
        depth_cap: int,
        sources: Sequence[str],
        costs: Costs | None = None,
        priors: Mapping[str, AcceptancePrior] | None = None,
    ) -> None:
        self._contention = Contention()
        self._slower: deque[float] = deque(maxlen=_RECENT_ROUNDS)
        super().__init__(depth_cap, sources, costs, priors)

    def calibrate(self, costs: Costs, depth_cap: int, priors: Mapping[str, AcceptancePrior] | None = None) -> None:
        super().calibrate(costs, depth_cap, priors)
        with self._lock:
            # Whoever wants both at once without a measurement gets it; the rounds themselves then tell what it costs.
            self._contention = costs.contention or Contention()
            self._slower.clear()

    def record(self, record: RoundRecord) -> None:
        with self._lock:
            if record.overlapped:
                curve, slowed = self._live_curve.curve(), max(1.0, self._contention.drafter_factor)
                if curve is not None and record.round_s > 0:
                    usual_s = curve.seconds(record.width) * max(1.0, self._contention.target_factor)
                    self._slower.append(record.round_s / usual_s)
                # A source's own pace is that of drafting alone.
                record = replace(record, draft_s=record.draft_s / slowed, sync_s=record.sync_s / slowed)
            super().record(record)

    def _granted(self, gate: ChainGate) -> Allowance:
        return Allowance(self._depth_cap + 1)

    def _pays(self, source: SourceState, cost: DraftCost, curve: Curve, lag: int) -> bool:
        slower = statistics.median(self._slower) if len(self._slower) >= _ENOUGH_ROUNDS else 1.0
        target_factor = max(1.0, self._contention.target_factor * slower)
        contended = curve.scaled(target_factor)
        drafting = cost.scaled(max(1.0, self._contention.drafter_factor))
        rates = source.acceptance.by_position(self._depth_cap)
        source.expected = curve.plain_s * choose_window(contended, drafting, rates, self._depth_cap).tokens_per_s
        source.possible = curve.plain_s * choose_window(contended, drafting, (1.0,), self._depth_cap).tokens_per_s
        if source.expected <= (1.0 if source.on else DRAFT_MARGIN):
            return False
        # While the drafter reads what it missed the target goes on, only slower.
        lost_s = lag * drafting.lag_token_s * (1.0 - 1.0 / target_factor)
        if not source.acceptance.proven:
            return lost_s <= self._credit_s
        return lost_s <= HORIZON_TOKENS * curve.plain_s * (1.0 - 1.0 / source.expected)
