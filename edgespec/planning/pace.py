"""How long forwards take now: what calibration measured, corrected by what recent rounds took."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from dataclasses import dataclass

from edgespec.planning.cost import Curve

# Forwards whose median tells how fast the machine is at present: five slow ones in a row are a change (heat, battery,
# a busy neighbour), one is a stall.
_RECENT = 9
_ENOUGH = 3

# A forward this many times longer than expected was not one: a suspended machine, a debugger, a clock that jumped.
_IMPLAUSIBLE_FACTOR = 50.0

# How fast a width's own deviation from the calibrated curve is learned once a few forwards of it were seen (before
# that it is their mean, in which the calibration counts for a few), and how much of it one forward may claim.
_LEARNING_RATE = 0.1
_LARGEST_STEP = math.log(2.0)
_CALIBRATION_WEIGHT = 3

# A width not seen for long may have changed meanwhile, so its next forward counts for as much as the missed ones
# would have, up to this.
_LARGEST_RATE = 0.5

# A forward this many times off is believed only if the one before it at its width was as far off: it may be a stall.
_STALL = math.log(3.0)

# Plain forwards before their speed is called measured.
_PLAIN_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCurves:
    """T(w) at one or more context lengths, ascending; every curve has the same widths."""

    contexts: tuple[int, ...]
    curves: tuple[Curve, ...]

    def __post_init__(self) -> None:
        if not self.contexts or len(self.contexts) != len(self.curves):
            raise ValueError("a curve for each context length")
        if list(self.contexts) != sorted(set(self.contexts)):
            raise ValueError("context lengths ascend")
        if len({curve.widths for curve in self.curves}) != 1:
            raise ValueError("curves of the same widths")

    def at(self, context_length: int) -> Curve:
        """The curve at a context length: linear in between, constant outside of what was measured."""
        contexts, curves = self.contexts, self.curves
        if context_length <= contexts[0]:
            return curves[0]
        for place in range(1, len(contexts)):
            if context_length <= contexts[place]:
                share = (context_length - contexts[place - 1]) / (contexts[place] - contexts[place - 1])
                low, high = curves[place - 1], curves[place]
                return Curve(
                    widths=low.widths,
                    forward_s=tuple(a + share * (b - a) for a, b in zip(low.forward_s, high.forward_s, strict=True)),
                )
        return curves[-1]


class Pace:
    """Corrects curves by recent forwards. Not safe for several threads; its policy guards it."""

    def __init__(self, curves: ContextCurves | None = None) -> None:
        self._curves = curves
        self._factors: deque[float] = deque(maxlen=_RECENT)
        self._own: dict[int, float] = {}  # log of a width's deviation from the common factor
        self._seen: Counter[int] = Counter()
        self._latest: dict[int, int] = {}  # the number of a width's latest forward
        self._stalled: set[int] = set()  # widths whose latest forward was far off
        self._forwards = 0
        self._plain: deque[float] = deque(maxlen=_RECENT)
        self._context_length = 0

    @property
    def curves(self) -> ContextCurves | None:
        return self._curves

    @curves.setter
    def curves(self, curves: ContextCurves | None) -> None:
        """Exchange what was calibrated; what was learned about the old curves goes."""
        self._curves = curves
        self._factors.clear()
        self._own.clear()
        self._seen.clear()
        self._latest.clear()
        self._stalled.clear()

    @property
    def factor(self) -> float:
        """How many times longer forwards take now than when they were calibrated."""
        return statistics.median(self._factors) if len(self._factors) >= _ENOUGH else 1.0

    @property
    def plain_s(self) -> float | None:
        """Median of the recent plain forwards of this process; None before there were enough."""
        return statistics.median(self._plain) if len(self._plain) >= _PLAIN_ROUNDS else None

    def move_to(self, context_length: int) -> None:
        """Go on in a context of that many tokens, of which no forward was timed that could be compared."""
        self._context_length = context_length

    def record(self, width: int, context_length: int, seconds: float) -> bool:
        """Learn from one forward; False if the sample was thrown away."""
        if not math.isfinite(seconds) or seconds <= 0:
            return False
        self._context_length = context_length
        expected = None if self._curves is None else self._expected(width, context_length)
        limit = self.plain_s if expected is None else expected
        if limit is not None and seconds > _IMPLAUSIBLE_FACTOR * limit:
            return False
        if width == 1:
            self._plain.append(seconds)
        if expected is not None:
            self._factors.append(seconds / expected)
            if len(self._factors) >= _ENOUGH:
                self._learn_own(width, math.log(seconds / (expected * self.factor)))
        return True

    def _learn_own(self, width: int, off: float) -> None:
        """Move a width's own deviation towards a forward whose logarithm is ``off`` from what was expected.

        Width 1 has a deviation like any other: where every round drafts the common factor is that of wide forwards,
        and only the rare plain one tells that the shape of the curve has changed.
        """
        self._forwards += 1
        missed = self._forwards - self._latest.get(width, self._forwards - 1)
        self._latest[width] = self._forwards
        known_stall = width in self._stalled
        if abs(off) > _STALL and not known_stall:
            self._stalled.add(width)
            return
        if abs(off) <= _STALL:
            self._stalled.discard(width)
        self._seen[width] += 1
        caught_up = min(_LARGEST_RATE, 1.0 - (1.0 - _LEARNING_RATE) ** missed)
        rate = max(caught_up, 1.0 / (self._seen[width] + _CALIBRATION_WEIGHT))
        step = max(-_LARGEST_STEP, min(_LARGEST_STEP, off))
        self._own[width] = self._own.get(width, 0.0) + rate * step

    def _expected(self, width: int, context_length: int) -> float:
        """Seconds of such a forward at the speed of calibration."""
        assert self._curves is not None
        return self._curves.at(context_length).seconds(width) * math.exp(self._own.get(width, 0.0))

    def curve(self) -> Curve | None:
        """The curve as it is now, at the context of the latest forward; None if nothing was calibrated."""
        if self._curves is None:
            return None
        curve = self._curves.at(self._context_length)
        factor = self.factor
        return Curve(
            widths=curve.widths,
            forward_s=tuple(
                factor * math.exp(self._own.get(width, 0.0)) * seconds
                for width, seconds in zip(curve.widths, curve.forward_s, strict=True)
            ),
        )
