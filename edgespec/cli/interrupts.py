"""Ctrl-C: the first one stops the answer, a second one within two seconds leaves."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from edgespec.session import Session

_TWICE_WITHIN_S = 2.0


class Interrupts:
    """Turns SIGINT into ``session.cancel()`` while an answer is written, and into KeyboardInterrupt otherwise."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._answering = False
        self._last_at = float("-inf")
        self.leaving = False

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        twice = now - self._last_at < _TWICE_WITHIN_S
        self._last_at = now
        if twice:
            self.leaving = True
        if self._answering:
            # Not from here: the handler may have interrupted code that holds the session's lock.
            threading.Thread(target=self._session.cancel, daemon=True).start()
        else:
            raise KeyboardInterrupt

    @contextmanager
    def installed(self) -> Iterator[Interrupts]:
        """Handle SIGINT for the length of a block."""
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Ctrl-C inside the block stops the answer. Raises KeyboardInterrupt after it if it came twice."""
        self._answering = True
        try:
            yield
        finally:
            self._answering = False
        if self.leaving:
            raise KeyboardInterrupt
