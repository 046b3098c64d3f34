"""One restart after a back-off, and then the reason why there is none. On a clock of its own, without processes."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable

import pytest

from edgespec.errors import ClosedError, ModelFileError, WorkerLostError
from edgespec.runtimes.restarting import RESTART_AFTER_S, RestartingModel
from tests.support.fake_runtime import FakeModel


class Losable(FakeModel):
    lost: str | None = None


class House:
    """Starts models and keeps them; ``now`` is what time it is."""

    def __init__(self) -> None:
        self.now = 100.0
        self.started: list[Losable] = []
        self.fails: Callable[[], Exception] | None = None

    def start(self) -> Losable:
        if self.fails is not None:
            raise self.fails()
        self.started.append(Losable())
        return self.started[-1]

    def model(self) -> RestartingModel:
        return RestartingModel(self.start, restart_after_s=10.0, clock=lambda: self.now)

    def lose(self, reason: str = "it was ended by SIGKILL") -> None:
        self.started[-1].lost = reason


@pytest.fixture
def house() -> House:
    return House()


def test_while_nothing_is_lost_it_is_the_model(house: House) -> None:
    model = house.model()
    assert model.facts == house.started[0].facts
    assert model.open(16).context_length == model.open(16).context_length == 16
    assert (len(house.started), model.lost, model.off_because) == (1, None, None)


def test_a_first_start_that_fails_is_told_as_it_is(house: House) -> None:
    house.fails = lambda: ModelFileError("a", "broken")
    with pytest.raises(ModelFileError):
        house.model()


def test_a_lost_model_is_started_again_after_the_back_off_and_not_before(house: House) -> None:
    model = house.model()
    house.lose()
    assert model.lost == "it was ended by SIGKILL"
    for waited_s in (0.0, 5.0, 9.9):
        house.now = 100.0 + waited_s
        with pytest.raises(WorkerLostError, match="waits"):
            model.open(16)
        assert len(house.started) == 1
    house.now = 110.0
    assert model.lost is None
    sequence = model.open(16)
    assert len(house.started) == 2
    assert house.started[0].closed
    assert sequence in house.started[1].sequences
    assert model.off_because is None


def test_the_back_off_starts_when_the_loss_is_noticed(house: House) -> None:
    model = house.model()
    house.now = 500.0
    house.lose()
    assert model.off_because is None  # noticed here
    house.now = 509.0
    with pytest.raises(WorkerLostError, match="waits"):
        model.open(16)


def test_a_second_loss_is_for_good(house: House) -> None:
    model = house.model()
    house.lose()
    assert model.lost
    house.now = 110.0
    model.open(16)
    house.lose("it does not answer")
    for later_s in (0.0, 10.0, 1e6):
        house.now = 110.0 + later_s
        with pytest.raises(WorkerLostError, match="lost twice, now since it does not answer"):
            model.open(16)
    assert (
        model.off_because
        == model.lost
        == "fake is off: its worker process was lost twice, now since it does not answer"
    )
    assert len(house.started) == 2


def test_a_restart_that_fails_is_for_good_and_says_why(house: House) -> None:
    model = house.model()
    house.lose()
    assert model.lost
    house.now = 110.0
    house.fails = lambda: ModelFileError("a.gguf", "no such file", hint="fetch it again")
    for _ in range(2):
        with pytest.raises(WorkerLostError, match=r"did not start again: a\.gguf: no such file"):
            model.open(16)
    house.fails = None
    with pytest.raises(WorkerLostError, match="did not start again"):
        model.open(16)
    assert model.off_because is not None
    model.close()


def test_closing_closes_the_model_there_is(house: House) -> None:
    model = house.model()
    house.lose()
    assert model.lost
    house.now = 110.0
    model.open(16)
    model.close()
    model.close()
    assert [own.closed for own in house.started] == [True, True]
    with pytest.raises(ClosedError):
        model.open(16)


def test_defaults() -> None:
    parameters = inspect.signature(RestartingModel).parameters
    assert parameters["restart_after_s"].default == RESTART_AFTER_S == 5.0
    assert parameters["clock"].default is time.monotonic
