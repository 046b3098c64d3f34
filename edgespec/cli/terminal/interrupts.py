"""Ctrl-C: the first stops the answer, a second within two seconds leaves the program."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from edgespec.cli.terminal.ending import Ending

_TWICE_WITHIN_S = 2.0

# Seconds between calls of ``cancel`` until the answer ends; too short for a person to notice.
_RETRY_S = 0.05


class Answering(Protocol):
    """An object whose answers can be cancelled: a session, or the owner of a session."""

    def cancel(self) -> None:
        """End the answer in progress, if there is one. Any thread may call it."""


class Interrupts:
    """Turns SIGINT into ``session.cancel()`` while an answer is written, and into KeyboardInterrupt otherwise.

    ``ending`` does the same for SIGTERM and SIGHUP.
    """

    def __init__(self, session: Answering, ending: Ending) -> None:
        self._session = session
        self._ending = ending
        self._answer_ended: threading.Event | None = None  # of the answer in progress
        self._last_at = float("-inf")
        self.leaving = False

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        twice = now - self._last_at < _TWICE_WITHIN_S
        self._last_at = now
        if twice:
            self.leaving = True
        if twice or self._answer_ended is None:
            raise KeyboardInterrupt
        self._begin_to_stop(self._answer_ended)

    def _begin_to_stop(self, ended: threading.Event) -> None:
        # On another thread, because the handler may have interrupted code that holds the session's lock.
        threading.Thread(target=self._stop_answer, args=(ended,), daemon=True).start()

    def _stop_answer(self, ended: threading.Event) -> None:
        """Cancel repeatedly until the answer ends, because it may not have started when Ctrl-C was pressed."""
        while not ended.is_set():
            self._session.cancel()
            ended.wait(_RETRY_S)

    @contextmanager
    def installed(self) -> Iterator[Interrupts]:
        """Handle SIGINT within a block."""
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Within the block, Ctrl-C stops the answer. Raises KeyboardInterrupt at its end after a second Ctrl-C."""
        self._answer_ended = ended = threading.Event()
        self._ending.stop_answer = lambda: self._begin_to_stop(ended)
        try:
            yield
        finally:
            ended.set()
            self._ending.stop_answer = None
            self._answer_ended = None
        if self.leaving:
            raise KeyboardInterrupt
