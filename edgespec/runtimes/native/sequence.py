"""One native cache and the thread that computes with it."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import abc
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import (
    CancelledError,
    ClosedError,
    InvalidRequestError,
    RewindError,
    StaleRowsError,
)
from edgespec.interfaces.rows import Rows
from edgespec.runtimes.forward_request import MAX_SCORED_ROWS, checked_ids, chunk_sizes
from edgespec.runtimes.native.cache import NativeCache, NativeRows
from edgespec.runtimes.native.threads import make_threads
from edgespec.runtimes.thread import WorkerThread
from edgespec.runtimes.trimmed_rows import TrimmedRows

if TYPE_CHECKING:
    from edgespec.runtimes.native.model import NativeModel
    from edgespec.runtimes.native.parts import HeadRows, ModelPart

T = TypeVar("T")

__all__ = ["NativeSequence"]


class NativeSequence:
    """One native cache and its worker thread. Implements the contracts TreeSequence and ShortHeadSequence."""

    def __init__(
        self, model: NativeModel, part: ModelPart, context_length: int, keep_hidden: tuple[int, ...]
    ) -> None:
        self._model = model  # whoever keeps only the cache still has its facts and its weights
        self._context_length = context_length
        self._length = 0
        self._generation = 0
        self._parents: list[int] = []  # of the tree's nodes
        self._scored = 0  # rows of the last forward
        self._cancelled = threading.Event()
        facts = model.facts
        self._vocabulary_size = facts.vocabulary_size
        self._keep_hidden = keep_hidden
        self._part = part
        self._also: frozenset[int] = frozenset()  # what is scored beside a short head, while that is in use
        self._native = NativeCache(
            part,
            context_length=context_length,
            cache_bytes=facts.kv_bytes_per_token * context_length,
            threads=make_threads(facts.threads, model.settings.processors),
            level=str(facts.settings["level"]),
            keep_hidden=tuple(layer for layer in keep_hidden if layer >= 0),  # -1 is there anyway
        )
        # Not self.cancel: the thread must not keep a forgotten Sequence alive.
        try:
            self._worker = WorkerThread("edgespec-native", functools.partial(_cancel, self._native, self._cancelled))
        except BaseException:  # there are limits on threads
            self._native.free()
            raise
        # Runs at garbage collection and at interpreter exit alike: ends the forward in flight, then frees. The cache
        # holds the weights, which must go after it.
        self._finalizer = weakref.finalize(self, _shut_down, self._worker, self._native, self._cancelled)

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
        self._parents.clear()
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
        self._check_open()
        self._generation += 1
        self._scored = 0
        done = 0
        try:
            for size in chunk_sizes(count, rows):
                if self._cancelled.is_set():
                    raise CancelledError("the forward was cancelled")
                last = done + size == count
                self._native.decode(ids[done : done + size], start + done, rows if last else 0)
                done += size
                self._length = start + done
        except BaseException:
            self._length = start
            raise
        return self._rows(rows)

    def _rows(self, count: int) -> Rows:
        self._scored, generation = count, self._generation
        rows = NativeRows(self._native, count, lambda: self._generation == generation)
        head = self._native.head
        ids = self._part.head_ids if head is None else head.ids
        return rows if ids is None else TrimmedRows(rows, ids, self._vocabulary_size)

    @property
    def short_ids(self) -> abc.Set[int] | None:
        return None if self._part.head is None else self._part.head.known

    def score_all(self) -> None:
        self._check_open()
        if self._native.head is not None:
            self._worker.run(lambda: self._use_head(None))

    def score_short(self, also: abc.Collection[int] = ()) -> None:
        self._check_open()
        short, more = self._part.head, frozenset(also)
        if short is None or (self._native.head is not None and more == self._also):
            return
        head = short.and_also(more)
        self._worker.run(lambda: self._use_head(head, more))

    def _use_head(self, head: HeadRows | None, also: frozenset[int] = frozenset()) -> None:
        self._native.use_head(head)
        self._also = also
        self._generation += 1
        self._scored = 0

    def forward_tree(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> Rows:
        """See the contract. A tree has at most MAX_SCORED_ROWS tokens: more raise InvalidRequestError."""
        return self._worker.run(lambda: self._forward_tree(tokens, parents))

    def _forward_tree(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> Rows:
        known, self._parents = self._parents, []  # gone, unless all goes well
        self._check_open()
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
        self._generation += 1
        self._scored = 0
        if self._cancelled.is_set():
            raise CancelledError("the forward was cancelled")
        every = [*known, *parents]
        if len(tokens):
            self._native.decode_tree(ids, self._length, every)
        self._parents = every
        return self._rows(len(tokens))

    def keep(self, path: abc.Sequence[int]) -> None:
        self._check_open()
        above = -1
        for node in path:
            if not 0 <= node < len(self._parents) or self._parents[node] != above:
                raise InvalidRequestError("what is kept of a tree is a path from its root")
            above = node
        self._worker.run(lambda: self._native.keep(path, self._length))
        self._generation += 1
        self._length += len(path)
        self._parents.clear()

    def hidden(self, layer: int) -> NDArray[np.float32]:
        """The hidden states of the last forward's scored rows behind a layer: float32 of shape (rows, embedding).

        They are what enters the next layer; of -1, what the head reads. Raises InvalidRequestError for a layer that
        ``open`` was not told to keep, StaleRowsError where the forward's rows are stale.
        """
        self._check_open()
        if layer not in self._keep_hidden:
            raise InvalidRequestError(
                f"the hidden states behind layer {layer} are not kept", hint="name it in open(keep_hidden=...)"
            )
        if self._scored == 0:
            raise StaleRowsError("there is no forward whose rows have hidden states")
        return self._native.hidden(layer, self._scored)

    def rewind(self, length: int) -> None:
        self._check_open()
        if not 0 <= length <= self._length:
            raise RewindError(f"cannot rewind to {length}: the cache holds {self._length} tokens")
        if length < self._length or self._parents:
            self._generation += 1
            self._scored = 0
            self._parents.clear()
            self._length = length  # what lies beyond is written over before it is read

    def fork(self) -> NativeSequence:
        """A second Sequence with a copy of the cache's content. Raises ClosedError, MemoryLimitError."""
        self._check_open()
        self._parents.clear()
        other = self._model.open(self._context_length, keep_hidden=self._keep_hidden)
        try:
            # On both threads, so that neither cache is written or freed meanwhile.
            self._worker.run(lambda: other._worker.run(lambda: other._copy_from(self)))
        except BaseException:
            other.close()
            raise
        return other

    def _copy_from(self, source: NativeSequence) -> None:
        self._native.copy_from(source._native, source._length)
        self._length = source._length
        if source._native.head is not self._native.head:
            self._use_head(source._native.head, source._also)

    def cancel(self) -> None:
        _cancel(self._native, self._cancelled)

    def reset_cancel(self) -> None:
        self._native.cancel(False)
        self._cancelled.clear()

    def _check_open(self) -> None:
        # Not by the finalizer, which is over as soon as it begins: the answer in flight is to end as a cancelled one.
        if not self._native.is_open:
            raise ClosedError("this sequence is closed")

    def close(self) -> None:
        self._generation += 1
        self._finalizer()
        self._worker.join()  # also for whoever comes second while the first is still at it

    def __enter__(self) -> NativeSequence:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _cancel(native: NativeCache, cancelled: threading.Event) -> None:
    cancelled.set()
    native.cancel(True)


def _shut_down(worker: WorkerThread, native: NativeCache, cancelled: threading.Event) -> None:
    _cancel(native, cancelled)
    try:
        with contextlib.suppress(ClosedError):
            worker.run(native.free)
    finally:
        worker.close()
