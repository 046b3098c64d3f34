"""One thread reads answers and asks again; another ends them at random moments, as a Stop button does."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from edgespec.engine.answer import Generation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Text
from edgespec.engine.session import Session
from edgespec.errors import ClosedError
from edgespec.text.conversation.conversation import Conversation
from tests.engine.answers import plain_text
from tests.support.tiny_models import TinyModels, answer, read_all, shown

PROMPTS = ("hello world", "who are you", "count to ten", "the word")
TOKENS = 12
SECONDS = 0.5  # for each test; by hand 60
MOST_FAULTS_S = 2 * SECONDS  # for the test that saw the most: 1 turn in 20
LATEST_S = 0.006  # after which an answer is ended: while it begins, runs, and ends by itself
END_S = 0.0003  # what the end of an answer with tools takes for 16 kB of calls


@pytest.fixture(autouse=True)
def many_switches_and_slow_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads switch every 10 microseconds, and the end of an answer takes longer."""
    real, before_s = Conversation.end, sys.getswitchinterval()

    def slow(self: Conversation, *arguments: Any) -> None:
        time.sleep(END_S)
        real(self, *arguments)

    monkeypatch.setattr(Conversation, "end", slow)
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before_s)


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, str]:
    """Each prompt's answer in a fresh session."""
    return {prompt: plain_text(engine, prompt, max_tokens=TOKENS).text for prompt in PROMPTS}


def prompts(seconds: float) -> Iterator[tuple[str, str]]:
    """Two prompts a turn, until the time is over."""
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        yield PROMPTS[number % len(PROMPTS)], PROMPTS[(number + 1) % len(PROMPTS)]
        number += 1


def soon(leave: Any) -> threading.Thread:
    """Call ``leave`` on another thread at a random moment."""
    moment_s = random.random() * LATEST_S

    def run() -> None:
        time.sleep(moment_s)
        leave()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def read(generation: Generation) -> str:
    return "".join(event.text for event in generation if isinstance(event, Text))


def check_next(session: Session, prompt: str, alone: dict[str, str]) -> None:
    done = answer(session.generate(prompt, max_tokens=TOKENS, depth=3))
    assert (done.text, done.finish_reason) == (alone[prompt], "length")


def test_an_answer_closed_by_another_thread_leaves_the_next_one_alone(engine: Engine, alone: dict[str, str]) -> None:
    with engine.session() as session:
        for first, second in prompts(SECONDS):
            session.clear()
            generation = session.generate(first, max_tokens=400, depth=3)
            closer = soon(generation.close)
            said = read(generation)
            assert [message["content"] for message in session.messages] == ([first, said] if said else [])
            session.clear()
            check_next(session, second, alone)
            closer.join()


def test_an_answer_closed_while_the_next_one_is_asked_for_is_ended_before(engine: Engine) -> None:
    """Nothing waits between the two: raw text does not depend on the conversation."""
    expected = {prompt: plain_text(engine, prompt, max_tokens=TOKENS, raw=True).text for prompt in PROMPTS}
    with engine.session() as session:
        for first, second in prompts(MOST_FAULTS_S):
            generation = session.generate(first, max_tokens=400, raw=True, depth=0)
            closer = soon(generation.close)
            read(generation)
            done = answer(session.generate(second, max_tokens=TOKENS, raw=True, depth=0))
            assert (done.text, done.finish_reason) == (expected[second], "length")
            closer.join()


def test_an_answer_cancelled_at_its_end_leaves_the_next_one_alone(engine: Engine, alone: dict[str, str]) -> None:
    with engine.session() as session:
        for first, second in prompts(SECONDS):
            canceller = soon(session.cancel)
            read(session.generate(first, max_tokens=TOKENS, depth=3))
            canceller.join()  # a later call would cancel the next answer
            session.clear()
            check_next(session, second, alone)
            session.clear()


def test_a_session_that_is_used_after_cancel_gives_the_reader_its_end(engine: Engine, alone: dict[str, str]) -> None:
    with engine.session() as session, ThreadPoolExecutor(1) as readers:
        for first, second in prompts(SECONDS):
            session.clear()
            generation = session.generate(first, max_tokens=400, depth=3)
            reading = readers.submit(read_all, generation)
            soon(session.cancel).join()
            assert len(answer(session.generate(second, max_tokens=TOKENS, raw=True)).token_ids) == TOKENS
            events, done = reading.result()
            assert shown(events) == done.text
            assert [message["content"] for message in session.messages] == ([first, done.text] if done.text else [])
            session.clear()
            check_next(session, second, alone)


def follow_until_closed(session: Session, alone: dict[str, str]) -> None:
    """Ask until the session is closed: what is read is the beginning of the answer alone."""
    while True:
        for prompt in PROMPTS:
            try:
                session.clear()
                events = list(session.generate(prompt, max_tokens=TOKENS, depth=3))
            except ClosedError:
                return
            done = events[-1]
            assert isinstance(done, Done)
            assert alone[prompt].startswith(done.text)
            assert done.text == alone[prompt] or done.finish_reason == "cancelled"


def test_a_session_closed_by_another_thread_ends_its_reader_with_closed_error(
    engine: Engine, alone: dict[str, str]
) -> None:
    for _ in prompts(SECONDS):
        session = engine.session()
        closer = soon(session.close)
        follow_until_closed(session, alone)
        closer.join()


def test_an_engine_closed_by_another_thread_ends_its_readers_with_closed_error(
    tiny: TinyModels, alone: dict[str, str]
) -> None:
    for _ in prompts(SECONDS):
        engine = tiny.load_speculating(lookup=False)
        session = engine.session()
        closer = soon(engine.close)
        follow_until_closed(session, alone)
        closer.join()
