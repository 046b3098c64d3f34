"""How many proposed tokens a pipelined round verifies, by measured times and acceptance."""

from __future__ import annotations

from threading import TIMEOUT_MAX

from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import ContextCurves, DraftCost, expected_tokens, overlapped_tokens
from edgespec.planning.cost.live_times import LiveTimes
from edgespec.planning.cost.margins import SLOWER_ALLOWED

# Decay for each round, as in planning/cost/acceptance.py: text changes within a few sentences.
_DECAY = 0.97

# A drafter that is asked to stop finishes its current forward: twice its usual time is allowed, or, before any
# forward was timed, a slow token of a small model on a slow device. A slower drafter is reading a prompt; the target
# does not wait for it.
_PATIENCE, _FIRST_PATIENCE_S = 2.0, 0.05

# Reuse continues while at least half of the first re-proposed tokens are accepted: a wrong token costs one round's
# drafting, a right one saves it. Branches continue while this share meets the correction. On a forked cache the
# drafter would be idle otherwise, so one in ten is enough to justify the power. Without forks the drafter has to read
# its chain again whenever the chain is accepted after all.
_REUSE_PAYS = _BRANCHING_PAYS_UNFORKED = 0.5
_BRANCHING_PAYS = 0.1


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
            curve = costs.curves.curves[0].scaled(factor or 1.0)
            self._times = LiveTimes(ContextCurves(contexts=(0,), curves=(curve,)), depth_cap + 1)
        self._first_patience_s = TIMEOUT_MAX if waits else _FIRST_PATIENCE_S
        self._forward_s: float | None = None
        self._accepted = _Share(1.0, 2.0)
        # Reuse and corrections stop after a few failures; branches, which are worth more, after more failures.
        self._tried = {"again": _Share(1.0, 1.5), "correction": _Share(1.0, 1.5), "branch": _Share(3.0, 4.0)}

    @property
    def acceptance(self) -> float:
        """Share of recently compared tokens that were accepted, from 0 to 1."""
        return self._accepted.now

    def window(self, pending: int) -> int:
        """The window with the most expected tokens a second; all ``pending`` tokens if no times are known.

        A window of w tokens scores w + 1 positions. Each position gives a token if all before it were accepted.
        """
        most = min(pending, self._depth_cap)
        if self._times is None:
            return most
        forward_s = self._times.all_now(0)
        rates = [expected_tokens([self.acceptance] * window) / forward_s[window] for window in range(most + 1)]
        return rates.index(max(rates))

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
        return self._tried["again"].now >= _REUSE_PAYS

    def branches(self, forks: bool) -> int:
        """Number of branches: one for each position of a round, or one in all without forks.

        Without forks a second branch would evict the first from the cache.
        """
        met, kept = self._tried["correction"].now, self._tried["branch"].now
        if met < (_BRANCHING_PAYS if forks else _BRANCHING_PAYS_UNFORKED):
            return 0
        most = self._depth_cap + 1 if forks else 1
        return most if branch_pays(self.acceptance, kept, self._depth_cap) else 0

    def learn(self, what: str, well: bool) -> None:
        self._tried[what].learn(well)

    def record(self, record: RoundRecord) -> None:
        if record.overlapped and self._times is not None and record.width <= self._depth_cap + 1:
            self._times.record(record.width, 0, record.verify_s)
        if record.evaluated:
            self._accepted.learn(record.accepted, record.evaluated)
        working_s = record.draft_s - record.sync_s
        if record.draft_forwards and working_s > 0:
            own = working_s / record.draft_forwards
            self._forward_s = own if self._forward_s is None else _DECAY * self._forward_s + (1 - _DECAY) * own


def branch_pays(acceptance: float, standing: float, window: int) -> bool:
    """Whether verifying a branch is worth more than waiting for the first token after a correction.

    Tokens are accepted with probability ``acceptance`` a, those of branches with ``standing`` b. By the rejection
    rule b is lower, since no token of a branch counts as drawn at random. A round on a full pipe commits f = 1 + a +
    ... + a^w tokens and leaves the pipe full with probability t = a^(w + 1). A round on an empty pipe commits 1 and
    fills the pipe with probability a. In the long run a round commits g, and a full pipe is worth v = (g - 1) / a
    tokens more than an empty one, where v (1 - t) = f - g. A branch pays if 1 + b + ... + b^w + b^(w + 1) v reaches
    g.
    """
    if acceptance <= 0:
        return True  # a failed branch loses nothing
    tokens = expected_tokens([acceptance] * window)
    per_value = (1.0 - acceptance ** (window + 1)) / acceptance
    rate = (tokens + per_value) / (1.0 + per_value)
    value = (rate - 1.0) / acceptance
    return expected_tokens([standing] * window) + standing ** (window + 1) * value >= rate
