"""The threads of a server: all are started with it, and none while a request runs."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from edgespec.runtimes.thread import serve_jobs, start_thread
from edgespec.server.queue import MOST_RUNNING

T = TypeVar("T")

# Two for each place, as a step that its client left may still run; and one each for reading a body, for loading or
# measuring, and for freeing.
MOST_THREADS = 2 * MOST_RUNNING + 3


class Threads:
    """Run what would block the event loop. The threads are daemons: a program that ends does not wait for them."""

    def __init__(self, count: int = MOST_THREADS) -> None:
        """Raises MemoryLimitError if not all of them can be started."""
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        # Also without ``close``, once nothing refers to them. Not at exit: they are daemons.
        self._end = weakref.finalize(self, _end, self._jobs, count)
        self._end.atexit = False
        try:
            for _ in range(count):
                start_thread(
                    threading.Thread(target=serve_jobs, args=(self._jobs,), name="edgespec-serve", daemon=True)
                )
        except BaseException:
            self.close()
            raise

    def hand_over(self, work: Callable[[], T], future: Future[T]) -> None:
        """Queue ``work``, whose result becomes that of ``future``."""
        self._jobs.put((work, future))

    async def run(self, work: Callable[[], T], late: Callable[[T], object] | None = None) -> T:
        """The result of ``work``. A cancelled caller does not wait: ``late`` gets the result, on the same thread."""
        future: Future[T] = Future()
        self.hand_over(work, future)
        try:
            return await _result_of(future)
        except asyncio.CancelledError:
            if late is not None:
                future.add_done_callback(partial(_come_late, late))
            raise

    def close(self) -> None:
        """End the threads once they have done what is queued. Idempotent; does not wait."""
        self._end()


class Steps:
    """What one request does on the threads of its server: one step after another, in the order of the calls."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._last = Future[None]()
        self._last.set_result(None)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue ``work`` behind the steps before it, which may have failed."""
        future, ended = Future[T](), Future[None]()
        self._last.add_done_callback(lambda _: self._threads.hand_over(work, future))
        self._last = ended  # not ``future``: an error that it had would keep what the step worked on
        future.add_done_callback(lambda _: ended.set_result(None))
        return future

    async def run(self, work: Callable[[], T]) -> T:
        """The result of ``work``. A cancelled caller does not wait for it, but further steps do."""
        return await _result_of(self.submit(work))


async def _result_of(future: Future[T]) -> T:
    """The result; a caller that is cancelled leaves it to the thread, whose error is then dropped."""
    awaited = asyncio.wrap_future(future)
    awaited.add_done_callback(take_error)
    return await asyncio.shield(awaited)


def take_error(future: asyncio.Future[Any]) -> None:
    """Take the error of what is no longer awaited, so that asyncio does not write it as a traceback."""
    if not future.cancelled():
        future.exception()


def _come_late(late: Callable[[T], object], future: Future[T]) -> None:
    if future.exception() is None:
        late(future.result())


def _end(jobs: queue.SimpleQueue[Any], count: int) -> None:
    for _ in range(count):
        jobs.put(None)
