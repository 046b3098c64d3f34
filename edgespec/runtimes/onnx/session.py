"""An ONNX Runtime session for a model, a cache over the session, and a flag that cancels its runs."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import (
    CancelledError,
    ClosedError,
    ForwardError,
    MemoryLimitError,
    ModelFileError,
    RuntimeUnavailableError,
)
from edgespec.files.onnx.artefact import OnnxArtefact
from edgespec.files.onnx.interface import ROWS
from edgespec.files.progress import QUIET, Job
from edgespec.interfaces.model import PREFILL_CHUNK_TOKENS
from edgespec.interfaces.rows import IdArray, LogitsArray
from edgespec.runtimes.onnx.providers import CPU, OnnxLibrary, Provider
from edgespec.runtimes.sequence import MAX_SCORED_ROWS
from edgespec.runtimes.thread import WorkerThread

# ONNX Runtime puts a failure's reason into the exception; below this level it also prints the reason.
_LOG_FATAL_ONLY = 4

# Tokens that the second session of a fixed graph takes per run.
WIDE_TOKENS = 32

_LONGEST_SAID = 300  # characters of a native message: with stack frames it can run to pages

_OUT_OF_MEMORY = ("bad_alloc", "Failed to allocate memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxSettings:
    """How to load and run a model. Every field is part of the numeric class.

    ``provider`` is a device's name (``cpu``, ``DirectML``, ...) and ``options`` are that provider's. ``pad_to`` is
    the narrowest forward: with 2, a single token is computed with a padding token, and a single row of scores with a
    padding row. Kernels have a special case for a single row, so with padding every width gives the same rows.
    ``spinning`` lets idle threads wait busily for the next operator.
    """

    runtime: ClassVar[str] = "onnx"
    gpu_layers: ClassVar[int | None] = None

    threads: int = 1
    provider: str = "cpu"
    pad_to: int = 1
    spinning: bool = True
    options: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def device(self) -> str:
        """The device's name in plans and profiles."""
        return self.provider

    def as_json(self) -> dict[str, str | int | bool]:
        """The settings in the numeric class besides threads, device and cache type."""
        chosen: dict[str, str | int | bool] = {"pad_to": self.pad_to, "spinning": self.spinning}
        chosen.update({f"option.{key}": value for key, value in sorted(self.options.items())})
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxWeights:
    """Loaded weights: the native session that every Sequence of a model shares.

    ``wide`` is a second session of a graph whose width is fixed at loading: ``session`` then takes one token and
    ``wide`` WIDE_TOKENS. For other graphs ``wide`` is ``session``, which takes any number. ``turn`` is held during a
    run: only the CPU provider promises that runs may overlap.
    """

    artefact: OnnxArtefact
    api: Any
    session: Any
    wide: Any
    on_cpu: bool
    turn: contextlib.AbstractContextManager[Any]


def load_weights(
    library: OnnxLibrary,
    provider: Provider,
    artefact: OnnxArtefact,
    settings: OnnxSettings,
    job: Job = QUIET,
) -> OnnxWeights:
    """Load a checked artefact on the provider. Once ``cancelled()`` is true, loading ends early, if the provider
    supports that.

    Raises ModelFileError, RuntimeUnavailableError (the provider does not work here, or not for this model),
    MemoryLimitError, CancelledError.
    """
    api, on_cpu = library.api, provider.provider == CPU
    # The CPU provider runs fixed shapes like any others: one session, and one copy of the weights, is enough.
    widths = (1, WIDE_TOKENS) if artefact.cache == ROWS and not on_cpu else (None,)
    every_options = [_session_options(api, settings, width) for width in widths]
    chosen = {str(key): str(value) for key, value in settings.options.items()}

    def cancel_load() -> None:
        for options in every_options:
            getattr(options, "set_load_cancellation_flag", lambda _cancel: None)(True)

    loader = WorkerThread("edgespec-load", cancel_load)

    def load(options: Any) -> Any:
        providers: list[Any] | None = None
        if provider.ep_devices:
            options.add_provider_for_devices(list(provider.ep_devices), chosen)
        else:
            providers = [(provider.provider, chosen)] + ([] if provider.provider == CPU else [CPU])
        # Without its fallback, which prints, and without options from the model file.
        return api.InferenceSession(
            os.fspath(artefact.graph_path), options, providers, enable_fallback=0, read_config_from_model=0
        )

    try:
        sessions = loader.run(lambda: [load(options) for options in every_options], job.cancelled)
    except Exception as error:  # the bindings raise a dozen classes without a common base
        if job.cancelled():
            raise CancelledError("loading was cancelled") from error
        raise _load_error(error, artefact, provider) from error
    finally:
        loader.close()
    if not all(provider.provider in session.get_providers() for session in sessions):
        raise RuntimeUnavailableError(
            f"{provider.name} does not work here: ONNX Runtime continued without it",
            hint="its driver or its libraries are missing; the device `cpu` works everywhere",
        )
    return OnnxWeights(
        artefact=artefact,
        api=api,
        session=sessions[0],
        wide=sessions[-1],
        on_cpu=on_cpu,
        turn=contextlib.nullcontext() if on_cpu else threading.Lock(),
    )


def _session_options(api: Any, settings: OnnxSettings, width: int | None) -> Any:
    """Options of a session whose graph takes ``width`` tokens per run; None means any number."""
    options = api.SessionOptions()
    options.intra_op_num_threads = settings.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _LOG_FATAL_ONLY
    options.use_deterministic_compute = True
    # ONNX Runtime would keep a memory plan for each shape, and every prompt length is another shape.
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if settings.spinning else "0")
    if width is not None:
        options.add_free_dimension_override_by_name("tokens", width)
    return options


def said(error: BaseException) -> str:
    """A native message in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_SAID else f"{text[:_LONGEST_SAID]}..."


def out_of_memory(error: BaseException) -> bool:
    """Whether a native failure means that memory ran out."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY)


def _load_error(error: Exception, artefact: OnnxArtefact, provider: Provider) -> Exception:
    reason = said(error)
    if out_of_memory(error):
        return MemoryLimitError(
            f"ONNX Runtime found no memory for {artefact.folder.name}: {reason}",
            needed_bytes=None,
            available_bytes=None,
            hint="try a smaller model, or close what else runs here",
        )
    if provider.provider == CPU:
        return ModelFileError(
            artefact.graph_path,
            f"ONNX Runtime could not load it: {reason}",
            hint="export it again with `edgespec export`",
        )
    return RuntimeUnavailableError(
        f"{provider.name} could not load {artefact.folder.name}: {reason}", hint="the device `cpu` runs every model"
    )


class StopFlag:
    """Ends the run in flight, and refuses later runs until it is lowered. For any thread."""

    def __init__(self, weights: OnnxWeights) -> None:
        self.raised = False
        self.step_options = weights.api.RunOptions()
        self.prefill_options = weights.api.RunOptions()
        for options in (self.step_options, self.prefill_options):
            options.log_severity_level = _LOG_FATAL_ONLY
        if weights.on_cpu:
            # The memory of a long prompt returns to the system; that of a decode step is needed again immediately.
            self.prefill_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def set(self, raised: bool) -> None:
        self.raised = raised
        self.step_options.terminate = self.prefill_options.terminate = raised


class OnnxContext(ABC):
    """One cache and the buffers of its forwards, over a session that other contexts share.

    Used on the Sequence's worker thread only, except that a row may be read on any thread that may read the Rows.
    """

    _logits: LogitsArray  # (MAX_SCORED_ROWS, rows of the head)

    def __init__(self, weights: OnnxWeights, stop: StopFlag) -> None:
        self._weights: OnnxWeights | None = weights
        self._stop = stop

    @abstractmethod
    def decode(self, ids: IdArray, position: int, rows: int) -> int:
        """Feed ``ids`` at ``position`` and score the last ``rows``; returns the index for ``row`` of the first of
        them.

        Positions before ``position`` are in the cache and stay unchanged, also on errors; later positions are
        forgotten. At most PREFILL_CHUNK_TOKENS ids and MAX_SCORED_ROWS rows. Raises CancelledError, ForwardError,
        ClosedError, MemoryLimitError.
        """

    @abstractmethod
    def free(self) -> None:
        """Release the cache and the session. Idempotent."""

    def row(self, index: int) -> LogitsArray:
        """A view of one row of the last decode's scores: float32 (rows of the head,)."""
        row: LogitsArray = self._logits[index]
        return row

    def _no_memory(
        self, context_length: int, needed_bytes: int, hint: str = "try a smaller context (--context)"
    ) -> Exception:
        return MemoryLimitError(
            f"there is no memory for a context of {context_length} tokens",
            needed_bytes=needed_bytes,
            available_bytes=None,
            hint=hint,
        )

    def _loaded(self) -> OnnxWeights:
        if self._weights is None:
            raise ClosedError("this sequence is closed")
        return self._weights


@contextlib.contextmanager
def forward_errors(stop: StopFlag, no_memory: Callable[[], Exception] | None = None) -> Iterator[None]:
    """Translate what a native run raises: CancelledError if it was stopped, ForwardError otherwise.

    ``no_memory`` gives the error for a lack of memory, if that has its own.
    """
    try:
        yield
    except Exception as error:  # the bindings raise a dozen classes without a common base
        if stop.raised:
            raise CancelledError("the forward was cancelled") from None
        if no_memory is not None and out_of_memory(error):
            raise no_memory() from error
        raise ForwardError(f"ONNX Runtime's forward failed: {said(error)}") from error


def bind(bind_to: Callable[..., None], name: str, array: NDArray[Any], shape: Sequence[int] | None = None) -> None:
    """Bind an array in memory by ``bind_input`` or ``bind_output``; with a ``shape`` its beginning, in that shape."""
    bind_to(name, "cpu", 0, array.dtype.type, array.shape if shape is None else shape, array.ctypes.data)


class PaddedContext(OnnxContext):
    """A context whose forwards take any number of tokens, padded to ``pad_to`` tokens and as many rows of scores."""

    def __init__(self, weights: OnnxWeights, pad_to: int, stop: StopFlag) -> None:
        super().__init__(weights, stop)
        self._pad_to = pad_to
        self._ids = np.empty(PREFILL_CHUNK_TOKENS, dtype=np.int64)
        self._first_row = np.empty(1, dtype=np.int64)

    def _feed(self, ids: IdArray, rows: int) -> tuple[int, int]:
        """Write the tokens and the first row to score into their buffers; returns the forward's tokens and rows."""
        size = len(ids)
        fed = max(size, self._pad_to)
        # The output head is a matrix product too: a scored row is padded like tokens. At least one row must be
        # computed.
        scored = max(rows, self._pad_to) if rows else 1
        self._ids[:size] = ids
        self._ids[size:fed] = ids[-1]
        self._first_row[0] = fed - scored
        return fed, scored

    def _run(self, weights: OnnxWeights, binding: Any, fed: int) -> None:
        options = self._stop.prefill_options if fed > MAX_SCORED_ROWS else self._stop.step_options
        with weights.turn:
            weights.session.run_with_iobinding(binding, options)
