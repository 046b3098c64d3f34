"""SIGTERM and SIGHUP: the program leaves as after Ctrl-C, with its children ended and its temporaries removed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Ending:
    """Turns the first such signal into KeyboardInterrupt, or into ``stop_answer`` while an answer is written.

    ``number`` is the signal's. A second SIGTERM ends the process as it would without this; a terminal that is closed
    sends several SIGHUPs.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.stop_answer: Callable[[], object] | None = None

    @property
    def exit_code(self) -> int | None:
        """What a shell makes of it; None without a signal."""
        return None if self.number is None else 128 + self.number

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None and number != signal.SIGTERM:
            return
        self.number = number
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.stop_answer is None:
            raise KeyboardInterrupt
        self.stop_answer()

    @contextmanager
    def installed(self) -> Iterator[Ending]:
        """Handle them for the length of a block, where the main thread is at hand and nobody asked to ignore them."""
        on_main = threading.current_thread() is threading.main_thread()
        ours = [number for number in _SIGNALS if on_main and signal.getsignal(number) is signal.SIG_DFL]
        for number in ours:
            signal.signal(number, self._handle)
        try:
            yield self
        finally:
            for number in ours:
                signal.signal(number, signal.SIG_DFL)
