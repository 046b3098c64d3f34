"""Our own processor kernels as a runtime: verification nearly free, and the same bits at every width.

A row is computed by the same operations in the same order whatever is computed beside it, on however many threads and
by whichever instruction set, so plain decoding, verification and prefill belong to one numeric class.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import abc
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from edgespec.decoding.contracts import ModelFacts, Rows
from edgespec.errors import CancelledError, ClosedError, InvalidRequestError, RewindError, RuntimeUnavailableError
from edgespec.files.gguf import GgufHeader, read_header
from edgespec.runtimes.forward_request import checked_ids, chunk_sizes
from edgespec.runtimes.native_cache import NativeCache, NativeRows
from edgespec.runtimes.native_layout import read_layout, unsupported_reason
from edgespec.runtimes.native_library import LEVELS, NativeLibrary, load
from edgespec.runtimes.native_threads import check_threads, make_threads
from edgespec.runtimes.native_weights import NativeWeights, SidecarPlace, load_weights
from edgespec.runtimes.worker_thread import WorkerThread

T = TypeVar("T")

__all__ = ["NativeModel", "NativeSequence", "NativeSettings", "describe_native", "load_native", "unsupported_reason"]

KV_TYPE, KV_BITS = "f16", 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSettings:
    """How to run a model. ``level`` is an instruction set by its name, or ``auto`` for the fastest there is.

    With ``processors`` each thread stays on the processor of that number, the first on the first; on Linux only.
    ``sidecar``: whether a file with the laid out weights is used, and written, where loading is told of a place.
    None of these changes a bit of what is computed.
    """

    threads: int = 1
    level: str = "auto"
    processors: tuple[int, ...] | None = None
    sidecar: bool = True

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def kv_type(self) -> str:
        return KV_TYPE


def load_native(
    path: Path,
    settings: NativeSettings,
    *,
    name: str | None = None,
    sha256: str | None = None,
    header: GgufHeader | None = None,
    sidecar: Path | None = None,
) -> NativeModel:
    """Check the file, then lay its weights out for the kernels.

    ``sidecar`` is where they are kept for the next load, which then takes less than a second; it takes as much disk
    as the model, and is written only if ``sha256`` tells which model it is of and if there is plenty of room.

    Raises ModelFileError, RuntimeUnavailableError (no library, or not for this model), InvalidRequestError,
    MemoryLimitError, CancelledError.
    """
    header = read_header(path) if header is None else header
    facts = describe_native(header, settings, name=name or path.stem, sha256=sha256)
    place = None
    if settings.sidecar and sidecar is not None and sha256 is not None:
        place = SidecarPlace(path=sidecar, sha256=sha256)
    weights = load_weights(load(), header, read_layout(header), settings.threads, place)
    return NativeModel(weights, header, settings, facts)


def describe_native(header: GgufHeader, settings: NativeSettings, *, name: str, sha256: str | None) -> ModelFacts:
    """The facts of a model as ``load_native`` would report them, from its header alone.

    Raises RuntimeUnavailableError, InvalidRequestError.
    """
    check_threads(settings.threads, settings.processors)
    library = load()
    facts_settings: dict[str, str | int | bool] = {"level": _level(library, settings.level)}
    if settings.processors is not None:
        facts_settings["processors"] = ",".join(map(str, settings.processors[: settings.threads]))
    return ModelFacts(
        name=name,
        sha256=sha256,
        architecture=header.architecture,
        runtime="native",
        build=library.build,
        device=settings.device,
        threads=settings.threads,
        vocabulary_size=header.vocabulary_size,
        trained_context_length=header.context_length,
        weight_bytes=header.tensor_bytes,
        bytes_per_forward=header.bytes_per_forward,
        kv_bytes_per_token=header.kv_bytes_per_token(KV_BITS),
        kv_type=KV_TYPE,
        can_fork=True,
        settings=facts_settings,
    )


def _level(library: NativeLibrary, wanted: str) -> str:
    if wanted == "auto":
        return library.levels[-1]
    if wanted not in LEVELS:
        raise InvalidRequestError(f"unknown level {wanted!r}", hint=f"one of auto, {', '.join(LEVELS)}")
    if wanted not in library.levels:
        raise RuntimeUnavailableError(
            f"this processor or this build cannot run {wanted}", hint=f"here are {', '.join(library.levels)}"
        )
    return wanted


class NativeModel:
    """Weights laid out for the kernels. Implements the Model contract."""

    def __init__(
        self, weights: NativeWeights, header: GgufHeader, settings: NativeSettings, facts: ModelFacts
    ) -> None:
        self.header = header
        self.settings = settings
        self._facts = facts
        self._weights: NativeWeights | None = weights
        self._lock = threading.Lock()
        self._sequences: weakref.WeakSet[NativeSequence] = weakref.WeakSet()

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    def facts_with(self, *, threads: int | None = None) -> ModelFacts:
        """The facts ``with_caches`` would have. Raises InvalidRequestError."""
        settings = self._settings_with(threads)
        return describe_native(self.header, settings, name=self._facts.name, sha256=self._facts.sha256)

    def with_caches(self, *, threads: int | None = None) -> NativeModel:
        """The same weights, shared, on another number of threads; to be closed like any other model.

        Raises ClosedError, InvalidRequestError.
        """
        settings, facts = self._settings_with(threads), self.facts_with(threads=threads)
        with self._lock:
            return NativeModel(self._open_weights(), self.header, settings, facts)

    def _settings_with(self, threads: int | None) -> NativeSettings:
        return self.settings if threads is None else replace(self.settings, threads=threads)

    def open(self, context_length: int) -> NativeSequence:
        """A fresh Sequence with room for ``context_length`` tokens. Raises MemoryLimitError, ClosedError."""
        if context_length < 1:
            raise InvalidRequestError(f"a context of {context_length} tokens cannot hold anything")
        with self._lock:
            sequence = NativeSequence(self, self._open_weights(), context_length)
            self._sequences.add(sequence)
            return sequence

    def _open_weights(self) -> NativeWeights:
        if self._weights is None:
            raise ClosedError(f"model {self._facts.name} is closed")
        return self._weights

    def close(self) -> None:
        """Close every open Sequence, then free the weights. Idempotent."""
        with self._lock:
            weights, self._weights = self._weights, None
            sequences = list(self._sequences)
        for sequence in sequences:
            sequence.close()
        del weights  # a forgotten Sequence still being finalized on another thread may hold them a moment longer

    def __enter__(self) -> NativeModel:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class NativeSequence:
    """One native cache and its worker thread. Implements the Sequence contract."""

    def __init__(self, model: NativeModel, weights: NativeWeights, context_length: int) -> None:
        self._model = model  # whoever keeps only the cache still has its facts and its weights
        self._context_length = context_length
        self._length = 0
        self._generation = 0
        self._cancelled = threading.Event()
        facts = model.facts
        self._vocabulary_size = facts.vocabulary_size
        self._native = NativeCache(
            weights,
            context_length=context_length,
            cache_bytes=facts.kv_bytes_per_token * context_length,
            threads=make_threads(facts.threads, model.settings.processors),
            level=str(facts.settings["level"]),
        )
        # Not self.cancel: the thread must not keep a forgotten Sequence alive.
        self._worker = WorkerThread("edgespec-native", functools.partial(_cancel, self._native, self._cancelled))
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
        generation = self._generation
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
        return NativeRows(self._native, rows, lambda: self._generation == generation)

    def rewind(self, length: int) -> None:
        self._check_open()
        if not 0 <= length <= self._length:
            raise RewindError(f"cannot rewind to {length}: the cache holds {self._length} tokens")
        if length < self._length:
            self._generation += 1
            self._length = length  # what lies beyond is written over before it is read

    def fork(self) -> NativeSequence:
        """A second Sequence with a copy of the cache's content. Raises ClosedError, MemoryLimitError."""
        self._check_open()
        other = self._model.open(self._context_length)
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

    def cancel(self) -> None:
        _cancel(self._native, self._cancelled)

    def reset_cancel(self) -> None:
        self._native.cancel(False)
        self._cancelled.clear()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
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
