"""The thread behind a Sequence: order of jobs, exceptions, interrupts, and closing."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError as FutureCancelledError, Future, wait
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.engine.answer import AnswerTask
from edgespec.errors import ClosedError, MemoryLimitError
from edgespec.runtimes import thread as module
from edgespec.runtimes.process.frames import Frame
from edgespec.runtimes.process.link import WorkerLink
from edgespec.runtimes.thread import WorkerThread, map_on_threads, take

WAIT_S = 60


class Interrupted:
    """Counts interrupts, and lets a job wait for one."""

    def __init__(self) -> None:
        self.happened = threading.Event()
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        self.happened.set()


@pytest.fixture
def interrupted() -> Interrupted:
    return Interrupted()


@pytest.fixture
def worker(interrupted: Interrupted) -> Iterator[WorkerThread]:
    worker = WorkerThread("test-worker", interrupted)
    yield worker
    worker.close()


def hold(worker: WorkerThread) -> threading.Event:
    """Keep the worker busy until the returned event is set."""
    started, release = threading.Event(), threading.Event()

    def job() -> None:
        started.set()
        assert release.wait(WAIT_S)

    worker.submit(job)
    assert started.wait(WAIT_S)
    return release


def test_one_daemon_thread_of_the_given_name_runs_all_jobs(worker: WorkerThread) -> None:
    threads = {worker.run(threading.current_thread) for _ in range(5)}
    assert {thread.name for thread in threads} == {"test-worker"}
    assert len(threads) == 1
    assert threads.pop().daemon  # a process can always end


@pytest.mark.parametrize("chosen", [0, 2**24])
def test_starting_a_worker_thread_restores_the_processs_stack_size(interrupted: Interrupted, chosen: int) -> None:
    before = threading.stack_size(chosen)
    try:
        worker = WorkerThread("test-worker", interrupted)
        assert threading.stack_size() == chosen
        worker.close()
    finally:
        threading.stack_size(before)


def test_jobs_run_in_the_order_of_submission(worker: WorkerThread) -> None:
    release, seen = hold(worker), list[int]()
    futures = [worker.submit(lambda own=number: seen.append(own)) for number in range(50)]  # type: ignore[misc]
    release.set()
    for future in futures:
        future.result(WAIT_S)
    assert seen == list(range(50))


def test_callers_on_many_threads_each_get_their_jobs_result(worker: WorkerThread) -> None:
    found: dict[int, list[int]] = {}

    def call(caller: int) -> None:
        found[caller] = [worker.run(lambda: caller * 1000 + step) for step in range(100)]  # noqa: B023

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(WAIT_S)
    assert found == {caller: [caller * 1000 + step for step in range(100)] for caller in range(4)}


def test_a_nested_run_is_executed_in_place(worker: WorkerThread) -> None:
    assert (
        worker.run(lambda: worker.run(lambda: worker.run(lambda: threading.current_thread().name))) == "test-worker"
    )


@pytest.mark.parametrize("error", [ValueError("a"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
def test_a_jobs_exception_reaches_the_caller_and_the_thread_survives(
    worker: WorkerThread, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        worker.run(fail)
    assert raised.value is error
    assert worker.submit(fail).exception(WAIT_S) is error
    assert worker.run(lambda: 1) == 1


def test_a_jobs_exception_does_not_call_on_interrupt(worker: WorkerThread, interrupted: Interrupted) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.run(fail)
    assert interrupted.count == 0


def test_a_future_cancelled_before_it_starts_is_not_run(worker: WorkerThread) -> None:
    release, ran = hold(worker), list[int]()
    future = worker.submit(lambda: ran.append(1))
    assert future.cancel()
    release.set()
    assert worker.run(lambda: "alive") == "alive"
    assert ran == []
    with pytest.raises(FutureCancelledError):
        future.result(0)


def test_a_running_jobs_future_cannot_be_cancelled(worker: WorkerThread) -> None:
    started, release = threading.Event(), threading.Event()

    def job() -> int:
        started.set()
        assert release.wait(WAIT_S)
        return 7

    future = worker.submit(job)
    assert started.wait(WAIT_S)
    assert not future.cancel()
    release.set()
    assert future.result(WAIT_S) == 7


def test_no_wait_on_windows_is_longer_than_a_tenth_of_a_second(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C interrupts none there, and is seen between two."""
    waits = list[float]()

    def job(result: int) -> int:
        """Takes three waits."""
        before, until = len(waits), time.monotonic() + WAIT_S
        while len(waits) < before + 3 and time.monotonic() < until:
            time.sleep(0.01)
        return result

    def waiting(futures: list[Future[int]], timeout: float) -> object:
        waits.append(timeout)
        return wait(futures, timeout)

    def result(future: Future[int]) -> int:
        assert future.done()
        return before(future)

    before = Future.result
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(module, "wait", waiting)
    monkeypatch.setattr(Future, "result", result)
    assert worker.run(lambda: job(7)) == 7
    assert worker.run(lambda: job(8), lambda: True) == 8
    assert len(waits) >= 6
    assert max(waits) <= 0.1


class SlowQueue:
    """Its item comes at a time of an invented clock; it notes how long each wait was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, comes_after_s: float, item: object = None) -> None:
        self.waits, self._comes_after_s, self._item, self.now = list[float](), comes_after_s, item, 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(sys, "platform", "win32")

    def get(self, timeout: float) -> object:
        self.waits.append(timeout)
        self.now += timeout
        if self.now < self._comes_after_s:
            raise queue.Empty
        return self._item


@pytest.mark.parametrize(
    ("comes_after_s", "timeout_s", "times"), [(0.35, math.inf, 4), (0.0, 9.0, 1), (9.0, 0.25, 3)]
)
def test_a_queue_on_windows_is_asked_every_tenth_of_a_second(
    monkeypatch: pytest.MonkeyPatch, comes_after_s: float, timeout_s: float, times: int
) -> None:
    items: Any = SlowQueue(monkeypatch, comes_after_s, "item")
    with contextlib.nullcontext() if comes_after_s < timeout_s else pytest.raises(queue.Empty):
        assert take(items, timeout_s) == "item"
    assert len(items.waits) == times
    assert max(items.waits) <= 0.1
    assert sum(items.waits) <= timeout_s + 1e-9


def test_answers_and_worker_processes_are_awaited_in_these_short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    items: Any = SlowQueue(monkeypatch, 0.35)
    reader: Any = SimpleNamespace(_events=items, _ahead=queue.SimpleQueue())
    assert AnswerTask.read(reader) is None
    frame = Frame({"id": 3})
    inbox: Any = SimpleNamespace(queue=SlowQueue(monkeypatch, 0.35, frame))
    link: Any = SimpleNamespace()
    assert WorkerLink._wait(link, 3, inbox, 60.0, None) is frame
    assert len(items.waits) == len(inbox.queue.waits) == 4


@pytest.mark.skipif(sys.platform == "win32", reason="a thread cannot be sent SIGINT on Windows")
def test_an_interrupted_wait_asks_the_job_to_end_and_waits_for_it(
    worker: WorkerThread, interrupted: Interrupted
) -> None:
    ended = list[float]()
    main = threading.main_thread().ident
    assert main is not None

    def job() -> None:
        time.sleep(0.05)  # the caller is waiting by now
        signal.pthread_kill(main, signal.SIGINT)
        assert interrupted.happened.wait(WAIT_S)
        time.sleep(0.05)
        ended.append(time.perf_counter())

    with pytest.raises(KeyboardInterrupt):
        worker.run(job)
    assert interrupted.count == 1
    assert len(ended) == 1  # the job has ended when the caller resumes
    assert worker.run(lambda: 1) == 1


def test_an_interrupt_between_a_jobs_start_and_the_wait_ends_the_job(
    worker: WorkerThread, interrupted: Interrupted, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ended = threading.Event(), list[int]()
    hand_over = WorkerThread._hand_over

    def interrupted_hand_over(*arguments: Any) -> None:
        hand_over(*arguments)
        assert started.wait(WAIT_S)
        raise KeyboardInterrupt

    def job() -> None:
        started.set()
        assert interrupted.happened.wait(WAIT_S)
        ended.append(1)

    monkeypatch.setattr(WorkerThread, "_hand_over", interrupted_hand_over)
    with pytest.raises(KeyboardInterrupt):
        worker.run(job)
    assert (interrupted.count, ended) == (1, [1])


def test_an_interrupt_before_a_job_starts_cancels_the_job(
    worker: WorkerThread, interrupted: Interrupted, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, ran = hold(worker), list[int]()
    hand_over = WorkerThread._hand_over

    def interrupted_hand_over(*arguments: Any) -> None:
        hand_over(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WorkerThread, "_hand_over", interrupted_hand_over)
        with pytest.raises(KeyboardInterrupt):
            worker.run(lambda: ran.append(1))
    release.set()
    assert worker.run(lambda: "alive") == "alive"
    assert (interrupted.count, ran) == (0, [])  # another caller's job keeps running


def test_close_finishes_the_submitted_jobs(interrupted: Interrupted) -> None:
    worker = WorkerThread("test-worker", interrupted)
    release = hold(worker)
    futures = [worker.submit(lambda own=number: own) for number in range(10)]  # type: ignore[misc]
    threading.Timer(0.05, release.set).start()
    worker.close()
    assert [future.result(0) for future in futures] == list(range(10))


def test_after_close_the_thread_has_ended_and_jobs_are_refused(interrupted: Interrupted) -> None:
    worker = WorkerThread("test-worker", interrupted)
    thread = worker.run(threading.current_thread)
    worker.close()
    worker.close()
    worker.join()
    assert not thread.is_alive()
    for use in (worker.run, worker.submit):
        with pytest.raises(ClosedError):
            use(lambda: 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="forking a process with threads warns from 3.12 on")
def test_a_worker_thread_in_a_forked_process_refuses_jobs_and_can_close(worker: WorkerThread) -> None:
    child = os.fork()
    if child == 0:  # the child has only this thread
        try:
            signal.alarm(WAIT_S)
            worker.run(lambda: 1)
        except ClosedError:
            worker.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert worker.run(lambda: 1) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="forking a process with threads warns from 3.12 on")
def test_a_process_forked_while_a_thread_starts_can_start_threads(
    interrupted: Interrupted, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting, release, start = threading.Event(), threading.Event(), threading.Thread.start

    def slowly(thread: threading.Thread) -> None:
        if thread.name == "test-slow":
            starting.set()
            assert release.wait(WAIT_S)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slowly)
    starter = threading.Thread(target=lambda: WorkerThread("test-slow", interrupted).close())
    starter.start()
    assert starting.wait(WAIT_S)
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(WAIT_S)
            worker = WorkerThread("test-worker", interrupted)
            os._exit(worker.run(lambda: 0))
        finally:
            os._exit(1)
    release.set()
    starter.join(WAIT_S)
    assert os.waitpid(child, 0)[1] == 0


def limit_threads(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    start, begun = threading.Thread.start, list[str]()

    def limited(thread: threading.Thread) -> None:
        if len(begun) == most:
            raise RuntimeError("can't start new thread")
        begun.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def test_a_thread_that_cannot_be_started_raises_memory_limit_error_with_a_hint(
    interrupted: Interrupted, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.stack_size()
    limit_threads(monkeypatch, 0)
    with pytest.raises(MemoryLimitError, match="no thread can be started: can't start new thread") as raised:
        WorkerThread("test-worker", interrupted)
    assert "ulimit -u" in str(raised.value.hint)
    assert threading.stack_size() == before


def test_close_works_from_the_worker_thread_and_from_many_threads(interrupted: Interrupted) -> None:
    worker = WorkerThread("test-worker", interrupted)
    release = hold(worker)
    future = worker.submit(worker.close)
    closers = [threading.Thread(target=worker.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    release.set()
    # Submitted before the first close, or refused: never lost.
    assert future.result(WAIT_S) is None
    for closer in closers:
        closer.join(WAIT_S)
        assert not closer.is_alive()


def test_a_job_submitted_during_close_is_refused_or_run(interrupted: Interrupted) -> None:
    for _ in range(50):
        worker = WorkerThread("test-worker", interrupted)
        closer = threading.Thread(target=worker.close)
        closer.start()
        try:
            future = worker.submit(lambda: 1)
        except ClosedError:
            pass
        else:
            assert future.result(WAIT_S) == 1
        closer.join(WAIT_S)


def test_finished_jobs_and_results_are_released_immediately(worker: WorkerThread) -> None:
    class Result:
        pass

    gc.collect()
    gc.disable()
    try:
        result = worker.run(Result)
        reference = weakref.ref(result)
        del result
        deadline = time.monotonic() + WAIT_S
        while reference() is not None and time.monotonic() < deadline:
            time.sleep(0.001)  # the thread releases the job just after it has delivered the result
        assert reference() is None
    finally:
        gc.enable()


def test_a_raised_exception_does_not_hold_its_job_in_a_cycle(worker: WorkerThread) -> None:
    class Payload:
        def fail(self) -> None:
            raise ValueError

    payload = Payload()
    reference = weakref.ref(payload)
    gc.collect()
    gc.disable()
    try:
        try:
            worker.run(payload.fail)
        except ValueError:
            del payload
        deadline = time.monotonic() + WAIT_S
        while reference() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert reference() is None
    finally:
        gc.enable()


def test_a_cancelled_wait_calls_on_interrupt(worker: WorkerThread, interrupted: Interrupted) -> None:
    stop = threading.Event()

    def job() -> str:
        stop.set()
        assert interrupted.happened.wait(WAIT_S)
        return "the result"

    assert worker.run(job, stop.is_set) == "the result"
    assert interrupted.count == 1
    assert worker.run(lambda: "quick", threading.Event()) == "quick"
    assert interrupted.count == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_map_on_threads_returns_results_in_order(threads: int) -> None:
    at_work: set[str] = set()
    together = threading.Barrier(threads)

    def square(number: int) -> int:
        at_work.add(threading.current_thread().name)
        if number < threads:
            together.wait(WAIT_S)
        return number * number

    assert map_on_threads(square, range(20), threads, "test-map") == [number * number for number in range(20)]
    assert at_work == {threading.current_thread().name} | ({"test-map"} if threads > 1 else set())
    assert not [thread for thread in threading.enumerate() if thread.name == "test-map"]


@pytest.mark.parametrize("most", [0, 1])
def test_map_on_threads_works_with_the_threads_that_can_be_started(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    limit_threads(monkeypatch, most)
    assert map_on_threads(lambda number: -number, range(20), 3, "test-map") == [-number for number in range(20)]
    assert not [thread for thread in threading.enumerate() if thread.name == "test-map"]


@pytest.mark.parametrize("threads", [1, 2])
def test_map_on_threads_begins_no_item_after_a_failure(threads: int) -> None:
    begun: list[int] = []

    def fail(number: int) -> None:
        begun.append(number)
        raise ValueError(f"item {number}")

    with pytest.raises(ValueError, match="item"):
        map_on_threads(fail, range(1000), threads, "test-map")
    assert len(begun) <= threads


def test_the_thread_of_a_dropped_worker_finishes_its_jobs_and_ends() -> None:
    worker, done = WorkerThread("dropped", lambda: None), threading.Event()
    thread = worker._thread
    worker.submit(lambda: time.sleep(0.05))
    worker.submit(done.set)
    del worker
    thread.join(WAIT_S)
    assert done.is_set()
    assert not thread.is_alive()
