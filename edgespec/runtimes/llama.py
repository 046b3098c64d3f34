"""llama.cpp as a runtime: every architecture it knows, every device its build has.

Built on the low-level module of llama-cpp-python. The high-level class is not used: it copies every row, ignores
return codes of cache edits, and cannot be cancelled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
import weakref
from collections import abc
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from edgespec.decoding.contracts import LogitsArray, ModelFacts, Rows
from edgespec.errors import (
    CancelledError,
    ClosedError,
    ContextFullError,
    ForwardError,
    InvalidRequestError,
    MemoryLimitError,
    ModelFileError,
    RewindError,
    RuntimeUnavailableError,
)
from edgespec.files.gguf import GgufHeader, read_header
from edgespec.runtimes.llama_library import Device, LlamaLibrary, load
from edgespec.runtimes.worker_thread import WorkerThread

T = TypeVar("T")

# Prompt tokens per native call. Larger chunks gain under 3 % on CPUs (the weights are already read once per 256
# tokens) and delay a cancel where no native abort callback is available.
PREFILL_CHUNK_TOKENS = 256

# Rows one forward can score. Verification needs depth + 1; the scores of more rows would enlarge the compute
# buffer by vocabulary x 4 bytes each.
MAX_SCORED_ROWS = 64

# ggml.h's type numbers and bits per cached element (Q8_0: 32 int8 and one half-precision scale).
KV_TYPES: dict[str, tuple[int, float]] = {"f32": (0, 32.0), "f16": (1, 16.0), "q8_0": (8, 8.5), "q4_0": (2, 4.5)}

# llama_decode's return codes (llama.h).
_DECODE_NO_SLOT = 1
_DECODE_ABORTED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSettings:
    """How to load and run a model. Everything here is part of the numeric class.

    The defaults are the setting measured to keep the most widths bit-equal at every context on x86 (flash
    attention with a Q8_0 cache); ``repack`` lets llama.cpp re-lay the weights for faster kernels.
    """

    threads: int = 1
    device: str = "cpu"
    gpu_layers: int | None = None
    kv_type: str = "q8_0"
    flash_attention: bool = True
    repack: bool = True

    def as_json(self) -> dict[str, str | int | bool]:
        """The settings that enter the numeric class beside threads, device and cache type."""
        chosen: dict[str, str | int | bool] = {"flash_attention": self.flash_attention, "repack": self.repack}
        if self.device != "cpu":
            chosen["gpu_layers"] = -1 if self.gpu_layers is None else self.gpu_layers
        return chosen


def load_model(
    path: Path,
    settings: LlamaSettings,
    *,
    name: str | None = None,
    sha256: str | None = None,
    header: GgufHeader | None = None,
) -> LlamaModel:
    """Check the file, then load its weights on the named device.

    Raises ModelFileError, RuntimeUnavailableError, InvalidRequestError (unknown device or cache type).
    """
    if settings.kv_type not in KV_TYPES:
        raise InvalidRequestError(f"unknown cache type {settings.kv_type!r}", hint=f"one of {', '.join(KV_TYPES)}")
    if settings.threads < 1:
        raise InvalidRequestError(f"threads must be at least 1, not {settings.threads}")
    header = read_header(path) if header is None else header
    head_length = header.key_length
    if settings.kv_type in ("q8_0", "q4_0") and head_length % 32:
        # Quantized caches hold blocks of 32 along a head; llama.cpp aborts the process on anything else.
        settings = replace(settings, kv_type="f16")
    library = load()
    device = _find_device(library, settings.device)
    pointer = _load_weights(library.api, path, settings, device)
    return LlamaModel(library, pointer, header, settings, name=name or path.stem, sha256=sha256)


def _find_device(library: LlamaLibrary, name: str) -> Device | None:
    if name == "cpu":
        return None
    devices = library.devices()
    for device in devices:
        if device.name.lower() == name.lower():
            return device
    known = ", ".join(device.name for device in devices) or "cpu"
    raise RuntimeUnavailableError(
        f"this build of llama.cpp has no device {name!r}", hint=f"devices here: {known}; see `edgespec doctor`"
    )


def _load_weights(api: Any, path: Path, settings: LlamaSettings, device: Device | None) -> Any:
    params = api.llama_model_default_params()
    # An explicit, null-terminated list: the default is every GPU of the build, also for a model meant for the CPU.
    devices = (ctypes.c_void_p * 2)(device.handle if device else None, None)
    params.devices = ctypes.cast(devices, ctypes.c_void_p)
    everything = 999  # more than any model has; llama.cpp clamps it
    params.n_gpu_layers = 0 if device is None else everything if settings.gpu_layers is None else settings.gpu_layers
    params.use_extra_bufts = settings.repack
    interrupted = threading.Event()
    keep_going = api.llama_progress_callback(lambda _fraction, _data: not interrupted.is_set())
    params.progress_callback = keep_going
    loader = WorkerThread("edgespec-load", interrupted.set)
    try:
        pointer = loader.run(lambda: api.llama_model_load_from_file(str(path).encode(), params))
    finally:
        loader.close()
    if not pointer:
        if interrupted.is_set():
            raise CancelledError("loading was cancelled")
        raise ModelFileError(
            path, "llama.cpp could not load it", hint="its log (logger edgespec.native, --debug) says why"
        )
    return pointer


class LlamaModel:
    """Weights loaded by llama.cpp. Implements the Model contract."""

    def __init__(
        self,
        library: LlamaLibrary,
        pointer: Any,
        header: GgufHeader,
        settings: LlamaSettings,
        *,
        name: str,
        sha256: str | None,
    ) -> None:
        self.header = header
        self.settings = settings
        self._library = library
        self._lock = threading.Lock()
        self._sequences: weakref.WeakSet[LlamaSequence] = weakref.WeakSet()
        api = library.api
        self._pointer: Any = pointer
        self._free = weakref.finalize(self, api.llama_model_free, pointer)
        self._free.atexit = False  # the process is going: its memory goes with it
        self._facts = ModelFacts(
            name=name,
            sha256=sha256,
            architecture=header.architecture,
            runtime="llama",
            build=library.build,
            device=settings.device,
            threads=settings.threads,
            vocabulary_size=int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(pointer))),
            trained_context_length=int(api.llama_model_n_ctx_train(pointer)),
            weight_bytes=header.tensor_bytes,
            bytes_per_forward=header.bytes_per_forward,
            kv_bytes_per_token=header.kv_bytes_per_token(KV_TYPES[settings.kv_type][1]),
            kv_type=settings.kv_type,
            settings=settings.as_json(),
        )

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    def open(self, context_length: int) -> LlamaSequence:
        """A fresh Sequence with room for ``context_length`` tokens. Raises MemoryLimitError, ClosedError."""
        if context_length < 1:
            raise InvalidRequestError(f"a context of {context_length} tokens cannot hold anything")
        with self._lock:
            if self._pointer is None:
                raise ClosedError(f"model {self._facts.name} is closed")
            sequence = LlamaSequence(self, self._library.api, self._pointer, context_length)
            self._sequences.add(sequence)
            return sequence

    def close(self) -> None:
        """Close every open Sequence, then free the weights. Idempotent."""
        with self._lock:
            for sequence in list(self._sequences):
                sequence.close()
            self._pointer = None
            self._free()

    def __enter__(self) -> LlamaModel:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class LlamaSequence:
    """One llama.cpp context and its worker thread. Implements the Sequence contract."""

    def __init__(self, model: LlamaModel, api: Any, model_pointer: Any, context_length: int) -> None:
        self._model = model  # keeps the weights alive as long as the cache
        self._api = api
        self._context_length = context_length
        self._length = 0
        self._generation = 0
        self._vocabulary_size = model.facts.vocabulary_size
        self._abort_flag = ctypes.create_string_buffer(2)
        # Not self.cancel: the thread must not keep a forgotten Sequence alive.
        self._worker = WorkerThread("edgespec-llama", functools.partial(_raise_flag, self._abort_flag))
        try:
            self._native = self._worker.run(
                lambda: _NativeContext(api, model_pointer, model.settings, context_length, self._abort_flag)
            )
        except BaseException:
            self._worker.close()
            raise
        # Runs at garbage collection and at interpreter exit alike: ends the forward in flight, then frees.
        self._finalizer = weakref.finalize(self, _shut_down, self._worker, self._native, self._abort_flag)

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
        count = len(tokens)
        if not 0 <= rows <= min(count, MAX_SCORED_ROWS):
            raise InvalidRequestError(f"cannot score {rows} rows of {count} tokens (at most {MAX_SCORED_ROWS})")
        start = self._length
        if start + count > self._context_length:
            raise ContextFullError(
                f"{count} more tokens do not fit: {start} of {self._context_length} are used",
                hint="a larger --context holds more",
            )
        ids = np.asarray(tokens, dtype=np.int32)
        if count and (int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary_size):
            raise InvalidRequestError(f"token ids must be in 0..{self._vocabulary_size - 1}")
        self._generation += 1
        generation = self._generation
        done = size = 0
        try:
            while done < count:
                self._check_cancelled()
                # The scored rows must share the last chunk, so a chunk never ends inside them.
                size = min(PREFILL_CHUNK_TOKENS, count - done)
                if 0 < count - done - size < rows:
                    size = count - done - rows
                last = done + size == count
                self._native.decode(ids[done : done + size], start + done, rows if last else 0)
                done += size
                self._length = start + done
        except BaseException:
            self._drop_tail(start)
            raise
        native, first, vocabulary_size = self._native, size - rows, self._vocabulary_size
        return Rows(
            rows,
            lambda index: native.row(first + index, vocabulary_size),
            lambda: self._generation == generation,
        )

    def rewind(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise RewindError(f"cannot rewind to {length}: the cache holds {self._length} tokens")
        if length < self._length:
            self._worker.run(lambda: self._drop_tail(length))

    def _drop_tail(self, length: int) -> None:
        """Cut the cache to ``length`` and believe only what the cache itself then says."""
        self._generation += 1
        self._native.trim(length)
        self._length = length

    def fork(self) -> LlamaSequence:
        raise RuntimeUnavailableError("the llama runtime does not fork a sequence", hint="open a second sequence")

    def cancel(self) -> None:
        _raise_flag(self._abort_flag)

    def reset_cancel(self) -> None:
        self._abort_flag[0] = b"\0"

    def _check_cancelled(self) -> None:
        if self._abort_flag[0] != b"\0":
            raise CancelledError("the forward was cancelled")

    def close(self) -> None:
        self._generation += 1
        self._finalizer()

    def __enter__(self) -> LlamaSequence:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _raise_flag(abort_flag: ctypes.Array[ctypes.c_char]) -> None:
    abort_flag[0] = b"\x01"


def _shut_down(worker: WorkerThread, native: _NativeContext, abort_flag: ctypes.Array[ctypes.c_char]) -> None:
    _raise_flag(abort_flag)
    with contextlib.suppress(ClosedError):
        worker.run(native.free)
    worker.close()


class _NativeContext:
    """The ``llama_context`` and its batch: every native call of a Sequence, each return code checked.

    Used on the Sequence's worker thread only, except that reading a row is safe wherever the Rows are.
    """

    def __init__(
        self,
        api: Any,
        model_pointer: Any,
        settings: LlamaSettings,
        context_length: int,
        abort_flag: ctypes.Array[ctypes.c_char],
    ) -> None:
        params = api.llama_context_default_params()
        params.n_ctx = context_length
        params.n_batch = params.n_ubatch = PREFILL_CHUNK_TOKENS
        params.n_seq_max = 1
        if hasattr(params, "n_outputs_max"):
            params.n_outputs_max = MAX_SCORED_ROWS
        params.n_threads = params.n_threads_batch = settings.threads
        params.type_k = params.type_v = KV_TYPES[settings.kv_type][0]
        params.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_ENABLED if settings.flash_attention else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.offload_kqv = params.op_offload = settings.device != "cpu"
        params.no_perf = True
        self._abort_callback = _native_abort_callback(api)
        if self._abort_callback is not None:
            params.abort_callback = self._abort_callback
            params.abort_callback_data = ctypes.cast(abort_flag, ctypes.c_void_p)
        self._api = api
        self._pointer: Any = api.llama_init_from_model(model_pointer, params)
        if not self._pointer:
            raise MemoryLimitError(
                f"llama.cpp could not allocate a context of {context_length} tokens",
                needed_bytes=0,
                available_bytes=0,
                hint="try a smaller --context; its log (logger edgespec.native, --debug) says why",
            )
        self._memory = api.llama_get_memory(self._pointer)
        self._batch = api.llama_batch_init(PREFILL_CHUNK_TOKENS, 0, 1)
        shape = (PREFILL_CHUNK_TOKENS,)
        self._tokens = np.ctypeslib.as_array(self._batch.token, shape)
        self._positions = np.ctypeslib.as_array(self._batch.pos, shape)
        self._scored = np.ctypeslib.as_array(self._batch.logits, shape)
        np.ctypeslib.as_array(self._batch.n_seq_id, shape)[:] = 1
        for index in range(PREFILL_CHUNK_TOKENS):
            self._batch.seq_id[index][0] = 0

    def decode(self, ids: Any, position: int, rows: int) -> None:
        """Feed ``ids`` from ``position`` on and score the last ``rows``. Raises CancelledError, ForwardError."""
        size = len(ids)
        self._batch.n_tokens = size
        self._tokens[:size] = ids
        self._positions[:size] = np.arange(position, position + size, dtype=np.int32)
        self._scored[:size] = 0
        if rows:
            self._scored[size - rows : size] = 1
        code = int(self._api.llama_decode(self._pointer, self._batch))
        if code == _DECODE_ABORTED:
            raise CancelledError("the forward was cancelled")
        if code == _DECODE_NO_SLOT:
            raise ContextFullError("llama.cpp found no room for these tokens in its cache", hint="a larger --context")
        if code != 0:
            raise ForwardError(f"llama.cpp's forward failed with code {code}", code=code)

    def row(self, index: int, vocabulary_size: int) -> LogitsArray:
        """A view of the scores at batch index ``index``: float32 (vocabulary_size,)."""
        if self._pointer is None:
            raise ClosedError("this sequence is closed")
        pointer = self._api.llama_get_logits_ith(self._pointer, index)
        if not pointer:
            raise ForwardError(f"llama.cpp has no scores at batch index {index}")
        return np.ctypeslib.as_array(pointer, (vocabulary_size,))

    def trim(self, length: int) -> None:
        """Cut the cache to ``length`` tokens and check. Raises RewindError."""
        if self._pointer is None:
            raise ClosedError("this sequence is closed")
        removed = self._api.llama_memory_seq_rm(self._memory, 0, length, -1)
        left = int(self._api.llama_memory_seq_pos_max(self._memory, 0)) + 1
        if not removed or left != length:
            raise RewindError(f"llama.cpp's cache did not rewind to {length} tokens: it holds {left}")

    def free(self) -> None:
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self._api.llama_batch_free(self._batch)
            self._api.llama_free(pointer)


def _native_abort_callback(api: Any) -> Any:
    """``strlen`` of the C library as llama.cpp's abort callback, or None where it cannot serve.

    The callback runs at every node of the graph. A Python one takes the interpreter lock each time (measured: a
    forward 80 times slower beside a busy Python thread); ``strlen`` reads our two-byte flag buffer natively: ""
    gives 0, a non-zero first byte gives 1, which is the ``bool`` the caller looks at. That needs a 64-bit calling
    convention that returns both in the same register; elsewhere a cancel waits for the chunk in flight.
    """
    if sys.maxsize < 2**32:
        return None
    try:
        runtime = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
        return ctypes.cast(runtime.strlen, api.ggml_abort_callback)
    except (OSError, AttributeError):
        return None
