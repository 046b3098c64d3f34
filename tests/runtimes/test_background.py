"""A model that loads in the background, is restarted after one loss, and then stays off. No processes or clocks."""

from __future__ import annotations

import dataclasses
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from edgespec.errors import (
    ClosedError,
    EdgespecError,
    MemoryLimitError,
    ModelFileError,
    RuntimeUnavailableError,
    WorkerLostError,
)
from edgespec.interfaces.model import LoadsInBackground, Model
from edgespec.runtimes.background import RESTART_AFTER_S, BackgroundModel
from edgespec.runtimes.process.deadlines import Deadlines
from edgespec.runtimes.process.settings import WorkerSettings
from tests.support.fake_runtime import FakeModel

WAIT_S = 60.0
NEVER_S = 3600.0
KILLED = "it was ended by SIGKILL"
FACTS = FakeModel().facts


class Losable(FakeModel):
    lost: str | None = None


class Start:
    """One start, which ends with ``finish`` or ``close``."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.model: Losable | None = None
        self.error: Exception | None = None
        self.closed = 0

    def finish(self, error: Exception | None = None) -> None:
        self.model, self.error = Losable(), error
        self.over.set()

    def wait(self) -> Losable:
        assert self.over.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        if self.closed:
            raise ClosedError("given up")
        assert self.model is not None
        return self.model

    def close(self) -> None:
        self.closed += 1
        self.over.set()


class House:
    """Starts models and remembers each start."""

    def __init__(self) -> None:
        self.starts: list[Start] = []
        self.begun = threading.Condition()
        self.refuses: Exception | None = None

    def start(self) -> Start:
        if self.refuses is not None:
            raise self.refuses
        with self.begun:
            self.starts.append(Start())
            self.begun.notify_all()
        return self.starts[-1]

    def nth(self, number: int) -> Start:
        """The start with that number, once it has begun."""
        with self.begun:
            assert self.begun.wait_for(lambda: len(self.starts) > number, WAIT_S)
        return self.starts[number]


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture
def restarting(house: House) -> Iterator[Callable[[float], BackgroundModel]]:
    models: list[BackgroundModel] = []

    def make(restart_after_s: float = 0.0) -> BackgroundModel:
        where = " in a separate process"
        models.append(BackgroundModel(FACTS, house.start, restarts=1, restart_after_s=restart_after_s, where=where))
        models[-1].load()
        return models[-1]

    yield make
    for model in models:
        model.close()
        model.wait_until_ended()
    assert not [thread for thread in threading.enumerate() if thread.name == "edgespec-load-model"]


Make = Callable[..., BackgroundModel]


def started(house: House, model: BackgroundModel, number: int = 0) -> Losable:
    """The model of that start, which succeeds."""
    start = house.nth(number)
    start.finish()
    assert model.wait(WAIT_S)
    assert start.model is not None
    return start.model


def test_opening_a_sequence_does_not_wait_for_a_load(house: House, restarting: Make) -> None:
    model = restarting()
    assert isinstance(model, Model)
    assert isinstance(model, LoadsInBackground)
    assert model.facts is FACTS
    for _ in range(2):
        assert model.waits_because == "fake is still loading in a separate process"
        with pytest.raises(WorkerLostError, match="still loading"):
            model.open(16)
        assert not model.wait(0.0)
    first = started(house, model)
    assert model.waits_because is None
    assert model.open(16) in first.sequences
    assert len(house.starts) == 1


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ModelFileError("a.gguf", "broken"), ModelFileError),
        (RuntimeUnavailableError("no interpreter"), RuntimeUnavailableError),
        (OSError("no threads"), RuntimeUnavailableError),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_load_error_of_the_model_is_raised_unchanged(
    house: House, restarting: Make, error: Exception, raised: type[EdgespecError], at_once: bool
) -> None:
    house.refuses = error if at_once else None
    model = restarting()
    if not at_once:
        house.nth(0).finish(error)
    for use in (lambda: model.wait(WAIT_S), lambda: model.open(16), lambda: model.open(16)):
        with pytest.raises(raised, match=str(error)):
            use()
    assert model.waits_because is None
    assert len(house.starts) == (not at_once), "another start would fail the same way"


def test_a_lost_model_is_restarted_only_after_the_back_off(house: House, restarting: Make) -> None:
    model = restarting(NEVER_S)
    started(house, model).lost = KILLED
    for _ in range(2):
        assert (
            model.waits_because == "the worker process of fake is lost: it was ended by SIGKILL; "
            "it is being started again"
        )
        with pytest.raises(WorkerLostError, match="started again"):
            model.open(16)
    assert not model.wait(0.05)
    assert len(house.starts) == 1


def test_new_sequences_use_the_restarted_model(house: House, restarting: Make) -> None:
    model = restarting()
    first = started(house, model)
    held = model.open(16)
    first.lost = KILLED
    assert model.waits_because is not None
    second = started(house, model, 1)
    assert model.open(16) in second.sequences
    assert not first.closed, "its sequences must report the loss, not a close"
    assert held in first.sequences


def test_after_a_second_loss_the_model_stays_off(house: House, restarting: Make) -> None:
    model = restarting()
    started(house, model).lost = KILLED
    assert model.waits_because is not None
    started(house, model, 1).lost = "it does not answer"
    words = "fake is off: its worker process was lost twice, the last time because it does not answer"
    for use in (lambda: model.open(16), lambda: model.wait(WAIT_S), lambda: model.open(16)):
        with pytest.raises(WorkerLostError) as caught:
            use()
        assert caught.value.message == words
    assert model.waits_because is None
    assert len(house.starts) == 2


def test_a_process_lost_while_loading_is_restarted_once(house: House, restarting: Make) -> None:
    model = restarting()
    house.nth(0).finish(WorkerLostError("the worker process of fake is lost: it was ended by SIGKILL"))
    second = started(house, model, 1)
    assert model.open(16) in second.sequences
    second.lost = "it does not answer"
    with pytest.raises(WorkerLostError, match="lost twice, the last time because it does not answer"):
        model.open(16)


def test_waits_because_gives_the_reason_of_a_loss_while_loading(house: House, restarting: Make) -> None:
    model = restarting(NEVER_S)
    house.nth(0).finish(WorkerLostError("the worker process of fake is lost: it does not answer"))
    while "again" not in str(model.waits_because):
        assert not model.wait(0.01)
    assert model.waits_because == "the worker process of fake is lost: it does not answer; it is being started again"


@pytest.mark.parametrize("error", [WorkerLostError("it hangs"), ModelFileError("a.gguf", "it hangs", hint="fetch")])
def test_a_failed_restart_turns_the_model_off_with_the_reason(
    house: House, restarting: Make, error: EdgespecError
) -> None:
    model = restarting()
    started(house, model).lost = KILLED
    assert model.waits_because is not None
    house.nth(1).finish(error)
    for _ in range(2):
        with pytest.raises(WorkerLostError, match=r"fake is off: its worker process did not start again: .*it hangs"):
            model.wait(WAIT_S)
    with pytest.raises(WorkerLostError) as caught:
        model.open(16)
    assert caught.value.hint == error.hint
    assert len(house.starts) == 2


@pytest.mark.parametrize("losses", [0, 1])
def test_a_loss_detected_by_open_counts_immediately(
    house: House, restarting: Make, losses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = restarting()
    for number in range(losses):
        started(house, model, number).lost = KILLED
        assert model.waits_because is not None
    last = started(house, model, losses)

    def fail(_context_length: int) -> None:
        last.lost = KILLED
        raise WorkerLostError("the pipe broke")

    monkeypatch.setattr(last, "open", fail)
    with pytest.raises(WorkerLostError, match="lost twice" if losses else "started again"):
        model.open(16)


def test_closing_closes_the_lost_and_the_restarted_model(house: House, restarting: Make) -> None:
    model = restarting()
    first = started(house, model)
    first.lost = KILLED
    assert model.waits_because is not None
    second = started(house, model, 1)
    model.close()
    model.close()
    assert first.closed
    assert second.closed
    for use in (lambda: model.open(16), lambda: model.wait(0.0)):
        with pytest.raises(ClosedError):
            use()
    assert model.waits_because is None


def test_closing_cancels_a_start_in_progress(house: House, restarting: Make) -> None:
    model = restarting()
    start = house.nth(0)
    waiting: list[BaseException] = []

    def wait() -> None:
        try:
            model.wait(WAIT_S)
        except ClosedError as error:
            waiting.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    model.close()
    waiter.join(WAIT_S)
    assert len(waiting) == 1
    assert start.closed == 1


def test_closing_ends_a_back_off(house: House, restarting: Make) -> None:
    model = restarting(NEVER_S)
    started(house, model).lost = KILLED
    assert model.waits_because is not None
    model.close()
    assert len(house.starts) == 1


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_a_model_is_off_if_no_loading_thread_can_be_started(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    model = BackgroundModel(FACTS, house.start)
    with monkeypatch.context() as limited:
        refuse_threads(limited)
        model.load()
    assert model.waits_because is None
    for use in (lambda: model.open(16), lambda: model.wait(0.0)):
        with pytest.raises(MemoryLimitError, match="no thread can be started: can't start new thread"):
            use()
    model.close()
    model.wait_until_ended()
    assert not house.starts


def test_loading_time_is_counted_from_the_call_of_load(house: House) -> None:
    """Before its thread begins, loading time must not count from the machine's start."""
    model = BackgroundModel(FACTS, house.start)
    assert model.loading_for_s == 0.0
    with model._changed:  # keeps the loading thread from beginning
        model.load()
        assert model.waits_because is not None
        assert 0.0 <= model.loading_for_s < WAIT_S
    started(house, model)
    assert model.loading_for_s == 0.0
    model.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="forking a process with threads warns from 3.12 on")
def test_a_forked_process_loads_the_model_again(house: House, restarting: Make) -> None:
    model = restarting()
    house.nth(0)
    child = os.fork()
    if child == 0:  # the child has only this thread
        try:
            signal.alarm(int(WAIT_S))
            assert model.waits_because is not None
            started(house, model, 1)
            model.open(16)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    started(house, model)
    assert len(house.starts) == 1


def test_default_restart_delay_and_worker_settings_have_the_documented_values() -> None:
    assert inspect.signature(BackgroundModel).parameters["restart_after_s"].default == RESTART_AFTER_S == 5.0
    assert dataclasses.asdict(WorkerSettings()) == {
        "command": None,
        "environment": {},
        "deadlines": dataclasses.asdict(Deadlines()),
        "restart_after_s": 5.0,
    }
