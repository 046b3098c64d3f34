"""Threads that this process started and that still run."""

from __future__ import annotations

import threading

__all__ = ["started_threads"]


def started_threads() -> set[threading.Thread]:
    """The running threads that ``threading`` started.

    ``threading.active_count`` also counts any other thread once it has called ``threading.current_thread``.
    pytest-xdist has such a thread, and the garbage collector may close an answer on it.
    """
    return {each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}
