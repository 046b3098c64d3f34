"""What a Model uses of its weights: all layers or fewer, all rows of the head or a few."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np

from edgespec.decoding.contracts import IdArray
from edgespec.errors import InvalidRequestError, MemoryLimitError
from edgespec.runtimes.native_layout import WeightTensor
from edgespec.runtimes.native_library import Layer, Matrix, NativeModelStruct
from edgespec.runtimes.native_weights import NativeWeights

__all__ = ["HeadRows", "ModelPart"]


class HeadRows:
    """Some rows of a head, laid out anew: the scores of ``ids`` (int64, ascending) and of no others.

    Raises InvalidRequestError, MemoryLimitError.
    """

    def __init__(self, weights: NativeWeights, head: WeightTensor, ids: IdArray) -> None:
        wanted = np.asarray(ids)
        if wanted.ndim != 1 or not len(wanted) or wanted.dtype.kind not in "iu":
            raise InvalidRequestError("the rows of a head are a list of token ids, at least one")
        wanted = wanted.astype(np.int64)
        if wanted[0] < 0 or wanted[-1] >= head.rows or (np.diff(wanted) <= 0).any():
            raise InvalidRequestError(f"the rows of a head are ascending token ids in 0..{head.rows - 1}")
        self.ids: IdArray = wanted
        self._weights, self._head = weights, head
        api = weights.library.api
        size = int(api.es_relaid_bytes(head.type_number, len(wanted), head.columns))
        address = api.es_memory_take(size, 1)
        if not address:
            raise MemoryLimitError(
                f"no memory for {len(wanted)} rows of the head", needed_bytes=size, available_bytes=None
            )
        finalizer = weakref.finalize(self, api.es_memory_give, address, size)
        finalizer.atexit = False  # the process is going: its memory goes with it
        rows = weights.rows(head, wanted)
        # Scales that are not finite were refused when the whole head was laid out.
        api.es_relay(head.type_number, rows.ctypes.data, len(wanted), head.columns, address)
        self.matrix = Matrix(tiles=address, bias=None, rows=len(wanted), columns=head.columns, type=head.type_number)

    def beside(self, ids: IdArray) -> HeadRows:
        """Other rows of the same head. Raises InvalidRequestError, MemoryLimitError."""
        return HeadRows(self._weights, self._head, ids)


class ModelPart:
    """A model as the kernels see it, without the layers ``skipped``.

    Caches score with the rows of ``head`` at first, if given, and may turn to the head of the weights. ``head_ids``
    (int64, ascending) are the tokens that the latter scores, if those are not all. Shares the weights, and keeps
    them. Raises InvalidRequestError.
    """

    def __init__(
        self,
        weights: NativeWeights,
        skipped: Sequence[int] = (),
        head: HeadRows | None = None,
        head_ids: IdArray | None = None,
    ) -> None:
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
