"""One native cache: its handle, the rows of scores of its last forward, and the Sequence that computes with it."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import abc
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.architectures.shape import UnsupportedError
from edgespec.errors import (
    CancelledError,
    ClosedError,
    ForwardError,
    InvalidRequestError,
    MemoryLimitError,
    StaleRowsError,
)
from edgespec.interfaces.drawing import Drawn, DrawRequest
from edgespec.interfaces.features import Features, Hidden
from edgespec.interfaces.model import ALONE, Company, Model
from edgespec.interfaces.rows import IdArray, LogitsArray, Rows
from edgespec.runtimes.native.batch import NativeBatch
from edgespec.runtimes.native.cancel import NativeCancel
from edgespec.runtimes.native.draws import NativeDraws
from edgespec.runtimes.native.library import CANCELLED, NOT_FINITE, OTHER_PROCESS, Matrix
from edgespec.runtimes.native.reading import layers_read
from edgespec.runtimes.native.rows import NativeRows
from edgespec.runtimes.native.scheduler import Member, Request
from edgespec.runtimes.native.states import Checkpoints, State
from edgespec.runtimes.native.weights import HeadRows, ModelPart
from edgespec.runtimes.native.windows import STATE, SavedParts, Windows
from edgespec.runtimes.sequence import MAX_SCORED_ROWS, RuntimeSequence, TrimmedRows, checked_ids

_MOST_CACHE_BYTES = 2**46  # what a process can address on most systems; more would only overflow in native code


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

    def _forward(self, request: Request, what: str) -> None:
        self._read = None
        _check(self._batch.forward(request), what)
        self.company, self.experts = request.company, request.experts

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


class NativeSequence(RuntimeSequence):
    """One native cache.

    Implements TreeSequence, BatchedSequence, MixtureSequence, FrequentHeadSequence, SavableSequence and
    FeatureSequence.
    """

    def __init__(
        self,
        model: Model,
        part: ModelPart,
        batch: NativeBatch,
        context_length: int,
        keep_hidden: tuple[int, ...],
        open_another: Callable[[], NativeSequence],
    ) -> None:
        """``open_another`` opens an empty Sequence of the same kind."""
        facts = model.facts
        self._parents: list[int] = []  # of all nodes in the tree
        self._features: Features | None = None  # None: none are kept
        self._keeps_all = False  # else those of scored rows
        self._tree_features: list[Hidden] = []  # of the tree's nodes
        self._begun_at = 0  # tokens before the last forward
        self._scored = 0  # rows of the last forward
        self._keep_hidden = keep_hidden
        self._open_another = open_another
        self._checkpoints: Checkpoints | None = None
        self._also: frozenset[int] = frozenset()  # tokens scored besides a short head, while that head is used
        cancel = NativeCancel()
        self._native = NativeCache(
            part,
            batch,
            context_length=context_length,
            cache_bytes=facts.cache_bytes(context_length),
            level=str(facts.settings["level"]),
            cancel=cancel,
            keep_hidden=keep_hidden,
        )
        if self._native.has_states:
            self._checkpoints = Checkpoints()
        try:
            super().__init__(model, cancel, context_length, thread="edgespec-native")
        except BaseException:  # e.g. no more threads can be started
            self._native.free()
            raise
        self._free_at_end(self._native.free)  # the cache holds the weights, and they must go last

    def forward(self, tokens: abc.Sequence[int], rows: int) -> Rows:
        self._parents.clear()
        self._begun_at = self._length
        return self._worker.run(lambda: self._forward(tokens, rows))

    def _decode(self, ids: IdArray, position: int, rows: int) -> None:
        self._native.forget(position)
        self._check_in(len(ids), position, ends=rows > 0)
        keep = 0 if self._features is None else len(ids) if self._keeps_all else rows
        kept = self._native.decode(ids, position, rows, keep=keep)
        if self._features is not None:
            self._features.put(position + len(ids) - keep, kept)
        if self._checkpoints is not None:
            self._checkpoints.fed(ids.tolist(), position)

    def keep_features(self, *, scored: bool = False) -> Features:
        if self._features is None:
            self._features = Features(self._native.width, self._length)
        self._keeps_all |= not scored
        return self._features

    def _check_in(self, count: int, position: int, *, ends: bool) -> None:
        """Keep the state where a prompt begins and ends, and sometimes in between: longer forwards drop it."""
        kept = self._checkpoints
        if kept is None or count <= MAX_SCORED_ROWS or not position:
            return
        if kept.wants(position, turn=ends or position == self._begun_at) and self._native.can_continue(position):
            kept.keep(position, self._native.state(position))

    def _rows(self, count: int) -> Rows:
        self._scored = count
        rows = NativeRows(self._native, count, self._currency())
        head = self._native.head
        ids = self._native.part.head_ids if head is None else head.ids
        return rows if ids is None else TrimmedRows(rows, ids, self._vocabulary_size)

    @property
    def company(self) -> Company:
        return self._native.company

    @property
    def experts_read(self) -> int:
        return self._native.experts

    @property
    def frequent_ids(self) -> abc.Set[int] | None:
        head = self._native.part.head
        return None if head is None else head.known

    def score_all(self) -> None:
        self._check_usable()
        if self._native.head is not None:
            self._worker.run(lambda: self._use_head(None))

    def score_frequent(self, also: abc.Collection[int] = ()) -> None:
        self._check_usable()
        short, more = self._native.part.head, frozenset(also)
        if short is None or (self._native.head is not None and more == self._also):
            return
        head = short.and_also(more)
        self._worker.run(lambda: self._use_head(head, more))

    def _use_head(self, head: HeadRows | None, also: frozenset[int] = frozenset()) -> None:
        self._native.use_head(head)
        self._also = also
        self._overwrite()

    def forward_tree(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> Rows:
        """See the contract. A tree has at most MAX_SCORED_ROWS tokens: more raise InvalidRequestError."""
        return self._worker.run(lambda: self._forward_tree(tokens, parents))

    def _forward_tree(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> Rows:
        known, self._parents = self._parents, []  # invalid unless the forward succeeds
        del self._tree_features[len(known) :]
        self._check_usable()
        if self._checkpoints is not None:
            raise InvalidRequestError("this model's layers have a state, so that its tokens must be a chain")
        if len(parents) != len(tokens) or any(not -1 <= own < len(known) + i for i, own in enumerate(parents)):
            raise InvalidRequestError("a token of a tree follows an earlier one")
        if len(known) + len(tokens) > MAX_SCORED_ROWS:
            raise InvalidRequestError(
                f"a tree of {len(known) + len(tokens)} tokens is too large (at most {MAX_SCORED_ROWS})"
            )
        ids = checked_ids(
            tokens,
            len(tokens),
            length=self._length + len(known),
            context_length=self._context_length,
            vocabulary_size=self._vocabulary_size,
        )
        self._overwrite()
        self._check_cancelled()
        every = [*known, *parents]
        if len(tokens):
            self._native.forget(self._length)
            kept = self._native.decode_tree(ids, self._length, every, keep=self._features is not None)
            self._tree_features += [] if kept is None else list(kept)
        self._parents = every
        return self._rows(len(tokens))

    def keep(self, path: abc.Sequence[int]) -> None:
        self._check_usable()
        above = -1
        for node in path:
            if not 0 <= node < len(self._parents) or self._parents[node] != above:
                raise InvalidRequestError("the kept nodes of a tree must be a path from its root")
            above = node
        self._worker.run(lambda: self._native.keep(path, self._length))
        if self._features is not None and len(path):
            self._features.put(self._length, np.stack([self._tree_features[node] for node in path]))
        self._generation += 1
        self._length += len(path)
        self._parents.clear()

    def hidden(self, layer: int) -> NDArray[np.float32]:
        """Hidden states behind a layer, for the scored rows of the last forward: float32 of shape (rows, embedding).

        They are the next layer's input; for -1, the head's. Raises InvalidRequestError for a layer that ``open`` does
        not keep, StaleRowsError if the forward's rows are stale.
        """
        self._check_usable()
        if layer not in self._keep_hidden:
            raise InvalidRequestError(
                f"the hidden states behind layer {layer} are not kept", hint="name it in open(keep_hidden=...)"
            )
        if self._scored == 0:
            raise StaleRowsError("there is no forward whose rows have hidden states")
        return self._native.hidden(layer, self._scored)

    def rewind(self, length: int) -> None:
        super().rewind(length)
        if self._parents:
            self._cut(length)

    def _cut(self, length: int) -> None:
        again: list[int] | None = None
        if self._checkpoints is not None:
            self._checkpoints.cut(length)
        if not self._native.can_continue(length):
            length, again = self._worker.run(lambda: self._go_back(length))
        super()._cut(length)
        if self._features is not None:
            self._features.cut(length)
        self._parents.clear()
        if again:
            self._worker.run(lambda: self._forward(again, 0))

    def _go_back(self, length: int) -> tuple[int, list[int] | None]:
        """Continue from the last position before ``length`` at which that is possible. Returns it, and the tokens up
        to ``length`` if they are to be read again here. On the thread."""
        kept = self._checkpoints
        nearest = 0 if kept is None else kept.nearest(length)
        again = None if kept is None or self._stop.raised else kept.again(nearest, length)
        if kept is not None and nearest:
            self._native.continue_from(nearest, kept.states[nearest])
        else:
            self._native.start_over()
        if kept is not None:
            kept.cut(nearest)
            if nearest < kept.known_from:
                kept.begin(nearest)
        return nearest, again

    def _overwrite(self) -> None:
        self._generation += 1
        self._scored = 0

    def fork(self) -> NativeSequence:
        """A second Sequence with a copy of the cache's content. Raises ClosedError, MemoryLimitError."""
        self._check_usable()
        self._parents.clear()
        other = self._open_another()
        try:
            # On both threads, so that neither cache is written or freed during the copy.
            self._worker.run(lambda: other._worker.run(lambda: other._copy_from(self)))
        except BaseException:
            other.close()
            raise
        return other

    def _copy_from(self, source: NativeSequence) -> None:
        self._native.copy_from(source._native, source._length)
        self._length = source._length
        if source._checkpoints is not None:
            self._checkpoints = source._checkpoints.copy()
        if source._features is not None:
            self._features, self._keeps_all = source._features.copy(), source._keeps_all
        if source._native.head is not self._native.head:
            self._use_head(source._native.head, source._also)

    @property
    def angles(self) -> str:
        return self._native.angles

    def part_sizes(self, length: int) -> tuple[int, int]:
        parts = self._native.parts(length)
        return (0, 0) if parts is None else (parts.count, parts.size)

    def holds(self, length: int) -> bool:
        return 0 < length <= self._length and self._native.holds_saved(length)

    def read_part(self, part: int, length: int) -> bytes:
        self._check_usable()
        if not self.holds(length) or not 0 <= part < self.part_sizes(length)[0]:
            raise InvalidRequestError(f"there is no part {part} of {length} tokens: the cache holds {self._length}")
        return self._worker.run(lambda: self._native.read_part(part, length))

    def restore(self, parts: abc.Iterable[bytes], length: int) -> None:
        self._check_usable()
        if self._length or self._parents:
            raise InvalidRequestError("a saved cache is read into an empty one")
        self._worker.run(lambda: self._restore(parts, length))

    def _restore(self, parts: abc.Iterable[bytes], length: int) -> None:
        count, size = self.part_sizes(length)
        done = 0
        try:
            for done, part in enumerate(parts, 1):
                self._check_cancelled()
                if done > count or len(part) != size:
                    break
                self._native.write_part(done - 1, length, part)
            else:
                if count and done == count:
                    self._overwrite()
                    self._length = length
                    if self._features is not None:  # a file holds none
                        self._features.put(length, np.empty((0, self._native.width), np.float32))
                    if self._checkpoints is not None:
                        self._checkpoints.begin(length)
                    return
        finally:
            if not self._length:
                self._native.start_over()
        raise InvalidRequestError(f"a cache of {length} tokens has {count} parts of {size} bytes")

    def _check_usable(self) -> None:
        # Not by the finalizer, which counts as done once it begins: the answer in flight must end as cancelled.
        if not self._native.is_open:
            raise ClosedError("this sequence is closed")
