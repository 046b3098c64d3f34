"""Locks between processes. The operating system releases a lock when its process dies, so none is ever stale."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import filelock

from edgespec.errors import StoreLockedError
from edgespec.files.progress import QUIET, Job

# A person notices a wait of this length: then the job hears of it, and may end it.
POLL_S = 0.2


@contextlib.contextmanager
def locked(path: Path, doing: str, job: Job = QUIET, *, timeout_s: float = math.inf) -> Iterator[None]:
    """Hold the lock at ``path``, which processes hold while they are ``doing`` something, as in "fetching tiny".

    The job hears of a wait once, and may end it. Raises StoreLockedError after ``timeout_s`` seconds,
    CancelledError, and OSError, also where the file system has no locks.
    """
    lock = filelock.FileLock(path)
    deadline, told = time.monotonic() + timeout_s, False
    while True:
        try:
            lock.acquire(timeout=min(POLL_S, timeout_s))
            break
        except filelock.Timeout:
            pass
        except NotImplementedError as error:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(path)) from error
        if not told:
            job.tell("waiting for another process", "waiting", note=f"another process is {doing}")
            told = True
        job.check(f"waiting for another process that is {doing} was cancelled")
        if time.monotonic() >= deadline:
            raise StoreLockedError(
                f"another process has been {doing} for {timeout_s:.0f} s",
                hint=f"wait for that process or end it, then try again (the lock is {path})",
            )
    try:
        yield
    finally:
        lock.release()
