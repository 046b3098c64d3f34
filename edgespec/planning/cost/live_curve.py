"""How long forwards take now: what calibration measured, corrected by what recent rounds took."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.planning.cost.curve import ContextCurves, Curve

# Forwards whose median tells how fast the machine is at present: five slow ones in a row are a change (heat, battery,
# a busy neighbour), one is a stall.
_RECENT = 9
_ENOUGH = 3

# A forward this many times longer than expected was not one: a suspended machine, a debugger, a clock that jumped.
IMPLAUSIBLE_FACTOR = 50.0

# Forwards of a width that tell how far it is off what was calibrated, and how many the calibration counts for. In
# simulations (5 % stalls, 15 % noise, one width 10 % off) 49 tell hardly better than 25, and take twice as long.
_OWN_WINDOW = 25
_CALIBRATION_WEIGHT = 3

# After this many forwards in which a width could not be compared with others what was learned of it is forgotten:
# whoever avoids it as too slow would never find out that it no longer is. Some minutes; to find out again that it is
# may take a hundred forwards.
_OWN_MEMORY = 8192

# Forwards whose scatter tells what is chance.
_SCATTER_WINDOW = 49

# Of normal noise: its standard deviation by the median of what it is off, and the standard error of a median by that
# deviation over the root of the count.
_DEVIATION_BY_MEDIAN = 1.4826
_MEDIAN_ERROR = 1.2533

# Plain forwards before their speed is called measured.
_PLAIN_ROUNDS = 4


@dataclass(slots=True)
class _Width:
    """How far a width is off: ``samples`` are logarithms, ``latest`` is the number of the forward of the last one."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=_OWN_WINDOW))
    latest: int = 0
    own: float = 0.0


class LiveCurve:
    """Corrects curves by recent forwards. Not safe for several threads; its policy guards it.

    A forward of width w is expected to take T(w) as calibrated, times a factor that all widths share at present,
    times a deviation of its own. Both are medians, so that a stall moves neither. The deviation is told by comparing
    a width with *others* of the same moments, and believed as far as it is beyond chance: calibration measures with
    more care than decoding can, and without that pull the two would drift apart where no other width is used.
    """

    def __init__(self, curves: ContextCurves | None = None) -> None:
        self._curves = curves
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)  # widths, and logs of the factor they showed
        self._scatter: deque[float] = deque(maxlen=_SCATTER_WINDOW)
        self._widths: dict[int, _Width] = {}
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
        self._recent.clear()
        self._scatter.clear()
        self._widths.clear()

    @property
    def factor(self) -> float:
        """How many times longer forwards take now than when they were calibrated."""
        return math.exp(self._level())

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
        expected_s = None if self._curves is None else self._expected_s(width, context_length)
        limit_s = self.plain_s if expected_s is None else expected_s
        if limit_s is not None and seconds > IMPLAUSIBLE_FACTOR * limit_s:
            return False
        if width == 1:
            self._plain.append(seconds)
        if expected_s is not None:
            self._learn(width, math.log(seconds / expected_s))
        return True

    def _learn(self, width: int, off: float) -> None:
        """A forward took exp(``off``) times what its width would take at the speed of calibration."""
        self._forwards += 1
        others = [shown for other, shown in self._recent if other != width]
        if len(self._recent) >= _ENOUGH:
            self._scatter.append(abs(off - self._level()))
        if len(others) >= _ENOUGH:
            # Where two widths differ nobody knows which is off. The one that is decoded less gives way; the shares of
            # two come to one, so that they do not overshoot in turns.
            gap = off - statistics.median(others)
            same = len(self._recent) - len(others)
            share = len(others) ** 2 / (len(others) ** 2 + same**2)
            known = self._widths.setdefault(width, _Width())
            known.samples.append(known.own + share * gap)
            known.latest = self._forwards
            learned = self._believed(known.samples)
            off += known.own - learned
            known.own = learned
        self._recent.append((width, off))
        for name in [name for name, known in self._widths.items() if self._forwards - known.latest > _OWN_MEMORY]:
            del self._widths[name]

    def _believed(self, samples: Sequence[float]) -> float:
        """Their median, the calibration among them, without what may be chance."""
        middle = statistics.median((*(0.0,) * _CALIBRATION_WEIGHT, *samples))
        deviation = _DEVIATION_BY_MEDIAN * statistics.median(self._scatter)
        chance = _MEDIAN_ERROR * deviation / math.sqrt(len(samples) + _CALIBRATION_WEIGHT)
        return math.copysign(max(0.0, abs(middle) - chance), middle)

    def _level(self) -> float:
        """The logarithm of the factor."""
        return statistics.median(shown for _, shown in self._recent) if len(self._recent) >= _ENOUGH else 0.0

    def _own(self, width: int) -> float:
        known = self._widths.get(width)
        return 0.0 if known is None else known.own

    def _expected_s(self, width: int, context_length: int) -> float:
        """Seconds of such a forward at the speed of calibration."""
        assert self._curves is not None
        return self._curves.at(context_length).seconds(width) * math.exp(self._own(width))

    def curve(self) -> Curve | None:
        """The curve as it is now, at the context of the latest forward; None if nothing was calibrated."""
        if self._curves is None:
            return None
        curve = self._curves.at(self._context_length)
        factor = self.factor
        return Curve(
            widths=curve.widths,
            forward_s=tuple(
                factor * math.exp(self._own(width)) * seconds
                for width, seconds in zip(curve.widths, curve.forward_s, strict=True)
            ),
        )
