"""ONNX Runtime as a runtime: an exported model on the CPU, or on any execution provider that is installed.

What is loaded is a folder that ``edgespec export --to onnx`` wrote and ``read_onnx_folder`` has checked.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import abc
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import numpy as np

from edgespec.errors import (
    CancelledError,
    ClosedError,
    InvalidRequestError,
    RewindError,
    RuntimeUnavailableError,
)
from edgespec.files.gguf.header import GgufHeader
from edgespec.files.onnx.artefact import OnnxArtefact
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.rows import IdArray, Rows
from edgespec.runtimes.forward_request import checked_ids, chunk_sizes
from edgespec.runtimes.onnx import providers as onnx_providers
from edgespec.runtimes.onnx.contexts import OnnxContext, open_context
from edgespec.runtimes.onnx.session import OnnxSettings, OnnxWeights, StopFlag, load_weights
from edgespec.runtimes.thread import WorkerThread
from edgespec.runtimes.trimmed_rows import TrimmedRows

T = TypeVar("T")

__all__ = ["PADDINGS", "OnnxModel", "OnnxSequence", "OnnxSettings", "describe_onnx", "load_onnx"]

PADDINGS = (1, 2)  # more than two rows are computed like two


def load_onnx(
    artefact: OnnxArtefact, settings: OnnxSettings, *, name: str | None = None, sha256: str | None = None
) -> OnnxModel:
    """Load a checked artefact on the provider that the settings name.

    Raises RuntimeUnavailableError (no onnxruntime, no such provider), InvalidRequestError, ModelFileError,
    MemoryLimitError.
    """
    facts = describe_onnx(artefact, settings, name=name or artefact.folder.name, sha256=sha256)
    provider = onnx_providers.find_provider(settings.provider)
    weights = load_weights(onnx_providers.load(), provider, artefact, settings)
    return OnnxModel(weights, settings, facts)


def describe_onnx(artefact: OnnxArtefact, settings: OnnxSettings, *, name: str, sha256: str | None) -> ModelFacts:
    """The facts of a model as ``load_onnx`` would report them, from its artefact alone.

    Raises RuntimeUnavailableError, InvalidRequestError.
    """
    if settings.threads < 1:
        raise InvalidRequestError(f"threads must be at least 1, not {settings.threads}")
    if settings.pad_to not in PADDINGS:
        raise InvalidRequestError(
            f"a forward cannot be padded to {settings.pad_to} tokens", hint=f"one of {', '.join(map(str, PADDINGS))}"
        )
    library, provider = onnx_providers.load(), onnx_providers.find_provider(settings.provider)
    longest = artefact.context_length
    if artefact.static_cache is not None:  # its forwards need no room for padding: only rows that count are kept
        longest = min(longest, artefact.static_cache)
    return ModelFacts(
        name=name,
        sha256=sha256,
        architecture=artefact.architecture,
        runtime="onnx",
        build=" ".join(filter(None, (library.build, provider.provider, provider.plugin))),
        device=provider.name,
        threads=settings.threads,
        vocabulary_size=artefact.vocabulary_size,
        trained_context_length=longest,
        weight_bytes=artefact.weight_bytes,
        bytes_per_forward=artefact.bytes_per_forward,
        kv_bytes_per_token=artefact.kv_bytes_per_token,
        kv_type="f32",
        settings=settings.as_json(),
    )


class OnnxModel:
    """Weights loaded by ONNX Runtime. Implements the Model contract."""

    def __init__(self, weights: OnnxWeights, settings: OnnxSettings, facts: ModelFacts) -> None:
        self.artefact = weights.artefact
        self.settings = settings
        self._facts = facts
        self._weights: OnnxWeights | None = weights
        self._lock = threading.Lock()
        self._sequences: weakref.WeakSet[OnnxSequence] = weakref.WeakSet()

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def header(self) -> GgufHeader:
        """The source's metadata and tokenizer; it lists no tensors."""
        return self.artefact.tokenizer_header

    def _settings_with(self, threads: int | None, pad_to: int | None) -> OnnxSettings:
        own = self.settings
        return replace(
            own,
            threads=own.threads if threads is None else threads,
            pad_to=own.pad_to if pad_to is None else pad_to,
        )

    def facts_with(self, *, threads: int | None = None, pad_to: int | None = None) -> ModelFacts:
        """The facts ``with_settings`` would have. Raises InvalidRequestError."""
        settings = self._settings_with(threads, pad_to)
        return describe_onnx(self.artefact, settings, name=self._facts.name, sha256=self._facts.sha256)

    def with_settings(self, *, threads: int | None = None, pad_to: int | None = None) -> OnnxModel:
        """The same weights with forwards of at least ``pad_to`` tokens; to be closed like any other model.

        They are shared, unless another number of ``threads`` is asked for: ONNX Runtime lays weights out for a
        session of fixed threads. Raises ClosedError, InvalidRequestError, and then what loading raises.
        """
        settings, facts = self._settings_with(threads, pad_to), self.facts_with(threads=threads, pad_to=pad_to)
        with self._lock:
            weights = self._open_weights()
        if settings.threads != self.settings.threads:
            provider = onnx_providers.find_provider(settings.provider)
            weights = load_weights(onnx_providers.load(), provider, self.artefact, settings)
        return OnnxModel(weights, settings, facts)

    def open(self, context_length: int) -> OnnxSequence:
        """A fresh Sequence with room for ``context_length`` tokens.

        Raises MemoryLimitError, ClosedError, and InvalidRequestError for more tokens than the model has positions.
        """
        if context_length < 1:
            raise InvalidRequestError(f"a context of {context_length} tokens cannot hold anything")
        longest = self._facts.trained_context_length
        if context_length > longest:
            raise InvalidRequestError(
                f"{self._facts.name} has positions for {longest} tokens, not for {context_length}",
                hint=f"use --context {longest} or less",
            )
        with self._lock:
            sequence = OnnxSequence(self, self._open_weights(), context_length)
            self._sequences.add(sequence)
            return sequence

    def _open_weights(self) -> OnnxWeights:
        if self._weights is None:
            raise ClosedError(f"model {self._facts.name} is closed")
        return self._weights

    def close(self) -> None:
        """Close every open Sequence, then let go of the weights. Idempotent."""
        with self._lock:
            self._weights = None
            sequences = list(self._sequences)
        for sequence in sequences:
            sequence.close()

    def __enter__(self) -> OnnxModel:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class OnnxSequence:
    """One cache in ONNX Runtime and its worker thread. Implements the Sequence contract."""

    def __init__(self, model: OnnxModel, weights: OnnxWeights, context_length: int) -> None:
        self._model = model  # whoever keeps only the cache still has its facts and its weights
        self._context_length = context_length
        self._length = 0
        self._generation = 0
        artefact = model.artefact
        self._vocabulary_size = artefact.vocabulary_size
        self._kept: IdArray | None = None if artefact.ids is None else artefact.ids.astype(np.int64)
        self._stop = StopFlag(weights)
        self._native = open_context(weights, context_length, model.settings.pad_to, self._stop)
        # Not self.cancel: the thread must not keep a forgotten Sequence alive.
        self._worker = WorkerThread("edgespec-onnx", _raiser(self._stop))
        # Runs at garbage collection and at interpreter exit alike: ends the forward in flight, then frees.
        self._finalizer = weakref.finalize(self, _shut_down, self._worker, self._native, self._stop)

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
        done = first = 0
        try:
            for size in chunk_sizes(count, rows):
                self._check_cancelled()
                last = done + size == count
                first = self._native.decode(ids[done : done + size], start + done, rows if last else 0)
                done += size
                self._length = start + done
        except BaseException:
            self._length = start
            raise
        native = self._native
        scored = Rows(rows, lambda index: native.row(first + index), lambda: self._generation == generation)
        return scored if self._kept is None else TrimmedRows(scored, self._kept, self._vocabulary_size)

    def rewind(self, length: int) -> None:
        self._check_open()
        if not 0 <= length <= self._length:
            raise RewindError(f"cannot rewind to {length}: the cache holds {self._length} tokens")
        if length < self._length:
            self._generation += 1
            self._length = length

    def fork(self) -> OnnxSequence:
        raise RuntimeUnavailableError("the onnx runtime does not fork a sequence", hint="open a second sequence")

    def cancel(self) -> None:
        self._stop.set(True)

    def reset_cancel(self) -> None:
        self._stop.set(False)

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("this sequence is closed")

    def _check_cancelled(self) -> None:
        if self._stop.raised:
            raise CancelledError("the forward was cancelled")

    def close(self) -> None:
        self._generation += 1
        self._finalizer()
        self._worker.join()  # also for whoever comes second while the first is still at it

    def __enter__(self) -> OnnxSequence:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _raiser(stop: StopFlag) -> Callable[[], None]:
    return lambda: stop.set(True)


def _shut_down(worker: WorkerThread, native: OnnxContext, stop: StopFlag) -> None:
    stop.set(True)
    try:
        with contextlib.suppress(ClosedError):
            worker.run(native.free)
    finally:
        worker.close()
