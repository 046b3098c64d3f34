"""ONNX Runtime as a runtime: an exported model on the CPU or on any installed execution provider.

Loads folders that ``edgespec export --to onnx`` wrote and ``read_onnx_folder`` has checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from edgespec.errors import ClosedError, InvalidRequestError
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.model_file import LocatedModel
from edgespec.files.onnx.artefact import OnnxArtefact
from edgespec.files.onnx.interface import ROWS, SHARED, WHOLE
from edgespec.files.progress import QUIET, Job
from edgespec.hardware.drivers import gpu_drivers
from edgespec.interfaces.model import HOST, ModelFacts
from edgespec.interfaces.rows import IdArray, Rows
from edgespec.runtimes.native.draws import DrawnRows
from edgespec.runtimes.onnx import providers as onnx_providers
from edgespec.runtimes.onnx.session import OnnxContext, OnnxSettings, OnnxWeights, StopFlag, load_weights
from edgespec.runtimes.onnx.shared import SharedContext
from edgespec.runtimes.onnx.static import StaticContext
from edgespec.runtimes.onnx.whole import WholeContext
from edgespec.runtimes.sequence import (
    RuntimeModel,
    RuntimeSequence,
    TrimmedRows,
    check_context_length,
    with_changes,
)

PADDINGS = (1, 2)  # more than two rows are computed like two


def load_onnx(file: LocatedModel, settings: OnnxSettings, job: Job = QUIET) -> OnnxModel:
    """Load an exported model on the settings' provider. Once ``cancelled()`` is true, loading ends early.

    Raises RuntimeUnavailableError (no onnxruntime, no such provider), InvalidRequestError, ModelFileError,
    MemoryLimitError, CancelledError.
    """
    facts = describe_onnx(file, settings)
    provider = onnx_providers.find_provider(settings.provider)
    weights = load_weights(onnx_providers.load(), provider, artefact_of(file), settings, job)
    return OnnxModel(weights, file, settings, facts)


def artefact_of(file: LocatedModel) -> OnnxArtefact:
    """The exported folder of a model. Raises InvalidRequestError for any other model."""
    if file.onnx is None:
        raise InvalidRequestError(
            f"{file.name} is not an ONNX model", hint="`edgespec export MODEL --to onnx -o DIR` makes one"
        )
    return file.onnx


def describe_onnx(file: LocatedModel, settings: OnnxSettings) -> ModelFacts:
    """The facts of a model as ``load_onnx`` would report them, from its artefact alone.

    Raises RuntimeUnavailableError, InvalidRequestError.
    """
    artefact = artefact_of(file)
    if settings.threads < 1:
        raise InvalidRequestError(f"threads must be at least 1, not {settings.threads}")
    if settings.pad_to not in PADDINGS:
        raise InvalidRequestError(
            f"a forward cannot be padded to {settings.pad_to} tokens", hint=f"one of {', '.join(map(str, PADDINGS))}"
        )
    library, provider = onnx_providers.load(), onnx_providers.find_provider(settings.provider)
    longest = artefact.context_length
    if artefact.static_cache is not None:  # padding needs no room: only the rows of real tokens are kept
        longest = min(longest, artefact.static_cache)
    return ModelFacts(
        name=file.name,
        sha256=file.identity,
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
        mask_id=artefact.tokenizer_header.mask_token_id,
        settings=settings.as_json() | ({} if provider.name == HOST else {"drivers": gpu_drivers()}),
    )


class OnnxModel(RuntimeModel[OnnxWeights]):
    """Weights loaded by ONNX Runtime. Implements the Model contract."""

    def __init__(self, weights: OnnxWeights, file: LocatedModel, settings: OnnxSettings, facts: ModelFacts) -> None:
        self._file = file
        self.artefact = weights.artefact
        self.settings = settings
        super().__init__(weights, facts)

    @property
    def header(self) -> GgufHeader:
        """The source's metadata and tokenizer, without tensors."""
        return self.artefact.tokenizer_header

    def facts_with(self, *, threads: int | None = None, pad_to: int | None = None) -> ModelFacts:
        """The facts ``with_settings`` would have. Raises InvalidRequestError."""
        return describe_onnx(self._file, with_changes(self.settings, threads=threads, pad_to=pad_to))

    def with_settings(self, *, threads: int | None = None, pad_to: int | None = None) -> OnnxModel:
        """The same weights with forwards of at least ``pad_to`` tokens. The caller closes the result like any other
        model.

        Shares the weights, but loads them again for another number of ``threads``: ONNX Runtime lays weights out for
        fixed threads. Raises ClosedError, InvalidRequestError, and what loading raises.
        """
        facts = self.facts_with(threads=threads, pad_to=pad_to)
        settings = with_changes(self.settings, threads=threads, pad_to=pad_to)
        with self._lock:
            weights = self._loaded()
        if settings.threads != self.settings.threads:
            provider = onnx_providers.find_provider(settings.provider)
            weights = load_weights(onnx_providers.load(), provider, self.artefact, settings)
        return OnnxModel(weights, self._file, settings, facts)

    def open(self, context_length: int) -> OnnxSequence:
        """A fresh Sequence with room for ``context_length`` tokens.

        Raises MemoryLimitError, ClosedError, and InvalidRequestError for more tokens than the model has positions.
        """
        check_context_length(context_length)
        longest = self._facts.trained_context_length
        if context_length > longest:
            raise InvalidRequestError(
                f"{self._facts.name} has positions for {longest} tokens, not for {context_length}",
                hint=f"use --context {longest} or less",
            )
        return self._open(lambda weights: OnnxSequence(self, weights, context_length))


# What a graph of each kind needs for a number of context tokens and a least number of tokens in a forward.
_CONTEXTS: Mapping[str, Callable[[OnnxWeights, int, int, StopFlag], OnnxContext]] = {
    SHARED: SharedContext,
    WHOLE: WholeContext,
    ROWS: StaticContext,
}


class OnnxSequence(RuntimeSequence):
    """One cache in ONNX Runtime. Implements the Sequence contract."""

    _CALLED = "the onnx runtime"

    def __init__(self, model: OnnxModel, weights: OnnxWeights, context_length: int) -> None:
        ids = weights.artefact.ids
        self._kept = None if ids is None else ids.astype(np.int64)
        self._first = 0  # index of the last decode's first scores
        stop = StopFlag(weights)
        self._native = _CONTEXTS[weights.artefact.cache](weights, context_length, model.settings.pad_to, stop)
        super().__init__(model, stop, context_length, thread="edgespec-onnx")
        self._free_at_end(self._native.free)

    def _decode(self, ids: IdArray, position: int, rows: int) -> None:
        self._first = self._native.decode(ids, position, rows)

    def _rows(self, count: int) -> Rows:
        native, first = self._native, self._first
        scored = DrawnRows(count, lambda index: native.row(first + index), self._currency())
        return scored if self._kept is None else TrimmedRows(scored, self._kept, self._vocabulary_size)

    def _check_usable(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("this sequence is closed")
