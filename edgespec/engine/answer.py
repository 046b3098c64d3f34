"""One answer: a task on the worker's side runs the loop, turns tokens into text and queues events; a Generation hands
them to the reader, sync or async.

Stop strings are found across chunks and never shown, and nothing is shown that might become one.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType

from edgespec.decoding.round_base import DecodeStats, Rounds, Step
from edgespec.engine.events import Done, Event, FinishReason, Notice, Round, Text
from edgespec.errors import CancelledError, InvalidRequestError
from edgespec.text.thinking import ThinkingText
from edgespec.text.tokenizer import Tokenizer


class StopStrings:
    """Watches text for stop strings.

    The text ends before the stop string that is complete first, as if each character came alone: so a chunk's size
    changes nothing, and generation ends as early as it can. Of several that are complete at the same character the
    longest counts, so that no part of a stop string is ever shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequestError for an empty stop string, which would stop everything."""
        if isinstance(stops, str):
            raise InvalidRequestError("stop strings are given as a list of texts, not as one text")
        if any(not stop for stop in stops):
            raise InvalidRequestError("a stop string is empty; it would stop before the first character")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self._stopped = False

    def feed(self, chunk: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was found). After a stop everything is dropped."""
        if self._stopped:
            return "", True
        text = self._held + chunk
        best: tuple[int, int] | None = None  # where the stop string that is whole first ends and begins
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
        """The text kept back, when no more comes; empty after a stop."""
        rest, self._held = self._held, ""
        return rest

    def _prefix_length(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


# Events the loop may be ahead of a slow reader: a screenful of text, after which decoding pauses rather than
# spend energy on what may never be read.
_EVENTS_AHEAD = 256

# Measured on two cores (benchmarks/busy_thread.py, 1.5B target): at 1 ms decoding beside a busy thread is within 10 %
# of decoding beside a busy process, at the default 5 ms it is 8 to 26 % slower.
SHORT_INTERVAL_S = 0.001

# Handing the lock over and taking it back takes some 50 microseconds; longer means that somebody else had it.
_CONTENDED_S = 0.0005

# Rounds between two looks, each of which costs one wait if the lock is contended.
_ROUNDS_BETWEEN_LOOKS = 16


class AnswerText:
    """Turns tokens into text to show, holding back what may still become a stop string or half a character.

    Bytes that are no UTF-8 are shown as U+FFFD, so that all of it is the text that decoding the bytes at once gives.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = StopStrings(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> tuple[str, bool]:
        """(text that may be shown now, whether a stop string is complete)."""
        return self._stops.feed(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        shown, stopped = self._stops.feed(self._decoder.decode(b"", True))
        return shown if stopped else shown + self._stops.flush()


class SwitchInterval:
    """Gets the interpreter lock back soon, beside busy Python threads. A context manager; ``look`` once a round.

    A thread that returns from native code asks for the lock and, while another Python thread computes, gets it after
    the interpreter's switch interval: 5 ms by default, once a token, of the 30 to 60 ms that a token of a small model
    takes. So while such waits are seen the interval is shortened, for the length of the answer, and then put back.
    Nothing is changed in a process without busy Python threads.
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
            time.sleep(0)  # gives the lock away and takes it back
            if time.perf_counter() - started > _CONTENDED_S and sys.getswitchinterval() > SHORT_INTERVAL_S:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(SHORT_INTERVAL_S)
                self._set_s = sys.getswitchinterval()
        self._rounds += 1

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        # Only if it is still ours: the application may have chosen another one meanwhile.
        if self._before_s is not None and sys.getswitchinterval() == self._set_s:
            sys.setswitchinterval(self._before_s)
        self._before_s = None


class AnswerTask:
    """One answer being decoded. ``run`` belongs to the target's worker thread, ``read`` to the reader.

    It knows nothing of the reader, so a reader that is simply forgotten can be noticed and the task abandoned.
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
        self._unshown: list[tuple[int, str | None, int]] = []  # tokens, who guessed them, characters that came
        self._events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        self._ahead = threading.Semaphore(_EVENTS_AHEAD)
        self._arrived: Callable[[], None] | None = None  # tells the event loop that waits for an event
        self.abandoned = False
        self.stats = stats
        self.finish_reason: FinishReason = "cancelled"
        self.delivered_text = ""
        self.delivered_ids: list[int] = []

    # ------------------------------------------------------------------------------- worker thread

    def run(self, prepare: Callable[[], None]) -> None:
        """``prepare``, then decode to the end. Never raises: an error is queued for the reader."""
        try:
            prepare()
            for notice in self._notices:
                self._put(Notice(notice))
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
        for place, (token, guessed_by) in enumerate(zip(step.tokens, step.guessed_by, strict=True)):
            self.stats.emitted_tokens += 1
            self.stats.guessed_tokens += guessed_by is not None
            piece, stopped = self._answer.feed(token)
            self._unshown.append((token, guessed_by, len(piece)))
            shown += piece
            if stopped:
                # The rest of the round is not part of the answer; plain decoding would not have got there.
                del self._history[len(self._history) - (len(step.tokens) - place - 1) :]
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
        self._put(Text(text, tokens, guessed_by, lengths))
        self._unshown.clear()

    def _put(self, event: Event | BaseException | None) -> None:
        # A reader that stopped reading must not keep the interpreter from exiting either.
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
        """``read`` for an event loop. No thread waits meanwhile, and a cancelled one has read nothing."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(queue.Empty):
                event = self._events.get_nowait()
                self._ahead.release()
                return event
            arrived = asyncio.Event()

            def tell(arrived: asyncio.Event = arrived) -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed, and nobody waits any more
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
        """Nobody reads any more: stop after the round in flight."""
        self.abandoned = True
        self._ahead.release()

    def forget(self) -> None:
        """``abandon`` for a destructor, which may run where the semaphore's own lock is held: noticed within 1 s."""
        self.abandoned = True


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
        thinking: Callable[[], ThinkingText | None],
    ) -> None:
        self._task = task
        self._thinking = thinking
        self._start = start
        self._cancel = cancel
        self._settle = settle
        self._started = False
        self._ended = False  # nobody reads any further
        self._settled = False  # and the session can be used again

    def thinking(self) -> ThinkingText | None:
        """What tells thinking from the answer in its events' texts; None where the template knows no thinking."""
        return self._thinking()

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
