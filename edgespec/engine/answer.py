"""One answer: a task on the target's worker thread runs the loop, turns tokens into text and queues events; a
Generation gives the events to the reader, sync or async.

Stop strings are found across chunks and never shown. Text that might become a stop string is held back.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import TracebackType

from edgespec.decoding.logprobs import TokenLogprob
from edgespec.decoding.round_base import DecodeStats, Rounds, Step
from edgespec.engine.events import Done, Event, FinishReason, Notice, Round, Text
from edgespec.errors import CancelledError, InvalidRequestError
from edgespec.text.conversation.thinking import ThinkingText
from edgespec.text.tokenizers.tokenizer import Tokenizer


class StopStrings:
    """Watches text for stop strings.

    The text ends before the stop string that is complete first. The size of the chunks does not change the result.
    If several stop strings end at the same character, the longest one is used: no part of a stop string is shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequestError for an empty stop string and for a text instead of a list."""
        if isinstance(stops, str):
            raise InvalidRequestError("stop strings must be a list of texts, not one text", param="stop")
        if any(not stop for stop in stops):
            raise InvalidRequestError(
                "a stop string is empty; it would stop before the first character", param="stop"
            )
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self._stopped = False

    def feed(self, chunk: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was found). All text after a stop is dropped."""
        if self._stopped:
            return "", True
        text = self._held + chunk
        best: tuple[int, int] | None = None  # end and start of the stop string that is complete first
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        if best is not None:
            self._held, self._stopped = "", True
            return text[: best[1]], True
        keep = self._prefix_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text held back, once all text has come; empty after a stop."""
        rest, self._held = self._held, ""
        return rest

    def _prefix_length(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that is a prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


# Events that the loop may be ahead of a slow reader: a screenful of text. Then decoding pauses, to save the energy.
_EVENTS_AHEAD = 256

# Two cores, 1.5B target (benchmarks/busy_thread.py): next to a busy thread, 1 ms is within 10 % of the speed next to
# a busy process; the default of 5 ms is 8 to 26 % slower.
SHORT_INTERVAL_S = 0.001

# Releasing and taking back the lock takes about 50 microseconds. If it takes longer, another thread held the lock.
_CONTENDED_S = 0.0005

# Rounds between two checks. A check costs one wait if the lock is contended.
_ROUNDS_BETWEEN_LOOKS = 16


class AnswerText:
    """Turns tokens into text to show, and holds back a possible stop string or an incomplete character.

    Bytes that are not UTF-8 are shown as U+FFFD, exactly as if all the bytes were decoded together.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], marks: Mapping[int, bytes] | None = None) -> None:
        """``marks``: control tokens that have a text here, and that text."""
        self._tokenizer = tokenizer
        self._marks = {} if marks is None else marks
        self._stops = StopStrings(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string is complete)."""
        shown = self._marks[token] if token in self._marks else self._tokenizer.token_bytes(token)
        return self._stops.feed(self._decoder.decode(shown))

    def flush(self) -> str:
        """The text held back, at the end of the answer."""
        shown, stopped = self._stops.feed(self._decoder.decode(b"", True))
        return shown if stopped else shown + self._stops.flush()


class SwitchInterval:
    """Shortens the interpreter's switch interval while other Python threads are busy. Call ``look`` once a round.

    A thread that returns from native code asks for the interpreter lock. While another Python thread computes, the
    lock comes after the switch interval: 5 ms by default, for each token, of the 30 to 60 ms that a small model's
    token takes. If such waits are seen, the interval is shortened until the answer ends, and then restored. In a
    process without busy Python threads nothing changes.
    """

    def __init__(self) -> None:
        self._rounds = 0
        self._before_s: float | None = None
        self._set_s = 0.0

    def __enter__(self) -> SwitchInterval:
        return self

    def look(self) -> None:
        """Shorten the switch interval if the lock turns out to be contended."""
        if self._before_s is None and self._rounds % _ROUNDS_BETWEEN_LOOKS == 0:
            started = time.perf_counter()
            time.sleep(0)  # releases the lock and takes it back
            if time.perf_counter() - started > _CONTENDED_S and sys.getswitchinterval() > SHORT_INTERVAL_S:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(SHORT_INTERVAL_S)
                self._set_s = sys.getswitchinterval()
        self._rounds += 1

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        # Only if the interval is still ours: the application may have set another one.
        if self._before_s is not None and sys.getswitchinterval() == self._set_s:
            sys.setswitchinterval(self._before_s)
        self._before_s = None


class AnswerTask:
    """One answer being decoded. ``run`` belongs to the target's worker thread, ``read`` to the reader.

    The task has no reference to its reader, so a forgotten reader is noticed and the task is abandoned.
    """

    def __init__(
        self,
        *,
        loop: Rounds,
        history: list[int],
        answer: AnswerText,
        stats: DecodeStats,
        notices: Sequence[str],
        started: float,
    ) -> None:
        self._loop = loop
        self._history = history
        self._answer = answer
        self._notices = notices
        self._started = started
        self._first_token_at: float | None = None
        self._unshown: list[tuple[int, str | None, int]] = []  # token, its drafter, characters of text
        self._logprobs: list[TokenLogprob] = []  # of the same tokens, if asked for
        self._events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        self._ahead = threading.Semaphore(_EVENTS_AHEAD)
        self._arrived: Callable[[], None] | None = None  # wakes the event loop that waits for an event
        self.abandoned = False
        self.stats = stats
        self.finish_reason: FinishReason = "cancelled"
        self.delivered_text = ""
        self.delivered_ids: list[int] = []

    # ------------------------------------------------------------------------------- worker thread

    def run(self, prepare: Callable[[], None], *, cancelled: bool = False) -> None:
        """Call ``prepare``, then decode to the end. Never raises: an error is queued for the reader.

        An answer that was ``cancelled`` before it began ends without a token.
        """
        try:
            prepare()
            for notice in self._notices:
                self._put(Notice(notice))
            if not cancelled:
                self._decode()
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _decode(self) -> None:
        steps = self._loop.steps()
        try:
            with SwitchInterval() as turns:
                for step in steps:
                    turns.look()
                    if self._take(step) or self.abandoned:
                        break
        except CancelledError:
            self.finish_reason = "cancelled"
        finally:
            steps.close()
        rest = self._answer.flush()
        if rest or self._unshown:
            self._show(rest)

    def _take(self, step: Step) -> bool:
        """Show one step's tokens; True if the answer is complete."""
        now = time.perf_counter()
        if self._first_token_at is None:
            self._first_token_at = now
            self.stats.ttft_s = now - self._started
        self.stats.decode_s = now - self._first_token_at
        if step.record is not None:
            self.stats.add_round(step.record)
            self._put(Round(step.record))
        shown, stopped = "", False
        for position, (token, guessed_by) in enumerate(zip(step.tokens, step.guessed_by, strict=True)):
            self.stats.emitted_tokens += 1
            self.stats.guessed_tokens += guessed_by is not None
            piece, stopped = self._answer.feed(token)
            self._unshown.append((token, guessed_by, len(piece)))
            self._logprobs += step.logprobs[position : position + 1]
            shown += piece
            if stopped:
                # The round's further tokens are not part of the answer: plain decoding would have stopped here.
                del self._history[len(self._history) - (len(step.tokens) - position - 1) :]
                break
        if shown:
            self._show(shown)
        if stopped:
            self.finish_reason = "stop"
        elif step.finish is not None:
            self.finish_reason = step.finish
        return stopped or step.finish is not None

    def _show(self, text: str) -> None:
        tokens, guessed_by, lengths = zip(*self._unshown, strict=True) if self._unshown else ((), (), ())
        self._put(Text(text, tokens, guessed_by, lengths, tuple(self._logprobs)))
        self._unshown.clear()
        self._logprobs.clear()

    def _put(self, event: Event | BaseException | None) -> None:
        # A reader that stopped reading must not keep the interpreter from exiting.
        while not self.abandoned and threading.main_thread().is_alive() and not self._ahead.acquire(timeout=1.0):
            pass
        self._events.put(event)
        arrived = self._arrived
        if arrived is not None:
            arrived()

    # -------------------------------------------------------------------------------------- reader

    def read(self) -> Event | BaseException | None:
        """The next event; None at the end of the answer, the exception if it failed."""
        event = self._events.get()
        self._ahead.release()
        return event

    async def read_async(self) -> Event | BaseException | None:
        """``read`` for an event loop. No thread waits, and a cancelled call has read no event."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(queue.Empty):
                event = self._events.get_nowait()
                self._ahead.release()
                return event
            arrived = asyncio.Event()

            def tell(arrived: asyncio.Event = arrived) -> None:
                with contextlib.suppress(RuntimeError):  # the event loop was closed
                    loop.call_soon_threadsafe(arrived.set)

            self._arrived = tell
            try:
                if self._events.empty():
                    await arrived.wait()
            finally:
                self._arrived = None

    def deliver(self, event: Event) -> None:
        """Count an event as given to the reader."""
        if isinstance(event, Text):
            self.delivered_text += event.text
            self.delivered_ids.extend(event.token_ids)

    def abandon(self) -> None:
        """Stop after the running round: the reader is gone."""
        self.abandoned = True
        self._ahead.release()

    def forget(self) -> None:
        """``abandon`` for a destructor, which must not touch the semaphore: the task notices within 1 s."""
        self.abandoned = True


class Generation:
    """Events of one answer, ending with Done. Created by ``Session.generate``; decoding starts at the first ``next``.

    Leaving early (``close()``, the end of a ``with`` block, or forgetting the object) cancels the answer. The text
    read until then stays in the conversation.
    """

    def __init__(
        self,
        task: AnswerTask,
        *,
        start: Callable[[], None],
        cancel: Callable[[], None],
        settle: Callable[[], Done],
        thinking: Callable[[], ThinkingText | None],
        shaped: Callable[[Event], list[Event]],
    ) -> None:
        self._task = task
        self._thinking = thinking
        self._shaped = shaped
        self._waiting = deque[Event]()  # events that came with the last one
        self._start = start
        self._cancel = cancel
        self._settle = settle
        self._reading = threading.Lock()
        self._started = False
        self._ended = False  # no further event is given to the reader
        self._settled = False  # the session can be used again

    def thinking(self) -> ThinkingText | None:
        """Separates thinking from the answer in the events' texts; None if the template has no thinking."""
        return self._thinking()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._waiting:
            return self._waiting.popleft()
        if self._ended:
            raise StopIteration
        self._begin()
        with self._alone():
            try:
                event = self._task.read()
            except BaseException:  # interrupted while waiting
                self.close()
                raise
        if self._ended:  # another thread closed the answer: drop the event
            raise StopIteration
        return self._given(event)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Within the block no other reader waits: each event comes once, and the other would wait for ever."""
        if not self._reading.acquire(blocking=False):
            raise InvalidRequestError("this answer is read elsewhere", hint="read it in one thread or task at a time")
        try:
            yield
        finally:
            self._reading.release()

    def _begin(self) -> None:
        if not self._started:
            self._start()
            self._started = True

    def _given(self, event: Event | BaseException | None) -> Event:
        """Count an event as delivered and return it; the last one settles the answer. Raises the answer's error."""
        if event is None or isinstance(event, BaseException):
            self._ended = self._settled = True
            done = self._settle()
            if event is not None:
                raise event
            event = done
        self._task.deliver(event)
        self._waiting.extend(self._shaped(event))
        return self._waiting.popleft()

    def close(self) -> None:
        """Cancel the rest of the answer and wait until the Session can be used again. Idempotent."""
        self._waiting.clear()
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
        # May run on any thread, also the worker's: never waits. The Session settles the answer at its next use.
        if not getattr(self, "_ended", True):
            self._leave()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._waiting:
            return self._waiting.popleft()
        if self._ended:
            raise StopAsyncIteration
        self._begin()
        with self._alone():
            try:
                event = await self._task.read_async()
            except BaseException:  # cancelled: ``aclose`` or the session's next use settles the answer
                self._abandon()
                raise
        if self._ended:  # closed by another thread, as in ``__next__``
            raise StopAsyncIteration
        return self._given(event)

    async def aclose(self) -> None:
        """``close`` without blocking the event loop. Also works after a cancelled ``await``."""
        loop = asyncio.get_running_loop()
        closed: asyncio.Future[None] = loop.create_future()
        # A separate thread: the threads of the loop's executor belong to the application.
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

    with contextlib.suppress(RuntimeError):  # the event loop was closed
        loop.call_soon_threadsafe(tell)
