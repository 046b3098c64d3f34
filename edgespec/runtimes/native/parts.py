"""What a Model uses of its weights: all layers or fewer, all rows of the head or a few."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Collection, Sequence

import numpy as np

from edgespec.errors import InvalidRequestError, MemoryLimitError
from edgespec.interfaces.rows import IdArray
from edgespec.runtimes.native.library import Layer, Matrix, NativeModelStruct
from edgespec.runtimes.native.weights import NativeWeights


class HeadRows:
    """Some rows of a head: the scores of ``ids`` (int64, ascending) and of no others.

    Ids from 0 on without a gap are used where they lie; the others are laid out anew. ``matrices`` are both, side by
    side. Raises InvalidRequestError, MemoryLimitError.
    """

    def __init__(self, weights: NativeWeights, ids: IdArray) -> None:
        head = weights.layout.head
        wanted = np.asarray(ids)
        if wanted.ndim != 1 or not len(wanted) or wanted.dtype.kind not in "iu":
            raise InvalidRequestError("the rows of a head are a list of token ids, at least one")
        wanted = wanted.astype(np.int64)
        if wanted[0] < 0 or wanted[-1] >= head.rows or (np.diff(wanted) <= 0).any():
            raise InvalidRequestError(f"the rows of a head are ascending token ids in 0..{head.rows - 1}")
        self.ids: IdArray = wanted
        self._weights = weights
        self._in_place = int(np.searchsorted(wanted - np.arange(len(wanted)), 0, side="right"))
        whole = weights.struct.head
        columns, number = int(whole.columns), int(whole.type)
        others = wanted[self._in_place :]
        self.matrices = tuple(
            Matrix(tiles=tiles, bias=None, rows=rows, columns=columns, type=number)
            for tiles, rows in ((whole.tiles, self._in_place), (self._lay_out(others), len(others)))
            if rows
        )

    def _lay_out(self, ids: IdArray) -> int | None:
        """Where those rows are now, for as long as this lives."""
        if not len(ids):
            return None
        api, head = self._weights.library.api, self._weights.layout.head
        size = int(api.es_relaid_bytes(head.type_number, len(ids), head.columns))
        address = api.es_memory_take(size, 1)
        if not address:
            raise MemoryLimitError(
                f"no memory for {len(ids)} rows of the head", needed_bytes=size, available_bytes=None
            )
        finalizer = weakref.finalize(self, api.es_memory_give, address, size)
        finalizer.atexit = False  # the process is going: its memory goes with it
        self._weights.lay_rows_out(head, ids, address)
        return int(address)

    @functools.cached_property
    def known(self) -> frozenset[int]:
        """``ids``, to look tokens up in."""
        return frozenset(self.ids.tolist())

    def and_also(self, tokens: Collection[int]) -> HeadRows:
        """With these tokens as well. Raises InvalidRequestError, MemoryLimitError."""
        more = np.array(list(set(tokens) - self.known), dtype=np.int64)
        if not len(more):
            return self
        behind = np.sort(np.concatenate((self.ids[self._in_place :], more)))
        return HeadRows(self._weights, np.concatenate((self.ids[: self._in_place], behind)))


class ModelPart:
    """A model as the kernels see it, without the layers ``skipped``.

    Caches score with the rows of ``head`` at first, if given, and may turn to the head of the weights. ``head_ids``
    (int64, ascending) are the tokens that the latter scores, if those are not all; then there is no ``head``. Shares
    the weights, and keeps them. Raises InvalidRequestError.
    """

    def __init__(
        self,
        weights: NativeWeights,
        skipped: Sequence[int] = (),
        head: HeadRows | None = None,
        head_ids: IdArray | None = None,
    ) -> None:
        if head is not None and head_ids is not None:
            raise InvalidRequestError("a head that is trimmed already cannot be shortened")
        count = int(weights.struct.layers)
        strange = [layer for layer in skipped if not 0 <= layer < count]
        if strange:
            raise InvalidRequestError(f"there is no layer {strange[0]} among {count}")
        self.weights = weights
        self.library = weights.library
        self.skipped = tuple(sorted(set(skipped)))
        self.head = head
        self.head_ids = head_ids
        kept = [weights.struct.layer[number] for number in range(count) if number not in self.skipped]
        if not kept:
            raise InvalidRequestError("a model without layers computes nothing")
        self.struct = NativeModelStruct.from_buffer_copy(weights.struct)
        self.struct.layers = len(kept)
        self.struct.layer = ctypes.cast((Layer * len(kept))(*kept), ctypes.POINTER(Layer))  # which keeps the array

    @property
    def head_rows(self) -> int | None:
        """How many rows of the head of the weights are scored at first, if not all."""
        return None if self.head is None else len(self.head.ids)

    def without(self, skipped: Sequence[int]) -> ModelPart:
        """The same weights and head without these layers."""
        return ModelPart(self.weights, skipped, self.head, self.head_ids)

    def scoring(self, head: HeadRows) -> ModelPart:
        """The same weights and layers with other rows of the whole head."""
        return ModelPart(self.weights, self.skipped, head)
