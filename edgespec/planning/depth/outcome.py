"""What an answer got of its plan, with intervals, and what that says about the plan's times and mode. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from edgespec.files.checked import Range
from edgespec.planning.cost.margins import NORMAL_95, t_95

# Whether answers confirm the measured times, or contradict them so that estimates are better.
TimesVerdict: TypeAlias = Literal["measured", "estimated"]
ModeVerdict: TypeAlias = Literal["serial", "pipelined"]

# A measured ratio of times that answers see to be off by this factor is wrong. Simulated: with drafting 1.25 times as
# dear as in truth, requests are 1 % slower, with 1.5 times 4 %, and with twice nothing is drafted.
WRONG = 1.5

# A drafter is timed near the beginning of a text. Beyond this context, in tokens, it takes noticeably longer.
NEAR = 1024

# Where a plain step takes less, Python's own time, up to a millisecond, is too large a part of every ratio.
LEAST_STEP_S = 0.005

# With fewer rounds of the pipelined mode their intervals say nothing of it: two answers decide until the next
# calibration.
LEAST_ROUNDS = 8

# A pipelined answer that was paused for its loss says so, however few its rounds, if these took this many times as
# long as the plan's contention says. Where both sides share the processors, a round takes 2 to 3 plain steps, and
# drafting is paused after 2 to 6 (2 cores of an Intel Xeon, AVX-512 VNNI). Less may be a text that does not suit.
DEARER = 1.25

_Number: TypeAlias = Annotated[float, Range(0)]


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean and its 95 % interval."""

    mean: _Number
    low: _Number
    high: _Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the rounds of an answer got, and what the plan had promised (None: it predicted nothing).

    ``token_s`` in seconds. ``times`` and ``mode``: what the answer says of the measured times and of the mode; None
    if nothing can be told.
    """

    rounds: Annotated[int, Range(1)]
    tokens_per_round: Spread
    token_s: Spread
    promised_tokens_per_round: _Number | None = None
    promised_token_s: _Number | None = None
    times: TimesVerdict | None = None
    mode: ModeVerdict | None = None

    def __str__(self) -> str:
        def told(spread: Spread, promised: float | None, factor: float, digits: int, unit: str) -> str:
            mean, low, high = (f"{factor * each:.{digits}f}" for each in (spread.mean, spread.low, spread.high))
            was = "" if promised is None else f", {factor * promised:.{digits}f} promised"
            return f"{mean} {unit} ({low} to {high}{was})"

        tokens = told(self.tokens_per_round, self.promised_tokens_per_round, 1.0, 2, "tokens a round")
        return f"{tokens}, {told(self.token_s, self.promised_token_s, 1000.0, 1, 'ms a token')}"


@dataclass(slots=True)
class Seen:
    """What one answer has shown so far: its rounds, and ratios of its times to the measured ones (1: as measured).

    ``drafting``: of the drafter to the target. ``widths``: of wider forwards to plain ones. ``compared`` guesses, of
    which ``right`` were accepted.
    """

    rounds: int = 0
    compared: int = 0
    right: int = 0
    drafting: list[float] = field(default_factory=list)
    widths: list[float] = field(default_factory=list)
    _tokens: float = 0.0
    _seconds: float = 0.0
    _tokens2: float = 0.0  # sums of squares and of products
    _seconds2: float = 0.0
    _both: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count a round."""
        self.rounds += 1
        self._tokens += tokens
        self._seconds += seconds
        self._tokens2 += tokens * tokens
        self._seconds2 += seconds * seconds
        self._both += tokens * seconds

    @property
    def seconds(self) -> float:
        """Of all rounds."""
        return self._seconds

    @property
    def tokens_per_round(self) -> Spread:
        mean = self._tokens / self.rounds
        return self._spread(mean, self._tokens2 - self.rounds * mean * mean, self.rounds)

    @property
    def token_s(self) -> Spread:
        """Seconds over tokens, a ratio of sums."""
        ratio = self._seconds / self._tokens
        left = self._seconds2 - 2.0 * ratio * self._both + ratio * ratio * self._tokens2
        return self._spread(ratio, left, self._tokens)

    def _spread(self, mean: float, squares: float, over: float) -> Spread:
        """``squares``: the sum of squared deviations of two rounds or more; ``over``: what the sum was divided by."""
        off = t_95(self.rounds - 1) * math.sqrt(max(0.0, squares) * self.rounds / (self.rounds - 1)) / over
        return Spread(mean, max(0.0, mean - off), mean + off)

    def times(self) -> TimesVerdict | None:
        """What the ratios say. The pace of plain steps says nothing: on a slower machine all ratios are the same."""
        if any(map(_wrong, (self.drafting, self.widths))):
            return "estimated"
        return "measured" if self.drafting else None

    def mode(self, serial_token_s: Callable[[float], float]) -> ModeVerdict | None:
        """The faster mode for this text, from pipelined rounds; ``serial_token_s`` by the share of right guesses."""
        if not self.compared or self.rounds < LEAST_ROUNDS:
            return None
        rate = self.right / self.compared
        off = NORMAL_95 * math.sqrt(max(rate * (1.0 - rate), 1.0 / self.compared) / self.compared)
        fast, slow = serial_token_s(min(1.0, rate + off)), serial_token_s(max(0.0, rate - off))
        if self.token_s.low > slow:
            return "serial"
        return "pipelined" if self.token_s.high < fast else None


def _wrong(ratios: Sequence[float]) -> bool:
    """Whether three in four of the ratios are off by ``WRONG`` in one direction.

    One is enough: where a text does not suit the drafter, an answer has that of its look alone. More would take time.
    """
    if not ratios:
        return False
    ordered = sorted(ratios)
    low, high = ordered[(len(ordered) - 1) // 4], ordered[(3 * (len(ordered) - 1) + 3) // 4]
    return low > WRONG or high < 1.0 / WRONG
