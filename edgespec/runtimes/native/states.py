"""Checkpoints of recurrent states: where a cache that has them can be rewound to.

A state cannot be cut as keys and values can. The kernels have it for each of the last 24 positions or more. A rewind
further back takes the nearest checkpoint, a copy of the state, and reads the tokens after it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.architectures.deltas import Deltas

State = NDArray[np.uint8]

# A choice: where the last two prompts begin and end.
MOST_CHECKPOINTS = 4

# Tokens from one checkpoint to the next while a long prompt is read. A choice: below a second of reading for a small
# model, and a copy takes as long as a few of them.
_APART = 2048

# A checkpoint nearer than this to the one before it saves too little reading.
_LEAST_APART = 128

# A rewind reads at most as many tokens again itself; a longer way is left to the caller. A choice: a prompt's slice.
MOST_READ_AGAIN = 256

_FLOAT_BYTES = 4
# The kernels keep this many states of a layer, and rows (delta.h).
_STATES, _LOG_ROWS = 2, 96


@dataclass(slots=True)
class Checkpoints:
    """States of one cache by their positions. ``tokens`` of the cache are known from position ``known_from`` on."""

    states: dict[int, State] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    known_from: int = 0

    def copy(self) -> Checkpoints:
        return Checkpoints(dict(self.states), list(self.tokens), self.known_from)

    def fed(self, ids: Sequence[int], position: int) -> None:
        """These tokens are at ``position`` and after it."""
        self.tokens[position - self.known_from :] = ids

    def begin(self, length: int) -> None:
        """The cache holds ``length`` tokens that are not known."""
        self.states.clear()
        self.tokens.clear()
        self.known_from = length

    def cut(self, length: int) -> None:
        """The cache has only the first ``length`` tokens."""
        for position in [each for each in self.states if each > length]:
            del self.states[position]
        del self.tokens[max(0, length - self.known_from) :]

    def wants(self, position: int, *, turn: bool) -> bool:
        """Whether a state at ``position`` is worth keeping. ``turn``: a prompt begins or ends there."""
        return position - max(self.states, default=0) >= (_LEAST_APART if turn else _APART)

    def keep(self, position: int, state: State) -> None:
        """Keep a state; with too many the one that is nearest to the one before it goes, but never the last."""
        self.states[position] = state
        if len(self.states) > MOST_CHECKPOINTS:
            order = sorted(self.states)
            gaps = {own: own - before for before, own in zip((0, *order), order[:-1], strict=False)}
            del self.states[min(gaps, key=lambda own: gaps[own])]

    def nearest(self, length: int) -> int:
        """The last checkpoint of the first ``length`` tokens; 0 without one."""
        return max((position for position in self.states if position <= length), default=0)

    def again(self, first: int, length: int) -> list[int] | None:
        """The tokens at positions first .. length - 1, if they are known and few enough to be read again."""
        if first < self.known_from or length - first > MOST_READ_AGAIN:
            return None
        return self.tokens[first - self.known_from : length - self.known_from]


def held_bytes(deltas: Deltas | None, layers: int) -> int:
    """What ``layers`` gated delta layers take of a cache of any length: states, rows and checkpoints."""
    if deltas is None:
        return 0
    state, row = deltas.heads * deltas.length**2, deltas.mixed + 2 * deltas.heads
    checkpoint = state + (deltas.kernel - 1) * row
    return layers * _FLOAT_BYTES * (_STATES * state + _LOG_ROWS * row + MOST_CHECKPOINTS * checkpoint)
