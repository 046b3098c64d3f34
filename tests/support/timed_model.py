"""A fake model with invented times, on an invented clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from edgespec.interfaces.rows import Rows
from tests.support.fake_runtime import FakeModel, FakeSequence

T = TypeVar("T")

# Seconds of a forward, given its width, the tokens before it, and the number of forwards so far.
Price = Callable[[int, int, int], float]


def by_width(width: int, _length: int, _count: int) -> float:
    """10 ms, and 1 ms more for each further row."""
    return 0.010 + 0.001 * (width - 1)


class Machine:
    """An invented clock. Jobs on separate threads run at the same time, in the order in which forwards end."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.jobs = 0
        self._ends: list[float] = []
        self._changed = threading.Condition()

    def compute(self, seconds: Callable[[], float]) -> None:
        """Let a forward pass, in a job or without any."""
        with self._changed:
            end = self.now_s + seconds()
            self._ends.append(end)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(self._ends) >= self.jobs and end == min(self._ends), 30)
            self._ends.remove(end)
            self.now_s = end

    def run(self, job: Callable[[], T]) -> Future[T]:
        """Run a job on a separate thread."""
        future = Future[T]()

        def work() -> None:
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            finally:
                with self._changed:
                    self.jobs -= 1
                    self._changed.notify_all()

        with self._changed:
            self.jobs += 1
        threading.Thread(target=work, daemon=True).start()
        return future


class TimedModel(FakeModel):
    """The clock of its ``machine`` advances by ``price`` with every forward, and only then."""

    def __init__(self, price: Price = by_width, machine: Machine | None = None, **settings: object) -> None:
        super().__init__(**{"order": 4, **settings})  # type: ignore[arg-type]
        self.price = price
        self.machine = machine or Machine()
        self.count = 0

    @property
    def now_s(self) -> float:
        return self.machine.now_s

    @now_s.setter
    def now_s(self, seconds: float) -> None:
        self.machine.now_s = seconds

    def clock(self) -> float:
        return self.now_s

    def open(self, context_length: int) -> FakeSequence:
        sequence = TimedSequence(self, context_length)
        self.sequences.append(sequence)
        return sequence

    @property
    def open_sequences(self) -> int:
        return sum(not sequence.closed for sequence in self.sequences)


class TimedSequence(FakeSequence):
    def __init__(self, model: TimedModel, context_length: int) -> None:
        super().__init__(model, context_length)
        self._timed = model

    def forward(self, tokens: Sequence[int], rows: int) -> Rows:
        length = self.length
        scored = super().forward(tokens, rows)
        self._timed.count += 1
        self._timed.machine.compute(lambda: self._timed.price(len(tokens), length, self._timed.count))
        return scored

    def submit(self, job: Callable[[], T]) -> Future[T]:
        return self._timed.machine.run(job)
