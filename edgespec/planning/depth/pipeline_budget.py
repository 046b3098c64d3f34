"""How much a pipelined round verifies: as many of the tokens put forward as pay, by measured times and acceptance."""

from __future__ import annotations

import math
from threading import TIMEOUT_MAX

from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import ContextCurves, Curve, DraftCost, expected_tokens, overlapped_tokens
from edgespec.planning.cost.live_times import LiveTimes
from edgespec.planning.cost.margins import SLOWER_ALLOWED

# Rounds after which an old one counts half, as planning.acceptance forgets: text changes within a few sentences.
_DECAY = 0.97

# A drafter told to end finishes the forward it is at. Twice its usual time covers one that is slower than usual; a
# drafter that takes longer is reading a prompt, and is not waited for.
_PATIENCE = 2.0

# Reuse goes on while at least half of the first tokens put forward again stand: a wrong one costs the drafting of one
# round, a right one saves it.
_REUSE_PAYS = 0.5

# Branches go on while they meet so many of the corrections that come. On forks of its cache the drafter spends time
# on them in which it had nothing else to do: any gain would do but for the power they take, so one in ten. Without
# forks it reads its chain again whenever that stands after all, which branches have to earn like any reuse.
_BRANCHING_PAYS = 0.1
_BRANCHING_PAYS_UNFORKED = _REUSE_PAYS

# Until a forward of the drafter was timed: as long as a slow token of a small model on a slow device.
_FIRST_PATIENCE_S = 0.05


class _Share:
    """How many of the latest ``tries`` went well, as if ``well`` of so many had before the first one."""

    def __init__(self, well: float, tries: float) -> None:
        self._well, self._tries = well, tries

    def learn(self, well: float, tries: float = 1.0) -> None:
        self._well, self._tries = _DECAY * self._well + well, _DECAY * self._tries + tries

    @property
    def now(self) -> float:
        return self._well / self._tries


class MeasuredBudget:
    """Learns how often tokens stand and how long both sides take.

    ``curve`` is T(w) of the target with the drafter at work, if calibrated; rounds correct it as they come.
    ``overlaps_prefill``: they do not slow each other down, so the drafter may read the prompt while the target does.
    ``waits`` for the drafter's first tokens, whatever it has to read before: so that a short answer is drafted too.
    """

    def __init__(
        self, depth_cap: int, curve: Curve | None, *, overlaps_prefill: bool = False, waits: bool = False
    ) -> None:
        self._depth_cap = depth_cap
        curves = None if curve is None else ContextCurves(contexts=(0,), curves=(curve,))
        self._times = None if curves is None else LiveTimes(curves, depth_cap + 1)
        self._overlaps_prefill = overlaps_prefill
        self._first_patience_s = TIMEOUT_MAX if waits else _FIRST_PATIENCE_S
        self._forward_s: float | None = None
        self._accepted = _Share(1.0, 2.0)
        self._reused, self._branched = _Share(1.0, 1.5), _Share(1.0, 1.5)  # tried, and given up after a few failures
        self._branch_stood = _Share(3.0, 4.0)  # more than a few have to fall before branches are given up

    @property
    def acceptance(self) -> float:
        """Share of the recently compared tokens that stood, from 0 to 1."""
        return self._accepted.now

    def window(self, confidences: tuple[float | None, ...]) -> int:
        """The window with the most expected tokens a second; all tokens where no times are known.

        A window of w tokens scores w + 1 places, each of which gives a token if all before it stood.
        """
        most = min(len(confidences), self._depth_cap)
        if self._times is None:
            return most
        forward_s = self._times.all_now(0)
        best, best_rate = 0, -math.inf
        for window in range(most + 1):
            rate = expected_tokens([self.acceptance] * window) / forward_s[window]
            if rate > best_rate:
                best, best_rate = window, rate
        return best

    def drafts_during_prefill(self) -> bool:
        """Whether reading the prompt on both sides at once delays nothing."""
        return self._overlaps_prefill

    def draft_tokens(self, pending: int, window: int) -> int:
        """As many as there is time for; the next window and the token compared before it where that is not known."""
        most = self._depth_cap + 1
        if self._times is None or self._forward_s is None:
            return most
        drafting = DraftCost(token_s=self._forward_s)
        return overlapped_tokens(self._times.now_s(window + 1, 0), drafting, self.acceptance, most)

    def patience_s(self) -> float:
        """Seconds to wait for the forward that the drafter is at."""
        return self._first_patience_s if self._forward_s is None else _PATIENCE * self._forward_s

    def reuses(self) -> bool:
        """Whether enough of what was put forward again stood."""
        return self._reused.now >= _REUSE_PAYS

    def reused(self, stood: bool) -> None:
        """Learn whether a token put forward again stood."""
        self._reused.learn(stood)

    def branches(self, forks: bool) -> int:
        """One for each place of a round if branches pay, if there is time; one where the drafter does not fork.

        There a second branch would push the first one out of the cache.
        """
        if self._branched.now < (_BRANCHING_PAYS if forks else _BRANCHING_PAYS_UNFORKED):
            return 0
        if not branch_pays(self.acceptance, self._branch_stood.now, self._depth_cap):
            return 0
        return self._depth_cap + 1 if forks else 1

    def branched(self, met: bool) -> None:
        """Learn whether a branch met a correction."""
        self._branched.learn(met)

    def branch_stood(self, stood: bool) -> None:
        """Learn whether a branch's first token stood."""
        self._branch_stood.learn(stood)

    def record(self, record: RoundRecord) -> None:
        """Learn from a round: what stood of what was compared, and how long a forward of either side takes."""
        if record.overlapped and self._times is not None and record.width <= self._depth_cap + 1:
            self._times.record(record.width, 0, record.verify_s)
        if record.evaluated:
            self._accepted.learn(record.accepted, record.evaluated)
        working_s = record.draft_s - record.sync_s
        if record.draft_forwards and working_s > 0:
            own = working_s / record.draft_forwards
            self._forward_s = own if self._forward_s is None else _DECAY * self._forward_s + (1 - _DECAY) * own


def make_budget(depth_cap: int, costs: Costs, *, waits: bool = False) -> MeasuredBudget:
    """How much a pipelined round verifies, by the target's times with the drafter at work beside it.

    ``waits``: each answer for its first draft, for checks that need one.
    """
    factor = None if costs.contention is None else max(1.0, costs.contention.target_factor)
    curve = None if costs.curves is None else costs.curves.curves[0].scaled(factor or 1.0)
    overlaps_prefill = factor is not None and factor <= SLOWER_ALLOWED
    return MeasuredBudget(depth_cap, curve, overlaps_prefill=overlaps_prefill, waits=waits)


def branch_pays(acceptance: float, standing: float, window: int) -> bool:
    """Whether a round that verifies a branch is worth more than one that waits for a first token after a correction.

    Tokens stand with probability ``acceptance`` a, those of branches with ``standing`` b: by the rejection rule b is
    lower, since nothing of a branch counts as drawn at random. A round on a full pipe commits f = 1 + a + ... + a^w
    tokens and leaves it full with probability t = a^(w + 1); one on an empty pipe commits 1 and fills it with
    probability a. In the long run a round commits g, and a full pipe is worth v = (g - 1) / a tokens more than an
    empty one, where v (1 - t) = f - g. A branch pays if 1 + b + ... + b^w + b^(w + 1) v reaches g.
    """
    if acceptance <= 0:
        return True  # nothing is lost by trying something else
    tokens = expected_tokens([acceptance] * window)
    per_value = (1.0 - acceptance ** (window + 1)) / acceptance
    rate = (tokens + per_value) / (1.0 + per_value)
    value = (rate - 1.0) / acceptance
    return expected_tokens([standing] * window) + standing ** (window + 1) * value >= rate
