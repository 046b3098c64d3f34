"""Rows of scores that are reduced in native memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from edgespec.errors import NonFiniteLogitsError
from edgespec.interfaces.drawing import Drawn, DrawRequest
from edgespec.interfaces.rows import IdArray, LogitsArray, Rows


class Scores(Protocol):
    """The scores of a cache's last decode."""

    def row(self, index: int) -> LogitsArray: ...

    def argmax(self, index: int) -> int: ...

    def top_k(self, index: int, ids: IdArray, scores: LogitsArray) -> None: ...

    def draw(self, index: int, request: DrawRequest, ids: IdArray | None, size: int | None) -> Drawn: ...


class NativeRows(Rows):
    """Rows reduced in native memory, with the interpreter lock held: a search takes microseconds.

    ``size``: how many scores of each row count, None for all.
    """

    def __init__(self, cache: Scores, count: int, is_current: Callable[[], bool], size: int | None = None) -> None:
        super().__init__(count, lambda index: cache.row(index)[:size], is_current)
        self._cache = cache
        self._size = size

    def argmax_row(self, index: int) -> int:
        self._check(index)
        best = self._cache.argmax(index)
        if best < 0:
            value = self._cache.row(index)[-1 - best]
            raise NonFiniteLogitsError(f"the target's logits hold {value} at token id {-1 - best}")
        if self._size is not None and best >= self._size:
            return self.draw(index, DrawRequest()).tokens[0]
        return best

    def top_k(self, k: int) -> tuple[IdArray, LogitsArray]:
        if self._size is not None:
            return super().top_k(k)
        ids = np.empty((self.count, k), dtype=np.int64)
        scores = np.empty((self.count, k), dtype=np.float32)
        for index in range(self.count):
            self._check(index)
            self._cache.top_k(index, ids[index], scores[index])
        return ids, scores

    def draw(self, index: int, request: DrawRequest, ids: IdArray | None = None) -> Drawn:
        self._check(index)
        return self._cache.draw(index, request, ids, self._size)

    def first(self, size: int) -> Rows:
        return NativeRows(self._cache, self.count, self._is_current, size)

    def logits(self, index: int) -> LogitsArray:
        return self._row(index)  # already a copy
