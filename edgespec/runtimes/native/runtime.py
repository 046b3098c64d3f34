"""edgespec's kernels as a Runtime value: verification is nearly free, and bit-equal at every width.

A row is computed by the same operations in the same order at any width, number of threads and instruction set. So
plain decoding, verification, prefill and the paths of a tree belong to one numeric class.

A drafter gets a short head by default: it reads its whole output head for every proposed token, a third of a 0.5B
model's bytes, and text uses few of the head's rows (VocabTrim, Goel et al., 2025; FR-Spec, Zhao et al., 2025). The
frequent tokens are known without counting: a byte-pair vocabulary lists its merges in the order they were learned,
by falling frequency. The whole head stays available, so another kind of text costs only time.
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import numpy as np

from edgespec.errors import InvalidRequestError, RuntimeUnavailableError
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.gguf.token_rows import always_kept, kept_ids
from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import QUIET, Job
from edgespec.interfaces.model import HOST, ModelFacts, WindowedLayers
from edgespec.interfaces.rows import IdArray
from edgespec.runtimes.native import library
from edgespec.runtimes.native.layout import elsewhere, read_layout, unsupported_reason
from edgespec.runtimes.native.library import PORTABLE
from edgespec.runtimes.native.model import (
    KV_BITS,
    NativeModel,
    NativeSettings,
    bytes_spared,
    describe_native,
    kept_weights,
    load_native,
    windowed_of,
)
from edgespec.runtimes.native.sidecar import Sidecar
from edgespec.runtimes.native.tensors import unread_reason
from edgespec.runtimes.native.weights import SidecarFile
from edgespec.runtimes.runtime import AS_FILED, DraftForm, Runtime

# What the store keeps for a model, in the model's folder: removed with the model.
NATIVE_SIDECAR, REQUANTIZED_SIDECAR = "native.tiles", "native-coarse.tiles"

# Rounding hurts small models. Share of 1500 prompt tokens that a model ranks first, in four bits and as filed: 31.3
# and 34.8 % (270M), 37.6 and 39.4 (135M), 42.4 and 42.9 (0.5B), 49.4 and 49.5 (1.5B) (docs/results/native.md). The
# limit is below a 0.5B model with a trimmed head.
LEAST_REQUANTIZED_PARAMETERS = 380_000_000

# Default pair: 97.4 % of the target's tokens are in this head or earlier in the text, and a drafter's step takes 0.78
# of its time; 32768 rows give 95.7 % and 0.76, 65536 rows 98.2 % and 0.81. Drafting is three tenths of a round, so
# three points of a step are worth one of acceptance (docs/results/native.md).
FREQUENT_HEAD_ROWS = 49152

# A head less than twice as long stays whole: shortening it would save at most a tenth of the drafter's bytes.
_LEAST_RATIO = 2

# llama.cpp's name for byte-pair vocabularies. Other vocabularies may not be in order of frequency.
_BYTE_PAIRS = "gpt2"


class NativeRuntime(Runtime):
    """GGUF files of the families and types that the kernels support, on the processor."""

    name: ClassVar[str] = "native"
    settings_type: ClassVar[type[Any]] = NativeSettings
    cache_grows = True

    def check(self, file: LocatedModel, device: str) -> None:
        if device.lower() != HOST:
            raise InvalidRequestError(f"the native runtime runs on the processor, not on {device}")
        if file.onnx is not None:
            raise InvalidRequestError(f"{file.name} is an ONNX model, which {self.name} does not run")
        library.load()
        reason = unsupported_reason(file.header, file.artefact)
        if reason is not None:
            raise RuntimeUnavailableError(
                f"the native runtime does not run {file.name}: {reason}",
                hint=elsewhere(file.header),
            )

    def preference(self) -> int:
        """First, unless the kernels run as portable C: then they are slower than llama.cpp."""
        return 0 if library.load().levels[-1] != PORTABLE else 2

    def settings(
        self, file: LocatedModel, *, threads: int, device: str, gpu_layers: int | None = None, sidecar: bool = True
    ) -> NativeSettings:
        return NativeSettings(threads=threads, sidecar=sidecar)

    def describe(self, file: LocatedModel, settings: NativeSettings, form: DraftForm = AS_FILED) -> ModelFacts:
        return describe_native(file, settings, form)

    def load(
        self,
        file: LocatedModel,
        settings: NativeSettings,
        form: DraftForm = AS_FILED,
        job: Job = QUIET,
    ) -> NativeModel:
        sidecar = _sidecar_file(file, settings, form)
        if sidecar is not None:
            with contextlib.suppress(OSError):  # then no sidecar is kept
                sidecar.path.parent.mkdir(parents=True, exist_ok=True)
        model = load_native(file, settings, sidecar=sidecar, requantized=form.requantized, job=job)
        if form.layer:
            with model:
                return self.drafting_layer(model, form)
        return _headed(model, form)

    def drafting_layer(self, target: NativeModel, form: DraftForm) -> NativeModel:
        return _headed(target.drafting_layer(), form)

    def is_prepared(self, file: LocatedModel, settings: NativeSettings, form: DraftForm = AS_FILED) -> bool:
        """Whether the laid out weights are in a sidecar, which a load only maps."""
        sidecar = _sidecar(file, settings, form)
        return sidecar is not None and sidecar.is_there()

    def will_prepare(self, file: LocatedModel, settings: NativeSettings, form: DraftForm = AS_FILED) -> bool:
        sidecar = _sidecar(file, settings, form)
        return sidecar is not None and not sidecar.is_there() and sidecar.may_be_written()

    def cache_bits(self, settings: NativeSettings) -> float:
        return KV_BITS

    def windowed_layers(self, file: LocatedModel) -> WindowedLayers:
        return windowed_of(read_layout(file.header, file.artefact))

    def why_not_read(self, drafter: LocatedModel, target: LocatedModel) -> str | None:
        return unread_reason(read_layout(drafter.header), read_layout(target.header, target.artefact))

    def no_drafting_layer(self, file: LocatedModel) -> str | None:
        return read_layout(file.header, file.artefact).no_drafting

    def draft_form(self, file: LocatedModel, *, whole_head: bool, filed_weights: bool) -> DraftForm:
        """A short head, and four bits a weight for a drafter above the size limit, or with another vocabulary.

        SmolLM2 135M's translated guesses are right in 65.5 % of places in four bits, and in 65.9 % as filed
        (docs/results/other-vocabularies.md), where a step reads more bytes.
        """
        rows = None if whole_head or file.artefact is not None else frequent_head_rows(file.header)
        large = file.header.parameter_count >= LEAST_REQUANTIZED_PARAMETERS
        bears = not filed_weights and (large or file.token_map is not None)
        return DraftForm(head_rows=rows, requantized=bears and bytes_spared(file) > 0)


def _headed(model: NativeModel, form: DraftForm) -> NativeModel:
    """The model, or in its place the one with the short head that the form asks for."""
    if form.head_rows is None:
        return model
    with model:
        return model.with_head_rows(frequent_head_ids(model.header))


def _sidecar_file(file: LocatedModel, settings: NativeSettings, form: DraftForm) -> SidecarFile | None:
    if not settings.sidecar or file.prepared_folder is None:
        return None
    name = REQUANTIZED_SIDECAR if form.requantized else NATIVE_SIDECAR
    return SidecarFile(path=file.prepared_folder / name, sha256=file.identity)


def _sidecar(file: LocatedModel, settings: NativeSettings, form: DraftForm) -> Sidecar | None:
    kept = _sidecar_file(file, settings, form)
    return None if kept is None else kept_weights(kept, file, requantized=form.requantized)


def frequent_head_rows(header: GgufHeader) -> int | None:
    """How many rows a drafter's short head has; None for a model whose head stays whole."""
    if header.metadata.get("tokenizer.ggml.model") != _BYTE_PAIRS:
        return None
    return FREQUENT_HEAD_ROWS if header.vocabulary_size >= _LEAST_RATIO * FREQUENT_HEAD_ROWS else None


def frequent_head_ids(header: GgufHeader) -> IdArray:
    """The tokens of a short head, int64 (FREQUENT_HEAD_ROWS,), ascending: all special tokens, then the first of the
    rest.

    Raises ModelFileError.
    """
    always = always_kept(header)
    if len(always) > FREQUENT_HEAD_ROWS:  # an unusual vocabulary: its special tokens get no priority
        always = always[:0]
    return kept_ids({}, FREQUENT_HEAD_ROWS, always, vocabulary_size=header.vocabulary_size).astype(np.int64)
