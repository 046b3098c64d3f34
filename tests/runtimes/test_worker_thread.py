"""The thread behind a Sequence: order, exceptions, interrupts, and an end to everything."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError as FutureCancelledError
from typing import Any

import pytest

from edgespec.errors import ClosedError, MemoryLimitError
from edgespec.runtimes.thread import WorkerThread, map_on_threads

WAIT_S = 30


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


def test_one_thread_of_that_name_runs_everything(worker: WorkerThread) -> None:
    threads = {worker.run(threading.current_thread) for _ in range(5)}
    assert {thread.name for thread in threads} == {"test-worker"}
    assert len(threads) == 1
    assert threads.pop().daemon  # a process can always end


@pytest.mark.parametrize("chosen", [0, 2**24])
def test_the_processs_own_stack_size_is_as_before(interrupted: Interrupted, chosen: int) -> None:
    before = threading.stack_size(chosen)
    try:
        worker = WorkerThread("test-worker", interrupted)
        assert threading.stack_size() == chosen
        worker.close()
    finally:
        threading.stack_size(before)


def test_jobs_run_in_the_order_they_were_handed_over(worker: WorkerThread) -> None:
    release, seen = hold(worker), list[int]()
    futures = [worker.submit(lambda own=number: seen.append(own)) for number in range(50)]  # type: ignore[misc]
    release.set()
    for future in futures:
        future.result(WAIT_S)
    assert seen == list(range(50))


def test_callers_on_many_threads_each_get_their_own_result(worker: WorkerThread) -> None:
    found: dict[int, list[int]] = {}

    def call(caller: int) -> None:
        found[caller] = [worker.run(lambda: caller * 1000 + step) for step in range(100)]  # noqa: B023

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(WAIT_S)
    assert found == {caller: [caller * 1000 + step for step in range(100)] for caller in range(4)}


def test_nested_run_is_in_place(worker: WorkerThread) -> None:
    assert (
        worker.run(lambda: worker.run(lambda: worker.run(lambda: threading.current_thread().name))) == "test-worker"
    )


@pytest.mark.parametrize("error", [ValueError("a"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
def test_every_exception_reaches_the_caller_and_the_thread_lives(worker: WorkerThread, error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        worker.run(fail)
    assert raised.value is error
    assert worker.submit(fail).exception(WAIT_S) is error
    assert worker.run(lambda: 1) == 1


def test_an_exception_of_the_job_is_not_an_interrupt(worker: WorkerThread, interrupted: Interrupted) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.run(fail)
    assert interrupted.count == 0


def test_a_future_taken_back_before_its_turn_is_not_run(worker: WorkerThread) -> None:
    release, ran = hold(worker), list[int]()
    future = worker.submit(lambda: ran.append(1))
    assert future.cancel()
    release.set()
    assert worker.run(lambda: "alive") == "alive"
    assert ran == []
    with pytest.raises(FutureCancelledError):
        future.result(0)


def test_a_running_job_cannot_be_taken_back(worker: WorkerThread) -> None:
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


@pytest.mark.skipif(sys.platform == "win32", reason="a thread cannot be sent SIGINT on Windows")
def test_an_interrupted_wait_tells_the_job_to_end_and_waits_for_it(
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
    assert len(ended) == 1  # not still at work when the caller goes on
    assert worker.run(lambda: 1) == 1


def test_an_interrupt_between_the_start_and_the_wait_ends_the_job_too(
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


def test_an_interrupt_before_its_turn_takes_the_job_back(
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
    assert (interrupted.count, ran) == (0, [])  # what another caller waits for goes on


def test_close_finishes_what_was_handed_over(interrupted: Interrupted) -> None:
    worker = WorkerThread("test-worker", interrupted)
    release = hold(worker)
    futures = [worker.submit(lambda own=number: own) for number in range(10)]  # type: ignore[misc]
    threading.Timer(0.05, release.set).start()
    worker.close()
    assert [future.result(0) for future in futures] == list(range(10))


def test_after_close_there_is_no_thread_and_no_work(interrupted: Interrupted) -> None:
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
def test_a_forked_process_is_told_and_can_close_instead_of_waiting_for_ever(worker: WorkerThread) -> None:
    child = os.fork()
    if child == 0:  # no thread but this one lives here
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


def test_without_a_thread_to_start_there_is_a_sentence_and_a_hint(
    interrupted: Interrupted, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.stack_size()
    limit_threads(monkeypatch, 0)
    with pytest.raises(MemoryLimitError, match="no thread can be started: can't start new thread") as raised:
        WorkerThread("test-worker", interrupted)
    assert "ulimit -u" in str(raised.value.hint)
    assert threading.stack_size() == before


def test_close_from_the_thread_itself_and_from_many_others(interrupted: Interrupted) -> None:
    worker = WorkerThread("test-worker", interrupted)
    release = hold(worker)
    future = worker.submit(worker.close)
    closers = [threading.Thread(target=worker.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    release.set()
    # Handed over before the first close or refused: never lost.
    assert future.result(WAIT_S) is None
    for closer in closers:
        closer.join(WAIT_S)
        assert not closer.is_alive()


def test_a_submit_that_races_with_close_is_refused_or_done(interrupted: Interrupted) -> None:
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


def test_results_and_jobs_are_let_go_at_once(worker: WorkerThread) -> None:
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
            time.sleep(0.001)  # the thread lets go just after it has delivered
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


def test_a_job_is_told_to_end_once_its_event_is_set(worker: WorkerThread, interrupted: Interrupted) -> None:
    stop = threading.Event()

    def job() -> str:
        stop.set()
        assert interrupted.happened.wait(WAIT_S)
        return "what there is"

    assert worker.run(job, stop) == "what there is"
    assert interrupted.count == 1
    assert worker.run(lambda: "quick", threading.Event()) == "quick"
    assert interrupted.count == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_items_are_shared_among_threads_and_results_are_in_order(threads: int) -> None:
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
def test_items_are_shared_among_the_threads_that_can_be_started(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    limit_threads(monkeypatch, most)
    assert map_on_threads(lambda number: -number, range(20), 3, "test-map") == [-number for number in range(20)]
    assert not [thread for thread in threading.enumerate() if thread.name == "test-map"]


@pytest.mark.parametrize("threads", [1, 2])
def test_after_a_failure_nothing_more_is_begun(threads: int) -> None:
    begun: list[int] = []

    def fail(number: int) -> None:
        begun.append(number)
        raise ValueError(f"item {number}")

    with pytest.raises(ValueError, match="item"):
        map_on_threads(fail, range(1000), threads, "test-map")
    assert len(begun) <= threads
