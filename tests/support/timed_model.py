"""A fake model with invented times, on an invented clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.interfaces.rows import Rows
from tests.support.fake_runtime import FakeModel, FakeSequence

# Seconds of a forward, given its width, the tokens before it, and the number of forwards so far.
Price = Callable[[int, int, int], float]


def by_width(width: int, _length: int, _count: int) -> float:
    """10 ms, and 1 ms more for each further row."""
    return 0.010 + 0.001 * (width - 1)


class TimedModel(FakeModel):
    """``clock`` advances by ``price`` with every forward, and only then."""

    def __init__(self, price: Price = by_width, **settings: object) -> None:
        super().__init__(**{"order": 4, **settings})  # type: ignore[arg-type]
        self.price = price
        self.now_s = 0.0
        self.count = 0

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
        self._timed.now_s += self._timed.price(len(tokens), length, self._timed.count)
        return scored
