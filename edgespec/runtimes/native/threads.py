"""How many threads compute for a native cache, and on which processors."""

from __future__ import annotations

import ctypes
import os
import sys

from edgespec.errors import InvalidRequestError
from edgespec.hardware.control_groups import processor_limit
from edgespec.runtimes.native.library import Threads

__all__ = ["MOST_THREADS", "check_threads", "make_threads"]

MOST_THREADS = 8192  # as many as the kernels take: the most processors that Linux is built for


def check_threads(threads: int, processors: tuple[int, ...] | None) -> None:
    """Raises InvalidRequestError unless there are so many threads to be had, each on a processor of its own.

    Of more processors than threads the first are used.
    """
    if not 1 <= threads <= MOST_THREADS:
        raise InvalidRequestError(f"threads must be at least 1 and at most {MOST_THREADS}, not {threads}")
    if processors is None:
        return
    if sys.platform != "linux":
        raise InvalidRequestError(
            "threads cannot be bound to processors on this system", hint="leave the choice to the system"
        )
    if len(processors) < threads:
        raise InvalidRequestError(f"{threads} threads cannot share {len(processors)} processors: name one for each")
    if len(set(processors)) < len(processors):
        raise InvalidRequestError(f"a processor is named twice: {', '.join(map(str, processors))}")
    allowed = os.sched_getaffinity(0)
    missing = [number for number in processors if number not in allowed]
    if missing:
        here = ", ".join(map(str, sorted(allowed)))
        raise InvalidRequestError(f"this process may not run on processor {missing[0]}", hint=f"it may on {here}")


def make_threads(threads: int, processors: tuple[int, ...] | None) -> Threads:
    """What ``es_open`` takes, for numbers that ``check_threads`` let through."""
    made = Threads(count=threads, most_busy=processor_limit() or 0)
    if processors is not None:
        made.processors = (ctypes.c_int32 * threads)(*processors[:threads])  # which keeps the array alive
    return made
