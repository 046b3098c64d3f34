"""Ctrl-C, SIGTERM, SIGHUP and Ctrl-Break: a signal is noted, and the command ends where it looks.

An exception that a signal handler raises arrives between any two instructions: inside a lock's own code, or in a
destructor, where Python drops it. So the handler raises nothing, except while a person's line is awaited.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TypeVar

from edgespec.errors import EdgespecError

T = TypeVar("T")

# Windows has no SIGHUP. Only Windows has SIGBREAK: Ctrl-Break, and how a process asks another to end.
_SIGHUP, _SIGBREAK = getattr(signal, "SIGHUP", None), getattr(signal, "SIGBREAK", None)
_ENDING = tuple(number for number in (signal.SIGTERM, _SIGBREAK) if number is not None)
SIGNALS = tuple(number for number in (signal.SIGINT, *_ENDING, _SIGHUP) if number is not None)

_TWICE_WITHIN_S = 2.0

# Work that a signal has not ended within this time hangs: the slowest answer measured took 0.16 s to end, next to a
# busy program (docs/results/leaving.md).
_HANGS_S = 10.0

# Seconds between calls of ``stop`` until its block ends; too short for a person to notice.
_RETRY_S = 0.05

EXIT_INTERRUPTED = 130
_SHOW_CURSOR_UNMARK_PASTES = b"\x1b[?25h\x1b[?2004l"


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """What signals do within a block. ``calling`` is held during calls of ``stop``."""

    stop: Callable[[], object] | None = None
    forgives: Collection[int] = ()
    counts: bool = True  # whether a signal may be the first or the second of two
    ended: threading.Event = field(default_factory=threading.Event)
    calling: threading.Lock = field(default_factory=threading.Lock)


class Interrupts:
    """Whether the program is to end, and what a signal does until then.

    The first signal is noted (``check`` raises KeyboardInterrupt, ``pending``), and makes ``leaving`` true unless the
    block forgives it. The next one ends the process immediately once ``leaving`` is true, but for SIGHUP, of which a
    closed terminal sends several. ``number`` is that of SIGTERM, SIGHUP or SIGBREAK, None without one.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.leaving = False
        self._pending = False
        self._pending_at: float | None = None  # None if the pending signal counts
        self._last_at = float("-inf")  # of a signal that counts
        self._block = _Block()
        self._reading = False
        self._restore_terminal: Callable[[], None] = lambda: None
        # ``put`` is reentrant: a handler may interrupt another ``put``. Nothing else here may take a lock in it.
        self._signals: queue.SimpleQueue[_Block | None] = queue.SimpleQueue()

    @property
    def exit_code(self) -> int | None:
        """The exit code that a shell expects: 128 plus ``number``; None without a number."""
        return None if self.number is None else 128 + self.number

    def pending(self) -> bool:
        """Whether a signal came that was not obeyed yet: the ``cancelled`` of a Job."""
        return self._pending

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal is pending."""
        if self._pending:
            raise KeyboardInterrupt

    def obeyed(self) -> None:
        """Forget a pending signal, unless the program is to end."""
        self._pending = self.leaving

    def read(self, line: Callable[[], T]) -> T:
        """The result of ``line``, which only waits for a person. A signal ends the wait with KeyboardInterrupt."""
        try:
            self._reading = True
            self.check()
            return line()
        finally:
            self._reading = False

    @contextmanager
    def during(
        self, stop: Callable[[], object] | None = None, *, forgives: Collection[int] = (), counts: bool = True
    ) -> Iterator[None]:
        """Within the block, signals call ``stop`` on another thread, repeatedly until the block ends.

        ``stop`` may come too early for what it is to stop, so it is called again. The first of the signals that the
        block ``forgives`` does not end the program; without ``counts`` none does, unless ``stop`` has ended nothing
        for 10 s. Raises KeyboardInterrupt for a signal that came before the block.
        """
        outer, block = self._block, _Block(stop, forgives, counts)
        try:
            self._block = block
            self.check()
            yield
        finally:
            self._block = outer
            block.ended.set()
            with block.calling:  # nothing is freed by another thread while the program exits
                pass

    @contextmanager
    def installed(self) -> Iterator[Interrupts]:
        """Handle the signals within a block, in the main thread only. Ignored signals stay ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        watcher = threading.Thread(target=self._watch, name="edgespec-signals", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started: signals are noted all the same
            watcher.start()
        self._restore_terminal = _terminal()
        before = {number: signal.getsignal(number) for number in SIGNALS}
        ours = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
        for number in ours:
            signal.signal(number, self._handle)
        try:
            yield self
        finally:
            for number in ours:
                signal.signal(number, before[number])
            self._signals.put(None)
            if watcher.ident is not None:
                watcher.join()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.leaving:
            if number != _SIGHUP:
                self._end_now()
            return
        if number not in self._block.forgives or self._again(number, time.monotonic()):
            self.leaving = True
            self.number = None if number == signal.SIGINT else number
            if number in _ENDING:
                signal.signal(number, signal.SIG_DFL)  # the next one also ends native code that does not return
        self._pending = True
        self._signals.put(self._block)  # a block that begins later is not stopped by this signal
        if self._reading:
            self._reading = False
            raise KeyboardInterrupt

    def _again(self, number: int, now: float) -> bool:
        """Whether a signal at ``now`` that a block forgives is the second of two.

        A SIGHUP is neither: a closed terminal sends several, and systemd one with each SIGTERM, before or behind it.
        """
        if number == _SIGHUP:
            self._pending_at = self._pending_at if self._pending else now
            return False
        if self._block.counts:
            again = (self._pending and self._pending_at is None) or now - self._last_at < _TWICE_WITHIN_S
            self._last_at, self._pending_at = now, None
            return again
        if not self._pending:
            self._pending_at = now
        return self._pending_at is not None and now - self._pending_at > _HANGS_S

    def _watch(self) -> None:
        """Call what stops the block that a signal came in, for each signal."""
        while (block := self._signals.get()) is not None:
            while block.stop is not None and not block.ended.is_set():
                with block.calling, contextlib.suppress(EdgespecError):
                    if not block.ended.is_set():
                        block.stop()
                block.ended.wait(_RETRY_S)

    def _end_now(self) -> None:
        """End the process, and restore the terminal. The next command removes temporary files."""
        self._restore_terminal()
        with contextlib.suppress(OSError):
            os.write(2, b"interrupted\n")
        os._exit(EXIT_INTERRUPTED if self.exit_code is None else self.exit_code)


def _terminal() -> Callable[[], None]:
    """What puts the terminal of stdin back to its present modes, shows the cursor and marks no pastes."""
    try:
        import termios
    except ImportError:  # Windows
        return lambda: None
    try:
        modes = termios.tcgetattr(0)
    except termios.error:
        return lambda: None

    def restore() -> None:
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(0, termios.TCSANOW, modes)
            if os.isatty(2) and os.environ.get("TERM") != "dumb":
                os.write(2, _SHOW_CURSOR_UNMARK_PASTES)

    return restore
