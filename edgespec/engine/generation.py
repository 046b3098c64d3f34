"""The reader's side of one answer: an iterator of events, sync or async."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from edgespec.engine.answer import AnswerTask
from edgespec.engine.events import Done, Event


class Generation:
    """Events of one answer, ending with Done. Created by ``Session.generate``; decoding starts at the first ``next``.

    Leaving early (``close()``, the end of a ``with`` block, or forgetting the object) cancels the rest; what was
    read so far stays in the conversation.
    """

    def __init__(
        self,
        task: AnswerTask,
        *,
        start: Callable[[], None],
        cancel: Callable[[], None],
        settle: Callable[[], Done],
    ) -> None:
        self._task = task
        self._start = start
        self._cancel = cancel
        self._settle = settle
        self._started = False
        self._ended = False  # nobody reads any further
        self._settled = False  # and the session can be used again

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        self._begin()
        try:
            event = self._task.read()
        except BaseException:  # interrupted while waiting
            self.close()
            raise
        if self._ended:  # closed by another thread meanwhile: nobody is given this event
            raise StopIteration
        return self._given(event)

    def _begin(self) -> None:
        if not self._started:
            self._start()
            self._started = True

    def _given(self, event: Event | BaseException | None) -> Event:
        """What the reader gets, counted as delivered; the end settles the answer. Raises its failure."""
        if event is None or isinstance(event, BaseException):
            self._ended = self._settled = True
            done = self._settle()
            if event is not None:
                raise event
            event = done
        self._task.deliver(event)
        return event

    def close(self) -> None:
        """Cancel what is left and wait until the Session can be used again. Idempotent."""
        self._abandon()
        if not self._settled:
            self._settled = True
            self._settle()

    def _abandon(self) -> None:
        if not self._ended:
            self._ended = True
            self._task.abandon()
            self._leave()

    def _leave(self) -> None:
        self._task.forget()
        if self._started:
            self._cancel()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        # May run on any thread, the worker's included: never waits. The Session settles at its next use.
        if not getattr(self, "_ended", True):
            self._leave()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        self._begin()
        try:
            event = await self._task.read_async()
        except BaseException:  # cancelled: the session is free after ``aclose``, or settles at its next use
            self._abandon()
            raise
        if self._ended:  # closed by another thread meanwhile, as in ``__next__``
            raise StopAsyncIteration
        return self._given(event)

    async def aclose(self) -> None:
        """``close`` without blocking the event loop, also after a cancelled ``await``."""
        loop = asyncio.get_running_loop()
        closed: asyncio.Future[None] = loop.create_future()
        # A thread of its own: those of the loop's executor are the application's.
        threading.Thread(target=_close, args=(self, loop, closed), name="edgespec-close", daemon=True).start()
        await asyncio.shield(closed)


def _close(generation: Generation, loop: asyncio.AbstractEventLoop, closed: asyncio.Future[None]) -> None:
    error: BaseException | None = None
    try:
        generation.close()
    except BaseException as raised:
        error = raised

    def tell() -> None:
        if not closed.done():
            closed.set_result(None) if error is None else closed.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
        loop.call_soon_threadsafe(tell)
