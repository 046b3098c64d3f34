"""The reader's side of one answer: an iterator of events, sync or async."""

from __future__ import annotations

import asyncio
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
        self._ended = False

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        event = self._advance()
        if event is None:
            raise StopIteration
        self._task.deliver(event)
        return event

    def _advance(self) -> Event | None:
        """The next event, not yet counted as delivered; None after the end."""
        if self._ended:
            return None
        if not self._started:
            self._start()
            self._started = True
            if self._task.abandoned:  # left meanwhile, by a cancelled ``await``
                self._cancel()
        try:
            event = self._task.read()
        except BaseException:  # interrupted while waiting
            self.close()
            raise
        if self._ended:  # left while waiting, by a cancelled ``await``: nobody is given this event
            return None
        if event is None or isinstance(event, BaseException):
            self._ended = True
            done = self._settle()
            if event is not None:
                raise event
            return done
        return event

    def close(self) -> None:
        """Cancel what is left and wait until the Session can be used again. Idempotent."""
        if not self._ended:
            self._ended = True
            self._task.abandon()
            self._leave()
            self._settle()

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
        waiting = asyncio.get_running_loop().run_in_executor(None, self._advance)
        try:
            event = await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self._ended = True
            self._task.abandon()
            self._leave()
            raise
        if event is None:
            raise StopAsyncIteration
        # Here and not on the other thread: a cancelled ``await`` has read nothing, whatever arrived meanwhile.
        self._task.deliver(event)
        return event

    async def aclose(self) -> None:
        """``close`` without blocking the event loop."""
        await asyncio.get_running_loop().run_in_executor(None, self.close)
