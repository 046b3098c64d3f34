"""The text as drafters and samplers see it: a view of it, and a text that counts its tokens."""

from __future__ import annotations

import math
from collections import abc
from typing import Any, TypeVar

import numpy as np

from edgespec.interfaces.drawing import Seen

# Nodes of the largest tree that is verified: with the text's last token 64 rows, the most that a forward scores
# (runtimes/sequence.py).
MOST_NODES = 63


class Context:
    """What a drafter sees: ``committed_length`` committed tokens, then possibly assumed ones.

    A view without a copy. Between two calls the tokens grow, or change after ``committed_length``; a drafter calls
    ``common_prefix`` to see how far it agrees. ``wants_tree``: the caller can verify a tree of at most
    ``most_nodes`` nodes. ``window`` and ``patience_s`` are those of an Allowance (interfaces/policy.py): how much of
    the text a drafter must have read, and how long reading may take.
    """

    __slots__ = (
        "committed_length",
        "hindsight",
        "most_nodes",
        "patience_s",
        "tokens",
        "wants_tree",
        "window",
    )

    def __init__(
        self,
        tokens: list[int],
        committed_length: int | None = None,
        *,
        wants_tree: bool = False,
        most_nodes: int = MOST_NODES,
    ) -> None:
        self.tokens = tokens
        self.committed_length = len(tokens) if committed_length is None else committed_length
        self.wants_tree = wants_tree
        self.most_nodes = most_nodes
        self.window: int | None = None
        self.patience_s = math.inf
        self.hindsight = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def common_prefix(self, known: list[int]) -> int:
        """Number of leading tokens that ``known`` shares with this context."""
        return common_prefix(known, self.tokens)


_Run = TypeVar("_Run", list[int], str)


def common_prefix(left: _Run, right: _Run) -> int:
    """Number of leading tokens or characters that both share; whole comparisons first, since they usually decide."""
    shorter = min(len(left), len(right))
    # Slices are copies, which would take longer than the comparison.
    if (left if shorter == len(left) else left[:shorter]) == (right if shorter == len(right) else right[:shorter]):
        return shorter
    low, high = 0, shorter  # left[:low] agrees, left[:high] does not
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


class CountedText(abc.Sequence[int]):
    """A text that grows and shrinks at its end, with the number of occurrences of each token.

    Tokens are counted when ``seen`` is asked for them, so a token takes the same time at any text length.
    """

    def __init__(self, tokens: abc.Iterable[int] = ()) -> None:
        self.tokens = list(tokens)
        self._first = self._end = 0  # the positions between them are counted
        self._begins = 0
        self._columns: dict[int, int] = {}  # each counted token's column in the arrays
        self._arrays = np.zeros((3, 0), dtype=np.int64)  # tokens, how often each is counted, how often in the answer

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Any) -> Any:
        return self.tokens[index]

    def extend(self, tokens: abc.Iterable[int]) -> None:
        self.tokens.extend(tokens)

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        self._add(range(max(self._first, length), self._end), -1)
        self._first, self._end = min(self._first, length), min(self._end, length)
        del self.tokens[length:]

    def follow(self, tokens: list[int]) -> None:
        """Become ``tokens``: cut what the two texts do not share."""
        self.cut(common_prefix(self.tokens, tokens))
        self.extend(tokens[len(self.tokens) :])

    def seen(self, first: int, begins: int) -> Seen:
        """The tokens from position ``first`` on, and how often the answer, from ``begins`` on, has each there.

        A view, valid until the text changes.
        """
        end, first = len(self.tokens), min(first, len(self.tokens))
        low, high = sorted((begins, self._begins))
        for position in range(max(low, self._first), min(high, self._end)):
            self._arrays[2, self._columns[self.tokens[position]]] += 1 if begins == low else -1
        self._begins = begins
        self._add(range(self._first, min(first, self._end)), -1)
        self._add(range(first, self._first), 1)
        self._add(range(max(first, self._end), end), 1)
        self._first, self._end = first, end
        tokens, _, occurrences = self._arrays[:, : len(self._columns)]
        return Seen(tokens, occurrences)

    def _add(self, positions: range, number: int) -> None:
        """Count the tokens at ``positions`` with 1, forget them with -1."""
        columns = self._columns
        for position in positions:
            token = self.tokens[position]
            column = columns.setdefault(token, len(columns))
            if column == self._arrays.shape[1]:
                self._arrays = np.pad(self._arrays, ((0, 0), (0, column + 1)))  # twice as many
            self._arrays[0, column] = token
            self._arrays[1, column] += number
            if position >= self._begins:
                self._arrays[2, column] += number
            if not self._arrays[1, column]:  # the last column moves here
                del columns[token]
                last = len(columns)
                self._arrays[:, column] = self._arrays[:, last]
                self._arrays[1:, last] = 0
                if column < last:
                    columns[int(self._arrays[0, column])] = column
