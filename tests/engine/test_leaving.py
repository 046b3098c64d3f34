"""Answers that end early: cancelled, left by the reader, or failed."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from edgespec.decoding.round_base import Step
from edgespec.engine.answer import AnswerTask, Generation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Event, Text
from edgespec.engine.pair.loaded_pair import ReadAhead
from edgespec.engine.session import Session
from edgespec.errors import (
    CancelledError,
    ClosedError,
    ForwardError,
    InvalidRequestError,
    RewindError,
)
from edgespec.text.conversation.conversation import Conversation, Turn
from edgespec.text.request_budget import RequestBudget
from tests.engine.answers import WAIT_S, CallerError, plain_text
from tests.support.tiny_models import TinyModels, answer, read_all, shown
from tests.support.watched_sequences import KINDS, is_closed, watch_forwards

# -------------------------------------------------------------------------------------------------------- cancel


def run_and_cancel(session: Session, prompt: str, when: threading.Event) -> Done:
    """Done of an answer that another thread cancels after ``when``, which its first text sets."""

    def cancel() -> None:
        assert when.wait(WAIT_S)
        session.cancel()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    done = None
    for event in session.generate(prompt):
        if isinstance(event, Text):
            when.set()
        if isinstance(event, Done):
            done = event
    canceller.join()
    assert done is not None
    return done


def test_cancel_during_the_prefill_ends_the_answer_soon(slow_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain_text(slow_engine, "hello", max_tokens=8).token_ids
    with slow_engine.session() as session:
        second, read = threading.Event(), list[int]()

        def noted(_sequence: object, tokens: list[int], _rows: int) -> None:
            read.append(len(tokens))
            if len(read) == 2:
                second.set()

        with monkeypatch.context() as patch:
            watch_forwards(patch, noted)
            done = run_and_cancel(session, "the " * 6000, second)
        assert (done.finish_reason, done.text, done.token_ids) == ("cancelled", "", ())
        assert done.stats.ttft_s is None
        assert sum(read) < 6000, "the rest of the prompt is not read"
        assert session.messages == ()  # a turn without an answer is not kept
        assert answer(session.generate("hello", max_tokens=8)).token_ids == expected


def interrupted_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Make the first call of a method raise KeyboardInterrupt."""
    method, calls = getattr(owner, name), list[object]()

    def interrupted(self: object) -> object:
        calls.append(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return method(self)

    monkeypatch.setattr(owner, name, interrupted)


def test_a_ctrl_c_in_close_still_closes_every_cache(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.load_speculating(lookup=False)
    one, two = engine.session(), engine.session()
    generation = one.generate("hello", depth=2)
    next(generation)
    with monkeypatch.context() as patch:
        interrupted_once(patch, AnswerTask, "abandon")
        with pytest.raises(KeyboardInterrupt):
            one.close()
    assert one.closed
    assert is_closed(one._target)  # the cache, which has no public attribute
    with monkeypatch.context() as patch:
        interrupted_once(patch, ReadAhead, "put_off")
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    assert two.closed
    for use in (lambda: engine.pair.target.open(16), engine.pair.pool.drafter_model):
        with pytest.raises(ClosedError):
            use()


def test_cancel_while_decoding_keeps_the_read_tokens(slow_engine: Engine) -> None:
    with slow_engine.session() as session:
        done = run_and_cancel(session, "hello", threading.Event())
        assert done.finish_reason == "cancelled"
        assert 0 < len(done.token_ids) < 4000
        assert session.messages[-1] == {"role": "assistant", "content": done.text}
        prompt = slow_engine.pair.prompts.read([*session.messages, {"role": "user", "content": "continue"}])
        tokens = answer(session.generate("continue", max_tokens=8)).token_ids
    assert plain_text(slow_engine, prompt, max_tokens=8, raw=True).token_ids == tokens


def test_cancelling_a_drafting_session_keeps_the_read_tokens(engine: Engine) -> None:
    with engine.session() as session:
        generation = session.generate("hello", depth=5)
        read = [next(generation) for _ in range(5)]
        session.cancel()  # the worker is far ahead of this reader and has paused
        rest, done = read_all(generation)
        assert done.finish_reason == "cancelled"
        assert shown([*read, *rest]) == done.text
        assert plain_text(engine, "hello", max_tokens=len(done.token_ids)).token_ids == done.token_ids
        prompt = engine.pair.prompts.read([*session.messages, {"role": "user", "content": "continue"}])
        tokens = answer(session.generate("continue", max_tokens=30, depth=5)).token_ids
    assert plain_text(engine, prompt, max_tokens=30, raw=True).token_ids == tokens


def test_cancel_without_a_running_answer_does_nothing(engine: Engine, session: Session) -> None:
    expected = plain_text(engine, "hello", max_tokens=20).token_ids
    session.cancel()
    generation = session.generate("hello", max_tokens=20)
    assert answer(generation).token_ids == expected
    session.cancel()
    session.clear()
    done = answer(session.generate("hello", max_tokens=20))
    assert (done.token_ids, done.finish_reason) == (expected, "length")


def test_an_answer_that_is_cancelled_before_it_begins_has_no_token(engine: Engine, session: Session) -> None:
    before = answer(session.generate("hello", max_tokens=5))
    generation = session.generate("hello", max_tokens=20)
    session.cancel()
    with session.generate("another answer, which runs", raw=True) as other:
        next(other)
        done = answer(generation)
    assert (done.token_ids, done.finish_reason) == ((), "cancelled")
    assert len(session.messages) == 2, "an answer without a token does not join the conversation"
    session.clear()
    assert answer(session.generate("hello", max_tokens=5)).token_ids == before.token_ids


@pytest.mark.parametrize("raw", [False, True])
def test_cancel_while_a_prompt_is_prepared_ends_the_preparation_and_changes_nothing(
    engine: Engine, session: Session, monkeypatch: pytest.MonkeyPatch, raw: bool
) -> None:
    before = answer(session.generate("hello world", max_tokens=5))
    messages, history = session.messages, list(session._conversation.history)
    read, encoded = RequestBudget.read, list[str]()

    def cancelled(budget: RequestBudget, characters: int) -> None:
        session.cancel()
        read(budget, characters)

    monkeypatch.setattr(RequestBudget, "read", cancelled)
    monkeypatch.setattr(type(engine.tokenizer), "encode", lambda _own, text, **_: encoded.append(text))
    done = answer(session.generate("hello " * 1000, max_tokens=20, raw=raw))
    assert (done.token_ids, done.finish_reason) == ((), "cancelled")
    assert (session.messages, session._conversation.history) == (messages, history)
    assert not encoded, "the prompt is not tokenised"
    monkeypatch.undo()
    assert answer(session.generate("more", max_tokens=5)).stats.cached_tokens >= len(before.token_ids)


def test_time_that_ends_while_a_prompt_is_prepared_changes_nothing(session: Session) -> None:
    before = answer(session.generate("hello world", max_tokens=5))
    messages, history = session.messages, list(session._conversation.history)
    done = answer(session.generate("hello again", max_tokens=5, budget=RequestBudget(seconds=0.0)))
    assert (done.token_ids, done.finish_reason) == ((), "cancelled")
    assert (session.messages, session._conversation.history) == (messages, history)
    assert answer(session.generate("more", max_tokens=5)).stats.cached_tokens >= len(before.token_ids)


def test_cancel_while_the_cache_is_rewound_ends_the_answer_without_an_error(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(session.generate("hello world", max_tokens=5))
    messages = session.messages

    def cancelled(_answer: object) -> None:
        raise CancelledError("the forward was cancelled")

    monkeypatch.setattr(session, "_take_over", cancelled)  # a state that goes back reads some tokens again
    begun = [{"role": "user", "content": "another one"}, {"role": "assistant", "content": "It"}]
    for asked in ({"prompt": "hello again"}, {"messages": begun}):
        done = answer(session.generate(**asked, max_tokens=5))
        assert (done.token_ids, done.finish_reason) == ((), "cancelled")
    monkeypatch.undo()
    assert session.messages == messages
    assert answer(session.generate("more", max_tokens=5)).finish_reason == "length"


def test_a_forgotten_answer_does_not_cancel_the_next_one(session: Session) -> None:
    next(iter(session.generate("hello", max_tokens=200)))
    gc.collect()
    assert answer(session.generate("hello", max_tokens=5)).finish_reason == "length"


def test_a_session_closed_during_its_answer_is_freed_with_its_last_reference(engine: Engine) -> None:
    own = engine.session()
    generation = own.generate("hello", max_tokens=200)
    next(generation)
    own.close()
    assert not engine.pair.answering
    watched = weakref.ref(own)
    gc.collect()
    gc.disable()
    try:
        del own, generation
        assert watched() is None, "a cycle of references keeps it"
    finally:
        gc.enable()


def test_an_answer_has_one_reader_at_a_time(session: Session) -> None:
    generation = session.generate("hello", max_tokens=20)
    next(generation)
    with generation._alone(), pytest.raises(InvalidRequestError, match="read elsewhere"):
        next(generation)
    assert len(answer(generation).token_ids) == 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("first", [0, 1, 2], ids=["answer", "session", "engine"])
def test_a_forked_process_can_leave_what_answers_and_does_not_disturb_its_parent(
    tiny: TinyModels, first: int
) -> None:
    with (
        tiny.load_speculating(lookup=False) as engine,
        engine.session() as session,
        session.generate("hello", max_tokens=400) as generation,
    ):
        next(generation)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            with contextlib.suppress(BaseException):  # or the child would run the other tests
                with pytest.raises(ClosedError):
                    list(generation)
                for each in (generation, session, engine)[first:]:
                    each.close()
                if first == 0:
                    assert list(generation) == [], "closed here: it does not wait"
                with pytest.raises(ClosedError):
                    session.generate("more")
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(answer(generation).token_ids) == 400


def test_cancel_after_the_last_token_keeps_the_whole_answer(engine: Engine, session: Session) -> None:
    """All tokens are decoded but not read: the answer is complete, and the next answer is not cancelled."""
    generation = session.generate("hello", max_tokens=20)
    next(generation)
    decoded = generation._task.decoded  # private: a reader sees the last token only when it reads it
    assert decoded is not None
    decoded.result(WAIT_S)
    session.cancel()
    with pytest.raises(InvalidRequestError, match="already generating"):
        session.cache_sizes("", [1])  # what keeps beginnings in between cuts no answer that is still read
    done = answer(generation)
    assert len(done.token_ids) == 20
    session.clear()
    assert answer(session.generate("hello", max_tokens=20)).token_ids == done.token_ids


@pytest.mark.parametrize("stop", [[], ["e"]])
def test_an_answer_that_is_closed_before_its_end_is_read_is_cancelled(session: Session, stop: list[str]) -> None:
    """All tokens are decoded: the loop ended for another reason than the reader."""
    generation = session.generate("hello world", max_tokens=20, stop=stop)
    read = [next(generation) for _ in range(3)]
    decoded = generation._task.decoded  # private: as above
    assert decoded is not None
    decoded.result(WAIT_S)
    generation.close()
    done = generation.result()
    assert (done.finish_reason, done.stop_text, done.text) == ("cancelled", None, shown(read))
    assert done.stats.emitted_tokens > len(done.token_ids)


def test_a_session_is_free_after_cancel_while_the_answer_is_still_held(engine: Engine, session: Session) -> None:
    expected = plain_text(engine, "more", max_tokens=5).text
    generation = session.generate("hello", max_tokens=400)
    read = [next(generation) for _ in range(3)]
    session.cancel()
    session.clear()
    assert session.generate("more", max_tokens=5).text == expected
    rest, done = read_all(generation)
    assert (done.finish_reason, done.text, rest) == ("cancelled", shown(read), [done])
    assert generation.result() == done
    assert [message["content"] for message in session.messages] == ["more", expected]


def test_cancel_from_many_threads_at_random_moments_leaves_a_usable_session(engine: Engine) -> None:
    expected = plain_text(engine, "hello world", max_tokens=200).token_ids
    with engine.session() as session:
        stop = threading.Event()

        def pester(pause_s: float) -> None:
            while not stop.is_set():
                time.sleep(pause_s)
                session.cancel()

        threads = [threading.Thread(target=pester, args=(pause,)) for pause in (0.003, 0.007)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(60):
                done = answer(session.generate("hello world", max_tokens=200, depth=3))
                assert done.token_ids == expected[: len(done.token_ids)]
                assert done.finish_reason == ("length" if len(done.token_ids) == 200 else "cancelled")
                session.clear()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert answer(session.generate("hello world", max_tokens=200)).token_ids == expected


def interrupted_submit(session: Session, patch: pytest.MonkeyPatch, *, queued: bool) -> None:
    """Let a Ctrl-C come as a job is handed to the target's thread, before or after it is queued."""
    submit = session._target.submit

    def interrupted(job: Callable[[], object]) -> None:
        if queued:
            submit(job)
        raise KeyboardInterrupt

    patch.setattr(session._target, "submit", interrupted)


@pytest.mark.parametrize("where", ["before the job", "before it is queued", "after it is queued"])
def test_a_turn_whose_end_is_interrupted_ends_once(
    session: Session, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    generation = session.generate("hello", max_tokens=40)
    while not isinstance(next(generation), Text):
        pass
    with monkeypatch.context() as patch:
        if where == "before the job":
            patch.setattr("edgespec.engine.session.partial", raise_interrupt)
        else:
            interrupted_submit(session, patch, queued=where == "after it is queued")
        with pytest.raises(KeyboardInterrupt):
            generation.close()
    assert generation._task.ended is None, "the next use would wait for ever"
    generation.close()
    assert [message["role"] for message in session.messages] == ["user", "assistant"]
    assert answer(session.generate("more", max_tokens=3)).finish_reason == "length"


def raise_interrupt(*_arguments: object) -> None:
    raise KeyboardInterrupt


def test_an_answer_whose_start_is_interrupted_ends_with_the_next_use(
    slow_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow_engine.session() as session:
        generation = session.generate("hello", max_tokens=100)
        with monkeypatch.context() as patch:
            interrupted_submit(session, patch, queued=True)
            with pytest.raises(KeyboardInterrupt):
                next(generation)
        assert answer(session.generate("more", max_tokens=3)).finish_reason == "length"
        assert generation._task.stats.emitted_tokens < 100
        assert [message["content"] for message in session.messages[::2]] == ["more"]


def test_cancel_by_a_signal_handler_while_an_answer_starts_ends_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation, check = session.generate("hello", max_tokens=200), Conversation.check

    def signalled(conversation: Conversation, turn: Turn) -> None:
        session.cancel()
        check(conversation, turn)

    monkeypatch.setattr(Conversation, "check", signalled)
    assert answer(generation).finish_reason == "cancelled"


# ------------------------------------------------------------------------------------------------- leaving early


class Reading:
    """Reads pieces of an answer until there are ``count`` of them or the given ``text``."""

    def __init__(self, count: int | None = None, text: str | None = None) -> None:
        self._count, self._text = count, text
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def enough(self, event: Event) -> bool:
        if isinstance(event, Text):
            self._pieces.append(event.text)
        return self.text == self._text if self._count is None else len(self._pieces) == self._count


Leave = Callable[[Generation, Reading], None]


def leave_by_break(generation: Generation, reading: Reading) -> None:
    for event in generation:
        if reading.enough(event):
            break


def leave_by_close(generation: Generation, reading: Reading) -> None:
    with generation:
        while not reading.enough(next(generation)):
            pass
    assert list(generation) == []


def leave_by_forgetting(generation: Generation, reading: Reading) -> None:
    cycle = [generation]
    cycle.append(cycle)  # type: ignore[arg-type]
    while not reading.enough(next(generation)):
        pass


def leave_by_exception(generation: Generation, reading: Reading) -> None:
    try:
        with generation:
            for event in generation:
                if reading.enough(event):
                    raise CallerError
    except CallerError:
        pass


def leave_and_go_on(session: Session, leave: Leave, reading: Reading, *, depth: int, pause_s: float) -> Done:
    """Ask, leave the answer early, and ask again."""
    leave(session.generate("hello world", depth=depth), reading)
    gc.collect()
    time.sleep(pause_s)
    done = answer(session.generate("continue", max_tokens=25, depth=depth))
    first = ({"role": "user", "content": "hello world"}, {"role": "assistant", "content": reading.text})
    assert session.messages[:2] == first
    assert len(session.messages) == 4
    return done


@pytest.mark.slow
@pytest.mark.parametrize("leave", [leave_by_break, leave_by_close, leave_by_forgetting, leave_by_exception])
@pytest.mark.parametrize("count", [1, 4, 40])
@pytest.mark.parametrize("pause_s", [0.0, 0.05])
def test_leaving_early_keeps_the_read_text_as_the_answer(
    engine: Engine, leave: Leave, count: int, pause_s: float
) -> None:
    """The conversation continues like a plainly decoded one that was left at the same token."""
    reading = Reading(count=count)
    with engine.session() as session:
        done = leave_and_go_on(session, leave, reading, depth=3, pause_s=pause_s)
    with engine.session() as session:
        plain = leave_and_go_on(session, leave, Reading(text=reading.text), depth=0, pause_s=0.0)
    assert done.token_ids == plain.token_ids
    assert done.stats.cached_tokens == plain.stats.cached_tokens


@pytest.mark.slow
def test_an_answer_forgotten_before_its_round_is_counted_leaves_a_usable_session(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round's tokens are in the history, but not yet counted as emitted."""
    real = AnswerTask._take

    def take(task: AnswerTask, step: Step) -> bool:
        if step.record is not None:
            time.sleep(0.1)
        return real(task, step)

    monkeypatch.setattr(AnswerTask, "_take", take)
    reading = Reading(count=1)
    with engine.session() as session:
        leave_by_forgetting(session.generate("hello world", depth=0), reading)
        gc.collect()
        time.sleep(0.05)
        session.clear()
        assert len(session._conversation.history) == len(engine.pair.prompts.request_tokens("hello world")) + 1
        assert answer(session.generate("continue", max_tokens=5)).token_ids


def test_a_generation_that_was_never_started_changes_nothing(session: Session) -> None:
    with session.generate("hello"):
        pass
    session.generate("hello").close()
    del_me = session.generate("hello")
    del del_me
    assert session.messages == ()
    assert answer(session.generate("hello", max_tokens=3)).text


def test_closing_a_generation_after_the_readers_exception_frees_the_session(session: Session) -> None:
    """The traceback keeps the generation alive; closing it frees the session."""
    generation = session.generate("hello")

    def fail() -> None:
        for _ in generation:
            raise CallerError

    with pytest.raises(CallerError):
        fail()
    with pytest.raises(InvalidRequestError, match="already generating"):
        session.generate("more")
    generation.close()
    assert answer(session.generate("more", max_tokens=3)).text


def test_a_session_refuses_a_second_answer_while_one_is_running(session: Session) -> None:
    generation = session.generate("hello")
    next(generation)
    for use in (lambda: session.generate("more"), session.clear):
        with pytest.raises(InvalidRequestError, match="already generating") as caught:
            use()
        assert caught.value.hint
    early = session.generate  # a second answer that was created earlier is refused when it starts
    generation.close()
    first, second = early("one", max_tokens=300), early("two", max_tokens=300)
    next(first)
    with pytest.raises(InvalidRequestError, match="already generating"):
        next(second)
    assert answer(first).finish_reason == "length"
    with pytest.raises(InvalidRequestError, match="conversation has changed since this answer was prepared"):
        next(second)
    assert len(session.messages) == 2


def test_a_failing_forward_is_raised_to_the_reader_and_the_session_stays_usable(
    engine: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain_text(engine, "hello", max_tokens=30).token_ids
    calls = [0]

    def fail(_sequence: object, _tokens: list[int], _rows: int) -> None:
        calls[0] += 1
        if calls[0] == 12:
            raise ForwardError("the device went away", code=-3)

    watch_forwards(monkeypatch, fail)
    read: list[int] = []

    def follow() -> None:
        for event in session.generate("hello", max_tokens=30, depth=0):
            if isinstance(event, Text):
                read.extend(each.id for each in event.tokens)

    with pytest.raises(ForwardError, match="went away"):
        follow()
    assert tuple(read) == expected[: len(read)]
    assert len(read) > 3
    session.clear()
    assert answer(session.generate("hello", max_tokens=30)).token_ids == expected


def test_a_failing_rewind_raises_an_error_instead_of_hanging(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(session.generate("hello", max_tokens=5))
    session.clear()

    def rewind(_sequence: object, _length: int) -> None:
        raise RewindError("this cache keeps what it has")

    for kind in KINDS:
        monkeypatch.setattr(kind, "rewind", rewind)
    generation = session.generate("other", max_tokens=5)
    caught: list[BaseException] = []

    def read() -> None:
        try:
            answer(generation)
        except BaseException as error:
            caught.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(WAIT_S)
    assert not reader.is_alive()
    assert isinstance(caught[0], RewindError)
    monkeypatch.undo()
    assert answer(session.generate("other", max_tokens=5)).text


def test_a_broken_cache_that_is_not_kept_is_opened_again(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(session.generate("hello", max_tokens=5)).token_ids
    broken = session._target

    def rewind(_length: int) -> None:
        raise RewindError("this cache keeps what it has")

    monkeypatch.setattr(broken, "rewind", rewind)
    session.clear(keep_cache=False)
    assert session._target is not broken
    done = answer(session.generate("hello", max_tokens=5))
    assert (done.token_ids, done.stats.cached_tokens) == (expected, 0)


@pytest.mark.parametrize("closed", [False, True], ids=["open session", "closed session"])
def test_an_answer_whose_end_fails_raises_the_error_and_does_not_hang(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    def fail(*_arguments: object) -> None:
        raise CallerError

    with engine.session() as session:
        generation = session.generate("hello", max_tokens=40)
        next(generation)
        if closed:
            session.close()
        with monkeypatch.context() as patch:
            patch.setattr(Conversation, "end", fail)
            with pytest.raises(CallerError):
                generation.close()
        assert not session.answering
        if not closed:
            session.clear()
            assert answer(session.generate("hello", max_tokens=3)).text
