"""Forgotten answers in reference cycles: the garbage collector may free an answer on any thread."""

from __future__ import annotations

import threading

import psutil
import pytest

from edgespec.engine.answer import Generation
from edgespec.engine.engine import Engine
from tests.engine.answers import SAMPLED, plain_text
from tests.support.forgetting import Forget, alive, eager_collector, in_cycles, in_tasks, in_threads
from tests.support.started_threads import started_threads

FORGOTTEN = 500
PAUSE_S = 0.001
WAIT_S = 60.0
GROWTH_BYTES = 16 * 2**20  # a leaked cache takes 6 MiB, a leaked answer 0.1 MiB


def test_forgetting_an_answer_waits_for_no_lock_of_its_session(slow_engine: Engine) -> None:
    """A destructor runs wherever memory is allocated, also under locks that the holder of this one waits for."""
    with slow_engine.session() as session:
        generation = session.generate("hello world", max_tokens=1000)
        next(generation)
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with session._lock:  # as another thread that uses the session
                held.set()
                release.wait(WAIT_S)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(WAIT_S)
        del generation
        assert holder.is_alive(), "it did not wait"
        release.set()
        holder.join()
        assert session.generate("hello again", max_tokens=2)


def test_a_forgotten_answer_is_none_in_progress(slow_engine: Engine) -> None:
    with slow_engine.session() as session:
        generation = session.generate("hello world", max_tokens=1000)
        next(generation)
        assert slow_engine.pair.answering
        del generation
        assert not slow_engine.pair.answering, "the session's next use may never come"
        assert not session.answering


@pytest.mark.slow
@pytest.mark.parametrize("forget", [in_cycles, in_threads, in_tasks])
def test_five_hundred_forgotten_answers_leak_no_memory_and_no_threads(engine: Engine, forget: Forget) -> None:
    expected = plain_text(engine, "hello world", max_tokens=20, sampling=SAMPLED).token_ids
    with eager_collector():
        forget(engine, 40, PAUSE_S)
        threads, bytes_before = len(started_threads()), psutil.Process().memory_info().rss
        forget(engine, FORGOTTEN, PAUSE_S)
        assert alive(Generation) == 0
    assert len(started_threads()) <= threads
    assert psutil.Process().memory_info().rss - bytes_before < GROWTH_BYTES
    assert plain_text(engine, "hello world", max_tokens=20, sampling=SAMPLED).token_ids == expected
