"""How many proposed tokens a pipelined round verifies, by measured times and acceptance."""

from __future__ import annotations

from threading import TIMEOUT_MAX

from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import DraftCost, overlapped_tokens, window_by_rate
from edgespec.planning.cost.live_times import LiveTimes
from edgespec.planning.cost.margins import SLOWER_ALLOWED

# Decay for each round, as in planning/cost/acceptance.py: text changes within a few sentences.
_DECAY = 0.97

# A drafter that is asked to stop finishes its current forward: twice its usual time is allowed, or, before any
# forward was timed, a slow token of a small model on a slow device. A slower drafter is reading a prompt; the target
# does not wait for it.
_PATIENCE, _FIRST_PATIENCE_S = 2.0, 0.05

# Reuse continues while at least half of the first re-proposed tokens are accepted: a wrong token costs one round's
# drafting, a right one saves it.
_REUSE_PAYS = 0.5


class _Share:
    """Decayed share of recent tries that succeeded; starts as ``well`` of ``tries``."""

    def __init__(self, well: float, tries: float) -> None:
        self._well, self._tries = well, tries

    def learn(self, well: float, tries: float = 1.0) -> None:
        self._well, self._tries = _DECAY * self._well + well, _DECAY * self._tries + tries

    @property
    def now(self) -> float:
        return self._well / self._tries


class MeasuredBudget:
    """Learns how often tokens are accepted and how long both sides take. Implements Budget of decoding/pipelined.

    T(w) starts as calibrated with the drafter running, and rounds correct it. If neither side slows the other down,
    the drafter may read the prompt in parallel with the target. With ``waits`` the loop waits for the first draft,
    whatever the drafter has to read: for checks of short answers.
    """

    def __init__(self, depth_cap: int, costs: Costs, *, waits: bool = False) -> None:
        factor = None if costs.contention is None else max(1.0, costs.contention.target_factor)
        self.overlaps_prefill = factor is not None and factor <= SLOWER_ALLOWED
        self._depth_cap = depth_cap
        self._times: LiveTimes | None = None
        if costs.curves is not None:
            self._times = LiveTimes(costs.curves.near(factor or 1.0), depth_cap + 1)
        self._first_patience_s = TIMEOUT_MAX if waits else _FIRST_PATIENCE_S
        self._forward_s: float | None = None
        self._accepted = _Share(1.0, 2.0)
        self._reused = _Share(1.0, 1.5)  # so that reuse stops after a few failures

    @property
    def acceptance(self) -> float:
        """Share of recently compared tokens that were accepted, from 0 to 1."""
        return self._accepted.now

    def window(self, pending: int) -> int:
        """The window with the most expected tokens a second; all ``pending`` tokens if no times are known."""
        most = min(pending, self._depth_cap)
        if self._times is None:
            return most
        return window_by_rate(self._times.all_now(0)[: most + 1], self.acceptance)

    def draft_tokens(self, window: int) -> int:
        """Number of tokens there is time to draft; without times, the next window and the token before it."""
        most = self._depth_cap + 1
        if self._times is None or self._forward_s is None:
            return most
        drafting = DraftCost(token_s=self._forward_s)
        return overlapped_tokens(self._times.now_s(window + 1, 0), drafting, self.acceptance, most)

    def patience_s(self) -> float:
        return self._first_patience_s if self._forward_s is None else _PATIENCE * self._forward_s

    def reuses(self) -> bool:
        return self._reused.now >= _REUSE_PAYS

    def learn_reuse(self, well: bool) -> None:
        self._reused.learn(well)

    def record(self, record: RoundRecord) -> None:
        if record.overlapped and self._times is not None and record.width <= self._depth_cap + 1:
            self._times.record(record.width, 0, record.verify_s, experts=record.experts)
        if record.evaluated:
            self._accepted.learn(record.accepted, record.evaluated)
        working_s, forwards = record.draft_s - record.sync_s, record.forwards_after_reading
        if forwards > 0 and working_s > 0:
            own = working_s / forwards
            self._forward_s = own if self._forward_s is None else _DECAY * self._forward_s + (1 - _DECAY) * own
