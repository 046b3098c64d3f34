"""What layers with a window keep of a cache: the last positions. The memory of earlier ones is given back.

A later row sees the last ``window`` positions, and a rewind may go back ``KEPT_BACK`` tokens. A rewind that goes
further empties the cache: what a layer holds at a position depends on the windows of all layers below, so keys and
values of the window alone cannot be computed again, and the tokens are read from the first one on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
