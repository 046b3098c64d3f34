"""Measuring this machine while a person reads an answer: a first chat starts at once, later ones are fast."""

from __future__ import annotations

import threading
from types import TracebackType

from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError


class IdleCalibration:
    """``Engine.calibrate_for`` on a thread of its own between two answers: a context manager around the chat.

    Ctrl-C can interrupt ``Thread.start``, and a thread that has not begun cannot be joined. So the thread holds a
    lock while it measures, and a thread that begins only after ``stop`` finds its event set and measures nothing.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._measuring = threading.Lock()
        self._stop = threading.Event()  # one for each thread
        self._lines: tuple[str, ...] = ()
        self._given_up = False

    def start(self) -> None:
        """Begin to measure, if anything is missing."""
        if self._given_up or not self._engine.can_calibrate:
            return
        self._stop = threading.Event()
        threading.Thread(target=self._measure, args=(self._stop,), name="edgespec-calibrate", daemon=True).start()

    def _measure(self, stop: threading.Event) -> None:
        with self._measuring:
            if stop.is_set():
                return
            try:
                reasons = self._engine.calibrate_for(stop=stop)
            except EdgespecError as error:
                self._given_up = True
                self._lines = (f"measuring this machine failed: {error.message}",)
                return
            if reasons:
                self._lines = ("measured this machine meanwhile:", *(f"- {reason}" for reason in reasons))

    def stop(self) -> tuple[str, ...]:
        """Leave off within one forward; lines that say what was measured since the last call, once it is complete."""
        self._stop.set()
        with self._measuring:
            lines, self._lines = self._lines, ()
        return lines

    def __enter__(self) -> IdleCalibration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
