"""llama.cpp as a runtime: every architecture it knows, every device its build has.

Built on the low-level module of llama-cpp-python. The high-level class is not used: it copies every row, ignores
return codes of cache edits, and cannot be cancelled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import weakref
from collections import abc
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from edgespec.errors import (
    CancelledError,
    ClosedError,
    InvalidRequestError,
    ModelFileError,
    RewindError,
    RuntimeUnavailableError,
)
from edgespec.files.gguf.header import GgufHeader, read_header
from edgespec.files.trimmed_drafter import TrimmedDrafter
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.rows import Rows
from edgespec.runtimes.forward_request import checked_ids, chunk_sizes
from edgespec.runtimes.llama.context import EVERY_LAYER, KV_TYPES, RAISED, LlamaSettings, NativeContext, abort_flag
from edgespec.runtimes.llama.devices import Device, place
from edgespec.runtimes.llama.facts import describe_model, device_of, usable_settings
from edgespec.runtimes.llama.library import LlamaLibrary, load
from edgespec.runtimes.llama.rows import LlamaRows
from edgespec.runtimes.llama.trimmed import TrimmedVocabulary
from edgespec.runtimes.thread import WorkerThread

T = TypeVar("T")

__all__ = [
    "EVERY_LAYER",
    "KV_TYPES",
    "LlamaModel",
    "LlamaSequence",
    "LlamaSettings",
    "describe_model",
    "load_model",
    "usable_settings",
]


def load_model(
    path: Path,
    settings: LlamaSettings,
    *,
    name: str | None = None,
    sha256: str | None = None,
    header: GgufHeader | None = None,
    artefact: TrimmedDrafter | None = None,
) -> LlamaModel:
    """Check the file, then load its weights on the named device.

    A trimmed drafter is loaded with its ``artefact``, whose ``path`` and ``model_header`` are then the arguments of
    those names; it speaks the ids of its source.

    Raises ModelFileError, RuntimeUnavailableError (unknown device, for one), InvalidRequestError.
    """
    if settings.kv_type not in KV_TYPES:
        raise InvalidRequestError(f"unknown cache type {settings.kv_type!r}", hint=f"one of {', '.join(KV_TYPES)}")
    if settings.threads < 1:
        raise InvalidRequestError(f"threads must be at least 1, not {settings.threads}")
    if settings.gpu_layers is not None and settings.gpu_layers < 0:
        raise InvalidRequestError(f"gpu_layers must be at least 0, not {settings.gpu_layers}")
    header = read_header(path) if header is None else header
    settings = usable_settings(settings, header)
    trimmed = None if artefact is None else TrimmedVocabulary(artefact)
    library = load()
    device = device_of(library, settings)
    pointer = _load_weights(library.api, path, settings, device)
    weights = _Weights(library.api, pointer)
    return LlamaModel(library, weights, header, settings, name=name or path.stem, sha256=sha256, trimmed=trimmed)


def _load_weights(api: Any, path: Path, settings: LlamaSettings, device: Device | None) -> Any:
    params = api.llama_model_default_params()
    placed = place(params, device, settings.gpu_layers)
    params.use_extra_bufts = settings.repack
    interrupted = threading.Event()
    keep_going = api.llama_progress_callback(lambda _fraction, _data: not interrupted.is_set())
    params.progress_callback = keep_going
    loader = WorkerThread("edgespec-load", interrupted.set)
    try:
        pointer = loader.run(lambda: api.llama_model_load_from_file(os.fsencode(path), params))
    finally:
        loader.close()
    del placed  # kept until here: native code read it
    if not pointer:
        if interrupted.is_set():
            raise CancelledError("loading was cancelled")
        where = "" if device is None else f" on {device.name}, which may be too small for so many layers"
        raise ModelFileError(
            path, f"llama.cpp could not load it{where}", hint="its log (logger edgespec.native, --debug) says why"
        )
    return pointer


class _Weights:
    """Loaded weights, freed when the model and every cache made from them have let go."""

    def __init__(self, api: Any, pointer: Any) -> None:
        self.pointer = pointer
        finalizer = weakref.finalize(self, api.llama_model_free, pointer)
        finalizer.atexit = False  # the process is going: its memory goes with it


class LlamaModel:
    """Weights loaded by llama.cpp. Implements the Model contract."""

    def __init__(
        self,
        library: LlamaLibrary,
        weights: _Weights,
        header: GgufHeader,
        settings: LlamaSettings,
        *,
        name: str,
        sha256: str | None,
        trimmed: TrimmedVocabulary | None = None,
    ) -> None:
        self.header = header
        self.settings = settings
        self.trimmed = trimmed
        self._library = library
        self._lock = threading.Lock()
        self._sequences: weakref.WeakSet[LlamaSequence] = weakref.WeakSet()
        api, pointer = library.api, weights.pointer
        self._weights: _Weights | None = weights
        self.head_rows = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(pointer)))
        if trimmed is not None:
            trimmed.check_loaded(api, pointer, self.head_rows)
        self._facts = replace(
            describe_model(header, settings, name=name, sha256=sha256),
            vocabulary_size=self.head_rows if trimmed is None else trimmed.vocabulary_size,
            trained_context_length=int(api.llama_model_n_ctx_train(pointer)),
            # A recurrent state holds all of the past in one place: no part of it can be dropped.
            can_rewind=not (api.llama_model_is_recurrent(pointer) or api.llama_model_is_hybrid(pointer)),
        )

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    def _settings_with(self, threads: int | None, kv_type: str | None, flash_attention: bool | None) -> LlamaSettings:
        if kv_type is not None and kv_type not in KV_TYPES:
            raise InvalidRequestError(f"unknown cache type {kv_type!r}", hint=f"one of {', '.join(KV_TYPES)}")
        own = self.settings
        settings = replace(
            own,
            threads=own.threads if threads is None else threads,
            kv_type=own.kv_type if kv_type is None else kv_type,
            flash_attention=own.flash_attention if flash_attention is None else flash_attention,
        )
        return usable_settings(settings, self.header)

    def facts_with(
        self, *, threads: int | None = None, kv_type: str | None = None, flash_attention: bool | None = None
    ) -> ModelFacts:
        """The facts ``with_settings`` would have. Raises InvalidRequestError."""
        settings = self._settings_with(threads, kv_type, flash_attention)
        return describe_model(self.header, settings, name=self._facts.name, sha256=self._facts.sha256)

    def with_settings(
        self, *, threads: int | None = None, kv_type: str | None = None, flash_attention: bool | None = None
    ) -> LlamaModel:
        """The same weights, shared, with caches of another kind; to be closed like any other model.

        Raises ClosedError, InvalidRequestError.
        """
        settings = self._settings_with(threads, kv_type, flash_attention)
        with self._lock:
            if self._weights is None:
                raise ClosedError(f"model {self._facts.name} is closed")
            return LlamaModel(
                self._library,
                self._weights,
                self.header,
                settings,
                name=self._facts.name,
                sha256=self._facts.sha256,
                trimmed=self.trimmed,
            )

    def open(self, context_length: int) -> LlamaSequence:
        """A fresh Sequence with room for ``context_length`` tokens. Raises MemoryLimitError, ClosedError."""
        if context_length < 1:
            raise InvalidRequestError(f"a context of {context_length} tokens cannot hold anything")
        with self._lock:
            if self._weights is None:
                raise ClosedError(f"model {self._facts.name} is closed")
            sequence = LlamaSequence(self, self._library.api, self._weights, context_length)
            self._sequences.add(sequence)
            return sequence

    def close(self) -> None:
        """Close every open Sequence, then free the weights. Idempotent."""
        with self._lock:
            weights, self._weights = self._weights, None
            sequences = list(self._sequences)
        for sequence in sequences:
            sequence.close()
        del weights  # a forgotten Sequence still being finalized on another thread may hold them a moment longer

    def __enter__(self) -> LlamaModel:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class LlamaSequence:
    """One llama.cpp context and its worker thread. Implements the Sequence contract."""

    def __init__(self, model: LlamaModel, api: Any, weights: _Weights, context_length: int) -> None:
        self._model = model  # whoever keeps only the cache still has its facts and its weights
        self._context_length = context_length
        self._length = 0
        self._broken = False
        self._generation = 0
        self._vocabulary_size = model.facts.vocabulary_size
        self._head_rows = model.head_rows
        self._trimmed = trimmed = model.trimmed
        embedding = None if trimmed is None else trimmed.embedding
        self._abort_flag = abort_flag()
        # Not self.cancel: the thread must not keep a forgotten Sequence alive.
        self._worker = WorkerThread("edgespec-llama", functools.partial(_raise_flag, self._abort_flag))
        try:
            self._native = self._worker.run(
                lambda: NativeContext(
                    api, weights.pointer, model.settings, context_length, self._abort_flag, embedding
                )
            )
        except BaseException:
            self._worker.close()
            raise
        # Runs at garbage collection and at interpreter exit alike: ends the forward in flight, then frees. It holds
        # the weights, since garbage is collected in any order and a cache must go before them.
        self._finalizer = weakref.finalize(self, _shut_down, self._worker, self._native, self._abort_flag, weights)

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
        self._check_sound()
        self._generation += 1
        generation = self._generation
        done = size = 0
        try:
            for size in chunk_sizes(count, rows):
                self._check_cancelled()
                last = done + size == count
                self._native.decode(ids[done : done + size], start + done, rows if last else 0)
                done += size
                self._length = start + done
        except BaseException:
            self._drop_tail(start)
            raise
        native, first, head_rows = self._native, size - rows, self._head_rows
        scored = LlamaRows(native, first, rows, head_rows, lambda: self._generation == generation)
        return scored if self._trimmed is None else self._trimmed.rows(scored)

    def rewind(self, length: int) -> None:
        self._check_sound()
        if not 0 <= length <= self._length:
            raise RewindError(f"cannot rewind to {length}: the cache holds {self._length} tokens")
        if length < self._length:
            self._worker.run(lambda: self._drop_tail(length))

    def _drop_tail(self, length: int) -> None:
        """Cut the cache to ``length`` and believe only what the cache itself then says.

        A cache that will not be cut holds tokens nobody knows of: from then on it is never used again.
        """
        self._generation += 1
        try:
            self._native.trim(length)
        except RewindError:
            self._broken = True
            raise
        self._length = length

    def _check_sound(self) -> None:
        if self._broken:
            raise RewindError("this sequence's cache did not rewind and cannot be trusted", hint="open another one")

    def fork(self) -> LlamaSequence:
        raise RuntimeUnavailableError("the llama runtime does not fork a sequence", hint="open a second sequence")

    def cancel(self) -> None:
        _raise_flag(self._abort_flag)

    def reset_cancel(self) -> None:
        self._abort_flag[0] = 0

    def _check_cancelled(self) -> None:
        if self._abort_flag[0]:
            raise CancelledError("the forward was cancelled")

    def close(self) -> None:
        self._generation += 1
        self._finalizer()
        self._worker.join()  # also for whoever comes second while the first is still at it

    def __enter__(self) -> LlamaSequence:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _raise_flag(flag: ctypes.Array[ctypes.c_int32]) -> None:
    flag[0] = RAISED


def _shut_down(
    worker: WorkerThread, native: NativeContext, flag: ctypes.Array[ctypes.c_int32], _weights: _Weights
) -> None:
    _raise_flag(flag)
    try:
        with contextlib.suppress(ClosedError):
            worker.run(native.free)
    finally:
        worker.close()
