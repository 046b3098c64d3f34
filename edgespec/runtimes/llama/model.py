"""llama.cpp as a runtime: every architecture llama.cpp supports, every device its build has.

Built on the low-level module of llama-cpp-python. The high-level class is not used: it copies every row, ignores
return codes of cache edits, and cannot be cancelled.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.errors import CancelledError, InvalidRequestError, ModelFileError, RewindError
from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import QUIET, Job
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.rows import IdArray, Rows
from edgespec.runtimes.llama.context import KV_TYPES, AbortFlag, LlamaRows, LlamaSettings, NativeContext
from edgespec.runtimes.llama.devices import place
from edgespec.runtimes.llama.facts import describe_model, device_of, usable_settings, without_tiles
from edgespec.runtimes.llama.library import LlamaLibrary, load
from edgespec.runtimes.llama.trimmed import TrimmedVocabulary
from edgespec.runtimes.runtime import Device
from edgespec.runtimes.sequence import RuntimeModel, RuntimeSequence, check_context_length, with_changes
from edgespec.runtimes.thread import WorkerThread


def load_model(file: LocatedModel, settings: LlamaSettings, job: Job = QUIET) -> LlamaModel:
    """Load a file's weights on the named device. Loading ends early once the job is cancelled.

    A trimmed drafter takes and returns the ids of its source.

    Raises ModelFileError, RuntimeUnavailableError (e.g. an unknown device), InvalidRequestError, CancelledError.
    """
    _check_kv_type(settings.kv_type)
    if settings.threads < 1:
        raise InvalidRequestError(f"threads must be at least 1, not {settings.threads}")
    if settings.gpu_layers is not None and settings.gpu_layers < 0:
        raise InvalidRequestError(f"gpu_layers must be at least 0, not {settings.gpu_layers}")
    settings = usable_settings(settings, file.header)
    trimmed = None if file.artefact is None else TrimmedVocabulary(file.artefact)
    library = load()
    settings = without_tiles(settings, library)
    pointer = _load_weights(library.api, _paths(file), settings, device_of(library, settings), job)
    return LlamaModel(library, _Weights(library.api, pointer), file, settings, trimmed)


def _paths(file: LocatedModel) -> list[Path]:
    """The files to load: exactly those whose headers were checked."""
    return [part.path for part in file.header.split] or [file.path]


def _check_kv_type(kv_type: str) -> None:
    if kv_type not in KV_TYPES:
        raise InvalidRequestError(f"unknown cache type {kv_type!r}", hint=f"one of {', '.join(KV_TYPES)}")


def _load_weights(api: Any, paths: Sequence[Path], settings: LlamaSettings, device: Device | None, job: Job) -> Any:
    params = api.llama_model_default_params()
    placed = place(params, device, settings.gpu_layers)
    params.use_extra_bufts = settings.repack
    interrupted = threading.Event()
    keep_going = api.llama_progress_callback(lambda _fraction, _data: not interrupted.is_set())
    params.progress_callback = keep_going
    loader = WorkerThread("edgespec-load", interrupted.set)
    try:
        pointer = loader.run(lambda: _load_from(api, paths, params), job.cancelled)
    finally:
        loader.close()
    del placed  # native code has read it by now
    if not pointer:
        if interrupted.is_set():
            raise CancelledError("loading was cancelled")
        where = "" if device is None else f" on {device.name}, which may be too small for this number of layers"
        raise ModelFileError(
            paths[0],
            f"llama.cpp could not load it{where}",
            hint="llama.cpp's log (logger edgespec.native, --debug) says why",
        )
    return pointer


def _load_from(api: Any, paths: Sequence[Path], params: Any) -> Any:
    names = [os.fsencode(path) for path in paths]
    if len(names) == 1:
        return api.llama_model_load_from_file(names[0], params)
    return api.llama_model_load_from_splits((ctypes.c_char_p * len(names))(*names), len(names), params)


class _Weights:
    """Loaded weights, freed when the model and every cache made from them are closed or collected."""

    def __init__(self, api: Any, pointer: Any) -> None:
        self.pointer = pointer
        finalizer = weakref.finalize(self, api.llama_model_free, pointer)
        finalizer.atexit = False  # the process is exiting, and frees its memory


class LlamaModel(RuntimeModel[_Weights]):
    """Weights loaded by llama.cpp. Implements the Model contract."""

    def __init__(
        self,
        library: LlamaLibrary,
        weights: _Weights,
        file: LocatedModel,
        settings: LlamaSettings,
        trimmed: TrimmedVocabulary | None,
    ) -> None:
        self._file = file
        self.header = file.header
        self.settings = settings
        self.trimmed = trimmed
        self.library = library
        api, pointer = library.api, weights.pointer
        self.head_rows = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(pointer)))
        if trimmed is not None:
            trimmed.check_loaded(api, pointer, self.head_rows)
        facts = replace(
            describe_model(file, settings),
            vocabulary_size=self.head_rows if trimmed is None else trimmed.vocabulary_size,
            trained_context_length=int(api.llama_model_n_ctx_train(pointer)),
            # A recurrent state merges all past tokens: no part of it can be dropped.
            can_rewind=not (api.llama_model_is_recurrent(pointer) or api.llama_model_is_hybrid(pointer)),
        )
        super().__init__(weights, facts)

    def _settings_with(self, threads: int | None, kv_type: str | None, flash_attention: bool | None) -> LlamaSettings:
        changed = with_changes(self.settings, threads=threads, kv_type=kv_type, flash_attention=flash_attention)
        _check_kv_type(changed.kv_type)
        return usable_settings(changed, self.header)

    def facts_with(
        self, *, threads: int | None = None, kv_type: str | None = None, flash_attention: bool | None = None
    ) -> ModelFacts:
        """The facts ``with_settings`` would have. Raises InvalidRequestError."""
        return describe_model(self._file, self._settings_with(threads, kv_type, flash_attention))

    def with_settings(
        self, *, threads: int | None = None, kv_type: str | None = None, flash_attention: bool | None = None
    ) -> LlamaModel:
        """The same weights, shared, with caches of another kind. The caller closes the result like any other model.

        Raises ClosedError, InvalidRequestError.
        """
        settings = self._settings_with(threads, kv_type, flash_attention)
        with self._lock:
            return LlamaModel(self.library, self._loaded(), self._file, settings, self.trimmed)

    def open(self, context_length: int) -> LlamaSequence:
        """A fresh Sequence with room for ``context_length`` tokens. Raises MemoryLimitError, ClosedError."""
        check_context_length(context_length)
        return self._open(lambda weights: LlamaSequence(self, weights, context_length))


class LlamaSequence(RuntimeSequence):
    """One llama.cpp context. Implements the Sequence contract."""

    _CALLED = "the llama runtime"

    def __init__(self, model: LlamaModel, weights: _Weights, context_length: int) -> None:
        flag = AbortFlag()
        super().__init__(model, flag, context_length, thread="edgespec-llama")
        self._head_rows = model.head_rows
        self._trimmed = trimmed = model.trimmed
        self._first = 0  # batch index of the last decode's first scores
        embedding = None if trimmed is None else trimmed.embedding
        try:
            self._native = self._worker.run(
                lambda: NativeContext(
                    model.library.api, weights.pointer, model.settings, context_length, flag, embedding
                )
            )
        except BaseException:
            self._worker.close()
            raise
        self._free_at_end(self._native.free, weights)  # garbage collection has no order; weights go last

    def _decode(self, ids: IdArray, position: int, rows: int) -> None:
        self._native.decode(ids, position, rows)
        self._first = len(ids) - rows

    def _rows(self, count: int) -> Rows:
        scored = LlamaRows(self._native, self._first, count, self._head_rows, self._currency())
        return scored if self._trimmed is None else self._trimmed.rows(scored)

    def _cut(self, length: int) -> None:
        self._worker.run(lambda: self._drop_tail(length))

    def _drop_tail(self, length: int) -> None:
        """Cut the cache to ``length``, then check the length that the cache reports.

        A cache that cannot be cut holds unknown tokens, and is never used again.
        """
        self._overwrite()
        try:
            self._native.trim(length)
        except RewindError:
            self._broken = True
            raise
        self._length = length
