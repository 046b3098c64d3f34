"""Scores as llama.cpp holds them, reduced without waiting for other Python threads."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from edgespec.interfaces.rows import Rows
from edgespec.runtimes.llama.context import NativeContext

__all__ = ["LlamaRows"]

# numpy's argmax over 150 000 scores takes 0.02 ms; one that took this long had to wait for the interpreter lock.
_CONTENDED_S = 0.0005

# Rows reduced natively after such a wait, before numpy is tried again.
_NATIVE_ROWS = 64


class LlamaRows(Rows):
    """Rows whose argmax does not wait for other Python threads.

    numpy gives the interpreter lock away while it searches, and beside a busy Python thread gets it back only
    after that thread's 5 ms are over. When that has happened, the next rows are reduced by llama.cpp's greedy
    sampler with the lock held (0.25 ms for 150 000 scores). It skips a NaN that is not the first score, which the
    numpy of every 64th row then still finds.
    """

    def __init__(
        self, native: NativeContext, first: int, count: int, head_rows: int, is_current: Callable[[], bool]
    ) -> None:
        super().__init__(count, lambda index: native.row(first + index, head_rows), is_current)
        self._native = native
        self._first = first

    def argmax_row(self, index: int) -> int:
        native = self._native
        if native.native_rows_left > 0:
            row = self._row(index)
            native.native_rows_left -= 1
            best = native.argmax(self._first + index)
            if np.isfinite(row[best]):
                return best
        started = time.perf_counter()
        best = super().argmax_row(index)
        if time.perf_counter() - started > _CONTENDED_S and native.can_reduce:
            native.native_rows_left = _NATIVE_ROWS
        return best
