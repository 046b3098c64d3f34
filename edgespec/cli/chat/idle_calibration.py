"""Measures this machine while a person reads an answer, so that a first chat need not wait for calibration."""

from __future__ import annotations

import contextlib
import threading

from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError

# A speed-up below this would be printed as 1.0x.
TELLING = 1.05


class IdleCalibration:
    """Runs ``Engine.calibrate_for`` on a separate thread between two answers. A context manager.

    Ctrl-C can interrupt ``Thread.start``, and a thread that has not started cannot be joined. So the thread holds a
    lock while it measures, and a thread that starts only after ``stop`` finds its event set and measures nothing.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine  # the chat may replace it while nothing is measured
        self._measuring = threading.Lock()
        self._stop = threading.Event()  # one for each thread
        self._line: str | None = None
        self._given_up = False

    def start(self) -> None:
        """Start measuring on a thread if ``Engine.can_calibrate`` and no earlier measurement failed."""
        if self._given_up or not self.engine.can_calibrate:
            return
        self._stop = threading.Event()
        thread = threading.Thread(target=self._measure, args=(self._stop,), name="edgespec-calibrate", daemon=True)
        with contextlib.suppress(RuntimeError):  # the thread limit is reached: nothing is measured this time
            thread.start()

    def _measure(self, stop: threading.Event) -> None:
        with self._measuring:
            if stop.is_set():
                return
            try:
                reasons = self.engine.calibrate_for(stop=stop)
            except EdgespecError as error:
                self._given_up = True
                self._line = f"measuring this machine failed: {error.message}"
                return
            if reasons:
                self._line = f"measured: {_worth(self.engine)} (/plan says why)"

    def stop(self) -> str | None:
        """Stop within one forward. Returns a line about the result, once, after the measuring is complete."""
        self._stop.set()
        with self._measuring:
            line, self._line = self._line, None
        return line

    def __enter__(self) -> IdleCalibration:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()


def _worth(engine: Engine) -> str:
    """What guessing gains in the new plan, in a few words."""
    plan, costs = engine.plan, engine.pair.measurements.costs()
    if plan.mode == "plain":
        return "decoding without guesses is fastest here"
    predicted, plain_s = plan.predicted_tokens_per_s, costs.plain_s
    # What copies gain depends on the text, so that a plan with copies alone predicts 1.00.
    if predicted is None or plain_s is None or predicted * plain_s < TELLING:
        return "guessing is used where the text makes it faster"
    return f"guessing is worth about {predicted * plain_s:.1f}x here"
