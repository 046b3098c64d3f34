"""Probabilities over a support of token ids. Imported from ``contracts`` by all but that module."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgespec.decoding.rows import FloatArray, IdArray

__all__ = ["Distribution"]


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
    def likeliest(self) -> int:
        """The id with the highest probability; ties go to the lowest id."""
        return int(self.ids[int(np.argmax(self.probs))])

    def without(self, token: int) -> Distribution | None:
        """What is left without ``token``, not normalised; None if nothing is."""
        left = self.ids != token
        return Distribution(self.ids[left], self.probs[left]) if left.any() else None

    @property
    def entropy(self) -> float:
        """In nats."""
        return float(-np.dot(self.probs, np.log(self.probs)))
