"""How long the parent of a worker process waits before it takes the child for hung: as long as experience says."""

from __future__ import annotations

from dataclasses import dataclass

# Weight bytes a slow device computes with in a second, for each token of a prompt: a core of 20 GFLOP/s, and the
# 4 operations that a byte of 4-bit weights stands for.
_SLOW_BYTES_PER_S = 5e9

# A forward may take this many times as long as the longest of late, plus ``timed_s``, before it counts as hung: other
# programs that use the device, a lower clock and a longer context each cost a factor of two to three.
_LONGER = 10.0

# Share of the longest time that is kept when a shorter one follows: a single slow forward is half forgotten after 23,
# as planning.acceptance forgets.
_KEPT = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds of a clock that stands while the machine is asleep, all far beyond what a working device takes.

    ``load_s``: tens of gigabytes from a slow disk, or an NPU's compiler at work. ``answer_s``: any other answer, or
    the fixed part of a forward, as long as none of its size was timed: a GPU compiles kernels first, for seconds to
    tens of them. ``token_s`` is added for each token of such a forward; None goes by the weights. ``timed_s``: the
    fixed part once forwards were timed; Windows resets a GPU that is silent for two seconds, so it is no longer than
    what drivers themselves allow. ``cancel_s``: from a cancel to the end of the forward; the longest part that cannot
    be interrupted is one layer, or one chunk on some devices. ``close_s``: for the child to end by itself.
    """

    load_s: float = 600.0
    answer_s: float = 30.0
    token_s: float | None = None
    timed_s: float = 2.0
    cancel_s: float = 20.0
    close_s: float = 2.0


class ForwardTimes:
    """What forwards of one model took, and how long the next one may take. Any thread may ask and tell.

    Sizes are told apart by powers of two: a chunk of a prompt and a single token have other kernels and other times.
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
        """Seconds to wait for anything but a forward."""
        deadlines = self._deadlines
        return min(deadlines.answer_s, deadlines.timed_s) if self._longest_s else deadlines.answer_s

    def deadline_s(self, tokens: int) -> float:
        """Seconds to wait for a forward of so many tokens."""
        untimed_s = self._deadlines.answer_s + tokens * self._token_s
        longest_s = self._longest_s.get(tokens.bit_length())
        return untimed_s if longest_s is None else min(untimed_s, self._deadlines.timed_s + _LONGER * longest_s)

    def record(self, tokens: int, seconds: float) -> None:
        """Learn what a forward of so many tokens took. Of two threads that tell at once, one may not be heard."""
        size = tokens.bit_length()
        if size not in self._begun:
            self._begun.add(size)
            return
        before_s = self._longest_s.get(size, seconds)
        self._longest_s[size] = max(seconds, _KEPT * before_s + (1 - _KEPT) * seconds)
