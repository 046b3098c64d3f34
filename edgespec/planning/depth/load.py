"""What draft tokens cost in a step that answers share.

A plain step then brings a token to each of these answers, and the time beyond it delays each of them, so it counts
once for each. Depths that pay by this count bring the most tokens a second of all answers together: the goodput of
SmartSpec (Liu et al., 2024) and the row budget of TETRIS (Wu et al., 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.interfaces.model import Company

# Weight of the latest round. An answer ends every few dozen rounds, and steps hold varying numbers of answers.
_LATEST = 0.25

# Below this average an answer counts as alone: 0.05 is one other answer in 20 rounds.
_NONE = 0.05

# While others run, an answer waits at most this long for its drafter to read. Their steps make the wait longer:
# without this limit an answer paused for up to 9 s (three answers and a prompt, on two cores without AVX-512).
MOST_PAUSE_S = 0.25

# While a prompt is read, an answer whose drafter reads misses steps of up to MOST_STEP_S: about what the drafter
# lacks after a draft that was rejected, and not the first look at a text.
MOST_PAUSE_WITH_PROMPT_S = 0.05

# While a prompt is read, a step in which all answers draft as deeply as this one must not take longer, so that a gap
# in an answer stays below 0.25 s: the prompt adds a third, and drafters and Python some milliseconds.
MOST_STEP_S = 0.15


def charged(seconds: float, plain_s: float, others: float) -> float:
    """A round's seconds, with the time beyond a plain step counted for ``others`` more answers."""
    return seconds + others * max(0.0, seconds - plain_s)


@dataclass(slots=True)
class Load:
    """The company of an answer's recent rounds, smoothed. ``seen``: whether it had any.

    ``reading``: whether a prompt was read in the latest.
    """

    others: float = 0.0
    rows: float = 0.0
    reading: bool = False
    seen: bool = False

    def see(self, company: Company) -> None:
        """Note a round's company."""
        self.reading = company.reading
        if not (self.others or company.answers):
            return
        latest = _LATEST if self.others else 1.0
        self.others += latest * (company.answers - self.others)
        self.rows += latest * (company.rows - self.rows)
        self.seen |= company.answers > 0
        if self.others < _NONE:
            self.others = self.rows = 0.0

    def forbids(self, reading_s: float) -> bool:
        """Whether the drafter may not read for that long."""
        if self.reading:
            return reading_s > MOST_PAUSE_WITH_PROMPT_S
        return self.others > 0.0 and reading_s > MOST_PAUSE_S

    def most_depth(self, cap: int, rows_s: Callable[[int], float]) -> int:
        """The deepest draft, up to ``cap``, of an answer whose step reads a prompt; ``rows_s`` is a step's time."""
        if not self.reading:
            return cap
        answers = 1.0 + self.others
        return next((depth for depth in range(cap, 0, -1) if rows_s(round(answers * (1 + depth))) <= MOST_STEP_S), 0)

    def charge(self, forward_s: Sequence[float]) -> list[float]:
        """The seconds of forwards of 1, 2, ... rows, with the time beyond the first counted for each answer."""
        if not self.others:
            return [*forward_s]
        return [charged(seconds, forward_s[0], self.others) for seconds in forward_s]
