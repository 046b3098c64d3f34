"""The Sequences of what drafts by a target's hidden rows: a layer of the target, or a model without keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import numpy as np

from edgespec.errors import InvalidRequestError
from edgespec.interfaces.features import Features, Hidden
from edgespec.interfaces.model import Sequence
from edgespec.interfaces.rows import IdArray
from edgespec.runtimes.native.cache import NativeCache
from edgespec.runtimes.native.sequence import NativeSequence


class DraftingSequence(NativeSequence):
    """The cache of a layer that drafts. Implements FollowingSequence."""

    _followed: Features | None = None
    _first = 0  # the text's position of the first token
    _lasting = 0  # the first tokens, those with the row that they will always have
    _last: tuple[int, Hidden] | None = None  # the number of tokens, and the output of the last one

    def follow(self, features: Features, target: Sequence) -> None:
        self._check_usable()
        self._followed = features

    def begin(self, position: int) -> None:
        super().rewind(0)
        self._first = position

    def rewind(self, length: int) -> None:
        super().rewind(min(length, self._lasting) if 0 <= length <= self._length else length)

    def _restore(self, parts: Iterable[bytes], length: int) -> None:
        super()._restore(parts, length)
        self._lasting = self._length

    def _cut(self, length: int) -> None:
        super()._cut(length)
        self._lasting = min(self._lasting, self._length)

    def _decode(self, ids: IdArray, position: int, rows: int) -> None:
        pairs = np.zeros((len(ids), self._native.width), dtype=np.float32)
        lasting = position
        for index, pair in enumerate(pairs):
            row, lasts = self._row_before(position + index)
            if row is not None:
                pair[:] = row
            if lasts and lasting == position + index:
                lasting += 1
        kept = self._compute(ids, position, rows, pairs)
        self._last = (position + len(ids), kept[-1]) if len(kept) else None
        if self._lasting >= position:
            self._lasting = lasting

    def _compute(self, ids: IdArray, position: int, rows: int, pairs: Hidden) -> Hidden:
        return self._native.decode(ids, position, rows, pairs=pairs, keep=len(ids) if rows else 0)

    def _row_before(self, number: int) -> tuple[Hidden | None, bool]:
        """The hidden row of the token before a token here, and whether it stays the same."""
        before, features = self._first + number - 1, self._followed
        if features is None or before < 0:
            return self._own(number), True
        row = features.row(before)
        return (self._own(number), before < features.first) if row is None else (row, True)

    def _own(self, number: int) -> Hidden | None:
        return self._last[1] if self._last is not None and self._last[0] == number else None


class BorrowingSequence(DraftingSequence):
    """Of a model without keys, which reads its target's cache. Implements FollowingSequence.

    It computes the rows that are scored alone. A drafted token has the position of the text's last token, as in
    training: there is no key behind it. Without a target it reads zeros, in the same time.
    """

    _lender: NativeCache | None = None

    def follow(self, features: Features, target: Sequence) -> None:
        super().follow(features, target)
        if not isinstance(target, NativeSequence):
            raise InvalidRequestError("a target of another runtime lends no cache")
        self._worker.run(lambda: self._native.borrow(target._native))
        self._lender = target._native

    def _compute(self, ids: IdArray, position: int, rows: int, pairs: Hidden) -> Hidden:
        if not rows:
            return pairs[:0]
        first, features = self._first + position + len(ids) - rows, self._followed
        if features is not None:
            first = min(first, features.end + 1 - rows)
        with contextlib.nullcontext() if self._lender is None else self._lender.lent():
            return self._native.decode(ids[-rows:], max(1, first), rows, pairs=pairs[-rows:], keep=rows)
