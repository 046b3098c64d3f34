"""Lines of a log on stderr, written by a thread: a reader that stops reading does not stop the program."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable

# Some minutes of a busy server's lines. Prompts and answers are lines too, so characters have a limit as well.
MOST_LINES = 1000
MOST_CHARACTERS = 4_000_000
# Time for the last lines to be written when the program ends.
CLOSE_S = 1.0
# A bar in the last row is drawn again below the line.
_OVER_THE_BAR = "\r\x1b[2K"


class LogWriter:
    """Writes lines in their order.

    Lines for which there is no room here or on the disk are dropped, and a line that follows says how many.
    ``has_bar``: whether a bar stands in the terminal's last row now.
    """

    def __init__(self, most_lines: int = MOST_LINES, most_characters: int = MOST_CHARACTERS) -> None:
        self.has_bar: Callable[[], bool] = lambda: False
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._most_lines = most_lines
        self._most_characters = most_characters
        self._lock = threading.Lock()
        self._waiting = 0
        self._characters = 0
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def write(self, *lines: str) -> None:
        """Write these lines soon. Does not block."""
        with self._lock:
            for line in lines:
                length = len(line)
                if self._waiting >= self._most_lines or self._characters + length > self._most_characters:
                    self._dropped += 1
                    continue
                self._waiting += 1
                self._characters += length
                self._lines.put(line)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="edgespec-log", daemon=True)
                with contextlib.suppress(RuntimeError):  # too many threads: the lines wait for the next call
                    thread.start()
                    self._thread = thread

    def close(self, within_s: float = CLOSE_S) -> None:
        """Wait until all lines are written, ``within_s`` at most."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(within_s)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            written = self._print(line)
            with self._lock:
                self._waiting -= 1
                self._characters -= len(line)
                self._dropped += not written
                dropped = self._dropped
            if dropped and written and self._print(f"lines of the log that stderr did not take: {dropped}"):
                with self._lock:
                    self._dropped -= dropped

    def _print(self, line: str) -> bool:
        """Whether the whole line was written. A closed stderr does not end the thread."""
        with contextlib.suppress(OSError, ValueError):
            over = _OVER_THE_BAR if self.has_bar() else ""
            data = f"{over}{line}\n".encode(sys.stderr.encoding or "utf-8", "backslashreplace")
            # Not through Python's buffer, whose lock a waiting thread would hold when the program ends.
            descriptor = sys.stderr.fileno()
            while data:
                data = data[os.write(descriptor, data) :]
            return True
        return False
