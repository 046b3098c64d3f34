"""The turns that the models of a process take while one of them computes for several sequences."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping

import pytest

from edgespec.runtimes.native.turns import CROWDED_S, Turns

WATCHDOG_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def complete(_now: float, _free_at: float) -> float:
    return 0.0


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WATCHDOG_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_no_model_waits_while_each_has_one_sequence() -> None:
    clock = Clock()
    turns = Turns(clock)
    assert not turns.enter(complete)
    assert not turns.enter(complete)
    turns.crowd()
    assert turns.enter(complete)
    turns.leave()
    clock.now += CROWDED_S
    assert not turns.enter(complete)


def start_steps(turns: Turns, waits: Mapping[str, float]) -> tuple[list[threading.Thread], list[str]]:
    """Threads with a step each, in this order, which wait as ``waits`` says; and the names of those that computed."""
    order: list[str] = []

    def take(name: str) -> None:
        entered = turns.enter(lambda _now, _free_at: waits[name])
        order.append(name)
        if entered:
            turns.leave()

    threads = [threading.Thread(target=take, args=(name,), daemon=True) for name in waits]
    steps = turns._steps
    for number, (thread, wait_s) in enumerate(zip(threads, waits.values(), strict=True)):
        thread.start()
        ready = wait_s == 0.0
        wait_until(lambda number=number, ready=ready: [each.ready for each in steps[number:]] == [ready])  # type: ignore[misc]
    return threads, order


def test_complete_steps_compute_in_order_and_those_that_wait_are_passed() -> None:
    turns = Turns(Clock())  # crowded, however long the threads take
    turns.crowd()
    assert turns.enter(complete)
    waits = {"waits": 1000.0, "first": 0.0, "second": 0.0}
    threads, order = start_steps(turns, waits)
    turns.leave()
    wait_until(lambda: len(order) == 2)
    waits["waits"] = 0.0
    turns.came(turns.caller, 1.0)
    for thread in threads:
        thread.join(WATCHDOG_S)
    assert order == ["first", "second", "waits"]


def test_a_step_that_waits_again_lets_those_behind_it_compute() -> None:
    """The model before it has ended its step, and so answers are between two forwards."""
    turns = Turns(Clock())  # crowded, however long the threads take
    turns.crowd()
    assert turns.enter(complete)
    waits = {"first": 0.0, "second": 0.0}
    threads, order = start_steps(turns, waits)
    waits["first"] = 1000.0
    turns.leave()
    wait_until(lambda: bool(order))
    waits["first"] = 0.0
    turns.went(turns.caller)
    for thread in threads:
        thread.join(WATCHDOG_S)
    assert order == ["second", "first"]


def test_a_step_that_is_collected_looks_again_when_the_time_is_over() -> None:
    turns = Turns()
    asked: list[float] = []

    def wait_s(now: float, _free_at: float) -> float:
        asked.append(now)
        return 0.01 if len(asked) == 1 else 0.0

    assert not turns.enter(wait_s)
    assert len(asked) == 2
    assert asked[1] - asked[0] >= 0.009


def test_a_step_knows_until_when_it_waited_for_another_model() -> None:
    clock = Clock()
    turns = Turns(clock)
    turns.crowd()
    assert turns.enter(complete)
    seen: list[float] = []

    def wait_s(_now: float, free_at: float) -> float:
        seen.append(free_at)
        return 0.0

    thread = threading.Thread(target=turns.enter, args=(wait_s,), daemon=True)
    thread.start()
    wait_until(lambda: bool(turns._steps) and turns._steps[0].ready)
    turns.came(turns.caller, 1.0)
    wait_until(lambda: len(seen) > 1)
    assert set(seen) == {-math.inf}, "another thread's request frees no turn"
    clock.now += CROWDED_S / 4
    turns.leave()
    thread.join(WATCHDOG_S)
    assert seen[-1] == clock.now
    turns.leave()


def test_a_step_waits_again_for_requests_only_once_behind_other_models() -> None:
    clock = Clock()
    turns = Turns(clock)
    turns.crowd()
    assert turns.enter(complete)
    waits, seen = [0.0], list[float]()

    def wait_s(_now: float, free_at: float) -> float:
        seen.append(free_at)
        return waits[0]

    thread = threading.Thread(target=turns.enter, args=(wait_s,), daemon=True)
    thread.start()
    for _ in range(2):
        wait_until(lambda: bool(turns._steps) and turns._steps[0].ready)
        waits[0] = 1000.0
        clock.now += CROWDED_S / 4
        turns.leave()
        wait_until(lambda: not turns._steps[0].ready)
        turns.crowd()
        assert turns.enter(complete)
        waits[0] = 0.0
        turns.came(turns.caller, 1.0)
    turns.leave()
    thread.join(WATCHDOG_S)
    turns.leave()
    assert len(set(seen)) == 2


def test_turns_are_crowded_for_a_while() -> None:
    clock = Clock()
    turns = Turns(clock)
    assert not turns.is_crowded
    turns.crowd()
    assert turns.is_crowded
    clock.now += CROWDED_S
    assert not turns.is_crowded


def test_a_job_that_another_thread_runs_is_the_callers() -> None:
    turns, clock = Turns(), Clock()
    own, found = turns.caller, []
    assert turns.caller is own
    thread = threading.Thread(target=turns.acting(lambda: found.append(turns.caller)))
    thread.start()
    thread.join(WATCHDOG_S)
    other: list[object] = []
    thread = threading.Thread(target=lambda: other.append(turns.caller))
    thread.start()
    thread.join(WATCHDOG_S)
    assert found == [own]
    assert other != [own]
    turns = Turns(clock)
    caller = turns.caller
    turns.came(caller, 5.0)
    assert caller.weight == 5.0
    turns.went(caller)
    assert (caller.weight, caller.left_at) == (None, clock.now)


def test_after_a_job_that_fails_the_thread_is_its_own_caller_again() -> None:
    turns = Turns()
    before = turns.caller
    acting: list[Callable[[], object]] = []
    thread = threading.Thread(target=lambda: acting.append(turns.acting(lambda: 1 // 0)))
    thread.start()
    thread.join(WATCHDOG_S)
    with pytest.raises(ZeroDivisionError):
        acting[0]()
    assert turns.caller is before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="forking a process with threads warns from 3.12 on")
def test_a_forked_process_does_not_wait_for_the_turns_of_the_first_process() -> None:
    turns = Turns()
    turns.crowd()
    assert turns.enter(complete)
    with turns._changed:
        child = os.fork()
        if child == 0:  # the child has only this thread
            signal.alarm(int(WATCHDOG_S))
            turns.crowd()
            os._exit(0 if turns.enter(complete) else 1)
        assert os.waitpid(child, 0)[1] == 0
    turns.leave()


def test_a_step_whose_wait_fails_is_no_longer_waited_for() -> None:
    turns = Turns()
    turns.crowd()
    assert turns.enter(complete)
    turns._changed.wait = _out_of_memory  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        turns.enter(complete)
    assert turns._steps == []


def _out_of_memory(timeout: float | None = None) -> bool:
    raise MemoryError
