"""One ``llama_context``: every native call a Sequence makes, with its return code checked, and its scored rows."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from edgespec.errors import (
    CancelledError,
    ClosedError,
    ContextFullError,
    ForwardError,
    MemoryLimitError,
    RewindError,
    RuntimeUnavailableError,
)
from edgespec.interfaces.model import PREFILL_CHUNK_TOKENS
from edgespec.interfaces.rows import IdArray, LogitsArray
from edgespec.runtimes.llama.trimmed import EmbeddingRows
from edgespec.runtimes.native import library as native_library
from edgespec.runtimes.native.draws import DrawnRows
from edgespec.runtimes.native.library import LEVELS, NativeLibrary
from edgespec.runtimes.sequence import MAX_SCORED_ROWS

# ggml.h's type numbers for keys and values, and bits per cached element (Q8_0: 32 int8 and one half-precision scale).
KV_TYPES: dict[str, tuple[tuple[int, int], float]] = {
    "f32": ((0, 0), 32.0),
    "f16": ((1, 1), 16.0),
    "q8_0+f16": ((8, 1), 12.25),  # keys in Q8_0, values in F16
    "q8_0": ((8, 8), 8.5),
    "q4_0": ((2, 2), 4.5),
}

# The numeric class's word for a model whose layers are all on its device.
EVERY_LAYER = -1

# llama_decode's return codes (llama.h).
_DECODE_NO_SLOT = 1
_DECODE_ABORTED = 2

# numpy's argmax over 150 000 scores takes 0.02 ms; a search this long had to wait for the interpreter lock.
_CONTENDED_S = 0.0005

# Rows searched by our kernels after such a wait, before numpy is tried again.
_NATIVE_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSettings:
    """How to load and run a model. Every field is part of the numeric class.

    The defaults keep the most widths bit-equal at every context on x86 without slowing plain decoding: flash
    attention splits a cache of one floating-point type differently for one row than for several, and splits no other
    cache. Keys in Q8_0 with values in F16 make a plain step as fast as the fastest cache; both in Q8_0 make it 12 %
    slower at 1 000 tokens of context, since dequantised values cost most. ``repack`` lets llama.cpp lay the weights
    out for faster kernels.

    ``gpu_layers`` layers of a model are on ``device``, counted from the end, the output head included; None means
    all.
    """

    runtime: ClassVar[str] = "llama"

    threads: int = 1
    device: str = "cpu"
    gpu_layers: int | None = None
    kv_type: str = "q8_0+f16"
    flash_attention: bool = True
    repack: bool = True

    def as_json(self) -> dict[str, str | int | bool]:
        """The settings in the numeric class besides threads, device and cache type."""
        chosen: dict[str, str | int | bool] = {"flash_attention": self.flash_attention, "repack": self.repack}
        if self.device != "cpu":
            chosen["gpu_layers"] = EVERY_LAYER if self.gpu_layers is None else self.gpu_layers
        return chosen


class AbortFlag:
    """Ends the forward in flight, and refuses later forwards until the flag is lowered. For any thread.

    ``native`` is an int32, and a C string of four bytes or none: see ``_native_abort_callback``.
    """

    def __init__(self) -> None:
        self.native = (ctypes.c_int32 * 2)()

    @property
    def raised(self) -> bool:
        return bool(self.native[0])

    def set(self, raised: bool) -> None:
        self.native[0] = -1 if raised else 0  # no byte of a raised flag is zero


class NativeContext:
    """The ``llama_context`` and its batch: every native call of a Sequence, each return code checked.

    Used on the Sequence's worker thread only, except that a row may be read on any thread that may read the Rows.
    With ``embedding``, tokens enter as rows of that table instead of ids.
    """

    def __init__(
        self,
        api: Any,
        model_pointer: Any,
        settings: LlamaSettings,
        context_length: int,
        flag: AbortFlag,
        embedding: EmbeddingRows | None = None,
    ) -> None:
        params = api.llama_context_default_params()
        params.n_ctx = context_length
        params.n_batch = params.n_ubatch = PREFILL_CHUNK_TOKENS
        params.n_seq_max = 1
        if hasattr(params, "n_outputs_max"):
            params.n_outputs_max = MAX_SCORED_ROWS
        params.n_threads = params.n_threads_batch = settings.threads
        params.type_k, params.type_v = KV_TYPES[settings.kv_type][0]
        params.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_ENABLED if settings.flash_attention else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.offload_kqv = params.op_offload = settings.device != "cpu"
        params.no_perf = True
        self._abort_callback = _native_abort_callback(api)
        if self._abort_callback is not None:
            params.abort_callback = self._abort_callback
            params.abort_callback_data = ctypes.cast(flag.native, ctypes.c_void_p)
        self._api = api
        self._pointer: Any = api.llama_init_from_model(model_pointer, params)
        if not self._pointer:
            raise MemoryLimitError(
                f"llama.cpp could not allocate a context of {context_length} tokens",
                needed_bytes=None,
                available_bytes=None,
                hint="try a smaller context (--context); llama.cpp's log (logger edgespec.native, --debug) says why",
            )
        self._memory = api.llama_get_memory(self._pointer)
        # On a GPU a forward returns before it has computed. Reading scores waits, and holds the interpreter's lock.
        self._waits = settings.device != "cpu"
        self._kernels = _our_kernels()
        self._logits_at = _keeping_the_lock(api, "llama_get_logits_ith", ctypes.POINTER(ctypes.c_float))
        self.native_rows_left = 0
        self._batch = api.llama_batch_init(PREFILL_CHUNK_TOKENS, 0 if embedding is None else embedding.columns, 1)
        self._enter = _entry_by_id(self._batch) if embedding is None else _entry_by_row(self._batch, embedding)
        shape = (PREFILL_CHUNK_TOKENS,)
        self._positions = np.ctypeslib.as_array(self._batch.pos, shape)
        self._scored = np.ctypeslib.as_array(self._batch.logits, shape)
        np.ctypeslib.as_array(self._batch.n_seq_id, shape)[:] = 1
        for index in range(PREFILL_CHUNK_TOKENS):
            self._batch.seq_id[index][0] = 0

    def decode(self, ids: Any, position: int, rows: int) -> None:
        """Feed ``ids`` at ``position`` and score the last ``rows``. Raises what a forward raises."""
        if self._pointer is None:
            raise ClosedError("this sequence is closed")
        size = len(ids)
        self._batch.n_tokens = size
        self._enter(ids)
        self._positions[:size] = np.arange(position, position + size, dtype=np.int32)
        self._scored[:size] = 0
        if rows:
            self._scored[size - rows : size] = 1
        code = int(self._api.llama_decode(self._pointer, self._batch))
        if code == _DECODE_ABORTED:
            raise CancelledError("the forward was cancelled")
        if code == _DECODE_NO_SLOT:
            raise ContextFullError(
                "llama.cpp found no room for these tokens in its cache", hint="a larger context (--context)"
            )
        if code != 0:
            raise ForwardError(f"llama.cpp's forward failed with code {code}", code=code)
        if self._waits:
            self._api.llama_synchronize(self._pointer)

    def row(self, index: int, vocabulary_size: int) -> LogitsArray:
        """A view of the scores at batch index ``index``: float32 (vocabulary_size,)."""
        if self._pointer is None:
            raise ClosedError("this sequence is closed")
        pointer = self._logits_at(self._pointer, index)
        if not pointer:
            raise ForwardError(f"llama.cpp has no scores at batch index {index}")
        return np.ctypeslib.as_array(pointer, (vocabulary_size,))

    @property
    def can_reduce(self) -> bool:
        return self._kernels is not None

    def argmax(self, row: LogitsArray) -> int:
        """The id with the highest score of a row, found with the interpreter lock held. Negative if the row holds a
        NaN or +infinity, or if our kernels are not available.
        """
        if self._kernels is None:
            return -1
        return int(self._kernels.api.es_best(row.ctypes.data, len(row), LEVELS[self._kernels.levels[-1]]))

    def trim(self, length: int) -> None:
        """Cut the cache to ``length`` tokens and check its length. Raises RewindError."""
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


class LlamaRows(DrawnRows):
    """Rows whose argmax does not wait for other Python threads.

    numpy releases the interpreter lock while it searches, and gets it back from a busy Python thread only after that
    thread's 5 ms. After such a wait, our kernels (if available) search the next rows with the lock held. Both
    searches find the same id, also in a row with a NaN.
    """

    def __init__(
        self, native: NativeContext, first: int, count: int, head_rows: int, is_current: Callable[[], bool]
    ) -> None:
        super().__init__(count, lambda index: native.row(first + index, head_rows), is_current)
        self._native = native

    def argmax_row(self, index: int) -> int:
        native = self._native
        if native.native_rows_left > 0:
            native.native_rows_left -= 1
            best = native.argmax(self._row(index))
            if best >= 0:
                return best
        started = time.perf_counter()
        best = super().argmax_row(index)
        if time.perf_counter() - started > _CONTENDED_S and native.can_reduce:
            native.native_rows_left = _NATIVE_ROWS
        return best


def _entry_by_id(batch: Any) -> Callable[[IdArray], None]:
    """Writes tokens into a batch as ids."""
    tokens = np.ctypeslib.as_array(batch.token, (PREFILL_CHUNK_TOKENS,))

    def enter(ids: IdArray) -> None:
        tokens[: len(ids)] = ids

    return enter


def _entry_by_row(batch: Any, embedding: EmbeddingRows) -> Callable[[IdArray], None]:
    """Writes tokens into a batch as their embeddings."""
    vectors = np.ctypeslib.as_array(batch.embd, (PREFILL_CHUNK_TOKENS, embedding.columns))

    def enter(ids: IdArray) -> None:
        vectors[: len(ids)] = embedding.read(ids)

    return enter


def _keeping_the_lock(api: Any, name: str, result: Any) -> Any:
    """A native function of (context, int32) that keeps the interpreter lock: a call takes microseconds, and getting
    the lock back from a busy Python thread takes milliseconds.
    """
    function = getattr(ctypes.PyDLL(api._lib._name), name)
    function.restype, function.argtypes = result, [ctypes.c_void_p, ctypes.c_int32]
    return function


def _native_abort_callback(api: Any) -> Any:
    """What llama.cpp calls at every node of the graph to learn whether to stop; None if no native function can serve.

    A Python callback would take the interpreter lock each time (measured: a forward 80 times slower next to a busy
    Python thread). Our library has such a function. Without our library, the C library's ``strlen`` reads the flag: 0
    for "", 4 for a raised flag, which llama.cpp reads as ``bool``. That needs a 64-bit calling convention that
    returns both types in the same register; on other systems a cancel waits for the chunk in flight.
    """
    kernels = _our_kernels()
    if kernels is not None:
        return ctypes.cast(kernels.api.es_abort, api.ggml_abort_callback)
    if sys.maxsize < 2**32:
        return None
    try:
        runtime = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
        return ctypes.cast(runtime.strlen, api.ggml_abort_callback)
    except (OSError, AttributeError):
        return None


def _our_kernels() -> NativeLibrary | None:
    """Our native library, if it was built."""
    try:
        return native_library.load()
    except RuntimeUnavailableError:
        return None
