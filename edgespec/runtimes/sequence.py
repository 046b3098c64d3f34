"""What the Models and Sequences of all runtimes share.

Requests are checked and divided into native calls, forwards can be cancelled and are rolled back when they fail, Rows
become stale, and caches and weights are freed in order.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np

from edgespec.errors import (
    CancelledError,
    ClosedError,
    ContextFullError,
    InvalidRequestError,
    RewindError,
    RuntimeUnavailableError,
)
from edgespec.interfaces.counted_text import MOST_NODES
from edgespec.interfaces.drawing import Drawn, DrawRequest
from edgespec.interfaces.model import PREFILL_CHUNK_TOKENS, Model, ModelFacts, Sequence
from edgespec.interfaces.rows import IdArray, LogitsArray, Rows
from edgespec.runtimes.thread import WorkerThread

T = TypeVar("T")
S = TypeVar("S", bound="RuntimeSequence")
W = TypeVar("W")

# Rows one forward can score: 64. Verification needs one more than the proposed tokens; more rows would enlarge the
# buffers by vocabulary x 4 bytes each.
MAX_SCORED_ROWS = MOST_NODES + 1


def checked_ids(
    tokens: abc.Sequence[int], rows: int, *, length: int, context_length: int, vocabulary_size: int
) -> IdArray:
    """The tokens as int64 of shape (len(tokens),), checked to fit after the ``length`` tokens in the cache.

    Raises InvalidRequestError (rows or ids out of range), ContextFullError.
    """
    count = len(tokens)
    if not 0 <= rows <= min(count, MAX_SCORED_ROWS):
        raise InvalidRequestError(f"cannot score {rows} rows of {count} tokens (at most {MAX_SCORED_ROWS})")
    if length + count > context_length:
        raise ContextFullError(
            f"{count} more tokens do not fit: {length} of {context_length} are used",
            hint="use a larger context (--context)",
        )
    try:
        ids = np.asarray(tokens, dtype=np.int64)  # wider than native ids, so that no id wraps into the range
    except (OverflowError, TypeError, ValueError):
        ids = np.full(count, -1, dtype=np.int64)
    if count and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary_size):
        raise InvalidRequestError(f"token ids must be in 0..{vocabulary_size - 1}")
    return ids


def chunk_sizes(count: int, rows: int) -> Iterator[int]:
    """The sizes of the native calls for ``count`` tokens whose last ``rows`` are scored.

    The scored rows share the last call, so no chunk ends inside them.
    """
    left = count
    while left:
        size = min(PREFILL_CHUNK_TOKENS, left)
        if 0 < left - size < rows:
            size = left - rows
        yield size
        left -= size


class CancelFlag(Protocol):
    """Ends the forward in flight, and refuses later forwards until it is lowered. For any thread."""

    @property
    def raised(self) -> bool: ...

    def set(self, raised: bool) -> None: ...


class RuntimeSequence(ABC):
    """One cache and the thread that computes with it. Implements the Sequence contract.

    A runtime implements how a chunk is decoded (``_decode``), what its scores are (``_rows``), and how the cache is
    cut (``_cut``), if that takes more than a number. Its ``__init__`` ends with ``_free_at_end``, or sets a
    ``_finalizer``.
    """

    _CALLED: ClassVar[str] = ""  # its name in the message that it cannot fork
    _finalizer: weakref.finalize[..., Any]

    def __init__(self, model: Model, stop: CancelFlag, context_length: int, *, thread: str) -> None:
        self._model = model  # keeps facts and weights alive as long as the cache
        self._stop = stop
        self._context_length = context_length
        self._vocabulary_size = model.facts.vocabulary_size
        self._length = 0
        self._generation = 0  # grows with every overwrite of the rows
        self._broken = False
        # Not self.cancel: the thread must not keep an unreferenced Sequence alive.
        self._worker = WorkerThread(thread, functools.partial(stop.set, True))

    def _free_at_end(self, free: Callable[[], None], *kept: object) -> None:
        """Have the cache freed on its thread, then release ``kept``, which must not refer to this Sequence.

        At ``close``, at garbage collection or at interpreter exit.
        """
        self._finalizer = weakref.finalize(self, _shut_down, self._worker, self._stop, free, kept)

    @abstractmethod
    def _decode(self, ids: IdArray, position: int, rows: int) -> None:
        """Feed at most PREFILL_CHUNK_TOKENS ids at ``position``, and score the last ``rows``. On the thread."""

    @abstractmethod
    def _rows(self, count: int) -> Rows:
        """The ``count`` rows that the last decode scored."""

    def _cut(self, length: int) -> None:
        """Forget everything beyond ``length``: by default it is overwritten before it is read."""
        self._overwrite()
        self._length = length

    def _take_back(self, length: int) -> None:
        """Cut the cache to ``length``, its length before a forward that failed. On the thread."""
        self._cut(length)

    def _check_usable(self) -> None:
        if self._broken:
            raise RewindError("this sequence's cache did not rewind and cannot be trusted", hint="open another one")

    def _check_cancelled(self) -> None:
        if self._stop.raised:
            raise CancelledError("the forward was cancelled")

    def _overwrite(self) -> None:
        """Make all existing Rows stale."""
        self._generation += 1

    def _currency(self) -> Callable[[], bool]:
        """A function that returns whether Rows created now are still valid."""
        generation = self._generation
        return lambda: self._generation == generation

    @property
    def length(self) -> int:
        return self._length

    @property
    def context_length(self) -> int:
        return self._context_length

    def run(self, job: Callable[[], T]) -> T:
        return self._worker.run(job)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        return self._worker.submit(job)

    def forward(self, tokens: abc.Sequence[int], rows: int) -> Rows:
        return self._worker.run(lambda: self._forward(tokens, rows))

    def _forward(self, tokens: abc.Sequence[int], rows: int) -> Rows:
        start, count = self._length, len(tokens)
        ids = checked_ids(
            tokens,
            rows,
            length=start,
            context_length=self._context_length,
            vocabulary_size=self._vocabulary_size,
        )
        self._check_usable()
        self._overwrite()
        done = 0
        try:
            for size in chunk_sizes(count, rows):
                self._check_cancelled()
                self._decode(ids[done : done + size], start + done, rows if done + size == count else 0)
                done += size
                self._length = start + done
        except BaseException as error:
            try:
                self._take_back(start)
            except RewindError:
                if not isinstance(error, CancelledError):  # else the next use says that the cache is lost
                    raise
            raise
        return self._rows(rows)

    def rewind(self, length: int) -> None:
        self._check_usable()
        if not 0 <= length <= self._length:
            raise RewindError(f"cannot rewind to {length}: the cache holds {self._length} tokens")
        if length < self._length:
            self._cut(length)

    def fork(self) -> Sequence:
        raise RuntimeUnavailableError(f"{self._CALLED} does not fork a sequence", hint="open a second sequence")

    def cancel(self) -> None:
        self._stop.set(True)

    def reset_cancel(self) -> None:
        self._stop.set(False)

    def close(self) -> None:
        self._generation += 1
        self._finalizer()
        self._worker.join()  # also for a second caller while the first still closes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _shut_down(worker: WorkerThread, stop: CancelFlag, free: Callable[[], None], _kept: tuple[object, ...]) -> None:
    stop.set(True)  # ends the forward in flight
    try:
        with contextlib.suppress(ClosedError):
            worker.run(free)
    finally:
        worker.close()


def check_context_length(context_length: int) -> None:
    """Raises InvalidRequestError for fewer than one token."""
    if context_length < 1:
        raise InvalidRequestError(f"a context of {context_length} tokens cannot hold anything")


def with_changes(settings: T, **changes: object) -> T:
    """A runtime's settings with the changes that are not None."""
    made: Any = settings
    changed: T = replace(made, **{name: value for name, value in changes.items() if value is not None})
    return changed


class RuntimeModel(Generic[W]):
    """Loaded weights and the Sequences that use them. Implements the Model contract except ``open``."""

    def __init__(self, weights: W, facts: ModelFacts) -> None:
        self._facts = facts
        self._weights: W | None = weights
        self._lock = threading.Lock()
        self._sequences: weakref.WeakSet[RuntimeSequence] = weakref.WeakSet()

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    def _loaded(self) -> W:
        """The weights. The caller holds the lock. Raises ClosedError."""
        if self._weights is None:
            raise ClosedError(f"model {self._facts.name} is closed")
        return self._weights

    def _open(self, make: Callable[[W], S]) -> S:
        """Make a Sequence of the weights and register it, to be closed with the model. Raises ClosedError."""
        with self._lock:
            sequence = make(self._loaded())
            self._sequences.add(sequence)
            return sequence

    def close(self) -> None:
        """Close every open Sequence, then release the weights. Idempotent."""
        with self._lock:
            weights, self._weights = self._weights, None
            sequences = list(self._sequences)
        for sequence in sequences:
            sequence.close()
        del weights  # a Sequence being finalized on another thread may hold them a moment longer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class TrimmedRows(Rows):
    """Rows of a trimmed output head in the ids of the model it was trimmed from (VocabTrim, Goel et al., 2025).

    ``rows`` has the kept columns only, ``ids`` (kept,) is ascending: a tie still goes to the lowest id. Tokens that
    were trimmed away score -infinity.
    """

    def __init__(self, rows: Rows, ids: IdArray, vocabulary_size: int) -> None:
        # Not a method: rows that refer to themselves would outlive their last use.
        super().__init__(rows.count, functools.partial(_spread, rows, ids, vocabulary_size))
        self._kept = rows
        self._ids = ids

    def argmax_row(self, index: int) -> int:
        return int(self._ids[self._kept.argmax_row(index)])

    def top_k(self, k: int) -> tuple[IdArray, LogitsArray]:
        if k > len(self._ids):
            return super().top_k(k)
        columns, scores = self._kept.top_k(k)
        return self._ids[columns], scores

    def scored(self, index: int) -> tuple[IdArray | None, LogitsArray]:
        return self._ids, self._kept.logits(index)

    def draw(self, index: int, request: DrawRequest, ids: IdArray | None = None) -> Drawn:
        return self._kept.draw(index, request, self._ids)

    def first(self, size: int) -> Rows:
        kept = int(np.searchsorted(self._ids, size))
        return TrimmedRows(self._kept.first(kept), self._ids[:kept], size)

    def logits(self, index: int) -> LogitsArray:
        return self._row(index)  # a new array, so the caller may keep it


def _spread(rows: Rows, ids: IdArray, vocabulary_size: int, index: int) -> LogitsArray:
    full = np.full(vocabulary_size, -np.inf, dtype=np.float32)
    full[ids] = rows.logits(index)
    return full
