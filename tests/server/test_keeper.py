"""Loading in the background, freeing when idle, loading again; the queue."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.errors import ClosedError, EdgespecError, MemoryLimitError, ModelFileError, WorkerLostError
from edgespec.server import keeper as keeping, queue as request_queue
from edgespec.server.errors import ApiError
from edgespec.server.keep_alive import Stays
from edgespec.server.keeper import KEEP_ALIVE_S, ModelKeeper
from edgespec.server.queue import (
    LONGEST_WAIT_S,
    MOST_RUNNING,
    MOST_WAITING,
    MOST_WAITING_BYTES,
    MOST_WAITING_OF_ONE,
    RequestQueue,
)
from edgespec.server.threads import MOST_THREADS, Steps, Threads
from tests.support.http_server import wait_until
from tests.support.started_threads import started_threads


class Loads:
    """Opens engines that only count."""

    def __init__(self, *, can_calibrate: bool = False) -> None:
        self.engines: list[Any] = []
        self.error: Exception | None = None
        self.release = threading.Event()
        self.release.set()
        self._can_calibrate = can_calibrate

    def __call__(self) -> Any:
        assert self.release.wait(60)
        if self.error is not None:
            raise self.error
        self.engines.append(_Engine(self._can_calibrate))
        return self.engines[-1]


class _Engine:
    def __init__(self, can_calibrate: bool) -> None:
        self.closed = False
        self.can_calibrate = can_calibrate
        self.measuring: threading.Event = threading.Event()
        self.stopped: bool | None = None
        self.said: tuple[str, ...] = ()
        self.plan = None
        self.pair = SimpleNamespace(forms=SimpleNamespace(prepare=lambda: None))

    def keep_prefixes(self, stop: threading.Event) -> tuple[str, ...]:
        return () if stop.is_set() else self.said

    def calibrate_for(self, *, stop: threading.Event) -> None:
        self.measuring.set()
        self.stopped = stop.wait(60)

    def close(self) -> None:
        self.closed = True


async def until(holds: Any) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.002)


async def use(keeper: ModelKeeper) -> Any:
    async with keeper.use() as loaded:
        return loaded.engine


@pytest.mark.anyio
async def test_requests_wait_for_one_loading_and_share_it() -> None:
    loads = Loads()
    loads.release.clear()
    keeper = ModelKeeper(loads)
    assert keeper.state == "unloaded"
    keeper.start()
    assert keeper.state == "loading"
    waiting = [asyncio.create_task(use(keeper)) for _ in range(3)]
    impatient = asyncio.create_task(use(keeper))
    await asyncio.sleep(0.01)
    impatient.cancel()
    loads.release.set()
    assert {id(engine) for engine in await asyncio.gather(*waiting)} == {id(loads.engines[0])}
    assert (keeper.state, keeper.loads, len(loads.engines)) == ("ready", 1, 1)
    await keeper.close()
    assert loads.engines[0].closed
    with pytest.raises(ClosedError):
        await use(keeper)


@pytest.mark.anyio
async def test_on_load_is_called_on_the_thread_of_the_load_and_may_fail() -> None:
    told, keeper = list[int](), ModelKeeper(loads := Loads())
    keeper.on_load = lambda engine: told.append(threading.get_ident())
    await use(keeper)
    assert threading.get_ident() not in told
    await keeper.free()

    def fail(_engine: Any) -> None:
        raise ValueError("no card")

    keeper.on_load = fail
    with pytest.raises(EdgespecError, match="the model cannot be loaded: ValueError: no card"):
        await use(keeper)
    assert (len(told), len(loads.engines), loads.engines[1].closed) == (1, 2, True)
    await keeper.close()


@pytest.mark.anyio
async def test_an_idle_model_is_freed_and_loaded_again_on_demand() -> None:
    loads = Loads()
    keeper = ModelKeeper(loads, keep_alive_s=0.02)
    async with keeper.use():
        await asyncio.sleep(0.05)
        assert keeper.state == "ready", "a model in use is not freed"
    await until(lambda: keeper.state == "unloaded")
    await until(lambda: loads.engines[0].closed)
    assert await use(keeper) is loads.engines[1]
    await keeper.close()
    assert KEEP_ALIVE_S == 300
    assert ModelKeeper(Loads())._usual_s == KEEP_ALIVE_S  # the defaults
    assert ModelKeeper(Loads()).context_length == 4096


@pytest.mark.anyio
async def test_a_failed_loading_is_reported_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, now = Loads(), keeping._now()
    monkeypatch.setattr(keeping, "_now", lambda: now)
    loads.error = ModelFileError("x.gguf", "it is broken")
    keeper = ModelKeeper(loads, keep_alive_s=None)
    for _ in range(2):
        with pytest.raises(ModelFileError):
            await use(keeper)
        assert (keeper.state, keeper.error) == ("failed", loads.error)
        now += keeping.FAILED_S
        assert keeper.state == "unloaded"
    loads.error = None
    assert await use(keeper) is loads.engines[0]
    assert keeper.error is None
    await keeper.close()


@pytest.mark.anyio
async def test_an_unexpected_failure_of_loading_is_reported_too() -> None:
    loads = Loads()
    loads.error = ZeroDivisionError("by zero")
    keeper = ModelKeeper(loads, keep_alive_s=None)
    with pytest.raises(EdgespecError, match="cannot be loaded: ZeroDivisionError: by zero"):
        await use(keeper)
    assert keeper.state == "failed"
    await keeper.close()


@pytest.mark.anyio
async def test_what_conversations_shared_is_kept_between_requests_and_the_log_says_so() -> None:
    loads, lines = Loads(), list[str]()
    keeper = ModelKeeper(loads, keep_alive_s=0.02, tell=lines.append)
    async with keeper.use() as loaded:
        loaded.engine.said = ("kept the beginning",)  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
        assert lines == [], "not while a request runs"
    await until(lambda: keeper.state == "unloaded")
    assert lines == ["kept the beginning"]
    await keeper.close()


@pytest.mark.anyio
async def test_a_measurement_that_fails_does_not_keep_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Engine, "calibrate_for", lambda *_, **__: 1 / 0)
    keeper = ModelKeeper(Loads(can_calibrate=True), keep_alive_s=0.01)
    await use(keeper)
    await until(lambda: keeper.state == "unloaded")
    await keeper.close()


@pytest.mark.anyio
@pytest.mark.parametrize(
    "error", [WorkerLostError("the process is gone"), ModelFileError("m.gguf", "the file was written to")]
)
async def test_a_model_whose_process_was_lost_or_whose_file_has_changed_is_loaded_again(error: EdgespecError) -> None:
    loads = Loads()
    keeper = ModelKeeper(loads, keep_alive_s=None)
    with pytest.raises(type(error)):
        async with keeper.use():
            raise error
    assert await use(keeper) is loads.engines[1]
    assert loads.engines[0].closed
    await keeper.close()


@pytest.mark.anyio
async def test_the_machine_is_measured_between_requests_and_a_request_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeping, "CALIBRATE_AFTER_S", 0.0)
    loads = Loads(can_calibrate=True)
    keeper = ModelKeeper(loads, keep_alive_s=None)
    engine = await use(keeper)
    await until(engine.measuring.is_set)
    await use(keeper)
    await until(lambda: engine.stopped is not None)
    assert engine.stopped is True
    await keeper.close()


def test_a_server_that_ends_while_it_loads_frees_what_comes_late() -> None:
    async def run() -> Loads:
        loads = Loads()
        loads.release.clear()
        keeper = ModelKeeper(loads)
        keeper.start()
        await asyncio.sleep(0.01)
        await keeper.close()
        return loads

    loads = asyncio.run(run())
    loads.release.set()
    wait_until(lambda: bool(loads.engines) and loads.engines[0].closed)


@pytest.mark.anyio
async def test_a_cancelled_caller_does_not_wait_for_the_thread_and_further_steps_do() -> None:
    threads, release, done = Threads(), threading.Event(), list[str]()
    steps = Steps(threads)

    def work() -> str:
        release.wait(60)
        done.append("work")
        return "late"

    tasks = [asyncio.create_task(threads.run(work, late=done.append)), asyncio.create_task(steps.run(work))]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    last = steps.submit(lambda: done.append("last"))
    await asyncio.sleep(0.01)
    assert not done
    release.set()
    await asyncio.wrap_future(last)
    await until(lambda: len(done) == 4)
    assert sorted(done) == ["last", "late", "work", "work"]
    with pytest.raises(ZeroDivisionError):
        await steps.run(lambda: 1 / 0)
    assert await steps.run(lambda: 3) == 3, "a step that failed does not hold up the next one"
    threads.close()


@pytest.mark.anyio
async def test_asyncio_writes_no_traceback_of_an_error_behind_a_cancelled_caller() -> None:
    threads, release, told = Threads(), threading.Event(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    def work() -> None:
        release.wait(60)
        raise ClosedError("loading was cancelled")

    steps = Steps(threads)
    tasks = [asyncio.create_task(run(work)) for run in (threads.run, steps.run)]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    release.set()
    await steps.run(lambda: None)
    await asyncio.sleep(0.01)
    gc.collect()
    assert told == []
    threads.close()


def test_the_threads_of_a_server_are_enough_for_all_places_and_end_with_it() -> None:
    before = started_threads()
    threads = Threads()
    own = started_threads() - before
    assert len(own) == MOST_THREADS == 2 * MOST_RUNNING + 3
    threads.close()
    threads.close()
    wait_until(lambda: not own & started_threads())
    forgotten = started_threads() - before
    assert not forgotten
    Threads()
    wait_until(lambda: not started_threads() - before)


def test_threads_that_cannot_all_be_started_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before, start = started_threads(), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if len(started_threads() - before) == 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(MemoryLimitError, match="no thread can be started"):
        Threads()
    wait_until(lambda: not started_threads() - before)


# ----------------------------------------------------------------------------------------------------- queue


@pytest.mark.anyio
async def test_requests_run_first_come_first_served_and_the_rest_is_refused() -> None:
    queue, order, release = RequestQueue(1, 2), list[int](), asyncio.Event()

    async def request(number: int) -> None:
        async with queue.turn():
            order.append(number)
            await release.wait()

    tasks = [asyncio.create_task(request(number)) for number in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (queue.running, queue.waiting) == (1, 2)
    with pytest.raises(ApiError) as found:
        await request(4)
    assert (found.value.status, found.value.code) == (429, "queue_full")
    assert found.value.retry_s is not None
    assert 1 <= found.value.retry_s <= 60
    tasks[1].cancel()
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 2]
    assert (queue.running, queue.waiting) == (0, 0)


@pytest.mark.anyio
async def test_a_request_waits_for_a_limited_time_only_and_not_for_a_server_that_ends() -> None:
    queue = RequestQueue(1, 5, longest_wait_s=0.01)
    async with queue.turn():
        with pytest.raises(ApiError, match="in time") as found:
            await queue.turn().__aenter__()
        assert found.value.status == 429
        waiting = asyncio.create_task(RequestQueue.turn(ending := RequestQueue(0, 5)).__aenter__())
        await asyncio.sleep(0)
        assert ending.waiting == 1
        ending.refuse_waiting()
        with pytest.raises(ApiError, match="shutting down"):
            await waiting
        assert ending.waiting == 0
    queue.draining = True
    with pytest.raises(ApiError, match="shutting down") as ending:
        await queue.turn().__aenter__()
    assert ending.value.status == 503


@pytest.mark.anyio
async def test_the_bodies_of_waiting_requests_have_a_limit_together() -> None:
    queue = RequestQueue(1, 5, most_waiting_bytes=100)
    async with queue.turn(1000):  # a request that need not wait is not counted
        waiting = asyncio.create_task(queue.turn(60).__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many requests") as found:
            await queue.turn(41).__aenter__()
        assert found.value.status == 429
        waiting.cancel()
        await asyncio.wait([waiting])
        second = asyncio.create_task(queue.turn(100).__aenter__())
        await asyncio.sleep(0)
        assert queue.waiting == 1
        second.cancel()
        await asyncio.wait([second])


@pytest.mark.anyio
async def test_one_owner_of_several_cannot_take_all_places_to_wait() -> None:
    queue = RequestQueue(1, 5, most_waiting_of_one=1)
    async with queue.turn(owner="a"):
        waiting = [asyncio.create_task(queue.turn(owner=owner).__aenter__()) for owner in ("a", "b", None, None)]
        await asyncio.sleep(0)
        assert queue.waiting == 4
        with pytest.raises(ApiError, match="too many requests"):
            await queue.turn(owner="a").__aenter__()
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        again = asyncio.create_task(queue.turn(owner="a").__aenter__())
        await asyncio.sleep(0)
        assert queue.waiting == 1
        again.cancel()
        await asyncio.wait([again])


@pytest.mark.anyio
async def test_one_owner_of_several_leaves_a_slot_and_the_one_with_fewest_running_comes_first() -> None:
    queue, order, leave = RequestQueue(4, 9), list[str](), dict[str, asyncio.Event]()

    async def request(name: str, owner: str | None) -> None:
        async with queue.turn(owner=owner):
            order.append(name)
            await leave.setdefault(name, asyncio.Event()).wait()

    names = ("a1", "a2", "a3", "a4", "a5", "b1", "b2")
    tasks = {name: asyncio.create_task(request(name, name[0])) for name in names}
    await asyncio.sleep(0)
    assert order == ["a1", "a2", "a3", "b1"]
    for name, following in (("a1", "b2"), ("b1", "a4"), ("a2", "a5")):
        leave[name].set()
        await tasks[name]
        await asyncio.sleep(0)
        assert order[-1] == following
    for each in leave.values():
        each.set()
    await asyncio.gather(*tasks.values())
    assert (queue.running, queue.waiting) == (0, 0)
    async with RequestQueue(1).turn(owner="a"):
        pass  # the only slot is left to no other


@pytest.mark.anyio
async def test_a_slot_whose_request_leaves_in_the_same_moment_is_given_on() -> None:
    queue = RequestQueue(1, 5)
    first = queue.turn()
    await first.__aenter__()
    entered = [queue.turn(), queue.turn()]
    waiting = [asyncio.create_task(each.__aenter__()) for each in entered]
    await asyncio.sleep(0)
    await first.__aexit__(None, None, None)
    waiting[0].cancel()
    await asyncio.wait(waiting)
    assert (waiting[0].cancelled(), queue.running, queue.waiting) == (True, 1, 0)


@pytest.mark.parametrize("waits_first", [False, True])
@pytest.mark.anyio
async def test_a_client_that_takes_nothing_does_not_hold_its_place_before_others(
    monkeypatch: pytest.MonkeyPatch, waits_first: bool
) -> None:
    assert request_queue.LONGEST_WRITE_BEFORE_OTHERS_S == 10.0
    monkeypatch.setattr(request_queue, "LONGEST_WRITE_BEFORE_OTHERS_S", 0.1)
    queue = RequestQueue(1, 5)
    had = asyncio.Event()

    async def stalled() -> None:
        async with queue.turn():
            await asyncio.sleep(0.05 if waits_first else 0)
            async with queue.writing(60.0):
                await asyncio.Event().wait()

    async def other() -> None:
        async with queue.turn():
            had.set()

    first = asyncio.create_task(stalled())
    await asyncio.sleep(0 if waits_first else 0.2)
    assert not first.done(), "no other request waits for its place"
    second = asyncio.create_task(other())
    await asyncio.wait_for(had.wait(), 60)
    with pytest.raises(TimeoutError):
        await first
    await second


@pytest.mark.anyio
async def test_a_request_that_would_not_get_the_place_ends_no_slow_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two keys has all places that it may have, and waits for one of them."""
    monkeypatch.setattr(request_queue, "LONGEST_WRITE_BEFORE_OTHERS_S", 0.05)
    queue = RequestQueue(3, 5)
    slow, done = asyncio.Event(), asyncio.Event()

    async def answer(owner: str, until: asyncio.Event) -> None:
        async with queue.turn(owner=owner), queue.writing(60.0):
            await until.wait()
        async with queue.turn(owner=owner), queue.writing(60.0):  # begun while the other waits
            await slow.wait()

    other = asyncio.create_task(answer("b", done))
    own = [asyncio.create_task(answer("a", slow)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting = asyncio.create_task(answer("a", slow))
    await asyncio.sleep(0.2)
    assert (queue.running, queue.waiting) == (3, 1)
    assert not other.done(), "its place would not be the waiting one's"
    done.set()
    await asyncio.sleep(0.2)
    assert not other.done()
    slow.set()
    await asyncio.gather(other, *own, waiting)


def test_the_queue_has_room_for_a_few_programs() -> None:
    queue = RequestQueue()
    assert (queue.most_running, queue._most_waiting, queue._longest_wait_s) == (4, 64, 600.0)  # the defaults
    assert queue._most_waiting_of_one == MOST_WAITING_OF_ONE == 16
    assert queue._most_waiting_bytes == MOST_WAITING_BYTES == 64_000_000
    assert (MOST_RUNNING, MOST_WAITING, LONGEST_WAIT_S) == (4, 64, 600.0)


@pytest.mark.anyio
async def test_a_request_says_how_long_the_model_stays() -> None:
    loads = Loads()
    keeper = ModelKeeper(loads, keep_alive_s=60.0)
    keeper.keep(0)  # nothing is loaded
    async with keeper.use():
        keeper.keep(0)
        assert keeper.expires_in_s == 0
        await asyncio.sleep(0.02)
        assert keeper.state == "ready", "a model in use is not freed"
    await until(lambda: keeper.state == "unloaded")
    await use(keeper)
    await until(lambda: keeper.expires_in_s != 60.0)
    assert keeper.expires_in_s is not None
    assert 50 < keeper.expires_in_s < 60, "a model that is loaded again stays for the usual time"
    keeper.keep(float("inf"))
    await until(lambda: keeper.expires_in_s is None)
    keeper.keep(0)
    await until(lambda: keeper.state == "unloaded")
    await keeper.close()
    assert len(loads.engines) == 2


@pytest.mark.anyio
async def test_a_model_that_is_not_to_stay_is_freed_behind_its_load() -> None:
    loads = Loads()
    loads.release.clear()
    keeper = ModelKeeper(loads, keep_alive_s=None)
    keeper.start()
    keeper.keep(0)
    loads.release.set()
    await until(lambda: bool(loads.engines) and keeper.state == "unloaded")
    assert await use(keeper) is loads.engines[1]
    assert keeper.expires_in_s is None, "what was asked for is over"
    await keeper.close()


@pytest.mark.anyio
async def test_a_model_stays_for_the_owner_who_keeps_it_longest() -> None:
    keeper = ModelKeeper(Loads(), keep_alive_s=60.0)
    async with keeper.use("one"):
        pass
    async with keeper.use("other"):
        keeper.keep(0, "other")
    keeper.keep(0, "other")
    await asyncio.sleep(0.02)
    assert keeper.state == "ready", "the first owner did not ask for that"
    assert keeper.expires_in_s is not None
    assert 50 < keeper.expires_in_s <= 60
    keeper.keep(0, "one")
    await until(lambda: keeper.state == "unloaded")
    await keeper.close()


@pytest.mark.parametrize(("usual_s", "until_s"), [(60.0, 65.0), (None, math.inf)])
def test_a_stay_ends_behind_the_last_request_that_keeps_it(usual_s: float | None, until_s: float) -> None:
    stays = Stays(usual_s, now=5.0)
    assert stays.until == until_s, "no user has come"
    stays.ask("one", 0.0, now=10.0)
    assert stays.until == 10.0
    stays.use("one", now=12.0)
    assert stays.until == 12.0
    stays.use("other", now=11.0)
    assert stays.until == until_s + 6.0
    stays.ask("other", 30.0, now=13.0)
    assert stays.until == 43.0
    stays.ask("one", math.inf, now=13.0)
    assert stays.until == math.inf


@pytest.mark.anyio
async def test_a_shorter_stay_ends_the_measurement_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "CALIBRATE_AFTER_S", 0.0)
    keeper = ModelKeeper(Loads(can_calibrate=True), keep_alive_s=None)
    engine = await use(keeper)
    await until(engine.measuring.is_set)
    keeper.keep(0)
    await until(lambda: engine.stopped is not None and engine.closed)
    assert engine.stopped is True
    await keeper.close()
