"""A model whose rows depend on how they were computed, by a rule of the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from edgespec.errors import ClosedError, RewindError
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.rows import LogitsArray, Rows
from tests.support.fake_runtime import FakeModel

VOCABULARY = 8

# The noise added to a row, given the width of the forward, the row's position, and the width that wrote each position
# up to it.
Rule = Callable[[int, int, Sequence[int]], float]


def no_noise(_width: int, _position: int, _written: Sequence[int]) -> float:
    return 0.0


class NoisyModel:
    def __init__(self, rule: Rule = no_noise, **facts: object) -> None:
        self.rule = rule
        self.facts: ModelFacts = replace(FakeModel(VOCABULARY).facts, **facts)  # type: ignore[arg-type]
        self.opened: list[NoisySequence] = []
        self.closed = False

    def open(self, context_length: int) -> NoisySequence:
        self.opened.append(NoisySequence(self, context_length))
        return self.opened[-1]

    def close(self) -> None:
        self.closed = True


class NoisySequence:
    def __init__(self, model: NoisyModel, context_length: int) -> None:
        self.context_length = context_length
        self.closed = False
        self.widths: list[int] = []
        self.rows: list[int] = []
        self._model = model
        self._tokens: list[int] = []
        self._written: list[int] = []

    @property
    def length(self) -> int:
        return len(self._tokens)

    def forward(self, tokens: Sequence[int], rows: int) -> Rows:
        if self.closed:
            raise ClosedError("closed")
        assert self.length + len(tokens) <= self.context_length
        self.widths.append(len(tokens))
        self.rows.append(rows)
        self._tokens.extend(tokens)
        self._written.extend([len(tokens)] * len(tokens))
        first = self.length - rows
        found = [self._row(len(tokens), position) for position in range(first, self.length)]
        return Rows(rows, found.__getitem__)

    def _row(self, width: int, position: int) -> LogitsArray:
        base = np.sin(np.arange(VOCABULARY) * (1 + self._tokens[position]) + position)
        base[position % VOCABULARY] += self._model.rule(width, position, self._written[: position + 1])
        return base.astype(np.float32)

    def rewind(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise RewindError("beyond")
        del self._tokens[length:], self._written[length:]

    def close(self) -> None:
        self.closed = True
