"""What a longer step costs while it computes rows of several answers.

A plain step then brings a token to each of these answers, and the time beyond it delays each of them, so it counts
once for each. Depths that pay by this count bring the most tokens a second of all answers together: the goodput of
SmartSpec (Liu et al., 2024) and the row budget of TETRIS (Wu et al., 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.interfaces.model import Company

# Weight of the latest round. An answer ends every few dozen rounds, and steps hold varying numbers of answers.
_LATEST = 0.25

# Fewer other answers than this are none.
_NONE = 0.05


def charged(seconds: float, plain_s: float, others: float) -> float:
    """A round's seconds, with the time beyond a plain step counted for ``others`` more answers."""
    return seconds + others * max(0.0, seconds - plain_s)


@dataclass(slots=True)
class Load:
    """The company of an answer's recent rounds, smoothed. ``seen``: whether it had any."""

    others: float = 0.0
    rows: float = 0.0
    seen: bool = False

    def see(self, company: Company) -> None:
        """Note a round's company."""
        if not (self.others or company.answers):
            return
        latest = _LATEST if self.others else 1.0
        self.others += latest * (company.answers - self.others)
        self.rows += latest * (company.rows - self.rows)
        self.seen |= company.answers > 0
        if self.others < _NONE:
            self.others = self.rows = 0.0

    def charge(self, forward_s: Sequence[float]) -> list[float]:
        """The seconds of forwards of 1, 2, ... rows, with the time beyond the first counted for each answer."""
        if not self.others:
            return [*forward_s]
        return [charged(seconds, forward_s[0], self.others) for seconds in forward_s]
