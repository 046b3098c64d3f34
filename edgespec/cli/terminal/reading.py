"""How much of a long prompt is read: a line on a terminal, gone when the answer begins, and lines of a log."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import cycle

from edgespec.cli.terminal.output import NARROWEST, obeys_codes, stderr_columns, stderr_is_rich, time_left
from edgespec.engine.events import Reading
from edgespec.interfaces.model import PREFILL_CHUNK_TOKENS

# A prompt that is read sooner shows nothing: a line for a moment would only flicker.
PATIENCE_S = 0.3
# Something moves at least twice a second, also on a machine that is late by half of that.
_BETWEEN_S = 0.2

# Turns, as the first part of a prompt takes seconds, and nothing is known of the pace before its end.
_TURNING = "|/-\\"

# A log has a line when a prompt of this many tokens begins (some seconds on two cores), and then at these intervals.
LONG_TOKENS = 1024
LOGGED_EACH_S = 5.0

# Later parts of a prompt take longer than the first: the pace is that of the last few.
_REMEMBERED = 4


class Pace:
    """How much of a prompt is read, estimated between its events. Times are in seconds, on one clock."""

    def __init__(self) -> None:
        self._heard = deque[tuple[int, float]](maxlen=_REMEMBERED)
        self._of = 0

    def add(self, event: Reading, now: float) -> None:
        self._heard.append((event.tokens, now))
        self._of = event.of

    def text(self, now: float, columns: int = 80) -> str:
        """For example ``reading the prompt · 1240 of 3812 tokens · 33 % · 9 s left``; fewer words in few columns."""
        (first, first_at), (last, last_at) = self._heard[0], self._heard[-1]
        if last == first:  # no pace yet
            return _fitting(columns, f"reading the prompt · {self._of} tokens", f"reading · {self._of} tokens")
        each_s = (last_at - first_at) / (last - first)
        most = min(last + PREFILL_CHUNK_TOKENS, self._of) - 1  # the end of a part comes as an event
        read = min(last + int((now - last_at) / each_s), most) if each_s > 0 else last
        end = f"{100 * read // self._of} % · {time_left((self._of - read) * each_s)} left"
        whole = f"{read} of {self._of} tokens · {end}"
        return _fitting(columns, f"reading the prompt · {whole}", f"reading · {whole}", f"reading · {end}")


def _fitting(columns: int, *texts: str) -> str:
    """The first of the texts that fits; the start of the last one if none does."""
    return next((text for text in texts if len(text) <= columns), texts[-1][:columns])


class ReadingLine:
    """Shows the pace on stderr from ``PATIENCE_S`` on, several times a second, until ``stop``.

    Shows nothing with ``quiet``, and if stderr is not a terminal, or cannot erase a line.
    """

    def __init__(self, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._shown = not quiet and obeys_codes(sys.stderr)
        self._clock = clock
        self._pace = Pace()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, event: Reading) -> None:
        """So much is read."""
        self._pace.add(event, self._clock())
        if self._thread is None and self._shown:
            self._ended.clear()
            thread = threading.Thread(target=self._run, name="edgespec-reading", daemon=True)
            with contextlib.suppress(RuntimeError):  # the thread limit is reached: nothing is shown
                thread.start()
                self._thread = thread

    def stop(self) -> None:
        """Remove the line. Idempotent."""
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        if self._ended.wait(PATIENCE_S):
            return
        for mark in cycle(_TURNING):
            columns = max(NARROWEST, stderr_columns() or 0) - 1 - len("| ")
            text = f"{mark} {self._pace.text(self._clock(), columns)}"
            _write(f"\r\x1b[2m{text}\x1b[0m\x1b[K" if stderr_is_rich() else f"\r{text}\x1b[K")
            if self._ended.wait(_BETWEEN_S):
                _write("\r\x1b[K")
                return


class ReadingLog:
    """Says how much of a long prompt is read, for a log: as it begins, and every few seconds."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._pace = Pace()
        self._next = 0.0

    def __call__(self, event: Reading) -> None:
        """So much is read."""
        now = self._clock()
        self._pace.add(event, now)
        if event.of >= LONG_TOKENS and (not event.tokens or now >= self._next):
            self._next = now + LOGGED_EACH_S
            self._write(self._pace.text(now, sys.maxsize))


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
