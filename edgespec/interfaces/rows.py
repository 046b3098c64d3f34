"""The scores of a forward, sparse distributions, and the array types that numbers come in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgespec.errors import NonFiniteLogitsError, StaleRowsError
from edgespec.interfaces.drawing import Drawn, DrawRequest, FloatArray, IdArray, LogitsArray, draw_from, highest

__all__ = ["Distribution", "FloatArray", "IdArray", "LogitsArray", "Rows"]


class Rows:
    """The scores of the last ``count`` positions of one forward.

    ``read_row(i)`` returns row i as float32 of shape (vocabulary,); it may be a view of native memory that the
    Sequence's next forward overwrites, so every access first asks ``is_current``. A runtime with native
    reductions overrides ``argmax_row``, ``top_k``, ``draw`` and ``first``; everything else inherits these.
    """

    def __init__(
        self, count: int, read_row: Callable[[int], LogitsArray], is_current: Callable[[], bool] = lambda: True
    ) -> None:
        self.count = count
        self._read_row = read_row
        self._is_current = is_current

    def _check(self, index: int) -> None:
        if not self._is_current():
            raise StaleRowsError("these rows were overwritten by a later forward, rewind or close")
        if not 0 <= index < self.count:
            raise IndexError(f"row {index} of {self.count}")

    def _row(self, index: int) -> LogitsArray:
        self._check(index)
        return self._read_row(index)

    def argmax_row(self, index: int) -> int:
        """The id with the highest score of row ``index``; ties go to the lowest id.

        Raises NonFiniteLogitsError if the row holds a NaN or +infinity.
        """
        row = self._row(index)
        best = int(np.argmax(row))  # numpy counts NaN as the maximum, so one look at the winner finds both
        if not np.isfinite(row[best]):
            raise NonFiniteLogitsError(f"the target's logits hold {row[best]} at token id {best}")
        return best

    def argmax(self) -> IdArray:
        """``argmax_row`` of every row: int64 of shape (count,)."""
        return np.array([self.argmax_row(i) for i in range(self.count)], dtype=np.int64)

    def top_k(self, k: int) -> tuple[IdArray, LogitsArray]:
        """The k best (ids, scores) of every row, best first, ties by lowest id; both of shape (count, k)."""
        ids = np.empty((self.count, k), dtype=np.int64)
        scores = np.empty((self.count, k), dtype=np.float32)
        for i in range(self.count):
            row = self._row(i)
            order = highest(row, k)
            ids[i], scores[i] = order, row[order]
        return ids, scores

    def logits(self, index: int) -> LogitsArray:
        """Row ``index``: float32 of shape (vocabulary,), the caller's to keep.

        Raises StaleRowsError after the Sequence's next forward, rewind or close.
        """
        return np.array(self._row(index), dtype=np.float32)

    def scored(self, index: int) -> tuple[IdArray | None, LogitsArray]:
        """The tokens that were scored, None for all, and the score of each, the caller's to keep. As ``logits``."""
        return None, self.logits(index)

    def draw(self, index: int, request: DrawRequest, ids: IdArray | None = None) -> Drawn:
        """Draw a token from row ``index``: equal requests and scores give the same token in every implementation.

        ``ids`` are the tokens of the scores, ascending; None: 0, 1, 2, ... Raises NonFiniteLogitsError if a score is
        NaN or the highest is infinite, and StaleRowsError.
        """
        return draw_from(self._row(index), request, ids)

    def first(self, size: int) -> Rows:
        """The same rows with the scores of ids below ``size`` only: a vocabulary may be padded at its end."""
        return Rows(self.count, lambda index: self._row(index)[:size])

    def copy(self) -> Rows:
        """The same rows, detached from the Sequence: valid permanently."""
        kept = [self.logits(i) for i in range(self.count)]
        return Rows(self.count, kept.__getitem__)


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Probabilities over a support: ``ids`` int64 ascending, ``probs`` float64 > 0 summing to 1, same shape."""

    ids: IdArray
    probs: FloatArray

    def dense(self, vocabulary_size: int) -> FloatArray:
        """Float64 of shape (vocabulary_size,), zero off the support."""
        full = np.zeros(vocabulary_size, dtype=np.float64)
        full[self.ids] = self.probs
        return full

    def normalised(self) -> Distribution:
        """The same distribution, summing to one to the last bit that float64 allows."""
        return Distribution(self.ids, self.probs / self.probs.sum())

    @property
    def peak(self) -> float:
        """The highest probability."""
        return float(self.probs.max())

    @property
    def entropy(self) -> float:
        """In nats."""
        return float(-np.dot(self.probs, np.log(self.probs)))
