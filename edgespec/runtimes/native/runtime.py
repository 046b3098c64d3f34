"""edgespec's own kernels as a value: verification nearly free, and the same bits at every width.

A row is computed by the same operations in the same order whatever is computed beside it, on however many threads and
by whichever instruction set, so plain decoding, verification, prefill and the paths of a tree belong to one numeric
class.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any, ClassVar

from edgespec.errors import InvalidRequestError, RuntimeUnavailableError
from edgespec.files.model_file import LocatedModel
from edgespec.interfaces.model import HOST, ModelFacts
from edgespec.runtimes.native import library
from edgespec.runtimes.native.frequent_head import frequent_head_ids, frequent_head_rows
from edgespec.runtimes.native.layout import unsupported_reason
from edgespec.runtimes.native.library import PORTABLE
from edgespec.runtimes.native.model import (
    KV_BITS,
    NativeModel,
    NativeSettings,
    bytes_spared,
    describe_native,
    has_sidecar,
    load_native,
)
from edgespec.runtimes.runtime import AS_FILED, DraftForm, Runtime

# What is kept of a model in the store, in the model's own folder: it goes when the model goes.
NATIVE_SIDECAR, REQUANTIZED_SIDECAR = "native.tiles", "native-coarse.tiles"

# Small models do not bear to be rounded. Of 1500 tokens of the suite's prompts a model of 270M weights has 31.3 %
# as its first choice in four bits and 34.8 as in its file, one of 135M 37.6 and 39.4, the 0.5B 42.4 and 42.9, the
# 1.5B 49.4 and 49.5 (docs/results/native.md). The limit is below a 0.5B model with a trimmed head.
LEAST_REQUANTIZED_PARAMETERS = 380_000_000


class NativeRuntime(Runtime):
    """GGUF files of the families and types that the kernels know, on the processor."""

    name: ClassVar[str] = "native"
    settings_type: ClassVar[type[Any]] = NativeSettings

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
                hint='runtime "auto" or "llama" runs it with llama.cpp',
            )

    def preference(self) -> int:
        """In portable C the kernels are slower than llama.cpp."""
        return 0 if library.load().levels[-1] != PORTABLE else 2

    def settings(
        self, file: LocatedModel, *, threads: int, device: str, gpu_layers: int | None = None, sidecar: bool = True
    ) -> NativeSettings:
        return NativeSettings(threads=threads, sidecar=sidecar)

    def describe(self, file: LocatedModel, settings: NativeSettings, form: DraftForm = AS_FILED) -> ModelFacts:
        return describe_native(
            file.header,
            settings,
            name=file.name,
            sha256=file.identity,
            head_rows=form.head_rows,
            requantized=form.requantized,
            artefact=file.artefact,
        )

    def load(
        self,
        file: LocatedModel,
        settings: NativeSettings,
        form: DraftForm = AS_FILED,
        stop: threading.Event | None = None,
    ) -> NativeModel:
        sidecar = _sidecar(file, form) if settings.sidecar else None
        if sidecar is not None:
            with contextlib.suppress(OSError):  # then nothing is kept
                sidecar.parent.mkdir(parents=True, exist_ok=True)
        return load_native(
            file.path,
            settings,
            name=file.name,
            sha256=file.identity,
            header=file.header,
            artefact=file.artefact,
            sidecar=sidecar,
            frequent_head=None if form.head_rows is None else frequent_head_ids(file.header),
            requantized=form.requantized,
            stop=stop,
        )

    def is_prepared(self, file: LocatedModel, settings: NativeSettings, form: DraftForm = AS_FILED) -> bool:
        """Whether the laid out weights are in a file that a load only maps."""
        path = _sidecar(file, form) if settings.sidecar else None
        return path is not None and has_sidecar(
            path, file.header, sha256=file.identity, artefact=file.artefact, requantized=form.requantized
        )

    def cache_bits(self, settings: NativeSettings) -> float:
        return KV_BITS

    def draft_form(self, file: LocatedModel, *, whole_head: bool, filed_weights: bool) -> DraftForm:
        """A short head, and four bits a weight for a drafter that is large enough to bear them."""
        rows = None if whole_head or file.artefact is not None else frequent_head_rows(file.header)
        bears = not filed_weights and file.header.parameter_count >= LEAST_REQUANTIZED_PARAMETERS
        return DraftForm(head_rows=rows, requantized=bears and bytes_spared(file.header, file.artefact) > 0)


def _sidecar(file: LocatedModel, form: DraftForm) -> Path | None:
    folder = file.prepared_folder
    return None if folder is None else folder / (REQUANTIZED_SIDECAR if form.requantized else NATIVE_SIDECAR)
