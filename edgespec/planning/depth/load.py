"""What draft tokens cost in a step that answers share.

A plain step then brings a token to each of these answers, and the time beyond it delays each of them, so it counts
once for each. Answers that draft share the drafter's forwards too: each pays its part. Depths that pay by this count
bring the most tokens a second of all answers together: the goodput of SmartSpec (Liu et al., 2024) and the row budget
of TETRIS (Wu et al., 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edgespec.interfaces.model import Company
from edgespec.planning.cost.curve import DraftCost

# Weight of the latest round. An answer ends every few dozen rounds, and steps hold varying numbers of answers.
_LATEST = 0.25

# The share of the others that is taken to draft in the same forwards until it is seen: each answer has to begin
# before another can follow. Of two answers that drafted, each met the other in half of its forwards.
USUALLY_MET = 0.5

# Weight of the latest draft: an answer drafts alone for some rounds until another follows.
_LATEST_DRAFT = 0.1

# How far what was seen is forgotten at the beginning of an answer.
_AGAIN = 0.05

# The gain, as a share of a token's time, that drafting has to promise more for each other answer: rows, meetings and
# pauses vary from step to step. Beside three others, promises of 0.05 to 0.2 lost 6 to 12 %.
SHARED_MARGIN = 0.1

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


class Meetings:
    """The share of the others that drafted in the same forwards, by the number of the others."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}

    def see(self, companions: float, others: int) -> None:
        """Note how many of the ``others`` were in a draft's forwards, on average."""
        self._move(others, min(1.0, companions / others), _LATEST_DRAFT)

    def begin(self, others: float) -> None:
        """An answer begins beside ``others``: where none drafts, nothing is seen, and they try again in a while."""
        self._move(round(others), USUALLY_MET, _AGAIN)

    def _move(self, others: int, towards: float, weight: float) -> None:
        known = self._known.get(others, USUALLY_MET)
        self._known[others] = known + weight * (towards - known)

    def share(self, others: float) -> float:
        return self._known.get(round(others), USUALLY_MET)


def charged(seconds: float, plain_s: float, others: float, draft_s: float = 0.0, drafting: float = 0.0) -> float:
    """A round's seconds, with the time beyond a plain step counted for ``others`` more answers.

    ``drafting`` of them draft in the same ``draft_s``, and pay their parts of it.
    """
    beyond_s = max(0.0, seconds - plain_s)
    shared_s = min(draft_s, beyond_s) * drafting / (1.0 + drafting)
    return seconds + others * beyond_s - (1.0 + others) * shared_s


def drafting_price(cost: DraftCost, others: float, drafting: float) -> DraftCost:
    """An answer's part of drafting that delays ``others`` more answers, of which ``drafting`` draft as well.

    Their forwards are one, which is longer by a row for each, as if the drafter read a token. Each reads for itself.
    """
    part = (1.0 + others) / (1.0 + drafting)
    forward_s = cost.token_s + drafting * cost.lag_token_s if cost.one_pass is None else 0.0
    one_pass = None if cost.one_pass is None else cost.one_pass.scaled(part)
    return replace(cost.scaled(1.0 + others), token_s=part * forward_s, one_pass=one_pass)


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
        self.rows = max(company.rows, self.rows + latest * (company.rows - self.rows))
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
