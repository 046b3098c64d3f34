"""What a Sequence asks of ONNX Runtime: a session made with care, and forwards over buffers that stay in place.

Keys and values live in arrays of the context's full length, bound as past and as present alike: attention writes new
rows where they belong, nothing is copied, and what lies behind the length it is told does not exist for it. So a
rewind is a smaller number.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.contracts import IdArray, LogitsArray
from edgespec.errors import (
    CancelledError,
    ClosedError,
    ForwardError,
    MemoryLimitError,
    ModelFileError,
    RuntimeUnavailableError,
)
from edgespec.files.onnx_folder import OnnxArtefact
from edgespec.runtimes.forward_request import MAX_SCORED_ROWS, PREFILL_CHUNK_TOKENS
from edgespec.runtimes.onnx_providers import CPU, OnnxLibrary, Provider
from edgespec.runtimes.worker_thread import WorkerThread

__all__ = ["OnnxContext", "OnnxSettings", "OnnxWeights", "StopFlag", "load_weights"]

# What ONNX Runtime has to say about a failure it also says in the exception; below this level it prints it as well.
_LOG_FATAL_ONLY = 4

_LONGEST_SAID = 300  # characters of a native message: with stack frames they run to pages

_OUT_OF_MEMORY = ("bad_alloc", "Failed to allocate memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxSettings:
    """How to load and run a model. Everything here is part of the numeric class.

    ``provider`` is a device's name (``cpu``, ``DirectML``, ...) and ``options`` are that provider's own. ``pad_to``
    is the narrowest forward: with 2, one token is computed beside a second that nobody asked for, and one row of
    scores beside a second. Kernels treat a single row as a case of its own and any more alike, so every width then
    gives the same rows. ``spinning`` lets idle threads wait busily for the next operator.
    """

    threads: int = 1
    provider: str = "cpu"
    pad_to: int = 1
    spinning: bool = True
    options: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def device(self) -> str:
        """Where it runs, by the name that plans and profiles use."""
        return self.provider

    def as_json(self) -> dict[str, str | int | bool]:
        """The settings that enter the numeric class beside threads, device and cache type."""
        chosen: dict[str, str | int | bool] = {"pad_to": self.pad_to, "spinning": self.spinning}
        chosen.update({f"option.{key}": value for key, value in sorted(self.options.items())})
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxWeights:
    """Loaded weights: the native session that every Sequence of a model shares.

    ``turn`` is held during a run: only the CPU provider promises that runs may overlap.
    """

    artefact: OnnxArtefact
    api: Any
    session: Any
    on_cpu: bool
    turn: contextlib.AbstractContextManager[Any]


def load_weights(
    library: OnnxLibrary, provider: Provider, artefact: OnnxArtefact, settings: OnnxSettings
) -> OnnxWeights:
    """Load a checked artefact on the provider.

    Raises ModelFileError, RuntimeUnavailableError (the provider does not work here, or not for this model),
    MemoryLimitError.
    """
    api, options = library.api, library.api.SessionOptions()
    options.intra_op_num_threads = settings.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _LOG_FATAL_ONLY
    options.use_deterministic_compute = True
    # It would keep a plan of the memory for each shape it has seen, and every length of a prompt is another.
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if settings.spinning else "0")
    chosen = {str(key): str(value) for key, value in settings.options.items()}
    cancel_load = getattr(options, "set_load_cancellation_flag", lambda _cancel: None)
    loader = WorkerThread("edgespec-load", lambda: cancel_load(True))

    def load() -> Any:
        providers: list[Any] | None = None
        if provider.ep_devices:
            options.add_provider_for_devices(list(provider.ep_devices), chosen)
        else:
            providers = [(provider.provider, chosen)] + ([] if provider.provider == CPU else [CPU])
        # Without its fallback, which prints, and without options that a model file may carry for itself.
        return api.InferenceSession(
            os.fspath(artefact.graph_path), options, providers, enable_fallback=0, read_config_from_model=0
        )

    try:
        session = loader.run(load)
    except Exception as error:  # the bindings raise a dozen classes of their own, without a common base
        raise _load_error(error, artefact, provider) from error
    finally:
        loader.close()
    if provider.provider not in session.get_providers():
        raise RuntimeUnavailableError(
            f"{provider.name} does not work here: ONNX Runtime went on without it",
            hint="its driver or its libraries are missing; the device `cpu` works everywhere",
        )
    on_cpu = provider.provider == CPU
    return OnnxWeights(
        artefact=artefact,
        api=api,
        session=session,
        on_cpu=on_cpu,
        turn=contextlib.nullcontext() if on_cpu else threading.Lock(),
    )


def _said(error: BaseException) -> str:
    """A native message in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_SAID else f"{text[:_LONGEST_SAID]}..."


def _load_error(error: Exception, artefact: OnnxArtefact, provider: Provider) -> Exception:
    said = _said(error)
    if isinstance(error, MemoryError) or any(sign in said for sign in _OUT_OF_MEMORY):
        return MemoryLimitError(
            f"ONNX Runtime found no memory for {artefact.folder.name}: {said}",
            needed_bytes=None,
            available_bytes=None,
            hint="try a smaller model, or close what else runs here",
        )
    if provider.provider == CPU:
        return ModelFileError(
            artefact.graph_path,
            f"ONNX Runtime could not load it: {said}",
            hint="export it again with `edgespec export`",
        )
    return RuntimeUnavailableError(
        f"{provider.name} could not load {artefact.folder.name}: {said}", hint="the device `cpu` runs every model"
    )


class StopFlag:
    """Ends the run in flight, and refuses later ones until it is lowered. For any thread."""

    def __init__(self, weights: OnnxWeights) -> None:
        self.raised = False
        self.step_options = weights.api.RunOptions()
        self.prefill_options = weights.api.RunOptions()
        for options in (self.step_options, self.prefill_options):
            options.log_severity_level = _LOG_FATAL_ONLY
        if weights.on_cpu:
            # What a long prompt took goes back to the system; what a decode step took is needed again at once.
            self.prefill_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def set(self, raised: bool) -> None:
        self.raised = raised
        self.step_options.terminate = self.prefill_options.terminate = raised


class OnnxContext:
    """One cache and the buffers of its forwards, bound to a session that other contexts use as well.

    Used on the Sequence's worker thread only, except that reading a row is safe wherever the Rows are.
    """

    def __init__(self, weights: OnnxWeights, context_length: int, pad_to: int, stop: StopFlag) -> None:
        self._weights: OnnxWeights | None = weights
        self._pad_to = pad_to
        self._stop = stop
        artefact = weights.artefact
        # The padding behind the last token needs a place as well.
        capacity = artefact.static_cache or context_length + pad_to - 1
        self._cache_shape = [1, artefact.head_count_kv, capacity, artefact.key_length]
        names = [f"{layer}.{part}" for layer in range(artefact.block_count) for part in ("key", "value")]
        try:
            # Zeros, in pages that take no memory before they are written.
            self._caches = {name: np.zeros(self._cache_shape, dtype=np.float32) for name in names}
            self._logits = np.empty((MAX_SCORED_ROWS, artefact.rows), dtype=np.float32)
        except (MemoryError, ValueError) as error:  # ValueError: more elements than an array can have
            raise MemoryLimitError(
                f"there is no memory for a context of {context_length} tokens",
                needed_bytes=capacity * artefact.kv_bytes_per_token,
                available_bytes=None,
                hint="try a smaller --context",
            ) from error
        self._ids = np.zeros(PREFILL_CHUNK_TOKENS, dtype=np.int64)
        self._last_position = np.zeros(1, dtype=np.int32)
        self._total_length = np.zeros((), dtype=np.int32)
        self._first_row = np.zeros(1, dtype=np.int64)
        self._binding: Any = weights.session.io_binding()
        for name, array in self._caches.items():
            self._bind_output(f"present.{name}", array, self._cache_shape)
        self._bind_lasting_inputs()

    def _bind_input(self, name: str, array: NDArray[Any], shape: list[int]) -> None:
        self._binding.bind_input(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)

    def _bind_output(self, name: str, array: NDArray[Any], shape: list[int]) -> None:
        self._binding.bind_output(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)

    def _bind_lasting_inputs(self) -> None:
        """Everything whose place and shape stay what they are."""
        self._bind_input("seqlens_k", self._last_position, [1])
        self._bind_input("total_sequence_length", self._total_length, [])
        self._bind_input("first_row", self._first_row, [1])
        for name, array in self._caches.items():
            self._bind_input(f"past_key_values.{name}", array, self._cache_shape)

    def decode(self, ids: IdArray, position: int, rows: int) -> int:
        """Feed ``ids`` from ``position`` on and score the last ``rows``; returns where ``row`` has the first of them.

        Whatever happens, the cache before ``position`` stays as it is. Raises CancelledError, ForwardError,
        ClosedError.
        """
        weights = self._weights
        if weights is None:
            raise ClosedError("this sequence is closed")
        size = len(ids)
        fed = max(size, self._pad_to)
        # The output head is a product like any other: a row that counts has company. One at least must be computed.
        scored = max(rows, self._pad_to) if rows else 1
        self._ids[:size] = ids
        self._ids[size:fed] = ids[-1]
        self._total_length[...] = position + fed
        self._last_position[0] = position + fed - 1
        self._first_row[0] = fed - scored
        self._bind_input("input_ids", self._ids, [1, fed])
        self._bind_output("logits", self._logits, [1, scored, self._logits.shape[1]])
        if not weights.on_cpu:  # elsewhere inputs are copied to the device, and that when they are bound
            self._bind_lasting_inputs()
        options = self._stop.prefill_options if fed > MAX_SCORED_ROWS else self._stop.step_options
        try:
            with weights.turn:
                weights.session.run_with_iobinding(self._binding, options)
        except Exception as error:  # the bindings raise a dozen classes of their own, without a common base
            if self._stop.raised:
                raise CancelledError("the forward was cancelled") from None
            raise ForwardError(f"ONNX Runtime's forward failed: {_said(error)}") from error
        return (size - rows) - (fed - scored)

    def row(self, index: int) -> LogitsArray:
        """A view of one row of the scores: float32 (rows of the head,)."""
        row: LogitsArray = self._logits[index]
        return row

    def free(self) -> None:
        """Let go of the cache and of the session. Idempotent."""
        self._binding = self._weights = None
        self._caches = {}
