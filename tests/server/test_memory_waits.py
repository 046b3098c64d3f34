"""Requests that wait for memory until others give some back, at any moment and whatever the others do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.session import Session
from edgespec.errors import MemoryLimitError
from edgespec.server.answers import _Held, _session
from edgespec.server.errors import ApiError
from edgespec.server.forms import FormCompiler
from edgespec.server.keeper import LoadedEngine
from edgespec.server.keystrokes import Keystrokes, KeyTurn
from edgespec.server.pool import Kept, SessionPool
from edgespec.server.schema import Request
from edgespec.text.conversation.hole import Hole
from edgespec.text.request_budget import RequestBudget
from tests.support.http_server import WAIT_S, Running


class FewRooms(SessionPool):
    """Sessions without content: memory holds ``sessions`` of them, and the prompts of ``prompts``."""

    def __init__(self, engine: Engine, *, sessions: int = 9, prompts: int = 1) -> None:
        super().__init__(engine)
        self.sessions, self.prompts = sessions, prompts
        self.opened, self.read = set[object](), set[object]()
        self.asked: Callable[[], None] = lambda: None  # while a prompt is refused
        self.refused = 0

    def take(self, owner: str, text: str) -> Kept:
        if len(self.opened) >= self.sessions:
            self._refuse()
        session = SimpleNamespace(close=lambda: None, cancel=lambda: None)
        session.generate = partial(self._generate, session)
        self.opened.add(id(session))
        return Kept(cast("Session", session), owner)

    def _generate(self, session: object, *_: object, **__: object) -> Any:
        if len(self.read) >= self.prompts:
            self._refuse()
        self.read.add(id(session))
        return SimpleNamespace(close=lambda: None)

    def _refuse(self) -> None:
        self.refused += 1
        self.asked()
        raise MemoryLimitError("memory is short", needed_bytes=2, available_bytes=1)

    def give(self, kept: Kept) -> None:
        self.opened.discard(id(kept.session))
        self.read.discard(id(kept.session))


@pytest.fixture
def loaded_with(server: Running, engine: Engine) -> Callable[..., LoadedEngine]:
    def make(**rooms: int) -> LoadedEngine:
        pool = FewRooms(engine, **rooms)
        return LoadedEngine(engine, pool, server.service.keeper.threads, FormCompiler())

    return make


def pool_of(loaded: LoadedEngine) -> FewRooms:
    return cast("FewRooms", loaded.pool)


def session(loaded: LoadedEngine, turn: KeyTurn | None = None) -> Any:
    return _session(Request(), "", loaded, RequestBudget(), turn or KeyTurn())


async def begin(held: _Held) -> None:
    await held.begin(held.first, Request(prompt="x"), Sampling())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.001)


async def all_of(*asks: Any) -> list[BaseException | None]:
    async with asyncio.timeout(WAIT_S):
        return await asyncio.gather(*asks, return_exceptions=True)


Make = Callable[..., LoadedEngine]


@pytest.mark.anyio
async def test_prompts_that_come_together_are_answered_in_turn_also_while_none_is_decoded(loaded_with: Make) -> None:
    loaded = loaded_with()

    async def ask() -> None:
        async with session(loaded) as held:
            await begin(held)
            await asyncio.sleep(0.01)  # its prompt is prepared, or the end of its answer is sent

    assert await all_of(*(ask() for _ in range(5))) == [None] * 5
    assert pool_of(loaded).refused


@pytest.mark.anyio
@pytest.mark.parametrize("sessions", [3, 9])
async def test_of_requests_that_would_wait_for_each_other_one_is_refused(loaded_with: Make, sessions: int) -> None:
    """Also where another one waits for a session."""
    loaded = loaded_with(sessions=sessions, prompts=0)
    pool = pool_of(loaded)

    async def ask() -> None:
        async with session(loaded) as held:
            await until(lambda: len(pool.opened) == min(sessions, 4) or pool.prompts > 0)
            try:
                await begin(held)
            except MemoryLimitError:
                pool.prompts = 1  # what it gives back is enough for another one
                raise

    found = await all_of(*(ask() for _ in range(4)))
    assert sorted(type(each) for each in found if each is not None) == [MemoryLimitError]


@pytest.mark.anyio
async def test_memory_that_is_given_back_while_a_request_is_refused_is_not_missed(loaded_with: Make) -> None:
    loaded = loaded_with()
    pool, refusing, go_on, end = pool_of(loaded), threading.Event(), threading.Event(), asyncio.Event()

    def held_up() -> None:
        refusing.set()
        assert go_on.wait(WAIT_S)

    async def first() -> None:
        async with session(loaded) as held:
            await begin(held)
            await end.wait()

    async def second() -> None:
        async with session(loaded) as held:
            await begin(held)

    async def third() -> None:  # it uses memory all the time, and gives none back before the second has ended
        async with session(loaded):
            go_on.set()
            await until(two.done)

    one = asyncio.create_task(first())
    await until(lambda: bool(pool.read))
    pool.asked = held_up
    two = asyncio.create_task(second())
    await until(refusing.is_set)
    end.set()
    await one
    assert await all_of(two, third()) == [None, None]


@pytest.mark.anyio
@pytest.mark.parametrize("waits_for", ["a session", "its prompt", "its turn"])
async def test_a_keystroke_that_waits_for_memory_is_replaced(loaded_with: Make, waits_for: str) -> None:
    loaded = loaded_with(sessions=9 if waits_for == "its prompt" else 1)
    pool, places, end = pool_of(loaded), Keystrokes(), asyncio.Event()

    async def other() -> None:
        async with session(loaded) as held:
            await begin(held)
            await end.wait()

    async def asks(before: str) -> None:
        async with places.turn("editor", Hole(before, "")) as turn, session(loaded, turn) as held:
            await begin(held)

    others = [asyncio.create_task(other())]
    await until(lambda: bool(pool.read))
    if waits_for == "its turn":
        others.append(asyncio.create_task(other()))
        await until(lambda: pool.refused == 1)
    older = asyncio.create_task(asks("a"))
    await until(lambda: pool.refused == 1)
    await asyncio.sleep(0.01)
    newer = asyncio.create_task(asks("ab"))
    with pytest.raises(ApiError, match="a newer request"):
        await asyncio.wait_for(older, WAIT_S)
    assert not newer.done()
    end.set()
    assert await all_of(newer, *others) == [None] * (1 + len(others))


@pytest.mark.anyio
async def test_branches_that_are_closed_give_memory_back(loaded_with: Make) -> None:
    loaded = loaded_with()
    pool, joined = pool_of(loaded), asyncio.Event()

    def branch(**_: object) -> Any:
        pool.read.add("branch")
        return SimpleNamespace(cancel=lambda: None, close=lambda: pool.read.discard("branch"))

    async def several() -> None:
        async with session(loaded) as held:
            held.first.kept.session.branch = branch
            await held.branch(2, 10)
            await until(lambda: pool.refused > 0)
            await held.join()
            await joined.wait()

    async def ask() -> None:
        async with session(loaded) as held:
            await begin(held)
        joined.set()

    one = asyncio.create_task(several())
    await until(lambda: bool(pool.read))
    assert await all_of(one, ask()) == [None, None]
