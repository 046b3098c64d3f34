"""One forward of the target and the drafter's work beside it, event by event: the clock of round_simulation.py."""

from __future__ import annotations

import math
from typing import Literal

from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.curve import DraftCost

__all__ = ["Flight", "lap"]

# Events closer together than this share of the target's forward are one: sums of floats differ in their last digits.
_TOGETHER = 1e-9


class Flight:
    """A proposal being made: up to ``most`` tokens, at least one; ``hand_over_s`` is the way there and back.

    The drafter looks after each token whether the target is done, and ends then; with ``whole`` it never looks.
    """

    __slots__ = ("_back_s", "_cost", "_left_s", "_most", "_phase", "_whole", "drafted", "told")

    def __init__(self, cost: DraftCost, most: int, hand_over_s: float = 0.0, *, whole: bool = False) -> None:
        if most < 1:
            raise ValueError("a proposal has at least one token")
        self._cost = cost
        self._most = most
        self._whole = whole
        self._back_s = hand_over_s / 2
        self._phase: Literal["there", "drafting", "back", "here"] = "there"
        self._left_s = hand_over_s / 2
        self.drafted = 0
        self.told = False

    @property
    def here(self) -> bool:
        """Whether its tokens have come back."""
        return self._phase == "here"

    @property
    def drafting(self) -> bool:
        """Whether the drafter is at work, and not the message under way."""
        return self._phase == "drafting"

    @property
    def left_s(self) -> float:
        """Seconds to its next event, at the pace of a drafter that is alone."""
        return math.inf if self.here else self._left_s

    def go_on(self, own_s: float) -> None:
        """Spend so many of ``left_s`` without reaching the event."""
        self._left_s -= own_s

    def reach(self) -> None:
        """The next event has come: the drafter starts, has a token, or its tokens are here."""
        if self._phase == "there":
            self._phase, self._left_s = "drafting", self._cost.round_s + self._cost.token_s
        elif self._phase == "back":
            self._phase = "here"
        else:
            self.drafted += 1
            if self.drafted < self._most and (self._whole or not self.told):
                self._left_s = self._cost.token_s
            else:
                self._phase, self._left_s = "back", self._back_s


def lap(
    flight: Flight, target_s: float, contention: Contention, *, patience_s: float = math.inf
) -> tuple[float, float, float]:
    """Seconds of a round, and those in which the target and the drafter were at work.

    The target forwards for ``target_s`` of its own; the round ends when the flight is here too, or ``patience_s``
    after the target. A flight that is late then goes on in the next lap. Each side is slowed while both are at work.
    """
    target_factor, drafter_factor = max(1.0, contention.target_factor), max(1.0, contention.drafter_factor)
    seconds = target_busy_s = drafter_busy_s = waited_s = 0.0
    left_s, together_s = target_s, _TOGETHER * target_s
    while left_s > 0.0 or (not flight.here and waited_s < patience_s):
        forwarding, drafting = left_s > 0.0, flight.drafting
        both = forwarding and drafting
        target_pace, drafter_pace = (target_factor, drafter_factor) if both else (1.0, 1.0)
        target_step = left_s * target_pace if forwarding else math.inf
        flight_step = flight.left_s * drafter_pace
        step = min(target_step, flight_step, math.inf if forwarding else patience_s - waited_s)
        seconds += step
        if forwarding:
            target_busy_s += step
        else:
            waited_s += step
        if drafting:
            drafter_busy_s += step
        # The target first: a drafter that has its token at the same moment finds that it is done.
        if target_step <= step + together_s:
            left_s = 0.0
            flight.told = True
        elif forwarding:
            left_s -= step / target_pace
        if flight_step <= step + together_s:
            flight.reach()
        elif not flight.here:
            flight.go_on(step / drafter_pace)
    return seconds, target_busy_s, drafter_busy_s
