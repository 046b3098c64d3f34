"""SIGTERM and SIGHUP end the program as Ctrl-C does: child processes end and temporary files are removed."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))

# Seconds until a dropped signal is sent again, when the callback or destructor has returned.
_AGAIN_S = 0.05


class Ending:
    """Turns the first signal into KeyboardInterrupt, or into ``stop_answer`` while an answer is written.

    ``number`` is the signal's number. A second SIGTERM ends the process immediately; later SIGHUPs are ignored, as a
    closed terminal sends several. Python drops a KeyboardInterrupt, also that of Ctrl-C, in a destructor and in a
    callback of native code; the signal is then sent again.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.stop_answer: Callable[[], object] | None = None

    @property
    def exit_code(self) -> int | None:
        """The exit code that a shell expects: 128 plus the signal's number; None without a signal."""
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
        """Handle the signals within a block, in the main thread only. Signals with another handler keep it."""
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
    """Send a signal to the main thread, waking it if the system can."""
    if sys.platform == "win32":
        _thread.interrupt_main(number)
    else:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, number)
