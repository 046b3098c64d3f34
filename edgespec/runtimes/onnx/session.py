"""What a model asks of ONNX Runtime: a session made with care, a cache, and a flag that ends what runs on it."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

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
from edgespec.interfaces.rows import IdArray, LogitsArray
from edgespec.runtimes.onnx.providers import CPU, OnnxLibrary, Provider
from edgespec.runtimes.sequence import MAX_SCORED_ROWS, PREFILL_CHUNK_TOKENS
from edgespec.runtimes.thread import WorkerThread

# What ONNX Runtime has to say about a failure it also says in the exception; below this level it prints it as well.
_LOG_FATAL_ONLY = 4

# Tokens that the second session of a fixed graph feeds at once.
WIDE_TOKENS = 32

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

    runtime: ClassVar[str] = "onnx"
    gpu_layers: ClassVar[int | None] = None

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

    ``wide`` is a second one of a graph whose width is fixed when it is loaded: ``session`` then takes one token, and
    ``wide`` as many as WIDE_TOKENS. Elsewhere it is ``session`` itself, which takes any number. ``turn`` is held
    during a run: only the CPU provider promises that runs may overlap.
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
    stop: threading.Event | None = None,
) -> OnnxWeights:
    """Load a checked artefact on the provider. Once ``stop`` is set, loading ends early, where it can be ended.

    Raises ModelFileError, RuntimeUnavailableError (the provider does not work here, or not for this model),
    MemoryLimitError, CancelledError.
    """
    api, on_cpu = library.api, provider.provider == CPU
    # The CPU provider runs fixed shapes like any others, so that one session, and one copy of the weights, does.
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
        # Without its fallback, which prints, and without options that a model file may carry for itself.
        return api.InferenceSession(
            os.fspath(artefact.graph_path), options, providers, enable_fallback=0, read_config_from_model=0
        )

    try:
        sessions = loader.run(lambda: [load(options) for options in every_options], stop)
    except Exception as error:  # the bindings raise a dozen classes of their own, without a common base
        if stop is not None and stop.is_set():
            raise CancelledError("loading was cancelled") from error
        raise _load_error(error, artefact, provider) from error
    finally:
        loader.close()
    if not all(provider.provider in session.get_providers() for session in sessions):
        raise RuntimeUnavailableError(
            f"{provider.name} does not work here: ONNX Runtime went on without it",
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
    """Options of a session whose graph feeds ``width`` tokens at a time, or with None as many as it is given."""
    options = api.SessionOptions()
    options.intra_op_num_threads = settings.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _LOG_FATAL_ONLY
    options.use_deterministic_compute = True
    # It would keep a plan of the memory for each shape it has seen, and every length of a prompt is another.
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
    """Whether a native failure is one of memory."""
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


class OnnxContext(ABC):
    """One cache and the buffers of its forwards, over a session that other contexts use as well.

    Used on the Sequence's worker thread only, except that reading a row is safe wherever the Rows are.
    """

    _logits: LogitsArray  # (MAX_SCORED_ROWS, rows of the head)

    def __init__(self, weights: OnnxWeights, stop: StopFlag) -> None:
        self._weights: OnnxWeights | None = weights
        self._stop = stop

    @abstractmethod
    def decode(self, ids: IdArray, position: int, rows: int) -> int:
        """Feed ``ids`` from ``position`` on and score the last ``rows``; returns where ``row`` has the first of them.

        Positions before ``position`` were fed before, later ones are forgotten. Whatever happens, the cache before
        ``position`` stays as it is. At most PREFILL_CHUNK_TOKENS ids and MAX_SCORED_ROWS rows. Raises CancelledError,
        ForwardError, ClosedError, MemoryLimitError.
        """

    @abstractmethod
    def free(self) -> None:
        """Let go of the cache and of the session. Idempotent."""

    def row(self, index: int) -> LogitsArray:
        """A view of one row of the last decode's scores: float32 (rows of the head,)."""
        row: LogitsArray = self._logits[index]
        return row

    def _no_memory(self, context_length: int, needed_bytes: int, hint: str = "try a smaller --context") -> Exception:
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
def forward_errors(stop: StopFlag) -> Iterator[None]:
    """What a native run inside raises, as CancelledError where it was stopped and as ForwardError otherwise."""
    try:
        yield
    except Exception as error:  # the bindings raise a dozen classes of their own, without a common base
        if stop.raised:
            raise CancelledError("the forward was cancelled") from None
        raise ForwardError(f"ONNX Runtime's forward failed: {said(error)}") from error


class PaddedContext(OnnxContext):
    """A context whose forwards take any number of tokens, padded to ``pad_to`` of them and as many rows of scores."""

    def __init__(self, weights: OnnxWeights, pad_to: int, stop: StopFlag) -> None:
        super().__init__(weights, stop)
        self._pad_to = pad_to
        self._ids = np.empty(PREFILL_CHUNK_TOKENS, dtype=np.int64)
        self._first_row = np.empty(1, dtype=np.int64)

    def _feed(self, ids: IdArray, rows: int) -> tuple[int, int]:
        """Put the tokens and the first row to score into their buffers; how many of both a forward then has."""
        size = len(ids)
        fed = max(size, self._pad_to)
        # The output head is a product like any other: a row that counts has company. One at least must be computed.
        scored = max(rows, self._pad_to) if rows else 1
        self._ids[:size] = ids
        self._ids[size:fed] = ids[-1]
        self._first_row[0] = fed - scored
        return fed, scored

    def _run(self, weights: OnnxWeights, binding: Any, fed: int) -> None:
        options = self._stop.prefill_options if fed > MAX_SCORED_ROWS else self._stop.step_options
        with weights.turn:
            weights.session.run_with_iobinding(binding, options)
