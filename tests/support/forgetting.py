"""Answers that are abandoned in reference cycles: sequentially, in threads, and in cancelled tasks."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from edgespec.decoding.sampling import Sampling
from edgespec.engine.answer import Generation
from edgespec.engine.engine import Engine
from edgespec.engine.session import Session
from edgespec.errors import InvalidRequestError

__all__ = ["Forget", "alive", "eager_collector", "in_cycles", "in_tasks", "in_threads"]

SAMPLING = Sampling(temperature=0.8, seed=3, top_k=20)
PROMPT = "Count from one to a hundred, in words."  # gives a long answer with any model
DEPTH = 3
AT_ONCE = 4  # sessions in parallel, each with a thread or a task
PHASES = 7  # an answer is abandoned after 1 to PHASES events or pauses
PATIENCE_S = 0.02
HANGING_S = 600.0  # five hundred answers of a 1.5B model take a tenth of it

# Abandon this many answers of an engine. ``pause_s``: unit of the time before tasks are cancelled.
Forget = Callable[[Engine, int, float], None]


def in_cycles(engine: Engine, times: int, _pause_s: float) -> None:
    """Sequentially, in one session."""
    with engine.session() as session:
        for number in range(times):
            forget(session, 1 + number % PHASES)


def in_threads(engine: Engine, times: int, pause_s: float) -> None:
    """In four parallel sessions, each read by a separate thread."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        begun = [threads.submit(in_cycles, engine, times // AT_ONCE, pause_s) for _ in range(AT_ONCE)]
        for each in begun:
            each.result(timeout=HANGING_S)


def in_tasks(engine: Engine, times: int, pause_s: float) -> None:
    """In four parallel sessions, each read by tasks that are cancelled."""

    async def read(session: Session) -> None:
        generation = ask(session)
        cycle: list[object] = [generation]
        cycle.append(cycle)  # a cancelled task's traceback forms such a cycle too
        async for _ in generation:
            pass

    async def cancel_tasks(times: int) -> None:
        with engine.session() as session:
            for number in range(times):
                reading = asyncio.create_task(read(session))
                await asyncio.sleep(pause_s * (number % PHASES))
                reading.cancel()
                await asyncio.wait([reading])

    async def ask_all() -> None:
        asking = asyncio.gather(*(cancel_tasks(times // AT_ONCE) for _ in range(AT_ONCE)))
        await asyncio.wait_for(asking, HANGING_S)

    asyncio.run(ask_all())


def ask(session: Session) -> Generation:
    """The first turn of a new conversation, with a long answer."""
    session.clear()
    return session.generate(PROMPT, depth=DEPTH, sampling=SAMPLING)


def begin(session: Session) -> Generation:
    """The next answer, after the last one was collected, mostly by its decoding thread."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask(session)
        except InvalidRequestError:
            if time.monotonic() > end:
                gc.collect()
            time.sleep(0.001)


def forget(session: Session, count: int) -> None:
    """Begin an answer and leave it in a cycle, as a traceback or a self-referencing closure does."""
    generation = begin(session)
    cycle: list[object] = [generation]
    cycle.append(cycle)
    for _ in range(count):
        next(generation, None)


@contextmanager
def eager_collector() -> Iterator[None]:
    """Collect garbage after every 40 objects, on decoding threads too.

    Existing objects are frozen first, and stay so: a real model has a vocabulary of 150 000 strings, and thousands of
    collected tests would lengthen each later collection by half a second.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(40, 2, 2)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def alive(kind: type) -> int:
    gc.collect()
    return sum(isinstance(each, kind) for each in gc.get_objects())
