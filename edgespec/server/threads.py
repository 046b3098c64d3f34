"""Work that would block the event loop, on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from edgespec.errors import MemoryLimitError
from edgespec.runtimes.thread import start_thread

T = TypeVar("T")
U = TypeVar("U")


async def in_thread(work: Callable[[], T], dispose: Callable[[T], None] | None = None, *, always: bool = False) -> T:
    """The result of ``work``, which runs on a daemon thread: a program that ends does not wait for it.

    A cancelled caller waits for the end of ``work``, so that whatever it opened can be closed. With ``dispose`` it
    does not wait, and ``dispose`` is called with the late result.

    If no thread can be started, raises MemoryLimitError. ``always`` is for work that gives back what is held: then it
    runs immediately, on the thread of the event loop.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    lock, abandoned = threading.Lock(), threading.Event()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            _tell(loop, done.set_exception, error)
            return
        with lock:
            late = abandoned.is_set()
            if not late:
                _tell(loop, done.set_result, result)
        if late and dispose is not None:
            dispose(result)

    try:
        start_thread(threading.Thread(target=run, name="edgespec-serve", daemon=True))
    except MemoryLimitError:
        if not always:
            raise
        run()
    cancelled: asyncio.CancelledError | None = None
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError as error:
            cancelled = error
            with lock:
                if dispose is not None and not done.done():
                    abandoned.set()
                    done.cancel()
    if cancelled is not None:
        if not done.cancelled() and done.exception() is None and dispose is not None:
            await in_thread(lambda: dispose(done.result()), always=True)
        raise cancelled
    return done.result()


def _tell(loop: asyncio.AbstractEventLoop, tell: Callable[[U], None], value: U) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop was closed
        loop.call_soon_threadsafe(_tell_once, tell, value)


def _tell_once(tell: Callable[[U], None], value: U) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # the caller is gone
        tell(value)
