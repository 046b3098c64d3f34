"""ONNX Runtime as a Runtime value: exported folders, on the processor or on an execution provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from edgespec.files.model_file import LocatedModel
from edgespec.files.onnx.interface import WHOLE
from edgespec.files.progress import QUIET, Job
from edgespec.interfaces.model import ModelFacts
from edgespec.runtimes.onnx import providers
from edgespec.runtimes.onnx.model import OnnxModel, artefact_of, describe_onnx, load_onnx
from edgespec.runtimes.onnx.session import OnnxSettings
from edgespec.runtimes.runtime import AS_FILED, Device, DraftForm, Runtime

# ONNX Runtime's processor kernels keep keys and values as float32.
_CACHE_BITS = 32


class OnnxRuntime(Runtime):
    """Folders that ``edgespec export --to onnx`` wrote."""

    name: ClassVar[str] = "onnx"
    settings_type: ClassVar[type[Any]] = OnnxSettings

    def runs(self, file: LocatedModel) -> bool:
        return file.onnx is not None

    def check(self, file: LocatedModel, device: str) -> None:
        artefact_of(file)

    def settings(
        self, file: LocatedModel, *, threads: int, device: str, gpu_layers: int | None = None, sidecar: bool = True
    ) -> OnnxSettings:
        return OnnxSettings(threads=threads, provider=device)

    def describe(self, file: LocatedModel, settings: OnnxSettings, form: DraftForm = AS_FILED) -> ModelFacts:
        return describe_onnx(file, settings)

    def load(
        self,
        file: LocatedModel,
        settings: OnnxSettings,
        form: DraftForm = AS_FILED,
        job: Job = QUIET,
    ) -> OnnxModel:
        return load_onnx(file, settings, job)

    def cache_bits(self, settings: OnnxSettings) -> float:
        return _CACHE_BITS

    def cache_copies(self, file: LocatedModel) -> int:
        return 2 if artefact_of(file).cache == WHOLE else 1  # the one before, and one with the new rows

    def list_devices(self) -> list[Device]:
        """Providers, including plugins. Loading a model shows whether a built-in provider's hardware exists."""
        return [
            Device(runtime=self.name, name=provider.name, kind=provider.kind, description=provider.description)
            for provider in providers.list_devices()
        ]

    def stable_settings(self, preferred: OnnxSettings) -> Sequence[OnnxSettings]:
        """Kernels compute width 1 differently from all widths above, so plain decoding is bit-equal to verification
        only at width 2 (about 20 % of plain speed).
        """
        return (preferred, replace(preferred, pad_to=2)) if preferred.pad_to == 1 else (preferred,)

    def other_caches(self, settings: OnnxSettings) -> Sequence[Mapping[str, Any]]:
        """There is one kind of cache; only padding may be left out."""
        return ({"pad_to": 1},) if settings.pad_to != 1 else ()
