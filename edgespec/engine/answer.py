"""One answer: a task on the target's worker thread runs the loop, reads what the tokens say and queues events; a
Generation gives the events to the reader, sync or async.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from edgespec.decoding.constraint import Bound
from edgespec.decoding.logprobs import TokenLogprob
from edgespec.decoding.round_base import DecodeStats, Rounds, Step
from edgespec.decoding.sampling import Sampling
from edgespec.drafters.combination import CombinationState
from edgespec.engine.events import Done, Event, FinishReason, Notice, Reading, Round, Text, Token
from edgespec.errors import CancelledError, InvalidRequestError
from edgespec.hardware.neighbours import Neighbours
from edgespec.interfaces.policy import AnswerPolicy
from edgespec.interfaces.reasons import Reason
from edgespec.planning.choice.plan import Plan
from edgespec.runtimes.thread import OwnProcess, take
from edgespec.text.conversation.answer_parts import AnswerParts, Said
from edgespec.text.conversation.conversation import Turn
from edgespec.text.conversation.ends import Ends
from edgespec.text.conversation.pieces import Piece, joined

# Events that the loop may be ahead of a slow reader: a screenful of text. Then decoding pauses, to save the energy.
_EVENTS_AHEAD = 256

# Two cores, 1.5B target (benchmarks/busy_thread.py): next to a busy thread, 1 ms is within 10 % of the speed next to
# a busy process; the default of 5 ms is 8 to 26 % slower.
SHORT_INTERVAL_S = 0.001

# Releasing and taking back the lock takes about 50 microseconds. If it takes longer, another thread held the lock.
_CONTENDED_S = 0.0005

# Rounds between two checks. A check costs one wait if the lock is contended.
_ROUNDS_BETWEEN_LOOKS = 16


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

    def __exit__(self, *_exception: object) -> None:
        # Only if the interval is still ours: the application may have set another one.
        if self._before_s is not None and sys.getswitchinterval() == self._set_s:
            sys.setswitchinterval(self._before_s)
        self._before_s = None


@dataclass(frozen=True, slots=True)
class _Given:
    """Events for the reader, and the pieces of the answer that they tell."""

    events: tuple[Event, ...]
    pieces: Sequence[Piece] = ()


class AnswerTask:
    """One answer being decoded: its turn, and how it is decoded. ``run`` belongs to the target's worker thread,
    ``read`` to the reader.

    ``history`` are the turn's tokens; the loop adds the answer's tokens. ``said`` and ``said_ids`` are what the
    reader got. ``grow`` lets the caches hold a number of tokens, or raises MemoryLimitError. The task has no
    reference to its reader, so a forgotten reader is noticed and the task is abandoned.
    """

    def __init__(
        self,
        *,
        turn: Turn,
        ends: Ends,
        bound: Bound | None,
        sampling: Sampling,
        seed_is_fresh: bool,
        depth: AnswerPolicy,
        plan: Plan,
        drafts: CombinationState,
        loop: Rounds,
        history: list[int],
        parts: AnswerParts,
        notices: Sequence[str],
        started: float,
        neighbours: Neighbours,
        grow: Callable[[int], None],
    ) -> None:
        self.turn, self.ends, self.bound = turn, ends, bound
        self.sampling, self.seed_is_fresh = sampling, seed_is_fresh
        self.depth, self.plan, self.drafts = depth, plan, drafts
        self.history = history
        self._loop = loop
        self._parts = parts
        self._notices = notices
        self._started = started
        self._grow = grow
        self._first_token_at: float | None = None
        self._unshown = list[Token]()
        self._events: queue.SimpleQueue[_Given | BaseException | None] = queue.SimpleQueue()
        # A permit for each event that the loop may be ahead. Unlike a semaphore's, the reader's calls may come from a
        # signal handler or a destructor, inside another call of the same thread.
        self._ahead: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(_EVENTS_AHEAD):
            self._ahead.put(None)
        self._arrived: Callable[[], None] | None = None  # wakes the event loop that waits for an event
        # ``close`` and ``cut_off`` come between two steps of the reader. Re-entrant: a signal handler may close an
        # answer that its thread reads, though not in the moment in which that thread begins or ends it.
        self.step = threading.RLock()
        self.cancelled = False  # the session may be used again, which cuts the answer
        self.cut = False  # the reader gets the end alone
        self.whole = False  # the reader got the end, of all that was decoded
        self.abandoned = False
        self.began = False  # whether the conversation is the turn's
        # The session's jobs for it. ``decoded``: None until it begins; ``ending``: nothing can cancel it any more.
        self.decoded: Future[None] | None = None
        self.ending = False
        self.ended: Future[Done] | None = None
        self.neighbours = neighbours  # while it is decoded
        self.stats = DecodeStats(prompt_tokens=turn.prompt_tokens)
        self.finish_reason: FinishReason = "cancelled"
        self.said = Said()
        self.said_ids: list[int] = []

    # ------------------------------------------------------------------------------- worker thread

    def run(self, prepare: Callable[[], None]) -> None:
        """Call ``prepare``, then decode to the end. Never raises: an error is queued for the reader."""
        try:
            prepare()
            self._notify()
            self._decode()
            self._put(None)
        except CancelledError:  # ``prepare`` may read a part of the prompt again
            self._put(None)
        except BaseException as error:
            self._put(error)

    def skip(self) -> None:
        """End without a token, in place of ``run``. Any thread."""
        self._notify()
        self._put(None)

    def _notify(self) -> None:
        for notice in self._notices:
            self._put(_Given((Notice(notice),)))

    def _decode(self) -> None:
        healed = self.stats.prompt_tokens - len(self.turn.tokens)
        steps = self._loop.steps(lambda tokens, of: self._put(_Given((Reading(tokens, of + healed),))))
        try:
            with self.neighbours, SwitchInterval() as turns:
                for step in steps:
                    turns.look()
                    if self._take(step) or self.abandoned:
                        break
                else:  # no token was asked for: the prompt is read
                    self.finish_reason = "length"
        except CancelledError:
            self.finish_reason = "cancelled"
        finally:
            steps.close()
        rest = self._parts.flush(cut=self.finish_reason != "stop")
        if rest or self._unshown:
            self._show(rest)

    def _take(self, step: Step) -> bool:
        """Show one step's tokens; True if the answer is complete. Raises MemoryLimitError."""
        self._grow(len(self.history))
        now = time.perf_counter()
        if self._first_token_at is None:
            self._first_token_at = now
            self.stats.ttft_s = now - self._started
        self.stats.decode_s = now - self._first_token_at
        if step.record is not None:
            self.stats.add_round(step.record)
            self._put(_Given((Round(step.record),)))
        if self.turn.healing is not None:  # behind the tokens that spell the prompt's end
            self.turn = replace(self.turn, tokens=self.history[: -len(step.tokens)], healing=None)
        pieces, stopped = list[Piece](), False
        for position, (token, guessed_by) in enumerate(zip(step.tokens, step.guessed_by, strict=True)):
            held = 0 if position else step.held
            self.stats.emitted_tokens += 1
            self.stats.guessed_tokens += guessed_by is not None
            thought = self._parts.thinks
            found, stopped = self._parts.feed(token, held)
            self.stats.reasoning_tokens += thought or self._parts.thinks
            scored = step.logprobs[position] if step.logprobs else None
            shown = "".join(piece.text for piece in found)
            self._unshown.append(self._token(token, shown, guessed_by, scored, held))
            pieces += found
            if stopped:
                # The round's further tokens are not part of the answer: plain decoding would have stopped here.
                del self.history[len(self.history) - (len(step.tokens) - position - 1) :]
                break
        if pieces:
            self._show(pieces)
        if stopped:
            self.finish_reason = "stop"
        elif step.finish is not None:
            self.finish_reason = step.finish
        return stopped or step.finish is not None

    def _token(self, token: int, text: str, guessed_by: str | None, scored: TokenLogprob | None, held: int) -> Token:
        if scored is None:
            return Token(text, token, guessed_by, held=held)
        whole = self._parts.text_of
        top = tuple(Token(whole(each, held), each, logprob=logprob, held=held) for each, logprob in scored.top)
        return Token(text, token, guessed_by, scored.logprob, top, held)

    def _show(self, pieces: list[Piece]) -> None:
        """Queue what the pieces say; the tokens since the last time are those of the first text."""
        whole = joined(pieces)
        if not whole or whole[0].call is not None:
            whole.insert(0, Piece(""))
        first, *others = whole
        own = Text(first.text, tuple(self._unshown), first.reasoning)
        told = [piece.call or Text(piece.text, reasoning=piece.reasoning) for piece in others]
        self._put(_Given((own, *told), pieces))
        self._unshown.clear()

    def _put(self, event: _Given | BaseException | None) -> None:
        # A reader that stopped reading must not keep the interpreter from exiting.
        while not self.abandoned and threading.main_thread().is_alive():
            with contextlib.suppress(queue.Empty):
                self._ahead.get(timeout=1.0)
                break
        self._events.put(event)
        arrived = self._arrived
        if arrived is not None:
            arrived()

    # -------------------------------------------------------------------------------------- reader

    def read(self) -> _Given | BaseException | None:
        """The next events; None at the end of the answer, the exception if it failed."""
        event = take(self._events)
        self._ahead.put(None)
        return event

    async def read_async(self) -> _Given | BaseException | None:
        """``read`` for an event loop. No thread waits, and a cancelled call has read no event."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(queue.Empty):
                event = self._events.get_nowait()
                self._ahead.put(None)
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

    def deliver(self, given: _Given) -> None:
        """Count events as given to the reader."""
        self.said.add(given.pieces)
        for event in given.events:
            if isinstance(event, Text):
                self.said_ids.extend(each.id for each in event.tokens)

    def done(self, off: Reason | None, plain_tokens_per_s: float | None) -> Done:
        """The answer's last event; ``off`` is why a drafter was not used."""
        reason = self.finish_reason if self.whole else "cancelled"  # the loop may have ended before its reader left
        return Done(
            finish_reason=reason,
            text=self.said.raw,
            token_ids=tuple(self.said_ids),
            stats=self.stats,
            plan=self.plan,
            sampling=self.sampling,
            speculation_off=None if off is None else off.text,
            speculation_off_code=None if off is None else off.code,
            plain_tokens_per_s=plain_tokens_per_s,
            content=self.said.content,
            reasoning=self.said.reasoning,
            tool_calls=tuple(self.said.calls),
            stop_text=self._parts.stop_text if reason == "stop" else None,
        )

    def abandon(self) -> None:
        """Stop after the running round: the reader is gone. Never waits."""
        if not self.abandoned:
            self.abandoned = True
            self._ahead.put(None)

    def cut_off(self) -> bool:
        """End a cancelled answer where it is read: its reader gets the end next. False if it was not cancelled."""
        if self.cancelled:
            with self.step:
                self.cut = not self.whole
                self.abandon()
        return self.cancelled


def done_with(done: Done) -> Future[Done]:
    """The future of an end that has come."""
    future = Future[Done]()
    future.set_result(done)
    return future


class Generation:
    """Events of one answer, ending with Done. Created by ``Session.generate``; decoding starts at the first ``next``.

    Iterate over it for the events, or take the answer as a whole (``result``, ``text``) or as pieces of text
    (``texts``); each of them reads the rest. Leaving early (``close()``, the end of a ``with`` block, or
    forgetting the object) cancels the answer. The text read until then stays in the conversation.
    """

    def __init__(
        self,
        task: AnswerTask,
        *,
        start: Callable[[], None],
        cancel: Callable[..., None],
        settle: Callable[[], Future[Done]],
    ) -> None:
        self._task = task
        self._waiting = deque[Event]()  # events that came with the last one
        self._start = start
        self._cancel = cancel
        self._settle = settle
        self._reading = threading.Lock()
        self._process = OwnProcess()
        self._started = False
        self._ended = False  # no further event is given to the reader
        self._error: BaseException | None = None  # that ended the answer

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt, cached ones included."""
        return self._task.stats.prompt_tokens

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if (event := self._at_hand()) is not None:
            return event
        if not self._ended:
            with self._alone():
                try:
                    given = self._task.read()
                except BaseException:  # interrupted while waiting
                    self.close()
                    raise
            found = self._given(given)
            if isinstance(found, Future):
                return self._outcome()
            if found is not None:
                return found
        self._settle().result()  # another thread may still be closing the answer
        raise StopIteration

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Within the block no other reader waits: each event comes once, and the other would wait for ever."""
        if not self._reading.acquire(blocking=False):
            raise InvalidRequestError("this answer is read elsewhere", hint="read it in one thread or task at a time")
        try:
            yield
        finally:
            self._reading.release()

    def _at_hand(self) -> Event | None:
        """An event that came with an earlier one. Without one the answer begins, unless it has begun or ended."""
        if not self._ended:
            self._process.check()  # another process's answer would be waited for without an end
        elif self._process.left:
            return None
        with self._task.step:
            if self._waiting:
                with contextlib.suppress(IndexError):  # closed by a signal handler on this thread
                    return self._waiting.popleft()
            if not self._started and not self._ended:
                self._start()
                self._started = True
            return None

    def _given(self, given: _Given | BaseException | None) -> Event | Future[Done] | None:
        """Count events as delivered and return the first. The end settles the answer: ``_outcome`` once that is done.

        None if another thread closed the answer: the events are dropped.
        """
        with self._task.step:
            if self._ended:
                return None
            if self._task.cut:
                given = None
            if isinstance(given, _Given):
                self._task.deliver(given)
                self._waiting.extend(given.events[1:])
                return given.events[0]
            self._ended, self._error = True, given
            self._task.whole = not self._task.cut
        return self._settle()

    def result(self) -> Done:
        """Read the rest of the answer and return its last event; again without waiting if it is read.

        ``finish_reason`` is ``cancelled`` for an answer that was cancelled or closed: the Done has what was read of
        it. Raises what the iteration raises.
        """
        for _ in self:
            pass
        return self._outcome()

    async def aresult(self) -> Done:
        """``result`` for an event loop. No thread waits; cancelling the task cancels the answer."""
        if self._ended:
            await self.aclose()  # a forward may still run for an answer that was left
        async for _ in self:
            pass
        return self._outcome()

    def _outcome(self) -> Done:
        done = self._settle().result()
        if self._error is not None:
            raise self._error
        return done

    @property
    def text(self) -> str:
        """The text of the whole answer without thinking and calls, as in ``Done.content``. Reads the rest of it.

        Raises what the iteration raises.
        """
        return self.result().content

    async def atext(self) -> str:
        """``text`` for an event loop."""
        return (await self.aresult()).content

    def texts(self) -> Iterator[str]:
        """The text as it comes, in complete characters, without thinking and calls.

        Raises what the iteration raises.
        """
        for event in self:
            if isinstance(event, Text) and event.reasoning is None and event.text:
                yield event.text

    async def atexts(self) -> AsyncIterator[str]:
        """``texts`` for an event loop."""
        async for event in self:
            if isinstance(event, Text) and event.reasoning is None and event.text:
                yield event.text

    def close(self) -> None:
        """Cancel the rest of the answer and wait until the Session can be used again. Idempotent.

        In a forked process it returns immediately, and the parent's answer continues.
        """
        if self._process.left:
            self._ended = True
            return
        self._abandon()
        self._settle().result()

    def _abandon(self) -> None:
        with self._task.step:
            self._waiting.clear()
            if self._ended:
                return
            self._task.abandon()
            self._ended = True  # now: a reader that asks again finds an abandoned answer, and waits for its end
        self._cancel()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        # May run on any thread, also the worker's, under any lock: never waits. The task ends after its round in any
        # case, and the Session settles the answer at its next use.
        if not getattr(self, "_ended", True):
            self._task.abandon()
            self._cancel(wait=False)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if (event := self._at_hand()) is not None:
            return event
        if self._ended:
            raise StopAsyncIteration
        with self._alone():
            try:
                given = await self._task.read_async()
            except BaseException:  # cancelled: ``aclose`` or the session's next use settles the answer
                self._abandon()
                raise
        found = self._given(given)
        if isinstance(found, Future):
            await asyncio.shield(asyncio.wrap_future(found))  # a cancelled wait cancels no end
            return self._outcome()
        if found is None:
            raise StopAsyncIteration
        return found

    async def aclose(self) -> None:
        """``close`` without blocking the event loop. Also works after a cancelled ``await``."""
        loop = asyncio.get_running_loop()
        closed: asyncio.Future[None] = loop.create_future()
        # A separate thread: the threads of the loop's executor belong to the application.
        thread = threading.Thread(target=_close, args=(self, loop, closed), name="edgespec-close", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # too many threads: the event loop's own waits, at most for the end of one forward
            _close(self, loop, closed)
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
