"""Answers that are forgotten in reference cycles: the collector finds them on whatever thread it runs on."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from edgespec.engine.answer import Generation
from edgespec.engine.engine import Engine
from edgespec.engine.session import Session
from edgespec.errors import InvalidRequestError
from tests.engine.answers import SAMPLED, plain_text

THREADS = 4
PATIENCE_S = 0.05
FORGOTTEN = 250  # in threads, and as many again in asyncio
GROWTH_BYTES = 16 * 2**20  # a cache of this engine takes 6 MiB, an answer that stays 0.1


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """The collector runs after every 40 objects: on decoding threads, and within whatever they hold."""
    before = gc.get_threshold()
    gc.set_threshold(40, 2, 2)
    yield
    gc.set_threshold(*before)


def begin(session: Session) -> Generation:
    """The next answer, once the last one was collected: mostly by the thread that decodes it."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return session.generate("hello world", depth=3, sampling=SAMPLED)
        except InvalidRequestError:
            if time.monotonic() > end:
                gc.collect()
            time.sleep(0.001)


def forget(session: Session, count: int) -> None:
    """Begin an answer and leave it in a cycle, as an exception's traceback or a closure on itself does."""
    generation = begin(session)
    cycle: list[object] = [generation]
    cycle.append(cycle)
    for _ in range(count):
        next(generation)


def forget_in_a_thread(engine: Engine, times: int) -> None:
    with engine.session() as session:
        for number in range(times):
            forget(session, 1 + number % 7)


async def forget_in_tasks(engine: Engine, times: int) -> None:
    async def read(session: Session) -> None:
        generation = session.generate("hello world", depth=3, sampling=SAMPLED)
        cycle: list[object] = [generation]
        cycle.append(cycle)  # a cancelled task's traceback does so as well
        async for _ in generation:
            pass

    async def ask(times: int) -> None:
        with engine.session() as session:
            for number in range(times):
                reading = asyncio.create_task(read(session))
                await asyncio.sleep(0.001 * (number % 7))
                reading.cancel()
                await asyncio.wait([reading])

    await asyncio.gather(*(ask(times // THREADS) for _ in range(THREADS)))


def alive(kind: type) -> int:
    gc.collect()
    return sum(isinstance(each, kind) for each in gc.get_objects())


@pytest.mark.slow
def test_five_hundred_forgotten_answers_leave_nothing(engine: Engine, eager_collector: None) -> None:
    expected = plain_text(engine, "hello world", max_tokens=20, sampling=SAMPLED).token_ids

    def forget_many(times: int) -> None:
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lambda _: forget_in_a_thread(engine, times // THREADS), range(THREADS), timeout=60))
        asyncio.run(asyncio.wait_for(forget_in_tasks(engine, times), 60))

    forget_many(40)
    threads, bytes_before = threading.active_count(), psutil.Process().memory_info().rss
    forget_many(FORGOTTEN)
    assert alive(Generation) == 0
    assert threading.active_count() <= threads
    assert psutil.Process().memory_info().rss - bytes_before < GROWTH_BYTES
    assert plain_text(engine, "hello world", max_tokens=20, sampling=SAMPLED).token_ids == expected
