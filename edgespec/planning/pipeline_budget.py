"""How much a pipelined round verifies: as many of the tokens put forward as pay, by measured times and acceptance."""

from __future__ import annotations

import math

from edgespec.decoding.contracts import RoundRecord
from edgespec.planning.cost import Curve, expected_tokens

__all__ = ["MeasuredBudget"]

# Rounds after which an old one counts half, as planning.acceptance forgets: text changes within a few sentences.
_DECAY = 0.97

# Before anything was verified: as if one token in two had been accepted, of two.
_PRIOR_ACCEPTED, _PRIOR_EVALUATED = 1.0, 2.0

# A drafter told to end finishes the forward it is at. Twice its usual time covers one that is slower than usual; a
# drafter that takes longer is reading a prompt, and is not waited for.
_PATIENCE = 2.0

# Reuse goes on while at least half of the first tokens put forward again stand: a wrong one costs the drafting of one
# round, a right one saves it.
_REUSE_PAYS = 0.5
_PRIOR_STOOD, _PRIOR_REUSED = 1.0, 1.5  # so that it is tried, and given up after a few failures

# Until a forward of the drafter was timed: as long as a slow token of a small model on a slow device.
_FIRST_PATIENCE_S = 0.05


class MeasuredBudget:
    """Learns how often tokens stand and how long the drafter takes. ``curve`` is T(w) of the target, if calibrated.

    Drafting needs no number: the drafter is told to end when the target is done, and may fill the next window.
    """

    def __init__(self, depth_cap: int, curve: Curve | None) -> None:
        self._depth_cap = depth_cap
        self._curve = curve
        self._accepted = _PRIOR_ACCEPTED
        self._evaluated = _PRIOR_EVALUATED
        self._forward_s: float | None = None
        self._stood, self._reused = _PRIOR_STOOD, _PRIOR_REUSED

    @property
    def acceptance(self) -> float:
        """Share of the recently compared tokens that stood, from 0 to 1."""
        return self._accepted / self._evaluated

    def window(self, confidences: tuple[float | None, ...]) -> int:
        """The window with the most expected tokens a second; all tokens where no times are known.

        A window of w tokens scores w + 1 places, each of which gives a token if all before it stood.
        """
        most = min(len(confidences), self._depth_cap)
        if self._curve is None:
            return most
        best, best_rate = 0, -math.inf
        for window in range(most + 1):
            rate = expected_tokens([self.acceptance] * window) / self._curve.seconds(window + 1)
            if rate > best_rate:
                best, best_rate = window, rate
        return best

    def draft_tokens(self, pending: int) -> int:
        """The next window and the token compared before it."""
        return self._depth_cap + 1

    def patience_s(self) -> float:
        """Seconds to wait for the forward that the drafter is at."""
        return _FIRST_PATIENCE_S if self._forward_s is None else _PATIENCE * self._forward_s

    def reuses(self) -> bool:
        """Whether enough of what was put forward again stood."""
        return self._stood / self._reused >= _REUSE_PAYS

    def reused(self, stood: bool) -> None:
        """Learn whether a token put forward again stood."""
        self._stood = _DECAY * self._stood + stood
        self._reused = _DECAY * self._reused + 1

    def record(self, record: RoundRecord) -> None:
        """Learn from a round: what stood of what was compared, and how long a forward of the drafter takes."""
        if record.evaluated:
            self._accepted = _DECAY * self._accepted + record.accepted
            self._evaluated = _DECAY * self._evaluated + record.evaluated
        working_s = record.draft_s - record.sync_s
        if record.draft_forwards and working_s > 0:
            own = working_s / record.draft_forwards
            self._forward_s = own if self._forward_s is None else _DECAY * self._forward_s + (1 - _DECAY) * own
