"""Blocking work on another thread, so that the caller's stays free for Ctrl-C, cancellation and progress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from edgespec.errors import CancelledError
from edgespec.files.progress import Cancelled

T = TypeVar("T")

# Often enough that a progress bar moves and a cancel feels immediate; a wake-up costs microseconds.
POLL_S = 0.1

# How long a cancelled job gets to notice. Past this it is inside a system call with a timeout of its own; it is a
# daemon thread, and it looks at its stop signal before it touches anything again.
GRACE_S = 1.0


def run_watched(
    job: Callable[[Callable[[], bool]], T], *, tick: Callable[[], None], cancelled: Cancelled | None, what: str
) -> T:
    """Run ``job(stopped)`` on a thread of its own; returns its value or raises its exception.

    ``tick`` runs on the caller's thread every tenth of a second; what it raises (and KeyboardInterrupt) stops the
    job. Raises CancelledError, saying that ``what`` was cancelled.
    """
    stop, done = threading.Event(), threading.Event()
    values: list[T] = []
    failures: list[BaseException] = []

    def body() -> None:
        try:
            values.append(job(stop.is_set))
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    threading.Thread(target=body, name="edgespec-files", daemon=True).start()
    try:
        while not done.wait(POLL_S):
            tick()
            if cancelled is not None and cancelled():
                raise CancelledError(f"{what} was cancelled; what has arrived is kept")
    except BaseException:
        stop.set()
        done.wait(GRACE_S)
        raise
    if failures:
        raise failures[0]
    tick()
    return values[0]
