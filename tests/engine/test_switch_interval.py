"""The switch interval is shortened only while a thread is busy, and only during an answer."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from edgespec.engine.answer import SHORT_INTERVAL_S, SwitchInterval

LONGEST_S = 60.0


@pytest.fixture(autouse=True)
def interval() -> Iterator[float]:
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)


@contextmanager
def busy_thread() -> Iterator[None]:
    stop, running = threading.Event(), threading.Event()

    def spin() -> None:
        running.set()
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    running.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def look_often(turns: SwitchInterval) -> None:
    """Call ``look`` until the interval is shortened: on a busy machine the busy thread may not always run."""
    before, end = sys.getswitchinterval(), time.monotonic() + LONGEST_S
    while sys.getswitchinterval() == before and time.monotonic() < end:
        turns.look()


def test_next_to_a_busy_thread_the_switch_interval_is_shortened_and_restored(interval: float) -> None:
    with busy_thread(), SwitchInterval() as turns:
        look_often(turns)
        assert sys.getswitchinterval() == pytest.approx(SHORT_INTERVAL_S)
    assert sys.getswitchinterval() == interval


def test_the_switch_interval_is_restored_after_an_error(interval: float) -> None:
    def fail() -> None:
        with SwitchInterval() as turns:
            look_often(turns)
            raise ValueError

    with busy_thread(), pytest.raises(ValueError):  # noqa: PT011
        fail()
    assert sys.getswitchinterval() == interval


def test_a_switch_interval_that_is_already_shorter_is_not_changed() -> None:
    sys.setswitchinterval(SHORT_INTERVAL_S / 2)
    with busy_thread(), SwitchInterval() as turns:
        for _ in range(1600):
            turns.look()
        assert sys.getswitchinterval() == pytest.approx(SHORT_INTERVAL_S / 2)
    assert sys.getswitchinterval() == pytest.approx(SHORT_INTERVAL_S / 2)


def test_a_switch_interval_set_by_the_application_during_an_answer_is_kept() -> None:
    with busy_thread(), SwitchInterval() as turns:
        look_often(turns)
        sys.setswitchinterval(0.003)
    assert sys.getswitchinterval() == pytest.approx(0.003)


def test_overlapping_answers_restore_the_switch_interval(interval: float) -> None:
    with busy_thread():
        with SwitchInterval() as outer:
            look_often(outer)
            with SwitchInterval() as inner:
                for _ in range(1600):
                    inner.look()
        assert sys.getswitchinterval() == interval
