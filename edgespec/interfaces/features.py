"""What a drafter that reads its target gets: the target's hidden rows, and the Sequences that give and take them."""

from __future__ import annotations

import threading
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgespec.interfaces.model import Sequence

Hidden = NDArray[np.float32]

# Positions that are kept: as many as a cache can always drop (interfaces/model.py). A choice: of a model 2560 wide
# they take 21 MB, and up to 42 with the room behind them. A drafter skips what a longer prompt has before them.
MOST_ROWS = 2048


class Features:
    """The hidden rows of a text's last positions, behind the target's last norm: float32, (width,) each.

    It holds the positions from ``first`` on to ``end`` - 1, at most ``MOST_ROWS``. For any thread.
    """

    def __init__(self, width: int, first: int = 0) -> None:
        self.width = width
        self._first = first
        self._rows = np.empty((0, width), dtype=np.float32)
        self._at, self._count = 0, 0  # those in use
        self._lock = threading.Lock()

    @property
    def first(self) -> int:
        with self._lock:
            return self._first

    @property
    def end(self) -> int:
        with self._lock:
            return self._first + self._count

    @property
    def begins(self) -> int:
        """The first position of the text whose token has the row of the token before; 0 for a whole text."""
        first = self.first
        return first + 1 if first else 0

    def put(self, position: int, rows: Hidden) -> None:
        """Take the rows from ``position`` on, (at most MOST_ROWS, width), in place of those there.

        Behind a gap only they are held.
        """
        with self._lock:
            self._cut(position)
            if position != self._first + self._count:
                self._first, self._at, self._count = position, 0, 0
            if self._at + self._count + len(rows) > len(self._rows):
                self._move(len(rows))
            end = self._at + self._count
            self._rows[end : end + len(rows)] = rows
            self._count += len(rows)
            self._drop(self._count - MOST_ROWS)

    def _move(self, more: int) -> None:
        """Make room behind the rows: twice what is needed."""
        self._drop(self._count + more - MOST_ROWS)
        grown = np.empty((2 * (self._count + more), self.width), dtype=np.float32)
        grown[: self._count] = self._rows[self._at : self._at + self._count]
        self._rows, self._at = grown, 0

    def _drop(self, count: int) -> None:
        """Forget the first rows."""
        dropped = max(0, count)
        self._first += dropped
        self._at += dropped
        self._count -= dropped

    def cut(self, length: int) -> None:
        """Forget the positions from ``length`` on."""
        with self._lock:
            self._cut(length)

    def _cut(self, length: int) -> None:
        self._count = min(self._count, max(0, length - self._first))
        if not self._count:
            self._first, self._at = min(self._first, length), 0

    def row(self, position: int) -> Hidden | None:
        """A copy of the row of a position, (width,); None if it is not held."""
        with self._lock:
            index = position - self._first
            return self._rows[self._at + index].copy() if 0 <= index < self._count else None

    def copy(self) -> Features:
        """The same rows, for a text that continues differently."""
        with self._lock:
            other = Features(self.width, self._first)
            other._rows, other._count = self._rows[self._at : self._at + self._count].copy(), self._count
        return other


@runtime_checkable
class FeatureSequence(Sequence, Protocol):
    """A target's Sequence that can keep its hidden rows."""

    def keep_features(self, *, scored: bool = False) -> Features:
        """From the next forward on keep the hidden row of every token, prompts included. Always the same object.

        With ``scored``, unless all were asked for: of scored tokens alone, which takes no time. A rewind cuts it, a
        fork has a copy, and a saved cache holds none of it.
        """


@runtime_checkable
class FollowingSequence(Sequence, Protocol):
    """A Sequence of a model that drafts by another one's hidden rows: each token needs the row of the token before.

    That is the followed target's where it has one. Behind it, so that several tokens can be drafted, it is what this
    Sequence gave for the token before; else, as for a text's first token, zeros. ``rewind`` also drops the tokens
    from the first one on whose row the target will have later: ``length`` tells how many are left.
    """

    def follow(self, features: Features, target: Sequence) -> None:
        """Read the hidden rows of a target, from the next forward on, and its cache if the model has none.

        Raises InvalidRequestError for a cache that it cannot read.
        """

    def begin(self, position: int) -> None:
        """Drop all tokens. The next one is the text's at ``position``."""
