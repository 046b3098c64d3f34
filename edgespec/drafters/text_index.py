"""An index of a text that finds where the text's end occurred before."""

from __future__ import annotations

from typing import Protocol

from edgespec.files.stored_text import LONGEST_MATCH_TOKENS
from edgespec.interfaces.counted_text import common_prefix

# Earlier positions that are compared, most recent first: bounds the time on text that repeats one phrase thousands of
# times.
_CANDIDATES = 64

# Runs of these lengths are indexed, longest first. Positions of the short run serve where the long run is new; the
# long run finds the best of thousands of positions of a common token.
_RUNS = (3, 1)

Match = tuple[int, int]  # where the text after the matching tokens begins, and the number of matching tokens


class EarlierText(Protocol):
    """A text to copy from. A position is where the text after the matching tokens begins.

    ``is_quick``: a search takes a few microseconds, so that one for each guessed token is negligible.
    """

    @property
    def is_quick(self) -> bool: ...

    def follow(self, tokens: list[int]) -> None:
        """Prepare for searches of the end of ``tokens``."""

    def matches(self, tail: list[int]) -> list[Match]:
        """Positions whose text ends as ``tail`` does, those to copy first at the front."""

    def after(self, position: int) -> int | None:
        """The token at ``position``; None at the end of the text."""

    def copy(self, position: int, count: int) -> list[int]:
        """At most ``count`` tokens from ``position`` on."""

    def clear(self) -> None:
        """Forget the text."""


class TextIndex:
    """Where each run of one and of three tokens ended, in a text that grows and whose end may change.

    Indexing takes about two microseconds a token.
    """

    is_quick = True

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def follow(self, tokens: list[int]) -> None:
        """Index ``tokens``: every run that has a following token. Only what changed since the last call is read."""
        self._cut(common_prefix(self.tokens, tokens))
        known = len(self.tokens)
        for size in _RUNS:
            for end in range(max(known, size), len(tokens)):
                self._ends.setdefault(tuple(tokens[end - size : end]), []).append(end)
        self.tokens.extend(tokens[known:])

    def matches(self, tail: list[int]) -> list[Match]:
        """Earlier positions whose text ends as ``tail`` does, most recent first.

        ``tail`` is the end of the indexed text, possibly with guessed tokens: at most LONGEST_MATCH_TOKENS tokens
        are compared.
        """
        tokens, last = self.tokens, len(tail) - 1
        for size in _RUNS:
            ends = self._ends.get(tuple(tail[-size:]))
            if ends is None or len(tail) < size:
                continue
            found = []
            for end in reversed(ends[-_CANDIDATES:]):
                length, limit = size, min(end, last + 1, LONGEST_MATCH_TOKENS)
                while length < limit and tokens[end - length - 1] == tail[last - length]:
                    length += 1
                found.append((end, length))
            return found
        return []

    def after(self, position: int) -> int | None:
        return self.tokens[position] if position < len(self.tokens) else None

    def copy(self, position: int, count: int) -> list[int]:
        """``count`` tokens from ``position`` on. At the text's end the copy repeats from its first token."""
        copied = self.tokens[position : position + count]
        period = len(copied)
        while len(copied) < count:
            copied.append(copied[-period])
        return copied

    def clear(self) -> None:
        """Forget the text."""
        self.tokens.clear()
        self._ends.clear()

    def _cut(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        for size in _RUNS:
            for end in range(len(self.tokens) - 1, max(length, size) - 1, -1):
                run = tuple(self.tokens[end - size : end])
                ends = self._ends[run]
                ends.pop()
                if not ends:
                    del self._ends[run]
        del self.tokens[length:]
