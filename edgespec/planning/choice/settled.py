"""Choices that change only after calibrations, or answers, agree: a target's device and threads, a pair's plan.

The device of the target decides how its sums are rounded, so each change of device changes texts. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Generic, TypeAlias, TypeVar

from edgespec.files.checked import Range
from edgespec.planning.cost.acceptance import UNKNOWN
from edgespec.planning.cost.curve import Curve, DraftCost, choose_depth
from edgespec.planning.cost.margins import TAKEOVER_CALIBRATIONS, TAKEOVER_MARGIN, USUAL_DRAFT_SHARE
from edgespec.planning.depth.outcome import ModeVerdict, Outcome, TimesVerdict

# A runtime, a device, and the number of layers there (None: all).
Place: TypeAlias = tuple[str, str, int | None]

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(Generic[V]):
    """``chosen`` is in use (None: the initial choice); ``ahead`` was found in each of the last ``count``.

    ``announced`` is False from a change until the user was notified.
    """

    chosen: V | None = None
    ahead: V | None = None
    count: Annotated[int, Range(0)] = 0
    announced: bool = True

    def after(self, faster: V | None, needed: int = TAKEOVER_CALIBRATIONS) -> Settled[V]:
        """The state after one more that found ``faster``; None, or the current choice, if nothing beat that."""
        if faster is None or faster == self.chosen:
            return replace(self, ahead=None, count=0)
        count = self.count + 1 if faster == self.ahead else 1
        if count >= needed:
            return Settled(chosen=faster, announced=False)
        return replace(self, ahead=faster, count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What the answers of a pair agreed on since its calibration, and what the latest one got.

    ``times``: whether the measured times hold. ``mode``: the faster one.
    """

    times: Settled[TimesVerdict] = Settled()
    mode: Settled[ModeVerdict] = Settled()
    latest: Outcome | None = None

    def after(self, outcome: Outcome) -> Answered:
        """The state after one more answer. One that tells nothing changes nothing."""
        return Answered(
            times=self.times if outcome.times is None else self.times.after(outcome.times),
            mode=self.mode if outcome.mode is None else self.mode.after(outcome.mode),
            latest=outcome,
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """The same in words."""
        said = [] if self.latest is None else [f"the latest: {self.latest}"]
        if self.times.ahead == "estimated":
            said.append(
                "it contradicts the measured times: if the next does too, estimates replace them, if there are any"
            )
        if self.mode.ahead is not None:
            said.append(f"{self.mode.ahead} would be faster by it: if the next one agrees, the plan follows")
        return tuple(said)


def usual_seconds(curve: Curve, depth_cap: int | None) -> float:
    """Expected seconds of a token with a usual drafter, independent of the actual one."""
    usual = DraftCost(token_s=USUAL_DRAFT_SHARE * curve.plain_s)
    return 1.0 / choose_depth(curve, usual, (UNKNOWN,), depth_cap or 0).tokens_per_s


def clearly_faster(own_s: float, others: Mapping[V, float], margin: float = TAKEOVER_MARGIN) -> V | None:
    """The fastest of ``others``, if ``own_s`` is at least ``margin`` times as long; else None."""
    best = min(others, key=lambda each: others[each], default=None)
    return best if best is not None and own_s >= margin * others[best] else None
