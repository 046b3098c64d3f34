"""llama.cpp as a Runtime value: the files it runs, its devices and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from edgespec.errors import InvalidRequestError, RuntimeUnavailableError
from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import QUIET, Job
from edgespec.interfaces.model import HOST, ModelFacts
from edgespec.runtimes.llama import library
from edgespec.runtimes.llama.context import KV_TYPES, LlamaSettings
from edgespec.runtimes.llama.facts import describe_model, usable_settings, without_tiles
from edgespec.runtimes.llama.model import LlamaModel, load_model
from edgespec.runtimes.runtime import AS_FILED, Device, DraftForm, Runtime

# GPU kernels are built for keys and values of one type only.
_GPU_CACHE = "q8_0"


class LlamaRuntime(Runtime):
    """Every GGUF file, on the processor and on every device of the build."""

    name: ClassVar[str] = "llama"
    settings_type: ClassVar[type[Any]] = LlamaSettings

    def check(self, file: LocatedModel, device: str) -> None:
        # llama.cpp reports a broken file when it loads the file.
        if file.onnx is not None:
            raise InvalidRequestError(f"{file.name} is an ONNX model, which {self.name} does not run")
        if file.header.reads_target:
            raise RuntimeUnavailableError(f"{file.name} reads its target's cache, and {self.name} lends none")
        library.load()
        if file.header.vision_tensors or file.header.completed:
            what, hint = "has other keys or names", "fetch the same model from the hub"
            if file.header.vision_tensors:
                what = "holds vision tensors in the text model's file"
                hint += ", where its vision part is a separate file"
            raise RuntimeUnavailableError(
                f"llama.cpp does not load {file.name}, which {what}, as Ollama writes them", hint=hint
            )

    def settings(
        self, file: LocatedModel, *, threads: int, device: str, gpu_layers: int | None = None, sidecar: bool = True
    ) -> LlamaSettings:
        kv_type = LlamaSettings().kv_type if device == HOST else _GPU_CACHE
        settings = LlamaSettings(threads=threads, device=device, gpu_layers=gpu_layers, kv_type=kv_type)
        return usable_settings(settings, file.header)

    def describe(self, file: LocatedModel, settings: LlamaSettings, form: DraftForm = AS_FILED) -> ModelFacts:
        return describe_model(file, settings)

    def load(
        self,
        file: LocatedModel,
        settings: LlamaSettings,
        form: DraftForm = AS_FILED,
        job: Job = QUIET,
    ) -> LlamaModel:
        return load_model(file, settings, job)

    def cache_bits(self, settings: LlamaSettings) -> float:
        return KV_TYPES[settings.kv_type][1]

    def find_device(self, wanted: str, needed_bytes: int) -> str:
        """``auto`` is the first GPU with ``needed_bytes`` free, else the processor.

        ``auto`` never means an integrated GPU: GPU and processor share the same memory, so only a measurement shows
        which is faster.
        """
        if wanted.lower() == HOST:
            return HOST
        if wanted == "auto":
            gpus = (gpu for gpu in self.gpus() if gpu.kind == "gpu")
            return next((gpu.name for gpu in gpus if (gpu.free_bytes or 0) > needed_bytes), HOST)
        names = (device.name for device in library.load().devices(with_memory=False))
        return next((name for name in names if name.lower() == wanted.lower()), wanted)

    def gpus(self) -> tuple[Device, ...]:
        """The GPUs in llama.cpp's order, integrated GPUs last; empty without llama.cpp."""
        try:
            found = [device for device in self.list_devices() if device.holds_models]
        except RuntimeUnavailableError:
            return ()
        return tuple(sorted(found, key=lambda device: device.kind == "igpu"))

    def list_devices(self) -> Sequence[Device]:
        return library.load().devices()

    def has_own_memory(self, device: str) -> bool:
        if device == HOST:
            return False
        found = (one for one in library.load().devices(with_memory=False) if one.name.lower() == device.lower())
        return any(one.memory != HOST for one in found)

    def stable_settings(self, preferred: LlamaSettings) -> Sequence[LlamaSettings]:
        """Measured on x86: repacked weights keep widths 1 to 3 bit-equal; weights as in the file keep 1 to 7, 5 to 25
        % slower in plain decoding.
        """
        preferred = without_tiles(preferred, library.load())
        return (preferred, replace(preferred, repack=False)) if preferred.repack else (preferred,)

    def other_caches(self, settings: LlamaSettings) -> Sequence[Mapping[str, Any]]:
        if settings.kv_type == "f16":
            return ()
        return ({"kv_type": "f16"}, {"kv_type": "f16", "flash_attention": False})

    def comparable_settings(self, settings: LlamaSettings) -> LlamaSettings:
        return replace(settings, kv_type="f16")

    def prompt_settings(self, settings: LlamaSettings) -> LlamaSettings:
        """Measured on x86: weights as in the file prefill 1.5 times as fast as repacked weights."""
        return replace(settings, repack=False) if settings.device == HOST else settings

    def moved(self, settings: LlamaSettings, other: LlamaSettings) -> LlamaSettings:
        return replace(settings, device=other.device, gpu_layers=other.gpu_layers, kv_type=other.kv_type)
