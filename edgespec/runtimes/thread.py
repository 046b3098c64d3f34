"""One thread that makes a Sequence's native calls, so that the caller's thread never blocks inside native code."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from edgespec.errors import ClosedError, MemoryLimitError

S = TypeVar("S")
T = TypeVar("T")

# Kernels keep 110 KB on the stack of whoever calls them, beside Python's own frames. Threads have 128 KB on musl, or
# as little as `ulimit -s` says. 8 MiB is what Linux usually gives; what is never touched takes no memory.
_STACK_BYTES = 8 * 2**20

# A job sees within this time that its event was set: what a person takes for at once is five times as long.
_STOP_SEEN_S = 0.02

# The stack's size is a setting of the process, for the moment of a start. By process number: a forked process would
# wait for ever for a lock that another thread held.
_STARTING: dict[int, threading.Lock] = {}

_Job = tuple[Callable[[], Any], "Future[Any]"]


class WorkerThread:
    """Runs jobs one after another. Jobs that call ``run`` again are run in place, without a thread switch."""

    def __init__(self, name: str, on_interrupt: Callable[[], None]) -> None:
        """``on_interrupt`` is called when the waiting caller is interrupted (Ctrl-C), to end the running job.

        Raises MemoryLimitError where no thread can be started.
        """
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._on_interrupt = on_interrupt
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
        start_thread(self._thread)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Hand ``job`` over without waiting. Raises ClosedError after ``close``, and in a forked process."""
        future: Future[T] = Future()
        self._hand_over(job, future)
        return future

    def _hand_over(self, job: Callable[[], T], future: Future[T]) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError("this sequence is closed")
            if not self._thread.is_alive():  # in a forked child: nobody would ever take the job
                raise ClosedError(
                    "this sequence belongs to the process that opened it", hint="load the model after forking"
                )
            self._jobs.put((job, future))

    def run(self, job: Callable[[], T], stop: threading.Event | None = None) -> T:
        """Run ``job`` on the thread and wait for its result; its exceptions are raised here.

        If the wait itself is interrupted, or ``stop`` is set meanwhile, the job is told to end and waited for, so
        that no native call outlives its caller. Raises ClosedError after ``close``, and in a forked process.
        """
        if threading.current_thread() is self._thread:
            return job()
        future: Future[T] = Future()
        try:
            # In here: an interrupt may come between the job's start and the wait for it.
            self._hand_over(job, future)
            if stop is not None:
                self._watch(future, stop)
            return future.result()
        except BaseException:
            if not future.cancel() and not future.done():
                self._on_interrupt()
                future.exception()
            raise
        finally:
            # A raised exception holds this frame, and the future holds the exception: without the cycle, whatever
            # the job used goes when its last user lets go.
            del future

    def _watch(self, future: Future[T], stop: threading.Event) -> None:
        """Wait for the job; tell it to end once ``stop`` is set."""
        while not wait([future], _STOP_SEEN_S).done:
            if stop.is_set():
                self._on_interrupt()
                return

    def close(self) -> None:
        """Finish the jobs already handed over, then end the thread. Idempotent; callable from the thread itself."""
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
    """``function`` of every item, in order, computed on so many threads, the caller's among them.

    The first exception is raised once every thread is through with its item; no other item is begun. Unlike those of
    an executor, the threads do not keep the interpreter from exiting, which would wait for all of the items. Where no
    more threads can be started, those there are compute everything.
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
    """Start a thread with room for native code on its stack. Raises MemoryLimitError where there are too many."""
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
                hint="close what else runs here, or raise the limit on threads (`ulimit -u`)",
            ) from error
        finally:
            threading.stack_size(before)


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (item := jobs.get()) is not None:
        job, future = item
        result = None
        if future.set_running_or_notify_cancel():  # false if whoever submitted it took it back
            try:
                result = job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        # Results hold views of native memory: do not keep them alive until the next job.
        del item, job, future, result
