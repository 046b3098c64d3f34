"""How far back a native cache can go: what layers with a window keep, and checkpoints of recurrent states.

A later row sees the last ``window`` positions, and a rewind may go back ``KEPT_BACK`` tokens: the memory of earlier
positions is given back. A rewind that goes further empties the cache: what a layer holds at a position depends on the
windows of all layers below, so keys and values of the window alone cannot be computed again, and the tokens are read
from the first one on.

A state cannot be cut as keys and values can. The kernels have it for each of the last 24 positions or more. A rewind
further back takes the nearest checkpoint, a copy of the state, and reads the tokens after it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.architectures.deltas import Deltas
from edgespec.interfaces.model import ALL_KEPT, PREFILL_CHUNK_TOKENS, WindowedLayers
from edgespec.runtimes.native.weights import ModelPart

# A choice: an answer of three pages, the question before it, and what a round takes back.
KEPT_BACK = 2048

# The same of a cache in a file. Less, so that a cache can still be kept after a rewind.
SAVED_BACK = 1024

# Positions that are given back at a time.
_STEP = 256

STATE = -1  # in place of a head's number

_TILE = 16  # positions whose keys lie together


@dataclass(frozen=True, slots=True)
class Windows:
    """The numbers of the layers with a window, and the widest window; none and 0 for a model without."""

    layers: tuple[int, ...]
    widest: int

    @staticmethod
    def of(part: ModelPart) -> Windows:
        """Those of a loaded model."""
        windows = [int(part.struct.layer[number].window) for number in range(int(part.struct.layers))]
        return Windows(tuple(number for number, window in enumerate(windows) if window), max(windows))

    def first_seen(self, length: int) -> int:
        """The first position that a row after ``length`` tokens sees."""
        return max(0, length + 1 - self.widest) if self.layers else 0

    def forgettable(self, length: int, held: int) -> int:
        """Up to where a cache of ``length`` tokens gives positions back; ``held``, where it did, if that is soon
        enough."""
        end = self.first_seen(length) - KEPT_BACK
        return end if end - held >= _STEP else held

    def saved_from(self, length: int) -> int:
        """The first position that a file of ``length`` tokens holds."""
        return max(0, self.first_seen(length) - SAVED_BACK) // _TILE * _TILE


def windowed_layers(bytes_per_token: int, widest: int) -> WindowedLayers:
    """What layers keep that take ``bytes_per_token`` together."""
    if not bytes_per_token:
        return ALL_KEPT
    most = widest + KEPT_BACK + _STEP + PREFILL_CHUNK_TOKENS  # and the forward in flight
    return WindowedLayers(bytes_per_token=bytes_per_token, positions=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedParts:
    """A cache in parts of one size: each head's of the layers without a window, then the others in one row, and the
    recurrent state.

    ``whole`` and ``windowed`` are the kernels' numbers of these heads, a ``piece`` is one of the latter in bytes, as
    ``state`` is that of a model with gated delta layers. The last part is filled with zeros.
    """

    whole: tuple[int, ...]
    windowed: tuple[int, ...]
    size: int
    piece: int
    state: int = 0

    @property
    def count(self) -> int:
        return len(self.whole) + -(-(len(self.windowed) * self.piece + self.state) // self.size)

    def bytes_of(self, number: int) -> int:
        """Of a piece, all parts together."""
        return self.state if number == STATE else self.piece

    def pieces(self, part: int) -> Iterator[tuple[int, slice]]:
        """The windowed heads of a part after the whole ones, then ``STATE``, and which of their bytes it holds."""
        begin = (part - len(self.whole)) * self.size
        starts = [(number, index * self.piece) for index, number in enumerate(self.windowed)]
        for number, start in (*starts, (STATE, len(self.windowed) * self.piece)):
            first, end = max(0, begin - start), min(self.bytes_of(number), begin + self.size - start)
            if first < end:
                yield number, slice(first, end)


# ------------------------------------------------------------------------------------------------ recurrent states

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
