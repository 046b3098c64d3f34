"""Choices that change only after calibrations agree that another is faster: a target's device and threads.

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

# A runtime, a device, and the number of layers there (None: all).
Place: TypeAlias = tuple[str, str, int | None]

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(Generic[V]):
    """``chosen`` is in use (None: the initial choice); ``ahead`` was faster in the last ``count`` calibrations.

    ``announced`` is False from a change until the user was notified.
    """

    chosen: V | None = None
    ahead: V | None = None
    count: Annotated[int, Range(0)] = 0
    announced: bool = True

    def after(self, faster: V | None, needed: int = TAKEOVER_CALIBRATIONS) -> Settled[V]:
        """The state after a calibration that found ``faster``, or None if nothing beat the current choice."""
        if faster is None:
            return replace(self, ahead=None, count=0)
        count = self.count + 1 if faster == self.ahead else 1
        if count >= needed:
            return Settled(chosen=faster, announced=False)
        return replace(self, ahead=faster, count=count)


def usual_seconds(curve: Curve, depth_cap: int | None) -> float:
    """Expected seconds of a token with a usual drafter, independent of the actual one."""
    usual = DraftCost(token_s=USUAL_DRAFT_SHARE * curve.plain_s)
    return 1.0 / choose_depth(curve, usual, (UNKNOWN,), depth_cap or 0).tokens_per_s


def clearly_faster(own_s: float, others: Mapping[V, float], margin: float = TAKEOVER_MARGIN) -> V | None:
    """The fastest of ``others``, if ``own_s`` is at least ``margin`` times as long; else None."""
    best = min(others, key=lambda each: others[each], default=None)
    return best if best is not None and own_s >= margin * others[best] else None
