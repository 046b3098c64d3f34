"""Current T(w): calibrated lines over the context, one factor for all widths, and a correction for each width.

The T(w) of a mixture of experts depends on the text too: each expert is read once a forward, and neighbouring rows of
some texts share more experts than those of others. A forward counts those that it read, and its time is compared with
that of as many. Later forwards are expected to share experts as the recent ones did (``_Shared``).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable

from edgespec.interfaces.counted_text import MOST_NODES
from edgespec.interfaces.model import ALONE, Company
from edgespec.planning.cost.curve import ContextCurves, ExpertTimes

# A forward this many times slower than expected is not a measurement: a suspended machine, a debugger, a clock jump.
# After SLOW of them in a row it is the machine that is slower.
IMPLAUSIBLE_FACTOR = 50.0

# The median of this many forwards is the machine's pace: two stalls in a row change nothing, three slow forwards do.
_RECENT, SLOW = 5, 3

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


# Weight of the calibrated experts, as a multiple of those that a second row adds, and a forward's decay: about thirty
# forwards count, as for acceptance. Counts are exact, so few of them tell how much the rows of a text share.
_CALIBRATED_ROWS, _DECAY = 8.0, 0.97

# The least that is left of a forward's calibrated time if it reads fewer experts: the seconds of one are an estimate.
_LEAST_PART = 0.1


class PlainTimes:
    """Recent times of plain forwards."""

    def __init__(self) -> None:
        self._forwards: deque[tuple[float, int]] = deque(maxlen=_RECENT_PLAIN)  # seconds and context

    def record(self, seconds: float, context: int) -> None:
        if math.isfinite(seconds) and seconds > 0.0:
            self._forwards.append((seconds, context))

    def tokens_per_s(self, relative_s: Callable[[int], float]) -> float | None:
        """Plain decoding's speed where ``relative_s`` is 1: the seconds of a forward by context, as a multiple."""
        if len(self._forwards) < _ENOUGH_PLAIN:
            return None
        return 1.0 / statistics.median(seconds / relative_s(context) for seconds, context in self._forwards)


class _Shared:
    """How many experts forwards read beyond those of one row, as a multiple of the calibrated number."""

    def __init__(self, experts: ExpertTimes | None, widest: int) -> None:
        self.expert_s = 0.0 if experts is None else experts.expert_s
        one = 0.0 if experts is None else experts.read_by(1)
        self._one = one
        self._further = [0.0] * (widest + 1)  # by width: calibrated experts beyond those of one row
        if experts is not None:
            self._further[1:] = (experts.read_by(width) - one for width in range(1, widest + 1))
        self._seen = self._usual = _CALIBRATED_ROWS * (self._further[2] if widest > 1 else 0.0)

    def learn(self, width: int, read: int) -> bool:
        """Learn from a forward of ``width`` rows; False if it tells nothing."""
        if not self._further[width]:
            return False
        self._seen = _DECAY * self._seen + max(0.0, read - self._one)
        self._usual = _DECAY * self._usual + self._further[width]
        return True

    def more(self, width: int, read: int) -> float:
        """Seconds by which ``read`` experts take longer than the calibrated number."""
        return self.expert_s * (read - self._one - self._further[width])

    @property
    def expected(self) -> list[float]:
        """By width, the seconds by which the experts that are expected take longer than the calibrated number."""
        factor = self._seen / self._usual - 1.0 if self._usual else 0.0
        return [self.expert_s * factor * further for further in self._further]


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
        self._shared = _Shared(curves.experts, len(self._base) - 1)
        self._more = [0.0] * len(self._base)  # by width: seconds that this text's experts add to the calibrated ones
        self._own = [1.0] * len(self._base)
        self._off: list[deque[float]] = [deque(maxlen=_LATEST_OFF) for _ in range(widest + 1)]
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._implausible = 0  # in a row
        self._plain: float | None = None  # the factor of the latest plain forward
        self._compared = 0
        self.factor = self.latest = 1.0  # over several forwards, and of the last forward
        self.pace = 1.0  # the factor before the forwards that read a part of a prompt too, which takes its time
        self.off: float | None = None  # what the last forward's width was off, if it was compared with a plain one
        self.since_plain = 0

    def usual_s(self, width: int, context: int) -> float:
        """Seconds of such a forward at the speed of calibration."""
        width = min(width, len(self._base) - 1)
        return self._seconds(width, context, self._more[width])

    def _seconds(self, width: int, context: int, more_s: float) -> float:
        line = self._base[width] + self._slope[width] * context
        return max(line + more_s, _LEAST_PART * line) * self._own[width]

    def now_s(self, width: int, context: int) -> float:
        return self.factor * self.usual_s(width, context)

    def between_s(self, rows: float, context: int) -> float:
        """``now_s`` of any number of rows: between whole ones, and beyond the known ones, on a line."""
        low = min(int(rows), len(self._base) - 2)
        below_s, above_s = self.now_s(low, context), self.now_s(low + 1, context)
        return below_s + (rows - low) * (above_s - below_s)

    def all_now(self, context: int, others: int = 0) -> list[float]:
        """T(1), T(2), ... at the current speed, each with ``others`` rows of other answers."""
        factor, first = self.factor, 1 + min(others, len(self._base) - 1 - self._widest)
        part = slice(first, first + self._widest)
        lines = zip(self._base[part], self._slope[part], self._more[part], self._own[part], strict=True)
        return [factor * own * (base + slope * context + more) for base, slope, more, own in lines]

    @property
    def moved(self) -> float:
        """Factor, 1 or more, by which the pace has changed since plain decoding was timed."""
        if self._plain is None:
            return 1.0
        return max(self.factor / self._plain, self._plain / self.factor)

    def record(
        self, width: int, context: int, seconds: float, company: Company = ALONE, experts: int = 0
    ) -> float | None:
        """Learn from a forward of an answer's ``width`` rows, and the rows of its ``company``.

        ``experts``: how many it read; 0 if they were not counted. Returns the factor it showed, or None for an
        implausible time. A shared forward says nothing about single widths: it may have waited for others, or have
        read a part of a prompt.
        """
        self.off = None
        if not 0.0 < seconds < math.inf:
            return None
        rows = min(width + company.rows, len(self._base) - 1)
        more_s = self._shared.more(rows, experts) if experts else self._more[rows]
        shown = seconds / self._seconds(rows, context, more_s)
        if experts and not company.reading and self._shared.learn(rows, experts):
            expected = zip(self._shared.expected, self._base, strict=True)
            self._more = [max(more, (_LEAST_PART - 1.0) * base) for more, base in expected]
        self._implausible = self._implausible + 1 if shown >= IMPLAUSIBLE_FACTOR * self.factor else 0
        if 0 < self._implausible < SLOW:
            return None
        if self._implausible:
            self._recent.extend([shown] * SLOW)
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
        if not company.reading:
            self.pace = self.factor
        return shown
