"""The turns that the models of a process take while one of them computes for several sequences."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time

import pytest

from edgespec.runtimes.native.turns import CROWDED_S, FIRST_S, NEXT_S, Turns

WATCHDOG_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_no_model_waits_while_each_has_one_sequence() -> None:
    clock = Clock()
    turns = Turns(clock)
    assert not turns.enter(1.0, 0.0)
    turns.crowd()
    assert turns.enter(1.0, 0.0)
    turns.leave(1.0)
    clock.now += CROWDED_S
    assert not turns.enter(1.0, 0.0)


def test_the_lighter_model_goes_first_and_its_next_step_is_awaited() -> None:
    turns = Turns()
    turns.crowd()
    assert turns.enter(5.0, math.inf)
    order: list[float] = []

    def take(weight: float) -> None:
        turns.crowd()
        entered = turns.enter(weight, WATCHDOG_S)
        order.append(weight)
        if entered:
            turns.leave(weight)

    threads = [threading.Thread(target=take, args=(weight,), daemon=True) for weight in (9.0, 1.0)]
    for number, thread in enumerate(threads):
        thread.start()
        deadline = time.monotonic() + WATCHDOG_S
        while len(turns._waiting) <= number:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    turns.leave(5.0)
    for thread in threads:
        thread.join(WATCHDOG_S)
    assert order == [1.0, 9.0]
    now = turns._clock()
    turns._left = {1.0: now}
    assert turns._wait_s((9.0, False), now) == pytest.approx(NEXT_S)
    assert turns._wait_s((9.0, True), now) == 0.0, "it has waited long enough"
    assert turns._wait_s((1.0, False), now) == 0.0


def test_a_heavier_model_waits_while_a_lighter_ones_step_is_collected() -> None:
    turns = Turns(Clock())
    turns.crowd()
    with turns.gathering(1.0):
        assert turns._wait_s((9.0, False), 100.0) == math.inf
        assert turns._wait_s((9.0, True), 100.0) == 0.0, "it has waited long enough"
        assert turns._wait_s((1.0, False), 100.0) == 0.0
    assert turns._wait_s((9.0, False), 100.0) == 0.0


def test_after_a_step_of_the_heavier_model_the_lighter_ones_first_step_is_awaited() -> None:
    clock = Clock()
    turns = Turns(clock)
    turns.crowd()
    turns.leave(9.0)
    assert turns._wait_s((9.0, False), clock.now) == 0.0, "no lighter model computes"
    turns.leave(1.0)
    clock.now += 2 * NEXT_S
    turns.leave(9.0)
    assert turns._wait_s((9.0, False), clock.now) == pytest.approx(FIRST_S)
    assert turns._wait_s((1.0, False), clock.now) == 0.0
    clock.now += CROWDED_S
    turns.leave(9.0)
    assert turns._wait_s((9.0, False), clock.now) == 0.0, "the lighter model has not computed for long"


def test_turns_are_crowded_for_a_while() -> None:
    clock = Clock()
    turns = Turns(clock)
    assert not turns.is_crowded
    turns.crowd()
    assert turns.is_crowded
    clock.now += CROWDED_S
    assert not turns.is_crowded


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="forking a process with threads warns from 3.12 on")
def test_a_forked_process_does_not_wait_for_the_turns_of_the_first_process() -> None:
    turns = Turns()
    turns.crowd()
    assert turns.enter(1.0, math.inf)
    with turns._changed:
        child = os.fork()
        if child == 0:  # the child has only this thread
            signal.alarm(int(WATCHDOG_S))
            turns.crowd()
            os._exit(0 if turns.enter(2.0, 0.0) else 1)
        assert os.waitpid(child, 0)[1] == 0
    turns.leave(1.0)


def test_a_model_whose_wait_fails_is_no_longer_waited_for() -> None:
    turns = Turns()
    turns.crowd()
    assert turns.enter(9.0, 0.0)
    turns._changed.wait = _out_of_memory  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        turns.enter(1.0, 0.0)
    assert turns._waiting == []


def _out_of_memory(timeout: float | None = None) -> bool:
    raise MemoryError
