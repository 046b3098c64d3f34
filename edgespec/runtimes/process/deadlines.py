"""How long the parent of a worker process waits before it treats the child as hung."""

from __future__ import annotations

from dataclasses import dataclass

# Weight bytes a slow device computes with in a second, for each token of a prompt: a core of 20 GFLOP/s, at 4
# operations per byte of 4-bit weights.
_SLOW_BYTES_PER_S = 5e9

# A forward counts as hung after the longest recent time multiplied by this, plus ``timed_s``: other programs on
# the device, a lower clock and a longer context each cost a factor of two to three.
_LONGER = 10.0

# Share of the longest time that is kept when a shorter time follows: a single slow forward is half forgotten after
# 23 forwards, as in planning.acceptance.
_KEPT = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Deadlines in seconds, all far beyond what a working device needs. The clock stops while the machine sleeps.

    ``load_s``: tens of gigabytes from a slow disk, or an NPU's compiler. ``answer_s``: any other answer, or the fixed
    part of a forward until a forward of its size was timed: a GPU compiles kernels first, for up to tens of seconds.
    ``token_s`` is added for each token of such a forward; None derives it from the weights. ``timed_s``: the fixed
    part once forwards were timed; Windows resets a GPU that is silent for two seconds, so no longer than what drivers
    allow. ``cancel_s``: from a cancel to the end of the forward; the longest uninterruptible part is one layer, or
    one chunk on some devices. ``close_s``: for the child to end by itself.
    """

    load_s: float = 600.0
    answer_s: float = 30.0
    token_s: float | None = None
    timed_s: float = 2.0
    cancel_s: float = 20.0
    close_s: float = 2.0


class ForwardTimes:
    """The times of one model's forwards, and the deadline of the next. For any thread.

    Sizes are grouped by powers of two: a chunk of a prompt and a single token use other kernels and take other times.
    The first forward of a size is not counted, since it may have waited for its kernels.
    """

    def __init__(self, deadlines: Deadlines, bytes_per_forward: int) -> None:
        self._deadlines = deadlines
        own = deadlines.token_s
        self._token_s = bytes_per_forward / _SLOW_BYTES_PER_S if own is None else own
        self._begun: set[int] = set()
        self._longest_s: dict[int, float] = {}  # by size

    @property
    def answer_s(self) -> float:
        """Seconds to wait for any answer but a forward's."""
        deadlines = self._deadlines
        return min(deadlines.answer_s, deadlines.timed_s) if self._longest_s else deadlines.answer_s

    def deadline_s(self, tokens: int) -> float:
        """Seconds to wait for a forward of ``tokens`` tokens."""
        untimed_s = self._deadlines.answer_s + tokens * self._token_s
        longest_s = self._longest_s.get(tokens.bit_length())
        return untimed_s if longest_s is None else min(untimed_s, self._deadlines.timed_s + _LONGER * longest_s)

    def record(self, tokens: int, seconds: float) -> None:
        """Record the time of a forward of ``tokens`` tokens. Of two parallel calls one may be lost."""
        size = tokens.bit_length()
        if size not in self._begun:
            self._begun.add(size)
            return
        before_s = self._longest_s.get(size, seconds)
        self._longest_s[size] = max(seconds, _KEPT * before_s + (1 - _KEPT) * seconds)
