"""Any runtime in a child process, as a Model and its Sequences: losing the device does not end the host.

Token ids cross with every forward, and the best id of every row comes back; whole rows cross only when they are read.
If the process dies or hangs, every call that needs it raises WorkerLostError from then on.
"""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections import abc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from edgespec.errors import (
    ClosedError,
    EdgespecError,
    InvalidRequestError,
    NonFiniteLogitsError,
    RewindError,
    WorkerLostError,
)
from edgespec.interfaces.drawing import Drawn, DrawRequest
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.rows import IdArray, LogitsArray, Rows
from edgespec.runtimes.process.deadlines import ForwardTimes
from edgespec.runtimes.process.draws import describe_request, read_drawn
from edgespec.runtimes.process.frames import Frame, ids_bytes
from edgespec.runtimes.process.link import Inbox, WorkerLink
from edgespec.runtimes.sequence import RuntimeModel, RuntimeSequence, check_context_length
from edgespec.runtimes.thread import WorkerThread

T = TypeVar("T")
_Scores = tuple[int, IdArray, dict[int, str]]  # a forward's number, its best ids, and the reasons of rows without one

# Beyond this many scores per row, rows cross one by one: 64 larger rows would not fit into one answer.
_MOST_TOP_K = 4096


class WorkerModel(RuntimeModel[WorkerLink]):
    """A model in a separate process. Implements the Model contract."""

    def __init__(self, link: WorkerLink, facts: ModelFacts) -> None:
        super().__init__(link, facts)
        self._link = link
        self.times = ForwardTimes(link.deadlines, facts.bytes_per_forward)
        self._keys = itertools.count()
        # At garbage collection and at interpreter exit.
        self._finalizer = weakref.finalize(self, link.close)

    @property
    def pid(self) -> int:
        """The process id, e.g. to measure its memory."""
        return self._link.pid

    @property
    def lost(self) -> str | None:
        """Why the process cannot be used any more; None while it can, or before its loss is noticed."""
        return self._link.lost if self._finalizer.alive else None

    def open(self, context_length: int) -> WorkerSequence:
        """A fresh Sequence. Raises MemoryLimitError, InvalidRequestError, ClosedError, WorkerLostError."""
        check_context_length(context_length)
        if context_length >= 2**31:
            raise InvalidRequestError(f"a context of {context_length} tokens is more than any runtime can count")
        return self._open(lambda link: self._ask_open(link, context_length))

    def _ask_open(self, link: WorkerLink, context_length: int) -> WorkerSequence:
        key = next(self._keys)
        header = {"op": "open", "sequence": key, "context_length": context_length}
        link.request(header, timeout_s=link.deadlines.answer_s)
        return WorkerSequence(self, link, key, context_length)

    def close(self) -> None:
        """Close every open Sequence, then end the process. Idempotent."""
        super().close()
        with self._lock:
            self._finalizer()


class WorkerSequence(RuntimeSequence):
    """One cache in the child, and a thread here that waits for its answers. Implements the Sequence contract."""

    _CALLED = "a worker process"

    def __init__(self, model: WorkerModel, link: WorkerLink, key: int, context_length: int) -> None:
        self._inbox = Inbox()
        super().__init__(model, self._inbox, context_length, thread="edgespec-worker")
        self._link = link
        self._key = key
        self._times = model.times
        self._scores: _Scores = 0, np.empty(0, dtype=np.int64), {}
        self._finalizer = weakref.finalize(self, _shut_down, self._worker, self._inbox, link, key)

    def _forward(self, tokens: abc.Sequence[int], rows: int) -> Rows:
        self._check_usable()  # first of all: every call on a lost process reports the loss
        return super()._forward(tokens, rows)

    def _decode(self, ids: IdArray, position: int, rows: int) -> None:
        number, answer = self._ask_forward(ids, rows)
        with self._link.reading():
            _expect_length(answer, position + len(ids))
            self._scores = number, _best_ids(answer, rows, self._vocabulary_size), _not_finite(answer)

    def _rows(self, count: int) -> Rows:
        number, best, not_finite = self._scores
        return WorkerRows(self, self._currency(), count, best, not_finite, number)

    def _ask_forward(self, ids: IdArray, rows: int) -> tuple[int, Frame]:
        count, started = len(ids), time.monotonic()
        answered = self._link.request(
            {"op": "forward", "sequence": self._key, "rows": rows},
            ids_bytes(ids),
            timeout_s=self._times.deadline_s(count),
            inbox=self._inbox,
            cancel={"op": "cancel", "sequence": self._key},
        )
        self._times.record(count, time.monotonic() - started)
        return answered

    def _take_back(self, length: int) -> None:
        """Take back what earlier chunks left in the child. A cache that cannot be cut is never used again."""
        done, self._length = self._length - length, length
        if not done:
            return
        try:
            self._length = self._ask_rewind(length)
        except EdgespecError as error:
            self._broken = True
            if isinstance(error, RewindError):
                raise

    def _cut(self, length: int) -> None:
        self._worker.run(lambda: self._rewind(length))

    def _rewind(self, length: int) -> None:
        self._overwrite()
        self._length = self._ask_rewind(length)

    def _ask_rewind(self, length: int) -> int:
        """The tokens that the child's cache then holds: fewer if it drops more than was asked (``rewind``)."""
        header = {"op": "rewind", "sequence": self._key, "length": length}
        _, answer = self._link.request(header, timeout_s=self._times.answer_s, inbox=self._inbox)
        with self._link.reading():
            kept = answer.integer("length")
            if kept > length:
                raise WorkerLostError(f"its cache should hold {length} tokens, but it reports {kept}")
        return kept

    def fetch(self, header: abc.Mapping[str, Any], read: Callable[[Frame], T], body: bytes = b"") -> T:
        """Ask about the scores of the last forward: for WorkerRows, on any thread that reads them."""
        _, answer = self._link.request({**header, "sequence": self._key}, body, timeout_s=self._times.answer_s)
        with self._link.reading():
            return read(answer)

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._link.pid

    @property
    def vocabulary_size(self) -> int:
        return self._vocabulary_size

    def _check_usable(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("this sequence is closed")
        self._link.check()
        super()._check_usable()


def _shut_down(worker: WorkerThread, inbox: Inbox, link: WorkerLink, key: int) -> None:
    """End the forward in flight, then the thread. Does not wait: garbage is collected on any thread.

    On the link's reader thread, a wait for an answer would be a wait for that thread itself.
    """
    inbox.set(True)
    with suppress(ClosedError):
        worker.submit(functools.partial(_end, worker, link, key))


def _end(worker: WorkerThread, link: WorkerLink, key: int) -> None:
    try:
        with suppress(WorkerLostError, ClosedError):
            link.check()
            link.send({"op": "close", "sequence": key})
    finally:
        worker.close()  # on the worker thread: it ends after this job


def _expect_length(answer: Frame, length: int) -> None:
    if answer.header.get("length") != length:
        raise WorkerLostError(f"its cache should hold {length} tokens, but it reports another length")


def _best_ids(answer: Frame, count: int, vocabulary_size: int) -> IdArray:
    best = answer.ids(0, count)
    if count and not 0 <= int(best.min()) <= int(best.max()) < vocabulary_size:
        raise WorkerLostError("its best token is outside the vocabulary")
    return best


def _not_finite(answer: Frame) -> dict[int, str]:
    """Rows without a usable best id, each with the reason."""
    listed = answer.header.get("not_finite")
    found = {}
    for entry in listed if isinstance(listed, list) else [None]:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], int)):
            raise WorkerLostError("it does not say which rows are finite")
        found[entry[0]] = str(entry[1])
    return found


class WorkerRows(Rows):
    """Rows that stay in the child, which draws from them: best ids are already here, scores cross when read.

    ``size``: how many scores of each row count, None for all.
    """

    def __init__(
        self,
        sequence: WorkerSequence,
        is_current: Callable[[], bool],
        count: int,
        best: IdArray,
        not_finite: abc.Mapping[int, str],
        forward: int,
        size: int | None = None,
    ) -> None:
        whole = sequence.vocabulary_size
        latest: dict[int, LogitsArray] = {}  # the latest row is kept: it may be read twice, and crossing is slow

        def read_row(index: int) -> LogitsArray:
            row = latest.get(index)
            if row is None:
                header = {"op": "row", "forward": forward, "index": index}
                row = sequence.fetch(header, lambda answer: answer.scores(0, whole))
                latest.clear()
                latest[index] = row
            return row[:size]

        super().__init__(count, read_row, is_current)
        self._best = best
        self._not_finite = not_finite
        self._sequence = sequence
        self._forward = forward
        self._size = whole if size is None else min(size, whole)

    def argmax_row(self, index: int) -> int:
        self._check(index)
        if index in self._not_finite:
            raise NonFiniteLogitsError(self._not_finite[index])
        best = int(self._best[index])
        return best if best < self._size else self.draw(index, DrawRequest()).tokens[0]

    def draw(self, index: int, request: DrawRequest, ids: IdArray | None = None) -> Drawn:
        if ids is not None:
            return super().draw(index, request, ids)
        self._check(index)
        numbers, seen = describe_request(request)
        header = {"op": "draw", "forward": self._forward, "index": index, "scores": self._size, **numbers}
        return self._sequence.fetch(header, lambda answer: read_drawn(answer, request, self._size), seen)

    def first(self, size: int) -> Rows:
        return WorkerRows(
            self._sequence, self._is_current, self.count, self._best, self._not_finite, self._forward, size
        )

    def top_k(self, k: int) -> tuple[IdArray, LogitsArray]:
        whole = self._sequence.vocabulary_size
        if self._size < whole or not self.count or not 1 <= k <= min(whole, _MOST_TOP_K):
            return super().top_k(k)
        self._check(0)
        shape, total = (self.count, k), self.count * k

        def read(answer: Frame) -> tuple[IdArray, LogitsArray]:
            return answer.ids(0, total).reshape(shape), answer.scores(total, total).reshape(shape)

        return self._sequence.fetch({"op": "top_k", "forward": self._forward, "k": k}, read)
