"""SIGTERM and SIGHUP: the program leaves as after Ctrl-C, with its children ended and its temporaries removed."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))

# A callback or a destructor has long returned by then.
_AGAIN_S = 0.05


class Ending:
    """Turns the first such signal into KeyboardInterrupt, or into ``stop_answer`` while an answer is written.

    ``number`` is the signal's. A second SIGTERM ends the process as it would without this; a terminal that is closed
    sends several SIGHUPs, and a SIGTERM with them. A KeyboardInterrupt that came in a destructor or in a callback of
    native code, where Python drops it, comes again, that of Ctrl-C too.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.stop_answer: Callable[[], object] | None = None

    @property
    def exit_code(self) -> int | None:
        """What a shell makes of it; None without a signal."""
        return None if self.number is None else 128 + self.number

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
        if self.number is not None:
            return
        self.number = number
        if self.stop_answer is None:
            raise KeyboardInterrupt
        self.stop_answer()

    def _send_again(self) -> None:
        number, self.number = self.number, None
        if number == signal.SIGTERM:
            signal.signal(number, self._handle)
        again = threading.Timer(_AGAIN_S, _send, (signal.SIGINT if number is None else number,))
        again.daemon = True
        again.start()

    @contextmanager
    def installed(self) -> Iterator[Ending]:
        """Handle them for the length of a block, where the main thread is at hand and nobody asked to ignore them."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        ours = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
        for number in ours:
            signal.signal(number, self._handle)
        tell = sys.unraisablehook

        def on_dropped(dropped: sys.UnraisableHookArgs) -> None:
            if isinstance(dropped.exc_value, KeyboardInterrupt):
                self._send_again()
            else:
                tell(dropped)

        sys.unraisablehook = on_dropped
        try:
            yield self
        finally:
            sys.unraisablehook = tell
            for number in ours:
                signal.signal(number, signal.SIG_DFL)


def _send(number: int) -> None:
    """To the main thread, which it wakes where a system can do that."""
    if sys.platform == "win32":
        _thread.interrupt_main(number)
    else:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, number)
