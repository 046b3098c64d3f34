"""Any runtime in a child process, as a Model and its Sequences: a lost device does not take the host along.

Token ids cross with every forward, and the best id of every row comes back; whole rows only when somebody reads them.
If the process dies or hangs, whatever needs it raises WorkerLostError, then and ever after.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections import abc
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from edgespec.errors import (
    CancelledError,
    ClosedError,
    EdgespecError,
    InvalidRequestError,
    NonFiniteLogitsError,
    RewindError,
    RuntimeUnavailableError,
    StaleRowsError,
    WorkerLostError,
)
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.rows import IdArray, LogitsArray, Rows
from edgespec.runtimes.forward_request import checked_ids, chunk_sizes
from edgespec.runtimes.process.deadlines import Deadlines, ForwardTimes
from edgespec.runtimes.process.frames import Frame, LoadRequest, facts_from_json, ids_bytes
from edgespec.runtimes.process.link import Inbox, WorkerLink
from edgespec.runtimes.thread import WorkerThread

T = TypeVar("T")

__all__ = [
    "Deadlines",
    "LoadRequest",
    "StartingWorker",
    "WorkerModel",
    "WorkerRows",
    "WorkerSequence",
    "start_model",
]

# Beyond this many scores of a row, rows cross one by one: 64 of them would not fit into one answer.
_MOST_TOP_K = 4096


def start_model(
    request: LoadRequest,
    *,
    command: abc.Sequence[str] | None = None,
    environment: abc.Mapping[str, str] | None = None,
    deadlines: Deadlines | None = None,
) -> WorkerModel:
    """Start a process, have it load a model, and wait for it: ``StartingWorker`` in one step."""
    return StartingWorker(request, command=command, environment=environment, deadlines=deadlines).wait()


class StartingWorker:
    """A process that loads a model."""

    def __init__(
        self,
        request: LoadRequest,
        *,
        command: abc.Sequence[str] | None = None,
        environment: abc.Mapping[str, str] | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        """Start it.

        ``command`` does (default: this interpreter on ``edgespec.runtimes.process.worker``; a frozen application
        needs its own), ``environment`` is added to its environment only. Raises RuntimeUnavailableError if no process
        can be started.
        """
        name = request.name or request.path.stem
        self._request = request
        self._link = WorkerLink(
            name=name, command=command, environment=environment, deadlines=deadlines or Deadlines()
        )

    def wait(self) -> WorkerModel:
        """The loaded model; called once. Raises what loading raises in this process, WorkerLostError, ClosedError."""
        link = self._link
        try:
            header = {"op": "load", "load": self._request.as_json()}
            _, answer = link.request(header, timeout_s=link.deadlines.load_s)
            with link.reading():
                facts = facts_from_json(answer.header.get("facts"))
        except BaseException:
            link.close()
            raise
        return WorkerModel(link, replace(facts, can_fork=False, can_branch=False))

    def close(self) -> None:
        """End the process, from any thread: ``wait`` then raises ClosedError."""
        self._link.close()


class WorkerModel:
    """A model in a process of its own. Implements the Model contract."""

    def __init__(self, link: WorkerLink, facts: ModelFacts) -> None:
        self._link = link
        self._facts = facts
        self.times = ForwardTimes(link.deadlines, facts.bytes_per_forward)
        self._keys = itertools.count()
        self._lock = threading.Lock()
        self._sequences: weakref.WeakSet[WorkerSequence] = weakref.WeakSet()
        # At garbage collection and at interpreter exit alike.
        self._finalizer = weakref.finalize(self, link.close)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def pid(self) -> int:
        """The process, for whoever watches its memory."""
        return self._link.pid

    @property
    def lost(self) -> str | None:
        """Why the process cannot be used any more; None while it can, or as long as nobody noticed."""
        return self._link.lost if self._finalizer.alive else None

    def open(self, context_length: int) -> WorkerSequence:
        """A fresh Sequence. Raises MemoryLimitError, InvalidRequestError, ClosedError, WorkerLostError."""
        if context_length < 1:
            raise InvalidRequestError(f"a context of {context_length} tokens cannot hold anything")
        if context_length >= 2**31:
            raise InvalidRequestError(f"a context of {context_length} tokens is more than any runtime can count")
        with self._lock:
            if not self._finalizer.alive:
                raise ClosedError(f"model {self._facts.name} is closed")
            key = next(self._keys)
            header = {"op": "open", "sequence": key, "context_length": context_length}
            self._link.request(header, timeout_s=self._link.deadlines.answer_s)
            sequence = WorkerSequence(self, self._link, key, context_length)
            self._sequences.add(sequence)
            return sequence

    def close(self) -> None:
        """Close every open Sequence, then end the process. Idempotent."""
        with self._lock:
            sequences = list(self._sequences)
        for sequence in sequences:
            sequence.close()
        with self._lock:
            self._finalizer()

    def __enter__(self) -> WorkerModel:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class WorkerSequence:
    """One cache in the child and a thread here that waits for its answers. Implements the Sequence contract."""

    def __init__(self, model: WorkerModel, link: WorkerLink, key: int, context_length: int) -> None:
        self._model = model  # whoever keeps only the cache still has its process
        self._link = link
        self._key = key
        self._context_length = context_length
        self._length = 0
        self._broken = False
        self._generation = 0
        self._times = model.times
        self._vocabulary_size = model.facts.vocabulary_size
        self._inbox = Inbox()
        # Not self.cancel: the thread must not keep a forgotten Sequence alive.
        self._worker = WorkerThread("edgespec-worker", self._inbox.cancel)
        self._finalizer = weakref.finalize(self, _shut_down, self._worker, self._inbox, link, key)

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
        self._check_sound()  # before anything else: whatever is asked of a lost process, that it is lost comes first
        start, count = self._length, len(tokens)
        ids = checked_ids(
            tokens,
            rows,
            length=start,
            context_length=self._context_length,
            vocabulary_size=self._vocabulary_size,
        )
        self._generation += 1
        done = number = 0
        best, not_finite = ids[:0], {}
        try:
            # In chunks from here: the length grows as they are done, and no answer takes long.
            for size in chunk_sizes(count, rows):
                self._check_cancelled()
                scored = rows if done + size == count else 0
                number, answer = self._ask_forward(ids[done : done + size], scored)
                with self._link.reading():
                    _expect_length(answer, start + done + size)
                    best, not_finite = _best_ids(answer, scored, self._vocabulary_size), _not_finite(answer)
                done += size
                self._length = start + done
        except BaseException:
            self._length = start
            if done:
                self._drop_chunks(start)
            raise
        return WorkerRows(self, rows, best, not_finite, number)

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

    def _drop_chunks(self, length: int) -> None:
        """Take back what earlier chunks of a failed forward left in the child. What cannot be is never used again."""
        try:
            self._ask_rewind(length)
        except EdgespecError as error:
            self._broken = True
            if isinstance(error, RewindError):
                raise

    def rewind(self, length: int) -> None:
        self._check_sound()
        if not 0 <= length <= self._length:
            raise RewindError(f"cannot rewind to {length}: the cache holds {self._length} tokens")
        if length < self._length:
            self._worker.run(lambda: self._rewind(length))

    def _rewind(self, length: int) -> None:
        self._generation += 1
        self._ask_rewind(length)
        self._length = length

    def _ask_rewind(self, length: int) -> None:
        header = {"op": "rewind", "sequence": self._key, "length": length}
        _, answer = self._link.request(header, timeout_s=self._times.answer_s, inbox=self._inbox)
        with self._link.reading():
            _expect_length(answer, length)

    def fetch(self, header: abc.Mapping[str, Any], read: Callable[[Frame], T]) -> T:
        """Ask for scores of the last forward: for WorkerRows, on whatever thread they are read."""
        whole = {**header, "sequence": self._key}
        _, answer = self._link.request(whole, timeout_s=self._times.answer_s)
        with self._link.reading():
            return read(answer)

    @property
    def pid(self) -> int:
        """The process it lives in."""
        return self._model.pid

    @property
    def generation(self) -> int:
        """Grows with everything that overwrites rows."""
        return self._generation

    @property
    def vocabulary_size(self) -> int:
        return self._vocabulary_size

    def fork(self) -> WorkerSequence:
        raise RuntimeUnavailableError("a worker process does not fork a sequence", hint="open a second sequence")

    def cancel(self) -> None:
        self._inbox.cancel()

    def reset_cancel(self) -> None:
        self._inbox.cancelled = False

    def _check_sound(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("this sequence is closed")
        self._link.check()
        if self._broken:
            raise RewindError("this sequence's cache did not rewind and cannot be trusted", hint="open another one")

    def _check_cancelled(self) -> None:
        if self._inbox.cancelled:
            raise CancelledError("the forward was cancelled")

    def close(self) -> None:
        self._generation += 1
        self._finalizer()
        self._worker.join()  # also for whoever comes second while the first is still at it

    def __enter__(self) -> WorkerSequence:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _shut_down(worker: WorkerThread, inbox: Inbox, link: WorkerLink, key: int) -> None:
    """End the forward in flight, then the thread. Waits for nothing: garbage is collected on any thread.

    On the link's own reader thread, for one, waiting for an answer would be waiting for oneself.
    """
    inbox.cancel()
    with suppress(ClosedError):
        worker.submit(functools.partial(_end, worker, link, key))


def _end(worker: WorkerThread, link: WorkerLink, key: int) -> None:
    try:
        with suppress(WorkerLostError, ClosedError):
            link.check()
            link.send({"op": "close", "sequence": key})
    finally:
        worker.close()  # on the thread itself: it ends after this job


def _expect_length(answer: Frame, length: int) -> None:
    if answer.header.get("length") != length:
        raise WorkerLostError(f"its cache should hold {length} tokens, and it says otherwise")


def _best_ids(answer: Frame, count: int, vocabulary_size: int) -> IdArray:
    best = answer.ids(0, count)
    if count and not 0 <= int(best.min()) <= int(best.max()) < vocabulary_size:
        raise WorkerLostError("its best token is none of the vocabulary")
    return best


def _not_finite(answer: Frame) -> dict[int, str]:
    """Rows without a usable best id, and what is wrong with each."""
    listed = answer.header.get("not_finite")
    found = {}
    for entry in listed if isinstance(listed, list) else [None]:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], int)):
            raise WorkerLostError("it does not say which rows are finite")
        found[entry[0]] = str(entry[1])
    return found


class WorkerRows(Rows):
    """Rows that stay in the child: the best ids are here already, scores are fetched when they are read."""

    def __init__(
        self, sequence: WorkerSequence, count: int, best: IdArray, not_finite: abc.Mapping[int, str], forward: int
    ) -> None:
        generation, size = sequence.generation, sequence.vocabulary_size

        latest: dict[int, LogitsArray] = {}  # a drafter looks at one row twice, and crossing is dear

        def read_row(index: int) -> LogitsArray:
            row = latest.get(index)
            if row is None:
                header = {"op": "row", "forward": forward, "index": index}
                row = sequence.fetch(header, lambda answer: answer.scores(0, size))
                latest.clear()
                latest[index] = row
            return row

        super().__init__(count, read_row, lambda: sequence.generation == generation)
        self._best = best
        self._not_finite = not_finite
        self._sequence = sequence
        self._forward = forward

    def argmax_row(self, index: int) -> int:
        if not self._is_current():
            raise StaleRowsError("these rows were overwritten by a later forward, rewind or close")
        if not 0 <= index < self.count:
            raise IndexError(f"row {index} of {self.count}")
        if index in self._not_finite:
            raise NonFiniteLogitsError(self._not_finite[index])
        return int(self._best[index])

    def top_k(self, k: int) -> tuple[IdArray, LogitsArray]:
        size = self._sequence.vocabulary_size
        if not self.count or not 1 <= k <= min(size, _MOST_TOP_K):
            return super().top_k(k)
        if not self._is_current():
            raise StaleRowsError("these rows were overwritten by a later forward, rewind or close")
        shape, total = (self.count, k), self.count * k

        def read(answer: Frame) -> tuple[IdArray, LogitsArray]:
            return answer.ids(0, total).reshape(shape), answer.scores(total, total).reshape(shape)

        return self._sequence.fetch({"op": "top_k", "forward": self._forward, "k": k}, read)
