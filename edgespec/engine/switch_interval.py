"""Getting the interpreter lock back soon, while an answer is decoded beside busy Python threads.

A thread that returns from native code asks for the lock and, while another Python thread computes, gets it after the
interpreter's switch interval: 5 ms by default, once a token, of the 30 to 60 ms that a token of a small model takes.
So while such waits are seen the interval is shortened, for the length of the answer, and then put back. Nothing is
changed in a process without busy Python threads.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

# Measured on two cores (benchmarks/busy_thread.py, 1.5B target): at 1 ms decoding beside a busy thread is within 10 %
# of decoding beside a busy process, at the default 5 ms it is 8 to 26 % slower.
SHORT_INTERVAL_S = 0.001

# Handing the lock over and taking it back takes some 50 microseconds; longer means that somebody else had it.
_CONTENDED_S = 0.0005

# Rounds between two looks, each of which costs one wait if the lock is contended.
_ROUNDS_BETWEEN_LOOKS = 16


class LockTurns:
    """Watches the interpreter lock for one answer. Use as a context manager and call ``look`` once a round."""

    def __init__(self) -> None:
        self._rounds = 0
        self._before_s: float | None = None
        self._set_s = 0.0

    def __enter__(self) -> LockTurns:
        return self

    def look(self) -> None:
        """Shorten the switch interval if the lock turns out to be contended."""
        if self._before_s is None and self._rounds % _ROUNDS_BETWEEN_LOOKS == 0:
            started = time.perf_counter()
            time.sleep(0)  # gives the lock away and takes it back
            if time.perf_counter() - started > _CONTENDED_S and sys.getswitchinterval() > SHORT_INTERVAL_S:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(SHORT_INTERVAL_S)
                self._set_s = sys.getswitchinterval()
        self._rounds += 1

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        # Only if it is still ours: the application may have chosen another one meanwhile.
        if self._before_s is not None and sys.getswitchinterval() == self._set_s:
            sys.setswitchinterval(self._before_s)
        self._before_s = None
