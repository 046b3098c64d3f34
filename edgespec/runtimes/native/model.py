"""A model in the native runtime: its settings, its facts, and the weights that its Sequences share."""

from __future__ import annotations

import functools
from collections import abc
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from edgespec.errors import InvalidRequestError, RuntimeUnavailableError
from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import QUIET, Job
from edgespec.interfaces.model import ModelFacts, WindowedLayers
from edgespec.interfaces.rows import IdArray
from edgespec.runtimes.native.batch import NativeBatch
from edgespec.runtimes.native.following import BorrowingSequence, DraftingSequence
from edgespec.runtimes.native.layout import read_layout
from edgespec.runtimes.native.library import LEVELS, MOST_THREADS, NativeLibrary, load
from edgespec.runtimes.native.rewinds import held_bytes, windowed_layers
from edgespec.runtimes.native.sequence import NativeSequence
from edgespec.runtimes.native.sidecar import Sidecar
from edgespec.runtimes.native.tensors import REQUANTIZED_TYPE, ModelLayout, requantize, spared_by, spared_of_forward
from edgespec.runtimes.native.weights import HeadRows, ModelPart, SidecarFile, load_weights, sidecar_of
from edgespec.runtimes.runtime import AS_FILED, DraftForm, mixture_of
from edgespec.runtimes.sequence import RuntimeModel, check_context_length, with_changes

KV_TYPE, KV_BITS = "f16", 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSettings:
    """How to run a model. ``level`` is the name of an instruction set, or ``auto`` for the fastest available.

    ``sidecar``: whether loading uses and writes a file with the laid out weights, if the caller names its path.
    No setting changes a bit of the results.
    """

    runtime: ClassVar[str] = "native"
    gpu_layers: ClassVar[int | None] = None

    threads: int = 1
    level: str = "auto"
    sidecar: bool = True

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def kv_type(self) -> str:
        return KV_TYPE


def load_native(
    file: LocatedModel,
    settings: NativeSettings,
    *,
    sidecar: SidecarFile | None = None,
    requantized: bool = False,
    job: Job = QUIET,
) -> NativeModel:
    """Lay a file's weights out for the kernels. Once ``cancelled()`` is true, loading ends early.

    ``sidecar`` is where the laid out weights are kept for the next load, which then takes less than a second. They
    take as much disk as the model, and are written only with plenty of free disk.

    A ``requantized`` model, for drafting, has its matrices of wider types as Q4_0: it computes what a file in Q4_0
    would.

    Raises ModelFileError, RuntimeUnavailableError (no library, or a model it does not run), InvalidRequestError,
    MemoryLimitError, CancelledError.
    """
    (facts, _), artefact = _filed_facts(file, settings), file.artefact
    layout = _read_layout(file, requantized=requantized)
    embedding = None if artefact is None else artefact.embedding.path
    weights = load_weights(load(), file.header, layout, settings.threads, sidecar, embedding=embedding, job=job)
    head_ids = None if artefact is None else artefact.ids.astype(np.int64)
    return NativeModel(ModelPart(weights, head_ids=head_ids), file, settings, facts)


def describe_native(file: LocatedModel, settings: NativeSettings, form: DraftForm = AS_FILED) -> ModelFacts:
    """The facts of a model as it would have once loaded, from its header alone.

    Raises RuntimeUnavailableError, InvalidRequestError, ModelFileError.
    """
    return _facts_of_part(*_filed_facts(file, settings, form), form.head_rows)


def _filed_facts(
    file: LocatedModel, settings: NativeSettings, form: DraftForm = AS_FILED
) -> tuple[ModelFacts, ModelLayout]:
    """The facts of the whole model, with the weights as filed, and its layout. Raises as ``describe_native``."""
    header = file.header
    if not 1 <= settings.threads <= MOST_THREADS:
        raise InvalidRequestError(f"threads must be at least 1 and at most {MOST_THREADS}, not {settings.threads}")
    library = load()
    layout = _read_layout(file, requantized=form.requantized)
    drafting = tuple(f"blk.{number}." for number in range(len(layout.layers), header.block_count))
    behind = [tensor for tensor in header.tensors if drafting and tensor.name.startswith(drafting)]
    left_out = behind if layout.drafting is None else []
    as_filed = ModelFacts(
        name=file.name,
        sha256=file.identity,
        architecture=header.architecture,
        runtime="native",
        build=library.build,
        device=settings.device,
        threads=settings.threads,
        vocabulary_size=header.vocabulary_size,
        trained_context_length=header.context_length,
        weight_bytes=header.tensor_bytes - sum(tensor.byte_count for tensor in left_out),
        bytes_per_forward=header.bytes_per_forward - sum(map(header.bytes_read_of, behind)),
        kv_bytes_per_token=_cache_bytes(layout, range(len(layout.layers))),
        kv_type=KV_TYPE,
        can_fork=not layout.borrows,
        can_branch=layout.deltas is None and not layout.borrows,
        bit_equal_by_construction=not layout.borrows,  # a row may depend on the output of the row before it
        follows=layout.borrows,
        borrows=layout.borrows,
        mask_id=header.mask_token_id,
        mixture=mixture_of(header),
        settings={"level": _level(library, settings.level)},
    )
    return _facts_of_layer(as_filed, layout) if form.layer else (as_filed, layout)


def _facts_of_layer(model: ModelFacts, whole: ModelLayout) -> tuple[ModelFacts, ModelLayout]:
    """The facts of a model's layer that drafts, and its layout. Raises RuntimeUnavailableError without one.

    Its weights are counted with the model's.
    """
    layout = whole.drafting
    if layout is None:
        why = whole.no_drafting or "the file holds none"
        raise RuntimeUnavailableError(f"no layer drafts for {model.name}: {why}")
    own = layout.own_matrices
    facts = replace(
        model,
        name=f"{model.name}'s drafting layer",
        weight_bytes=spared_by(layout),  # none, then
        bytes_per_forward=int(sum(each.read * each.tensor.byte_count for each in own)),
        kv_bytes_per_token=_cache_bytes(layout, (0,)),
        can_fork=False,
        can_branch=False,
        bit_equal_by_construction=False,  # a row depends on the output of the row before it
        follows=True,
        mixture=None,
        settings={**model.settings, "drafting_layer": True},
    )
    return facts, layout


def windowed_of(layout: ModelLayout) -> WindowedLayers:
    """What the layers with a window or a state take of a cache."""
    windowed = [number for number, layer in enumerate(layout.layers) if layer.window]
    found = windowed_layers(_cache_bytes(layout, windowed), max((layer.window for layer in layout.layers), default=0))
    state_bytes = held_bytes(layout.deltas, sum(layer.delta is not None for layer in layout.layers))
    return replace(found, state_bytes=state_bytes) if state_bytes else found


def _cache_bytes(layout: ModelLayout, numbers: abc.Iterable[int]) -> int:
    """Bytes of a token's keys and values in these layers; those of a layer that reads another's count there."""
    owners = (layout.layers[number] for number in numbers if layout.layers[number].cache == number)
    return sum(layer.cache_elements for layer in owners) * KV_BITS // 8


def bytes_spared(file: LocatedModel) -> int:
    """How many bytes requantising the matrices of a model saves. Raises RuntimeUnavailableError, ModelFileError."""
    return spared_by(_read_layout(file, requantized=True)) - spared_by(_read_layout(file, requantized=False))


def kept_weights(sidecar: SidecarFile, file: LocatedModel, *, requantized: bool) -> Sidecar:
    """The file there for the model's present layout, whether or not it exists."""
    return sidecar_of(load(), _read_layout(file, requantized=requantized), sidecar, 1, lambda: False)


def _read_layout(file: LocatedModel, *, requantized: bool) -> ModelLayout:
    layout = read_layout(file.header, file.artefact)
    return requantize(layout) if requantized else layout


def _level(library: NativeLibrary, wanted: str) -> str:
    if wanted == "auto":
        return library.levels[-1]
    if wanted not in LEVELS:
        raise InvalidRequestError(f"unknown level {wanted!r}", hint=f"one of auto, {', '.join(LEVELS)}")
    if wanted not in library.levels:
        raise RuntimeUnavailableError(
            f"this processor or this build cannot run {wanted}", hint=f"levels here: {', '.join(library.levels)}"
        )
    return wanted


def _facts_of_part(facts: ModelFacts, layout: ModelLayout, head_rows: int | None) -> ModelFacts:
    """``facts`` are those of the whole file, with the weights as filed."""
    read, settings = facts.bytes_per_forward - spared_of_forward(layout), dict(facts.settings)
    if any(weight.kept_as is not None for weight in layout.matrices):
        settings["weights"] = REQUANTIZED_TYPE
    if head_rows is not None:
        read -= layout.head.kept_row_bytes * (layout.head.rows - head_rows)
        settings["head_rows"] = head_rows
    return replace(
        facts,
        weight_bytes=facts.weight_bytes - spared_by(layout),
        bytes_per_forward=read,
        windowed=windowed_of(layout),
        settings=settings,
    )


class NativeModel(RuntimeModel[ModelPart]):
    """Weights laid out for the kernels. Implements the Model contract."""

    def __init__(self, part: ModelPart, file: LocatedModel, settings: NativeSettings, facts: ModelFacts) -> None:
        """``facts`` are those of the whole model, with the weights as filed."""
        self._file = file
        self.header = file.header
        self.settings = settings
        self._form = DraftForm(layer=facts.follows and not part.weights.layout.borrows)
        super().__init__(part, _facts_of_part(facts, part.weights.layout, part.head_rows))
        self._batch = NativeBatch(
            part, threads=facts.threads, level=str(facts.settings["level"]), weight=self._facts.bytes_per_forward
        )

    def facts_with(self, *, threads: int | None = None) -> ModelFacts:
        """The facts ``with_settings`` would have. Raises ClosedError, InvalidRequestError."""
        with self._lock:
            part = self._loaded()
            whole, _ = _filed_facts(self._file, with_changes(self.settings, threads=threads), self._form)
            return _facts_of_part(whole, part.weights.layout, part.head_rows)

    def with_settings(self, *, threads: int | None = None) -> NativeModel:
        """The same weights, shared, on another number of threads. The caller closes the result like any other model.

        Raises ClosedError, InvalidRequestError.
        """
        with self._lock:
            return self._with_part(self._loaded(), with_changes(self.settings, threads=threads))

    def with_head_rows(self, ids: IdArray) -> NativeModel:
        """The same weights, shared, with a head that scores only these tokens at first: ascending ids, integers (n,).

        Any token can be fed. Tokens outside ``ids`` score -infinity; the other scores are bit-equal to the whole
        head's (VocabTrim, Goel et al., 2025). Its Sequences can score more tokens (``FrequentHeadSequence``). The
        caller closes the result like any other model. Raises ClosedError, MemoryLimitError, InvalidRequestError.
        """
        with self._lock:
            part = self._loaded()
            if part.head_ids is not None:
                raise InvalidRequestError(f"the head of {self._facts.name} is trimmed already")
            head = HeadRows(part.weights, ids)
            return self._with_part(ModelPart(part.weights, head), self.settings)

    def drafting_layer(self) -> NativeModel:
        """The layer of the file that drafts for this model, over the same weights. Its Sequences follow this model's.

        The caller closes the result like any other model. Raises ClosedError, InvalidRequestError,
        RuntimeUnavailableError without one.
        """
        with self._lock:
            facts, _ = _filed_facts(self._file, self.settings, DraftForm(layer=True))
            return NativeModel(ModelPart(self._loaded().weights.drafting_layer()), self._file, self.settings, facts)

    def _with_part(self, part: ModelPart, settings: NativeSettings) -> NativeModel:
        return NativeModel(part, self._file, settings, _filed_facts(self._file, settings, self._form)[0])

    def open(self, context_length: int, *, keep_hidden: abc.Sequence[int] = ()) -> NativeSequence:
        """A fresh Sequence with room for ``context_length`` tokens. It keeps its forwards' hidden states behind the
        layers ``keep_hidden``; -1 is behind the head's norm.

        Raises MemoryLimitError, ClosedError, InvalidRequestError.
        """
        check_context_length(context_length)
        kept = tuple(dict.fromkeys(keep_hidden))
        another = functools.partial(self.open, context_length, keep_hidden=kept)

        def make(part: ModelPart) -> NativeSequence:
            strange = [layer for layer in kept if not -1 <= layer < part.struct.layers]
            if strange:
                raise InvalidRequestError(f"there is no layer {strange[0]} among {part.struct.layers}")
            kind = DraftingSequence if self._facts.follows else NativeSequence
            kind = BorrowingSequence if part.weights.layout.borrows else kind
            return kind(self, part, self._batch, context_length, kept, another)

        return self._open(make)
