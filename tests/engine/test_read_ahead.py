"""When the drafter begins to read ahead, without models."""

from __future__ import annotations

import inspect
import threading
import time
import weakref

import pytest

from edgespec.engine.pair.loaded_pair import IDLE_S, ReadAhead

WAIT_S = 60.0
SOON_S = 0.02


class Owner:
    def __init__(self) -> None:
        self.answering = False


class Reader:
    def __init__(self) -> None:
        self.reads = threading.Event()
        self.stopped = 0

    def read_ahead(self) -> object:
        self.reads.set()
        return None

    def stop_reading(self) -> None:
        self.stopped += 1


def none_left() -> bool:
    """Whether no timer is waiting after a short time."""
    end = time.monotonic() + WAIT_S
    while (waiting := _timers()) and time.monotonic() < end:
        time.sleep(0.005)
    return not waiting


def _timers() -> int:
    return sum(thread.name == "edgespec-read-ahead" for thread in threading.enumerate())


def test_reading_ahead_begins_after_the_idle_time() -> None:
    owner, reader = Owner(), Reader()
    ahead = ReadAhead(owner, SOON_S)
    ahead.when_idle(reader)
    assert reader.reads.wait(WAIT_S)
    ahead.put_off()
    assert reader.stopped == 1
    assert none_left()


def test_an_answer_restarts_the_idle_time_before_reading_ahead() -> None:
    owner, reader = Owner(), Reader()
    ahead = ReadAhead(owner, WAIT_S)
    ahead.when_idle(reader)
    ahead.put_off()
    ahead.put_off()
    assert none_left()
    assert not reader.reads.is_set()
    soon = ReadAhead(owner, SOON_S)
    soon.when_idle(reader)
    soon.when_idle(reader)
    assert reader.reads.wait(WAIT_S)
    assert none_left(), "the second timer replaced the first"


def test_reading_ahead_does_not_begin_while_an_answer_runs() -> None:
    owner, reader = Owner(), Reader()
    owner.answering = True
    ahead = ReadAhead(owner, SOON_S)
    ahead.when_idle(reader)
    assert none_left()
    assert not reader.reads.is_set()


def test_if_no_thread_can_start_nothing_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    owner, reader = Owner(), Reader()
    ahead = ReadAhead(owner, SOON_S)
    ahead.when_idle(reader)
    ahead.put_off()
    assert not reader.reads.is_set()


@pytest.mark.parametrize("who", ["owner", "reader"])
def test_reading_ahead_keeps_no_forgotten_engine_or_session_alive(who: str) -> None:
    owner, reader = Owner(), Reader()
    ahead, reads = ReadAhead(owner, 0.5), reader.reads
    ahead.when_idle(reader)
    alive = weakref.ref(owner if who == "owner" else reader)
    if who == "owner":
        del owner
    else:
        del reader
    assert alive() is None
    assert none_left()
    assert not reads.is_set()
    ahead.put_off()


def test_the_idle_time_before_reading_ahead_is_half_a_second() -> None:
    assert inspect.signature(ReadAhead).parameters["idle_s"].default == IDLE_S == 0.5
