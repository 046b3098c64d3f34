"""One native cache: the handle, what it computes, and the rows of scores it leaves."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import CancelledError, ClosedError, ForwardError, MemoryLimitError, NonFiniteLogitsError
from edgespec.hardware.control_groups import processor_limit
from edgespec.interfaces.rows import IdArray, LogitsArray, Rows
from edgespec.runtimes.native.library import CANCELLED, LEVELS, OTHER_PROCESS, Matrix, Threads
from edgespec.runtimes.native.parts import HeadRows, ModelPart

_MOST_CACHE_BYTES = 2**46  # what a process can address on most systems; more would only overflow on its way down


class NativeCache:
    """Keys, values and buffers of one Sequence, and its threads.

    ``decode``, ``use_head``, ``copy_from`` and ``free`` are for the Sequence's worker thread; the rest is for any.
    """

    def __init__(
        self,
        part: ModelPart,
        *,
        context_length: int,
        cache_bytes: int,
        threads: int,
        level: str,
        keep_hidden: tuple[int, ...] = (),
    ) -> None:
        self._api = part.library.api
        self._part = part
        self._scores_per_row = int(part.struct.head.rows)
        self._embedding = int(part.struct.embedding)
        self._lock = threading.Lock()  # between whoever uses the pointer for a moment, and free
        self._pointer: int | None = None
        self.head: HeadRows | None = None  # the rows that are scored and kept alive; None for all
        if cache_bytes <= _MOST_CACHE_BYTES:
            wanted = Threads(count=threads, most_busy=processor_limit() or 0)
            self._pointer = self._api.es_open(
                ctypes.byref(part.struct), context_length, ctypes.byref(wanted), LEVELS[level]
            )
        if not self._pointer:
            raise MemoryLimitError(
                f"no memory for a cache of {context_length} tokens ({cache_bytes / 2**30:.2f} GiB)",
                needed_bytes=cache_bytes,
                available_bytes=None,
                hint="use a smaller --context",
            )
        if part.head is not None:
            self.use_head(part.head)
        layers = np.array(keep_hidden, dtype=np.int64)
        if keep_hidden and self._api.es_keep_hidden(self._pointer, layers.ctypes.data, len(layers)):
            self.free()
            raise MemoryLimitError(
                f"no memory for the hidden states of {len(layers)} layers", needed_bytes=None, available_bytes=None
            )

    @property
    def is_open(self) -> bool:
        """Whether it has not been freed."""
        return self._pointer is not None

    def _open(self) -> int:
        if self._pointer is None:
            raise ClosedError("this sequence is closed")
        return self._pointer

    def use_head(self, head: HeadRows | None) -> None:
        """Score with these rows of the model's head from the next decode on; None: with all of them.

        The last decode's scores are gone. Raises ClosedError.
        """
        matrices = (self._part.struct.head,) if head is None else head.matrices
        with self._lock:
            code = self._api.es_use_heads(self._open(), (Matrix * len(matrices))(*matrices), len(matrices))
            _check(code, "another head")
            self.head = head
            self._scores_per_row = sum(int(matrix.rows) for matrix in matrices)

    def decode(self, ids: IdArray, position: int, rows: int) -> None:
        """Feed ``ids`` from ``position`` on and score the last ``rows``; earlier positions stay whatever happens.

        At most PREFILL_CHUNK_TOKENS ids and MAX_SCORED_ROWS rows. Raises CancelledError, ForwardError, ClosedError.
        """
        tokens = np.ascontiguousarray(ids, dtype=np.int32)
        code = self._api.es_forward(self._open(), tokens.ctypes.data, len(tokens), position, rows)
        _check(code, f"the forward of {len(tokens)} tokens at {position}")

    def decode_tree(self, ids: IdArray, position: int, parents: Sequence[int]) -> None:
        """Add ``ids`` to a tree that follows ``position`` positions, and score them; ``parents`` are all nodes'.

        Raises as ``decode``.
        """
        tokens, every = np.ascontiguousarray(ids, dtype=np.int32), np.array(parents, dtype=np.int32)
        first = len(every) - len(tokens)
        code = self._api.es_forward_tree(
            self._open(), tokens.ctypes.data, len(tokens), position, every.ctypes.data, first
        )
        _check(code, f"the forward of a tree of {len(every)} tokens at {position}")

    def keep(self, nodes: Sequence[int], position: int) -> None:
        """Copy these nodes of the tree to where the cache holds ``position`` and what follows."""
        every = np.array(nodes, dtype=np.int32)
        _check(self._api.es_keep(self._open(), every.ctypes.data, len(every), position), "keeping a path")

    def hidden(self, layer: int, rows: int) -> NDArray[np.float32]:
        """A copy of the last decode's hidden states: float32 of shape (rows, embedding)."""
        with self._lock:
            address = self._api.es_hidden(self._open(), layer)
            view = (ctypes.c_float * (rows * self._embedding)).from_address(address)
            return np.array(view, dtype=np.float32).reshape(rows, self._embedding)

    def copy_from(self, other: NativeCache, length: int) -> None:
        """Take the first ``length`` positions from a cache of the same weights. Raises ForwardError, ClosedError."""
        _check(self._api.es_copy(self._open(), other._open(), length), f"copying {length} positions")

    def cancel(self, cancelled: bool) -> None:
        with self._lock:
            if self._pointer is not None:
                self._api.es_cancel(self._pointer, int(cancelled))

    def row(self, index: int) -> LogitsArray:
        """A copy of one row of the last decode's scores: float32 of shape (vocabulary,)."""
        with self._lock:
            start = ctypes.addressof(self._api.es_scores(self._open()).contents) + index * self._scores_per_row * 4
            view = (ctypes.c_float * self._scores_per_row).from_address(start)
            return np.array(view, dtype=np.float32)

    def argmax(self, index: int) -> int:
        """The best id of a row; -1 - id if its score is not finite."""
        with self._lock:
            return int(self._api.es_argmax(self._open(), index))

    def top_k(self, index: int, ids: IdArray, scores: LogitsArray) -> None:
        """Fill ``ids`` and ``scores``, both contiguous and of one length, with the best of a row."""
        with self._lock:
            code = self._api.es_top_k(self._open(), index, len(ids), ids.ctypes.data, scores.ctypes.data)
        if code:
            raise ValueError(f"a row of {self._scores_per_row} scores has no best {len(ids)}")

    def free(self) -> None:
        """Idempotent."""
        with self._lock:
            pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self._api.es_close(pointer)


class NativeCancel:
    """Ends the forward in flight, and refuses later ones until it is lowered. For any thread."""

    def __init__(self, cache: NativeCache) -> None:
        self.raised = False
        self._cache = cache

    def set(self, raised: bool) -> None:
        if raised:
            self.raised = True
        self._cache.cancel(raised)
        self.raised = raised


def _check(code: int, what: str) -> None:
    if code == CANCELLED:
        raise CancelledError("the forward was cancelled")
    if code == OTHER_PROCESS:
        raise ForwardError(
            "this sequence belongs to the process that opened it", code=code, hint="load the model after forking"
        )
    if code:
        raise ForwardError(f"{what} was refused", code=code)


class NativeRows(Rows):
    """Rows reduced where they are, with the interpreter lock held: a search takes microseconds."""

    def __init__(self, cache: NativeCache, count: int, is_current: Callable[[], bool]) -> None:
        super().__init__(count, cache.row, is_current)
        self._cache = cache

    def argmax_row(self, index: int) -> int:
        self._check(index)
        best = self._cache.argmax(index)
        if best < 0:
            value = self._cache.row(index)[-1 - best]
            raise NonFiniteLogitsError(f"the target's logits hold {value} at token id {-1 - best}")
        return best

    def top_k(self, k: int) -> tuple[IdArray, LogitsArray]:
        ids = np.empty((self.count, k), dtype=np.int64)
        scores = np.empty((self.count, k), dtype=np.float32)
        for index in range(self.count):
            self._check(index)
            self._cache.top_k(index, ids[index], scores[index])
        return ids, scores

    def logits(self, index: int) -> LogitsArray:
        return self._row(index)  # a copy already
