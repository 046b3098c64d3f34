"""One thread that makes a Sequence's native calls, so that the caller's thread never blocks inside native code."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from edgespec.errors import ClosedError, MemoryLimitError
from edgespec.files.progress import Cancelled

S = TypeVar("S")
T = TypeVar("T")

# Kernels keep 110 KB on the stack of the calling thread, besides Python's frames. Threads have 128 KB on musl, or as
# little as `ulimit -s` says. 8 MiB is Linux's usual size; untouched stack takes no memory.
_STACK_BYTES = 8 * 2**20

# A job learns of its event within this time; a person notices a delay from five times as long on.
_STOP_SEEN_S = 0.02

# On Windows Ctrl-C does not interrupt a wait (Python 3.11 to 3.13): waits are this short there, and repeated.
_SLICE_S = 0.1

# The stack's size is a process-wide setting, changed while a thread starts. One lock per process id: a forked process
# would wait forever for a lock that another thread held.
_STARTING: dict[int, threading.Lock] = {}

_Job = tuple[Callable[[], Any], "Future[Any]"]


def take(items: queue.SimpleQueue[T], timeout_s: float = math.inf) -> T:
    """The queue's next item; Ctrl-C interrupts the wait on every system. Raises queue.Empty after ``timeout_s``."""
    if sys.platform != "win32":
        return items.get(timeout=None if timeout_s == math.inf else timeout_s)
    end = time.monotonic() + timeout_s
    while (left_s := end - time.monotonic()) > _SLICE_S:
        with contextlib.suppress(queue.Empty):
            return items.get(timeout=_SLICE_S)
    return items.get(timeout=max(0.0, left_s))


def awaited(future: Future[T]) -> Future[T]:
    """A future whose result Ctrl-C may interrupt the wait for: on Windows it is done."""
    while sys.platform == "win32" and not wait([future], _SLICE_S).done:
        pass
    return future


class OwnProcess:
    """The process that made something. A forked one has none of its threads, and a lock that one held stays held."""

    def __init__(self) -> None:
        self._number = os.getpid()

    @property
    def left(self) -> bool:
        """Whether this is another process, a forked one. Nothing may be waited for here; its parent frees all."""
        return os.getpid() != self._number

    def check(self) -> None:
        """Raises ClosedError in a forked process."""
        if self.left:
            raise ClosedError(
                "this session belongs to the process that opened it", hint="load the model after forking"
            )


class WorkerThread:
    """Runs jobs one after another. Jobs that call ``run`` again are run in place, without a thread switch."""

    def __init__(self, name: str, on_interrupt: Callable[[], None]) -> None:
        """``on_interrupt`` is called when the waiting caller is interrupted (Ctrl-C), to end the running job.

        Raises MemoryLimitError if no thread can be started.
        """
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._on_interrupt = on_interrupt
        self._closed = False
        self._lock = threading.Lock()
        self._process = OwnProcess()
        self._thread = threading.Thread(target=serve_jobs, args=(self._jobs,), name=name, daemon=True)
        start_thread(self._thread)
        # Without a reference no other job can come. Not at exit: the thread is a daemon.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue ``job`` without waiting. Raises ClosedError after ``close``, and in a forked process."""
        future: Future[T] = Future()
        self._hand_over(job, future)
        return future

    def _hand_over(self, job: Callable[[], T], future: Future[T]) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError("this sequence is closed")
            self._process.check()  # in a forked one no thread would ever run the job
            self._jobs.put((job, future))

    def run(self, job: Callable[[], T], cancelled: Cancelled | None = None) -> T:
        """Run ``job`` on the thread and wait for its result; its exceptions are raised here.

        If the wait is interrupted, or ``cancelled()`` is true, the job is asked to end and still waited for, so that
        no native call outlives its caller. Raises ClosedError after ``close``, and in a forked process.
        """
        if threading.current_thread() is self._thread:
            return job()
        future: Future[T] = Future()
        try:
            # Inside the try: an interrupt may come between the job's start and the wait for it.
            self._hand_over(job, future)
            if cancelled is not None:
                self._watch(future, cancelled)
            return awaited(future).result()
        except BaseException:
            if not future.cancel() and not future.done():
                self._on_interrupt()
                awaited(future).exception()
            raise
        finally:
            # A raised exception holds this frame, and the future holds the exception: without that cycle, the job's
            # objects are freed with their last reference.
            del future

    def _watch(self, future: Future[T], cancelled: Cancelled) -> None:
        """Wait for the job; ask it to end once ``cancelled()`` is true."""
        while not wait([future], _STOP_SEEN_S).done:
            if cancelled():
                self._on_interrupt()
                return

    def close(self) -> None:
        """Finish the queued jobs, then end the thread. Idempotent; callable from the thread itself."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self.join()

    def join(self) -> None:
        """Wait for the thread to end after a ``close``; does nothing on the thread itself."""
        if threading.current_thread() is not self._thread:
            self._thread.join()


def map_on_threads(function: Callable[[S], T], items: Iterable[S], threads: int, name: str) -> list[T]:
    """``function`` of every item, in order, computed on ``threads`` threads, the caller's included.

    After an exception no further item is begun, and the exception is raised once every thread has ended its item.
    Unlike an executor's, these threads do not delay interpreter exit until all items are done. If no more threads can
    be started, the existing threads compute everything.
    """
    waiting = iter(enumerate(items))
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    lock = threading.Lock()

    def serve() -> None:
        while True:
            with lock:
                taken = None if errors else next(waiting, None)
            if taken is None:
                return
            try:
                results[taken[0]] = function(taken[1])
            except BaseException as error:
                errors.append(error)

    helpers: list[threading.Thread] = []
    with contextlib.suppress(MemoryLimitError):
        for _ in range(threads - 1):
            helper = threading.Thread(target=serve, name=name, daemon=True)
            start_thread(helper)
            helpers.append(helper)
    serve()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(results))]


def start_thread(thread: threading.Thread) -> None:
    """Start a thread with stack for native code. Raises MemoryLimitError if there are too many threads."""
    with _STARTING.setdefault(os.getpid(), threading.Lock()):
        before = threading.stack_size()
        threading.stack_size(max(before, _STACK_BYTES))
        try:
            thread.start()
        except RuntimeError as error:
            raise MemoryLimitError(
                f"no thread can be started: {error}",
                needed_bytes=None,
                available_bytes=None,
                hint="close other programs, or raise the limit on threads (`ulimit -u`)",
            ) from error
        finally:
            threading.stack_size(before)


def serve_jobs(jobs: queue.SimpleQueue[_Job | None]) -> None:
    """Run jobs and settle their futures, until None comes."""
    while (item := jobs.get()) is not None:
        job, future = item
        result = None
        if future.set_running_or_notify_cancel():  # false if the caller cancelled it
            try:
                result = job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        # Results hold views of native memory: do not keep them alive until the next job.
        del item, job, future, result
