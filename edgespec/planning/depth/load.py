"""What draft tokens cost in a step that answers share.

A plain step then brings a token to each of these answers, and the time beyond it delays each of them, so it counts
once for each. Answers that draft cause that time together, and share the drafter's forwards: each pays its part.
Depths that pay by this count bring the most tokens a second of all answers together: the goodput of SmartSpec (Liu et
al., 2024) and the row budget of TETRIS (Wu et al., 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edgespec.interfaces.model import Company
from edgespec.planning.cost.curve import DraftCost

# Weight of the latest round. An answer ends every few dozen rounds, and steps hold varying numbers of answers.
_LATEST = 0.25

# The share of the others that may draft which is taken to draft with this answer, also where it is judged: if each
# counted only those that it met, each would wait for the others to begin. With 0.6, 0.8 and 0.9 two answers got 1.24,
# 1.40 and 1.42 times the tokens of plain decoding, and four 1.13, 1.10 and 1.06 times (by their steps' usual times).
MET = 0.8

# The gain, as a share of a token's time, that drafting has to promise more for each other answer: rows, meetings and
# pauses vary from step to step. Without it eight answers would draft for hardly any gain.
SHARED_MARGIN = 0.05

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


def charged(
    seconds: float, plain_s: float, others: float, draft_s: float = 0.0, drafting: float = 0.0, part: float = 1.0
) -> float:
    """A round's seconds, with what this answer adds to a plain step counted for ``others`` more answers.

    ``drafting`` of them draft in the same ``draft_s``, and pay their parts of it. ``part`` is this answer's share of
    the rows beyond one an answer.
    """
    beyond_s = max(0.0, seconds - plain_s)
    draft_s = min(draft_s, beyond_s)
    return seconds - beyond_s + (1.0 + others) * (draft_s / (1.0 + drafting) + part * (beyond_s - draft_s))


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
    reading: bool = False
    seen: bool = False

    def see(self, company: Company) -> None:
        """Note a round's company."""
        self.reading = company.reading
        if not (self.others or company.answers):
            return
        latest = _LATEST if self.others else 1.0
        self.others += latest * (company.answers - self.others)
        self.seen |= company.answers > 0
        if self.others < _NONE:
            self.others = 0.0

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

    def rows(self, width: int, drafting: float) -> float:
        """The rows of a step if this answer has ``width``, and so have the ``drafting`` of the others that draft."""
        return 1.0 + self.others + (1.0 + drafting) * (width - 1)

    def charge(self, forward_s: Sequence[float], drafting: float) -> list[float]:
        """The seconds of forwards with ``rows`` of widths 1, 2, ..., with the time beyond the first counted for each
        answer, of which ``drafting`` more pay their parts.
        """
        part = 1.0 / (1.0 + drafting)
        return [charged(seconds, forward_s[0], self.others, part=part) for seconds in forward_s]
