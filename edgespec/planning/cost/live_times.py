"""Current T(w): calibrated lines over the context, one factor for all widths, and a correction for each width."""

from __future__ import annotations

import math
import statistics
from collections import deque

from edgespec.interfaces.counted_text import MOST_NODES
from edgespec.interfaces.model import ALONE, Company
from edgespec.planning.cost.curve import ContextCurves

# A forward this many times slower than expected is not a measurement: a suspended machine, a debugger, a clock jump.
# After _SLOW of them in a row it is the machine that is slower.
IMPLAUSIBLE_FACTOR = 50.0

# The median of this many forwards is the machine's pace: two stalls in a row change nothing, three slow forwards do.
_RECENT, _SLOW = 5, 3

# Forwards after a plain one that are compared with it: half a sentence, as long as a shared machine keeps its pace.
_COMPARED = 8

# Comparisons whose median corrects a width, and the calibration's weight among them. Simulated with 5 % stalls: with
# 9 comparisons stalls bend a curve, with 15 or 25 by 1 % of T(1), and both follow as fast.
_LATEST_OFF = 25
_CALIBRATED = (1.0, 1.0, 1.0)

# Rows that a forward scores at most.
_MOST_ROWS = MOST_NODES + 1

# Plain forwards whose median is plain decoding's speed, and how many are needed.
_RECENT_PLAIN, _ENOUGH_PLAIN = 9, 4


class PlainTimes:
    """Recent times of plain forwards, independent of any calibration."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_RECENT_PLAIN)

    def record(self, seconds: float) -> None:
        if math.isfinite(seconds) and seconds > 0.0:
            self._seconds.append(seconds)

    @property
    def tokens_per_s(self) -> float | None:
        return 1.0 / statistics.median(self._seconds) if len(self._seconds) >= _ENOUGH_PLAIN else None


class LiveTimes:
    """Calibrated times corrected by observed forwards. Not thread-safe; the owner guards it.

    Widths are rows of a forward: those of one answer, up to ``widest``, and of other answers computed with it.
    """

    def __init__(self, curves: ContextCurves, widest: int) -> None:
        self._widest = widest
        low, high = curves.curves[0], curves.curves[-1]
        apart = max(1, curves.contexts[-1] - curves.contexts[0])
        self._base, self._slope = [0.0], [0.0]  # by width: seconds at an empty context, and for each token of it
        for width in range(1, max(widest, _MOST_ROWS) + 1):
            slope = max(0.0, (high.seconds(width) - low.seconds(width)) / apart)
            self._slope.append(slope)
            self._base.append(max(low.seconds(width) - slope * curves.contexts[0], 0.1 * low.seconds(width)))
        self._own = [1.0] * len(self._base)
        self._off: list[deque[float]] = [deque(maxlen=_LATEST_OFF) for _ in range(widest + 1)]
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._implausible = 0  # in a row
        self._plain: float | None = None  # the factor of the latest plain forward
        self._compared = 0
        self.factor = self.latest = 1.0  # over several forwards, and of the last forward
        self.off: float | None = None  # what the last forward's width was off, if it was compared with a plain one
        self.since_plain = 0

    def usual_s(self, width: int, context: int) -> float:
        """Seconds of such a forward at the speed of calibration."""
        width = min(width, len(self._base) - 1)
        return (self._base[width] + self._slope[width] * context) * self._own[width]

    def now_s(self, width: int, context: int) -> float:
        return self.factor * self.usual_s(width, context)

    def all_now(self, context: int, others: int = 0) -> list[float]:
        """T(1), T(2), ... at the current speed, each with ``others`` rows of other answers."""
        factor, first = self.factor, 1 + min(others, len(self._base) - 1 - self._widest)
        part = slice(first, first + self._widest)
        lines = zip(self._base[part], self._slope[part], self._own[part], strict=True)
        return [factor * own * (base + slope * context) for base, slope, own in lines]

    @property
    def moved(self) -> float:
        """Factor, 1 or more, by which the pace has changed since plain decoding was timed."""
        if self._plain is None:
            return 1.0
        return max(self.factor / self._plain, self._plain / self.factor)

    def record(self, width: int, context: int, seconds: float, company: Company = ALONE) -> float | None:
        """Learn from a forward of an answer's ``width`` rows, and the rows of its ``company``.

        Returns the factor it showed, or None for an implausible time. A shared forward says nothing about single
        widths: it may have waited for others, or have read a part of a prompt.
        """
        self.off = None
        if not 0.0 < seconds < math.inf:
            return None
        shown = seconds / self.usual_s(width + company.rows, context)
        self._implausible = self._implausible + 1 if shown >= IMPLAUSIBLE_FACTOR * self.factor else 0
        if 0 < self._implausible < _SLOW:
            return None
        if self._implausible:
            self._recent.extend([shown] * _SLOW)
            self._implausible = 0
        self.latest = shown
        self.since_plain += 1
        if width == 1:
            self._plain, self._compared, self.since_plain = shown, _COMPARED if company == ALONE else 0, 0
        elif self._compared and self._plain is not None and company == ALONE:
            self._compared -= 1
            self.off = shown * self._own[width] / self._plain
            self._off[width].append(self.off)
            self._own[width] = statistics.median((*_CALIBRATED, *self._off[width]))
        self._recent.append(shown)
        self.factor = sorted(self._recent)[len(self._recent) // 2]
        return shown
