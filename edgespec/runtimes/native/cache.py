"""One native cache: its handle, the flag that ends its forwards, and the rows of scores of the last one."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.architectures.shape import UnsupportedError
from edgespec.errors import (
    CancelledError,
    ClosedError,
    ForwardError,
    InvalidRequestError,
    MemoryLimitError,
    NonFiniteLogitsError,
)
from edgespec.interfaces.drawing import Drawn, DrawRequest
from edgespec.interfaces.features import Hidden
from edgespec.interfaces.model import ALONE
from edgespec.interfaces.rows import IdArray, LogitsArray, Rows
from edgespec.runtimes.native.batch import NativeBatch
from edgespec.runtimes.native.draws import NativeDraws
from edgespec.runtimes.native.library import CANCELLED, NOT_FINITE, OTHER_PROCESS, Matrix
from edgespec.runtimes.native.rewinds import STATE, SavedParts, State, Windows
from edgespec.runtimes.native.scheduler import Member, Request
from edgespec.runtimes.native.tensors import layers_read
from edgespec.runtimes.native.weights import HeadRows, ModelPart

T = TypeVar("T")

_MOST_CACHE_BYTES = 2**46  # what a process can address on most systems; more would only overflow in native code


class NativeCancel:
    """Ends the forward in flight, and refuses later forwards until it is lowered.

    For any thread, and without a lock: a destructor may raise it during garbage collection, and a signal handler at
    any instruction.
    """

    def __init__(self) -> None:
        self._flag = ctypes.c_int32(0)  # read by the threads of a forward

    @property
    def address(self) -> int:
        return ctypes.addressof(self._flag)

    @property
    def raised(self) -> bool:
        return bool(self._flag.value)

    def set(self, raised: bool) -> None:
        self._flag.value = raised


class NativeCache:
    """Keys, values and scores of one Sequence.

    ``decode``, ``use_head``, ``copy_from`` and ``free`` are for the Sequence's worker thread, everything else for any
    thread.
    """

    def __init__(
        self,
        part: ModelPart,
        batch: NativeBatch,
        *,
        context_length: int,
        cache_bytes: int,
        level: str,
        cancel: NativeCancel,
        keep_hidden: tuple[int, ...] = (),
    ) -> None:
        self._cancel = cancel  # its flag outlives the threads that read it
        self._api = part.library.api
        self._part: ModelPart | None = part
        self._batch, self._member = batch, Member(cancel)
        self._scores_per_row = int(part.struct.head.rows)
        self._embedding = int(part.struct.embedding)
        self.angles = _angles(part, context_length)
        self._context_length = context_length
        self._windows = Windows.of(part)
        self._held = 0  # layers with a window hold the positions from here on
        self._state_bytes = 0
        self._read: tuple[int, State] | None = None  # the state that is being saved, by its position
        self._begun = bytearray()  # of a windowed head whose other bytes are in the next saved part
        self._lock = threading.Lock()  # between ``free`` and any short use of the pointer
        self._pointer: int | None = None
        self._readers = 0  # forwards of other models that read the cache
        self._unused: int | None = None  # the pointer, if it is to be freed after them
        self._draws = NativeDraws(self._api, level)
        self.head: HeadRows | None = None  # the scored rows, kept alive; None for all
        self.company = ALONE  # of the last decode
        self.waited_s = 0.0  # before the last decode
        self.experts = 0  # that the last decode read
        if cache_bytes <= _MOST_CACHE_BYTES:
            self._pointer = self._api.es_open(batch.take(part), context_length, cancel.address)
            if not self._pointer:
                batch.give(self._member)
        if not self._pointer:
            raise MemoryLimitError(
                f"no memory for a cache of {context_length} tokens ({cache_bytes / 2**30:.2f} GiB)",
                needed_bytes=cache_bytes,
                available_bytes=None,
                hint="use a smaller context (--context)",
            )
        self._state_bytes = int(self._api.es_state_bytes(self._pointer))
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
        """Whether the cache has not been freed."""
        return self._pointer is not None

    @property
    def part(self) -> ModelPart:
        """The model part that the cache computes with. Raises ClosedError."""
        if self._part is None:
            raise ClosedError("this sequence is closed")
        return self._part

    def _open(self) -> int:
        if self._pointer is None:
            raise ClosedError("this sequence is closed")
        return self._pointer

    def use_head(self, head: HeadRows | None) -> None:
        """Score with these rows of the model's head from the next decode on; None: with all rows.

        Invalidates the last decode's scores. Raises ClosedError.
        """
        matrices = (self.part.struct.head,) if head is None else head.matrices
        with self._lock:
            code = self._api.es_use_heads(self._open(), (Matrix * len(matrices))(*matrices), len(matrices))
            _check(code, "another head")
            self.head = head
            self._scores_per_row = sum(int(matrix.rows) for matrix in matrices)

    @property
    def width(self) -> int:
        """Elements of a hidden row that it gives."""
        struct = self.part.struct
        return int(struct.pair_length) if struct.passed_on.tiles else self._embedding

    def borrow(self, lender: NativeCache) -> None:
        """Read that cache from now on. Raises InvalidRequestError if its model's layers do not fit, ClosedError."""
        part, other = self.part, lender.part
        try:
            layers = np.array(layers_read(part.weights.layout, other.weights.layout), dtype=np.int64)
        except UnsupportedError as error:
            raise InvalidRequestError(str(error)) from error
        with lender.lent() as address:
            _check(self._api.es_borrow(self._open(), address, layers.ctypes.data), "reading another model's cache")

    @contextlib.contextmanager
    def lent(self) -> Iterator[int]:
        """The cache's address, for a forward that reads it. It is not freed before the block ends. Raises
        ClosedError."""
        with self._lock:
            address = self._open()
            self._readers += 1
        try:
            yield address
        finally:
            with self._lock:
                self._readers -= 1
            self._release()

    def decode(self, ids: IdArray, position: int, rows: int, *, pairs: Hidden | None = None, keep: int = 0) -> Hidden:
        """Feed ``ids`` at ``position`` and score the last ``rows``; earlier positions stay unchanged, also on errors.

        At most PREFILL_CHUNK_TOKENS ids and MAX_SCORED_ROWS rows. ``pairs``: the hidden row of each token, for a
        model that needs them. It returns what follows the head's norm in the last ``keep`` rows, all, the scored
        ones or none, (keep, width). Raises CancelledError, ForwardError, ClosedError.
        """
        tokens = np.ascontiguousarray(ids, dtype=np.int32)
        kept = np.empty((keep, self.width), dtype=np.float32)
        self._forward(
            Request(self._member, self._open(), tokens, position, rows, pairs=pairs, kept=kept if keep else None),
            f"the forward of {len(tokens)} tokens at {position}",
        )
        return kept

    def decode_tree(
        self, ids: IdArray, position: int, parents: Sequence[int], *, keep: bool = False
    ) -> Hidden | None:
        """Add ``ids`` to a tree after ``position`` cached positions, and score them; ``parents`` covers all nodes.

        Returns and raises as ``decode``.
        """
        tokens, every = np.ascontiguousarray(ids, dtype=np.int32), np.array(parents, dtype=np.int32)
        kept = np.empty((len(tokens), self._embedding), dtype=np.float32) if keep else None
        self._forward(
            Request(self._member, self._open(), tokens, position, len(tokens), every, kept=kept),
            f"the forward of a tree of {len(every)} tokens at {position}",
        )
        return kept

    def called(self) -> None:
        """The thread that asks makes the next forward, although the worker's thread computes it."""
        self._member.caller = self._batch.turns.caller

    def acting(self, job: Callable[[], T]) -> Callable[[], T]:
        """The job, for the worker's thread: its forwards are made by the thread that asks, which waits for it."""
        return self._batch.turns.acting(job)

    def _forward(self, request: Request, what: str) -> None:
        self._read = None
        _check(self._batch.forward(request), what)
        self.company, self.experts, self.waited_s = request.company, request.experts, request.waited_s

    def keep(self, nodes: Sequence[int], position: int) -> None:
        """Copy these nodes of the tree into the cache, at ``position`` and the positions after it."""
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
        code = self._api.es_copy(self._open(), other._open(), other._held, length)
        _check(code, f"copying {length} positions")
        self._held = other._held

    def forget(self, length: int) -> None:
        """Give back what rows after ``length`` tokens, and after a rewind as far as promised, do not see."""
        end = self._windows.forgettable(length, self._held)
        if end > self._held:
            self._give_back(self._held, end)
            self._held = end

    def can_continue(self, length: int) -> bool:
        """Whether all that rows after the first ``length`` positions see is there."""
        return self._held <= self._windows.first_seen(length) and self._has_state(length)

    def _has_state(self, length: int) -> bool:
        with self._lock:
            return not self._state_bytes or int(self._api.es_state_floor(self._open())) <= length

    @property
    def has_states(self) -> bool:
        """Whether some layers have a recurrent state."""
        return self._state_bytes > 0

    def state(self, length: int) -> State:
        """A copy of the state after ``length`` tokens. Raises ForwardError, ClosedError."""
        found = np.empty(self._state_bytes, dtype=np.uint8)
        code = self._api.es_read_state(self._open(), length, found.ctypes.data, len(found))
        _check(code, f"reading the state after {length} tokens")
        return found

    def continue_from(self, length: int, state: State) -> None:
        """Take a state after ``length`` tokens. Raises InvalidRequestError for numbers that are not finite,
        ForwardError, ClosedError."""
        code = self._api.es_write_state(self._open(), length, state.ctypes.data, len(state))
        if code == NOT_FINITE:
            raise InvalidRequestError("a saved cache holds a number that is not finite")
        _check(code, f"writing the state after {length} tokens")

    def start_over(self) -> None:
        """Forget all positions, of layers with a window or a state."""
        if self._state_bytes:
            _check(self._api.es_write_state(self._open(), 0, None, 0), "clearing the state")
        if self._held:
            self._give_back(0, self._context_length)
            self._held = 0

    def _give_back(self, first: int, end: int) -> None:
        with self._lock:
            _check(self._api.es_forget(self._open(), first, end), f"forgetting positions {first} to {end}")

    def holds_saved(self, length: int) -> bool:
        """Whether all that a file of the first ``length`` positions holds is there."""
        return self._held <= self._windows.saved_from(length) and self._has_state(length)

    def parts(self, length: int) -> SavedParts | None:
        """The parts of the first ``length`` positions; None for lengths that no cache of this kind has."""
        struct = self.part.struct
        layers = [struct.layer[number] for number in range(int(struct.layers))]
        kinds = [
            None if layer.delta.mixed.tiles else bool(layer.window)
            for number, layer in enumerate(layers)
            if layer.cache_layer == number
            for _head in range(int(layer.kv_heads))
        ] * 2  # the keys' heads, then the values'; a layer with a state has none in use
        whole = tuple(number for number, is_windowed in enumerate(kinds) if is_windowed is False)
        windowed = tuple(number for number, is_windowed in enumerate(kinds) if is_windowed)
        with self._lock:
            first = self._windows.saved_from(length)
            piece = int(self._api.es_part_bytes(self._open(), (windowed or whole or (0,))[0], first, length))
            size = int(self._api.es_part_bytes(self._open(), (whole or windowed or (0,))[0], 0, length))
        if not size:
            return None
        return SavedParts(whole=whole, windowed=windowed, size=size, piece=piece, state=self._state_bytes)

    def read_part(self, part: int, length: int) -> bytes:
        """One part of the first ``length`` positions. Raises ForwardError if there is none, ClosedError."""
        parts = self._parts(length)
        if part < len(parts.whole):
            return self._read_head(parts.whole[part], 0, length, parts.size).tobytes()
        first = self._windows.saved_from(length)
        pieces = [
            (self._saved_state(length) if number == STATE else self._read_head(number, first, length, parts.piece))[
                some
            ]
            for number, some in parts.pieces(part)
        ]
        if part == parts.count - 1:
            self._read = None
        return b"".join(piece.tobytes() for piece in pieces).ljust(parts.size, b"\0")

    def _saved_state(self, length: int) -> State:
        """The state after ``length`` tokens, read once for all its parts."""
        if self._read is None or self._read[0] != length:
            self._read = length, self.state(length)
        return self._read[1]

    def _parts(self, length: int) -> SavedParts:
        parts = self.parts(length)
        if parts is None:
            raise ForwardError(f"there are no parts of {length} positions", code=None)
        return parts

    def _read_head(self, number: int, first: int, length: int, size: int) -> NDArray[np.uint8]:
        found = np.empty(size, dtype=np.uint8)
        code = self._api.es_read_part(self._open(), number, first, length, found.ctypes.data, size)
        _check(code, f"reading part {number} of {length} positions")
        return found

    def write_part(self, part: int, length: int, data: bytes) -> None:
        """Take one part; they come in order. Raises InvalidRequestError for numbers that are not finite,
        ForwardError, ClosedError."""
        parts = self._parts(length)
        if part < len(parts.whole):
            self._write_head(parts.whole[part], 0, length, data)
            return
        first = self._windows.saved_from(length)
        self._held, taken = first, 0
        for number, some in parts.pieces(part):
            if some.start == 0:
                self._begun.clear()
            count = some.stop - some.start
            self._begun += data[taken : taken + count]
            taken += count
            if some.stop == parts.bytes_of(number):
                if number == STATE:
                    self.continue_from(length, np.frombuffer(bytes(self._begun), dtype=np.uint8))
                else:
                    self._write_head(number, first, length, bytes(self._begun))
                self._begun.clear()

    def _write_head(self, number: int, first: int, length: int, data: bytes) -> None:
        given = np.frombuffer(data, dtype=np.uint8)
        code = self._api.es_write_part(self._open(), number, first, length, given.ctypes.data, len(given))
        if code == NOT_FINITE:
            raise InvalidRequestError("a saved cache holds a number that is not finite")
        _check(code, f"writing part {number} of {length} positions")

    def row(self, index: int) -> LogitsArray:
        """A copy of one row of the last decode's scores: float32 of shape (vocabulary,)."""
        with self._lock:
            view = (ctypes.c_float * self._scores_per_row).from_address(self._row_address(index))
            return np.array(view, dtype=np.float32)

    def _row_address(self, index: int) -> int:
        start: int = ctypes.addressof(self._api.es_scores(self._open()).contents)
        return start + index * self._scores_per_row * 4

    def draw(self, index: int, request: DrawRequest, ids: IdArray | None, size: int | None) -> Drawn:
        """See Rows. Draws from the first ``size`` scores, None for all."""
        with self._lock:
            count = self._scores_per_row if size is None else min(size, self._scores_per_row)
            return self._draws.draw(self._row_address(index), count, request, ids)

    def argmax(self, index: int) -> int:
        """The id with the highest score of a row; -1 - id if that score is not finite."""
        with self._lock:
            return int(self._api.es_argmax(self._open(), index))

    def top_k(self, index: int, ids: IdArray, scores: LogitsArray) -> None:
        """Fill ``ids`` and ``scores``, both contiguous and of equal length, with the highest of a row, best first."""
        with self._lock:
            code = self._api.es_top_k(self._open(), index, len(ids), ids.ctypes.data, scores.ctypes.data)
        if code:
            raise ValueError(f"a row of {self._scores_per_row} scores has no best {len(ids)}")

    def free(self) -> None:
        """Free the cache, then release the weights. Idempotent."""
        with self._lock:
            if self._pointer is not None:
                self._unused, self._pointer = self._pointer, None
        self._release()

    def _release(self) -> None:
        """Free what ``free`` left, once no other model's forward reads it."""
        with self._lock:
            pointer = None if self._readers else self._unused
            self._unused = self._unused if self._readers else None
        if pointer is not None:
            self._api.es_close(pointer)
            self._batch.give(self._member)
            self._part = self.head = None


def _angles(part: ModelPart, context_length: int) -> str:
    """See SavableSequence; chosen as es_open does."""
    if not part.struct.long_frequencies:
        return ""
    return "long" if context_length > part.struct.original_context else "short"


def _check(code: int, what: str) -> None:
    if code == CANCELLED:
        raise CancelledError("the forward was cancelled")
    if code == OTHER_PROCESS:
        raise ForwardError(
            "this session belongs to the process that opened it", code=code, hint="load the model after forking"
        )
    if code:
        raise ForwardError(f"{what} was refused", code=code)


class NativeRows(Rows):
    """Rows reduced in native memory, with the interpreter lock held: a search takes microseconds.

    ``size``: how many scores of each row count, None for all.
    """

    def __init__(
        self, cache: NativeCache, count: int, is_current: Callable[[], bool], size: int | None = None
    ) -> None:
        super().__init__(count, lambda index: cache.row(index)[:size], is_current)
        self._cache = cache
        self._size = size

    def argmax_row(self, index: int) -> int:
        self._check(index)
        best = self._cache.argmax(index)
        if best < 0:
            value = self._cache.row(index)[-1 - best]
            raise NonFiniteLogitsError(f"the target's logits hold {value} at token id {-1 - best}")
        if self._size is not None and best >= self._size:
            return self.draw(index, DrawRequest()).tokens[0]
        return best

    def top_k(self, k: int) -> tuple[IdArray, LogitsArray]:
        if self._size is not None:
            return super().top_k(k)
        ids = np.empty((self.count, k), dtype=np.int64)
        scores = np.empty((self.count, k), dtype=np.float32)
        for index in range(self.count):
            self._check(index)
            self._cache.top_k(index, ids[index], scores[index])
        return ids, scores

    def draw(self, index: int, request: DrawRequest, ids: IdArray | None = None) -> Drawn:
        self._check(index)
        return self._cache.draw(index, request, ids, self._size)

    def first(self, size: int) -> Rows:
        return NativeRows(self._cache, self.count, self._is_current, size)

    def logits(self, index: int) -> LogitsArray:
        return self._row(index)  # already a copy
