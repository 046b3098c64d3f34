"""Rows of a trimmed output head, in the ids of the model it was trimmed from (VocabTrim, Goel et al., 2025)."""

from __future__ import annotations

import functools

import numpy as np

from edgespec.interfaces.rows import IdArray, LogitsArray, Rows

__all__ = ["TrimmedRows"]


class TrimmedRows(Rows):
    """Rows of a trimmed head in the ids of its source; tokens that were trimmed away score -infinity.

    ``rows`` has the kept columns only, ``ids`` (kept,) is ascending: a tie still goes to the lowest id.
    """

    def __init__(self, rows: Rows, ids: IdArray, vocabulary_size: int) -> None:
        # Not a method of its own: rows that refer to themselves would outlive their last use.
        super().__init__(rows.count, functools.partial(_spread, rows, ids, vocabulary_size))
        self._kept = rows
        self._ids = ids

    def argmax_row(self, index: int) -> int:
        return int(self._ids[self._kept.argmax_row(index)])

    def top_k(self, k: int) -> tuple[IdArray, LogitsArray]:
        if k > len(self._ids):
            return super().top_k(k)
        columns, scores = self._kept.top_k(k)
        return self._ids[columns], scores

    def scored(self, index: int) -> tuple[IdArray | None, LogitsArray]:
        return self._ids, self._kept.logits(index)

    def logits(self, index: int) -> LogitsArray:
        return self._row(index)  # newly made, so the caller's to keep


def _spread(rows: Rows, ids: IdArray, vocabulary_size: int, index: int) -> LogitsArray:
    full = np.full(vocabulary_size, -np.inf, dtype=np.float32)
    full[ids] = rows.logits(index)
    return full
