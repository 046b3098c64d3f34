"""When a load begins while nobody waits for an answer. Without models."""

from __future__ import annotations

import inspect
import threading
import time
import weakref

import pytest

from edgespec.engine.loaded_pair import IDLE_S, LoadAhead
from edgespec.interfaces.model import LoadsInBackground

WAIT_S = 20.0
SOON_S = 0.02


class Owner:
    """With a model to be loaded, until it is. Is its own model."""

    def __init__(self) -> None:
        self.answering = False
        self.cheap = True
        self.begun = threading.Event()
        self.waits_because: str | None = "not loaded"

    def cheap_load(self) -> LoadsInBackground | None:
        return self if self.cheap and not self.begun.is_set() else None

    def load(self) -> None:
        self.begun.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        raise AssertionError("nobody waits")


def timers() -> int:
    return sum(thread.name == "edgespec-load-ahead" for thread in threading.enumerate())


def none_left() -> bool:
    end = time.monotonic() + WAIT_S
    while timers() and time.monotonic() < end:
        time.sleep(0.005)
    return timers() == 0


def test_it_begins_once_nothing_was_answered_for_a_while() -> None:
    owner = Owner()
    ahead = LoadAhead(owner, SOON_S)
    ahead.when_idle()
    assert owner.begun.wait(WAIT_S)
    ahead.when_idle()
    assert none_left(), "there is nothing left to load"


def test_an_answer_puts_it_off_and_the_next_pause_is_waited_for() -> None:
    owner = Owner()
    ahead = LoadAhead(owner, WAIT_S)
    ahead.when_idle()
    ahead.put_off()
    ahead.put_off()
    assert none_left()
    assert not owner.begun.is_set()
    soon = LoadAhead(owner, SOON_S)
    soon.when_idle()
    soon.when_idle()
    assert owner.begun.wait(WAIT_S)
    assert none_left(), "the first timer gave way to the second"


@pytest.mark.parametrize("why", ["answering", "not cheap any more"])
def test_what_is_so_when_the_time_has_come_counts(why: str) -> None:
    owner = Owner()
    LoadAhead(owner, SOON_S).when_idle()
    owner.answering, owner.cheap = why == "answering", why == "answering"
    assert none_left()
    assert not owner.begun.is_set()


def test_without_a_thread_to_wait_on_nothing_is_loaded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    owner = Owner()
    ahead = LoadAhead(owner, SOON_S)
    ahead.when_idle()
    ahead.put_off()
    assert not owner.begun.is_set()


def test_an_owner_that_is_forgotten_is_not_kept_alive() -> None:
    owner = Owner()
    ahead, begun, alive = LoadAhead(owner, SOON_S), owner.begun, weakref.ref(owner)
    ahead.when_idle()
    del owner
    assert alive() is None
    assert none_left()
    assert not begun.is_set()
    ahead.when_idle()
    assert none_left()


def test_the_pause_is_that_of_a_person() -> None:
    assert inspect.signature(LoadAhead).parameters["idle_s"].default == IDLE_S == 0.5


class Reader:
    def __init__(self) -> None:
        self.reads = threading.Event()
        self.stopped = 0

    def read_ahead(self) -> object:
        self.reads.set()
        return None

    def stop_reading(self) -> None:
        self.stopped += 1


def test_once_the_drafter_is_loaded_it_reads_the_latest_conversation() -> None:
    owner, reader = Owner(), Reader()
    ahead = LoadAhead(owner, SOON_S)
    ahead.when_idle(reader)
    assert owner.begun.wait(WAIT_S)
    assert none_left()
    assert not reader.reads.is_set(), "it had to be loaded first"
    ahead.when_idle(reader)
    assert reader.reads.wait(WAIT_S)
    ahead.put_off()
    assert reader.stopped == 1
    owner.answering = True
    reader.reads.clear()
    ahead.when_idle(reader)
    assert none_left()
    assert not reader.reads.is_set(), "somebody is answered"


def test_a_conversation_that_is_forgotten_is_not_read() -> None:
    owner, reader = Owner(), Reader()
    owner.cheap = False
    ahead, gone = LoadAhead(owner, SOON_S), weakref.ref(reader)
    ahead.when_idle(reader)
    del reader
    assert none_left()
    assert gone() is None
    ahead.put_off()
