"""When the drafter begins to read ahead. Without models."""

from __future__ import annotations

import inspect
import threading
import time
import weakref

import pytest

from edgespec.engine.loaded_pair import IDLE_S, ReadAhead

WAIT_S = 20.0
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
    """Whether no timer is waiting any more, after a while."""
    end = time.monotonic() + WAIT_S
    while (waiting := _timers()) and time.monotonic() < end:
        time.sleep(0.005)
    return not waiting


def _timers() -> int:
    return sum(thread.name == "edgespec-read-ahead" for thread in threading.enumerate())


def test_it_begins_once_nothing_was_answered_for_a_while() -> None:
    owner, reader = Owner(), Reader()
    ahead = ReadAhead(owner, SOON_S)
    ahead.when_idle(reader)
    assert reader.reads.wait(WAIT_S)
    ahead.put_off()
    assert reader.stopped == 1
    assert none_left()


def test_an_answer_puts_it_off_and_the_next_pause_is_waited_for() -> None:
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
    assert none_left(), "the first timer gave way to the second"


def test_nothing_is_read_while_somebody_is_answered() -> None:
    owner, reader = Owner(), Reader()
    owner.answering = True
    ahead = ReadAhead(owner, SOON_S)
    ahead.when_idle(reader)
    assert none_left()
    assert not reader.reads.is_set()


def test_without_a_thread_to_wait_on_nothing_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    owner, reader = Owner(), Reader()
    ahead = ReadAhead(owner, SOON_S)
    ahead.when_idle(reader)
    ahead.put_off()
    assert not reader.reads.is_set()


@pytest.mark.parametrize("who", ["owner", "reader"])
def test_who_is_forgotten_is_not_kept_alive_and_nothing_is_read(who: str) -> None:
    owner, reader = Owner(), Reader()
    ahead, reads = ReadAhead(owner, SOON_S), reader.reads
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


def test_the_pause_is_that_of_a_person() -> None:
    assert inspect.signature(ReadAhead).parameters["idle_s"].default == IDLE_S == 0.5
