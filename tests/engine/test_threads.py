"""Sessions in several threads and in asyncio, closing, and interpreter exit."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.answer import Generation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Event, Text
from edgespec.engine.session import Session
from edgespec.errors import (
    ClosedError,
    InvalidRequestError,
    TemplateError,
)
from edgespec.runtimes.native.sequence import NativeSequence
from edgespec.text.conversation.conversation import Conversation
from tests.engine.answers import SAMPLED, WAIT_S, plain_text
from tests.support.command_line import run_python
from tests.support.http_server import wait_until
from tests.support.kernel_calls import require_native
from tests.support.tiny_models import TinyModels, answer
from tests.support.watched_sequences import KINDS, is_closed, watch_forwards

# ------------------------------------------------------------------------------------------- threads and asyncio


@pytest.mark.slow
def test_sessions_in_two_threads_give_the_text_of_running_alone(engine: Engine) -> None:
    prompts = {"a": ["hello world", "what is water"], "b": ["two words", "who said that"]}

    def talk(name: str) -> list[tuple[int, ...]]:
        with engine.session() as session:
            return [
                answer(session.generate(prompt, max_tokens=200, depth=4, sampling=SAMPLED)).token_ids
                for prompt in prompts[name]
            ]

    alone = {name: talk(name) for name in prompts}
    for _ in range(2):
        with ThreadPoolExecutor() as threads:
            assert dict(zip(prompts, threads.map(talk, prompts, timeout=WAIT_S), strict=True)) == alone


def test_sessions_interleaved_event_by_event_keep_their_texts(engine: Engine) -> None:
    expected = [plain_text(engine, prompt, max_tokens=50).token_ids for prompt in ("hello world", "two words")]
    with engine.session() as one, engine.session() as two:
        left = one.generate("hello world", max_tokens=50, depth=4)
        right = two.generate("two words", max_tokens=50, depth=4)
        events: list[list[object]] = [[], []]
        for pair in zip(left, right, strict=False):
            for kept, event in zip(events, pair, strict=True):
                kept.append(event)
        events[0] += left
        events[1] += right
    for kept, tokens in zip(events, expected, strict=True):
        done = [event for event in kept if isinstance(event, Done)]
        # The shorter stream ends the zip, which drops an event of the longer one; Done still has all tokens.
        assert [each.token_ids for each in done] == [tokens] or not done
    assert any(isinstance(event, Done) for event in events[0] + events[1])


@pytest.mark.parametrize("use", ["generate", "clear"])
def test_a_call_during_another_threads_answer_is_refused_and_leaves_its_cache_alone(
    session: Session, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    expected = answer(session.generate("hello world", max_tokens=40)).token_ids
    session.clear()
    other, settle = session.generate("hello world", max_tokens=40), session._settle_forgotten

    def settle_and_begin() -> None:
        settle()
        next(other)

    monkeypatch.setattr(session, "_settle_forgotten", settle_and_begin)
    with pytest.raises(InvalidRequestError, match="already generating"):
        session.generate("two words") if use == "generate" else session.clear(keep_cache=False)
    monkeypatch.undo()
    assert answer(other).token_ids == expected
    assert len(session.messages) == 2


def test_async_for_gives_the_answer_without_blocking_the_event_loop(engine: Engine) -> None:
    expected = plain_text(engine, "hello", max_tokens=40)

    async def main() -> tuple[str, Done | None, int]:
        ticks = [0]

        async def tick() -> None:
            while True:
                ticks[0] += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        text, last = "", None
        with engine.session() as session:
            async for event in session.generate("hello", max_tokens=40):
                if isinstance(event, Text):
                    text += event.text
                if isinstance(event, Done):
                    last = event
        ticking.cancel()
        return text, last, ticks[0]

    text, last, ticks = asyncio.run(main())
    assert last is not None
    assert (text, last.token_ids) == (expected.text, expected.token_ids)
    assert ticks > 40  # the event loop was not blocked


def test_the_event_loop_runs_while_the_end_of_an_answer_is_kept(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, released, loops = Conversation.end, threading.Event(), list[asyncio.AbstractEventLoop]()

    def slow(self: Conversation, *arguments: Any) -> None:
        loops[0].call_soon_threadsafe(released.set)
        assert released.wait(WAIT_S), "the event loop is blocked here"
        end(self, *arguments)

    async def main() -> None:
        with engine.session() as session:
            loops.append(asyncio.get_running_loop())
            assert len((await session.generate("hello", max_tokens=3).aresult()).token_ids) == 3

    monkeypatch.setattr(Conversation, "end", slow)
    asyncio.run(main())


def test_async_reading_raises_errors_and_aclose_frees_the_session(engine: Engine) -> None:
    async def main() -> None:
        with engine.session() as session:
            generation = session.generate("hello")
            async for _ in generation:
                break
            await generation.aclose()
            await generation.aclose()
            again = session.generate("more", max_tokens=3)
            assert [event async for event in again][-1].text  # type: ignore[union-attr]
            late = session.generate("late")
            session.close()
            with pytest.raises(ClosedError):
                async for _ in late:
                    pass

    asyncio.run(main())


def test_async_reading_takes_no_thread_of_the_loops_executor(engine: Engine) -> None:
    """The application needs these threads, and a server streams to more readers than there are threads."""
    expected = plain_text(engine, "hello", max_tokens=20).text
    release = threading.Event()

    async def read(session: Session) -> str:
        generation = session.generate("hello", max_tokens=20)
        text = "".join([event.text async for event in generation if isinstance(event, Text)])
        await generation.aclose()
        return text

    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as only:
            loop.set_default_executor(only)
            blocked = loop.run_in_executor(None, release.wait, WAIT_S)
            sessions = [engine.session() for _ in range(3)]
            try:
                return await asyncio.wait_for(asyncio.gather(*map(read, sessions)), WAIT_S / 2)
            finally:
                release.set()
                await blocked
                for session in sessions:
                    session.close()

    assert asyncio.run(main()) == [expected] * 3


async def read_to_end(generation: Generation) -> list[Event]:
    return [event async for event in generation]


def test_a_closed_event_loop_does_not_disturb_the_answer_that_it_waited_for(slow_engine: Engine) -> None:
    """The worker wakes a loop that is gone: the answer can still be closed, and the session used."""
    with slow_engine.session() as session:
        generation = session.generate("the " * 3000)
        loop = asyncio.new_event_loop()
        reading = loop.create_task(read_to_end(generation))
        loop.run_until_complete(asyncio.sleep(0.01))
        assert not reading.done()
        loop.set_exception_handler(lambda _loop, _context: None)  # the task is lost on purpose
        loop.close()
        wait_until(lambda: not generation._task._events.empty())  # the worker continued
        generation.close()
        assert answer(session.generate("hello", max_tokens=2)).text


def test_aclose_after_a_cancelled_await_waits_until_the_session_is_free(slow_engine: Engine) -> None:
    async def main() -> None:
        with slow_engine.session() as session:
            generation = session.generate("the " * 6000)
            reading = asyncio.create_task(read_to_end(generation))
            while not slow_engine.pair.answering:
                await asyncio.sleep(0.001)
            reading.cancel()
            await asyncio.wait([reading])
            settle, released = generation._settle, threading.Event()

            def when_released() -> Future[Done]:
                assert released.wait(WAIT_S), "the event loop is blocked here"
                return settle()

            generation._settle = when_released
            asyncio.get_running_loop().call_later(0.05, released.set)
            await generation.aclose()
            assert session._active is None, "the session is free"
            await generation.aclose()
            assert answer(session.generate("hello", max_tokens=2)).text

    asyncio.run(main())


@pytest.mark.parametrize("forwards", [0, 2])
def test_cancelling_an_await_ends_the_answer(
    slow_engine: Engine, forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled ``await`` ends the answer, also in the middle of a long prefill."""
    expected = plain_text(slow_engine, "hello", max_tokens=8).token_ids
    read = list[int]()
    watch_forwards(monkeypatch, lambda _sequence, tokens, _rows: read.append(len(tokens)))

    async def main() -> tuple[int, ...]:
        with slow_engine.session() as session:
            reading = asyncio.create_task(read_to_end(session.generate("the " * 6000)))
            await asyncio.sleep(0)
            while len(read) < forwards:
                await asyncio.sleep(0.001)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            done = answer(session.generate("hello", max_tokens=8))
            assert [message["content"] for message in session.messages] == ["hello", done.text]
            return done.token_ids

    assert asyncio.run(main()) == expected
    assert sum(read) < 6000, "the rest of the prompt is not read"


def test_cancelling_an_await_keeps_the_read_text_in_the_conversation_once(engine: Engine) -> None:
    """Whichever thread settles the answer first, the turn is in the conversation once, with the read text."""

    async def main() -> None:
        for pause_s in (0.0, 0.0005, 0.002, 0.01):
            for _ in range(5):
                with engine.session() as session:
                    read: list[str] = []

                    async def follow(session: Session = session, read: list[str] = read) -> None:
                        async for event in session.generate("hello", max_tokens=60):
                            if isinstance(event, Text):
                                read.append(event.text)

                    reading = asyncio.create_task(follow())
                    await asyncio.sleep(pause_s)
                    reading.cancel()
                    await asyncio.wait([reading])
                    done = answer(session.generate("more", max_tokens=3))
                    contents = [message["content"] for message in session.messages]
                    turn = ["hello", "".join(read)] if "".join(read) else []
                    assert contents == [*turn, "more", done.text]

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------- closing


def test_closing_a_session_ends_an_answer_in_another_thread(slow_engine: Engine) -> None:
    for wait_for_text in (False, True):
        session = slow_engine.session()
        started, outcome = threading.Event(), list[object]()

        def read(
            session: Session = session, started: threading.Event = started, outcome: list[object] = outcome
        ) -> None:
            try:
                for event in session.generate("the " * 300):
                    if isinstance(event, Text):
                        started.set()
                    outcome.append(event)
            except ClosedError as error:
                outcome.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        if wait_for_text:
            assert started.wait(WAIT_S)
        else:
            wait_until(lambda: slow_engine.pair.answering)
        session.close()
        reader.join(WAIT_S)
        assert not reader.is_alive()
        last = outcome[-1]
        assert isinstance(last, ClosedError) or (isinstance(last, Done) and last.finish_reason == "cancelled")


def test_closing_a_session_inside_its_event_loop_ends_the_answer(engine: Engine) -> None:
    session = engine.session()
    events = []
    for event in session.generate("hello"):
        session.close()
        events.append(event)
    assert isinstance(events[-1], Done)
    assert events[-1].finish_reason == "cancelled"


def test_closing_a_session_ends_a_save_in_another_thread(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_native()
    read, parts, found = NativeSequence.read_part, list[int](), list[BaseException]()
    with tiny.load(runtime="native", draft="none") as engine:
        session = engine.session()
        answer(session.generate("hello", max_tokens=3))

        def slowly(own: NativeSequence, part: int, length: int) -> bytes:
            parts.append(part)
            wait_until(lambda: session.closed)
            return read(own, part, length)

        def save() -> None:
            with pytest.raises(ClosedError) as raised:
                session.save(tmp_path / "talk")
            found.append(raised.value)

        monkeypatch.setattr(NativeSequence, "read_part", slowly)
        saver = threading.Thread(target=save)
        saver.start()
        wait_until(lambda: bool(parts))
        session.close()
        saver.join(WAIT_S)
        assert (len(found), parts) == (1, [0])
        assert list(tmp_path.iterdir()) == []


def test_several_threads_closing_a_session_all_wait_until_it_is_closed(slow_engine: Engine) -> None:
    """Later calls return only when the caches are freed: the engine may free the weights next."""
    session = slow_engine.session()
    reader = threading.Thread(target=lambda: list(session.generate("the " * 2000)))
    reader.start()
    wait_until(lambda: slow_engine.pair.answering)
    states: list[bool] = []
    target = session._target
    assert isinstance(target, KINDS)

    def close() -> None:
        session.close()
        states.append(is_closed(target))

    closers = [threading.Thread(target=close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in [*closers, reader]:
        closer.join(WAIT_S)
    assert states == [True] * 3


def test_using_a_closed_session_raises_closed_error(engine: Engine) -> None:
    session = engine.session()
    late = session.generate("hello")
    session.close()
    session.close()
    for use in (lambda: session.generate("hello"), session.clear, lambda: next(late)):
        with pytest.raises(ClosedError, match="closed"):
            use()
    session.cancel()
    late.close()
    assert session.messages == ()


def test_a_closed_or_forgotten_session_is_freed(engine: Engine) -> None:
    references = []
    for close in (True, False):
        session = engine.session()
        answer(session.generate("hello", max_tokens=3, depth=3))
        if close:
            session.close()
        references.append(weakref.ref(session))
        del session
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("use", ["not at all", "closed session", "open session"])
def test_a_forgotten_engine_is_freed_immediately(tiny: TinyModels, use: str) -> None:
    """The weights must not wait for the garbage collector, which may run minutes later."""
    gc.collect()
    gc.disable()
    try:
        engine = tiny.load(depth=3)
        session = engine.session()
        if use != "not at all":
            answer(session.generate("hello", max_tokens=3))
        if use == "open session":
            pair = weakref.ref(engine.pair)
            del engine
            assert pair() is not None, "the session needs the pair"
            assert answer(session.generate("hello", max_tokens=3)).token_ids
        else:
            session.close()
            pair, forgotten = weakref.ref(engine.pair), weakref.ref(engine)
            del engine
            assert forgotten() is None
        del session
        assert pair() is None
    finally:
        gc.enable()


def test_a_template_error_leaves_the_session_usable(tiny: TinyModels) -> None:
    picky = (
        "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0]['content'] }}"
    )
    target = tiny.with_template("one-turn", picky)
    with tiny.load(target, draft="none") as engine, engine.session() as session:
        done = answer(session.generate("hello", max_tokens=5))
        with pytest.raises(TemplateError, match="one turn only"):
            session.generate("again")
        assert [message["content"] for message in session.messages] == ["hello", done.text]
        session.clear()
        assert answer(session.generate("hello", max_tokens=5)).token_ids == done.token_ids


# ---------------------------------------------------------------------------------------------- interpreter exit


STREAM_AND_EXIT = """
import sys, threading, time
from edgespec import Engine
engine = Engine.load(sys.argv[1], draft=sys.argv[2], threads=1, lookup=sys.argv[2] != "none", depth=3)
session = engine.session()
generation = session.generate(sys.argv[4])
if sys.argv[3] == "thread":
    def read():
        for _ in generation:
            pass
    threading.Thread(target=read, daemon=True).start()
    time.sleep(0.2)
elif sys.argv[3] == "paused":
    next(generation)
    ahead = generation._task._ahead
    while not ahead.empty():  # until the worker waits for this reader
        time.sleep(0.01)
elif sys.argv[3] == "raise":
    next(generation)
    raise SystemExit(7)
else:
    next(generation)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["return", "paused", "thread", "raise"])
def test_the_interpreter_exits_while_an_answer_streams(tiny: TinyModels, how: str) -> None:
    result = run_python(STREAM_AND_EXIT, tiny.target, tiny.drafter, how, "hello", home=tiny.home.root)
    assert (result.code, result.out, result.err) == (7 if how == "raise" else 0, "", "")


@pytest.mark.slow
def test_the_interpreter_exits_during_a_prefill(tiny: TinyModels) -> None:
    prompt = "the " * 1900
    result = run_python(STREAM_AND_EXIT, tiny.slow, "none", "thread", prompt, home=tiny.home.root)
    assert (result.code, result.out, result.err) == (0, "", "")
