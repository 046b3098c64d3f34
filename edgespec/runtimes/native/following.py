"""The Sequence of a layer that drafts: it reads its target's hidden rows."""

from __future__ import annotations

import numpy as np

from edgespec.interfaces.features import Features, Hidden
from edgespec.interfaces.rows import IdArray
from edgespec.runtimes.native.sequence import NativeSequence


class DraftingSequence(NativeSequence):
    """The cache of a layer that drafts. Implements FollowingSequence."""

    _followed: Features | None = None
    _first = 0  # the text's position of the first token
    _lasting = 0  # the first tokens, those with the row that they will always have
    _last: tuple[int, Hidden] | None = None  # the number of tokens, and the output of the last one

    def follow(self, features: Features) -> None:
        self._check_usable()
        self._followed = features

    def begin(self, position: int) -> None:
        super().rewind(0)
        self._first = position

    def rewind(self, length: int) -> None:
        super().rewind(min(length, self._lasting) if 0 <= length <= self._length else length)

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
        kept = self._native.decode(ids, position, rows, pairs=pairs, keep=rows > 0)
        self._last = None if kept is None else (position + len(ids), kept[-1])
        if self._lasting >= position:
            self._lasting = lasting

    def _row_before(self, number: int) -> tuple[Hidden | None, bool]:
        """The hidden row of the token before a token here, and whether it stays the same."""
        before, features = self._first + number - 1, self._followed
        if features is None or before < 0:
            return self._own(number), True
        row = features.row(before)
        return (self._own(number), before < features.first) if row is None else (row, True)

    def _own(self, number: int) -> Hidden | None:
        return self._last[1] if self._last is not None and self._last[0] == number else None
