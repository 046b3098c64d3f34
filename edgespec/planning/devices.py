"""Which devices the runtimes installed here can compute on, and why a runtime is missing."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from edgespec.errors import RuntimeUnavailableError
from edgespec.runtimes import llama_library

DeviceKind = Literal["cpu", "gpu", "npu", "other"]

_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Something a runtime can compute on. ``name`` is the runtime's own; bytes are None where it does not tell."""

    runtime: str
    name: str
    kind: DeviceKind
    description: str
    free_bytes: int | None = None
    total_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Every field as it is."""
        return {
            "runtime": self.runtime,
            "name": self.name,
            "kind": self.kind,
            "description": self.description,
            "free_bytes": self.free_bytes,
            "total_bytes": self.total_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """Devices of the runtimes that work, and for each other runtime the sentence that says why it does not."""

    devices: tuple[Device, ...]
    missing: Mapping[str, str] = field(default_factory=dict)

    def of(self, runtime: str) -> tuple[Device, ...]:
        """The devices of one runtime."""
        return tuple(device for device in self.devices if device.runtime == runtime)


def list_devices(known_broken: Mapping[str, str] = _NONE) -> DeviceReport:
    """Ask every runtime for its devices.

    This loads native code, and a build for another processor can take the whole process along. Runtimes in
    ``known_broken`` (with the reason) are left alone and reported as missing.
    """
    devices: list[Device] = []
    missing: dict[str, str] = {}
    for runtime, ask in _ASK.items():
        if runtime in known_broken:
            missing[runtime] = known_broken[runtime]
            continue
        try:
            devices += ask()
        except RuntimeUnavailableError as error:
            missing[runtime] = error.message
    return DeviceReport(devices=tuple(devices), missing=MappingProxyType(missing))


# llama.cpp's "accel" is a library beside the CPU, such as a BLAS, and no device that could be named for a model.
_LLAMA_KINDS: Mapping[str, DeviceKind] = {"cpu": "cpu", "gpu": "gpu", "igpu": "gpu"}


def _llama_devices() -> list[Device]:
    return [
        Device(
            runtime="llama",
            name=device.name,
            kind=_LLAMA_KINDS.get(device.kind, "other"),
            description=device.description,
            # Backends that cannot tell say zero of zero.
            free_bytes=device.free_bytes if device.total_bytes else None,
            total_bytes=device.total_bytes or None,
        )
        for device in llama_library.load().devices()
    ]


# OpenVINO, Core ML and NNAPI choose among processor, GPU and NPU by themselves, so their kind is not known.
_PROVIDERS: Mapping[str, tuple[str, DeviceKind]] = {
    "CPUExecutionProvider": ("cpu", "cpu"),
    "XnnpackExecutionProvider": ("XNNPACK", "cpu"),
    "DnnlExecutionProvider": ("oneDNN", "cpu"),
    "CUDAExecutionProvider": ("CUDA", "gpu"),
    "TensorrtExecutionProvider": ("TensorRT", "gpu"),
    "NvTensorRTRTXExecutionProvider": ("TensorRT-RTX", "gpu"),
    "ROCMExecutionProvider": ("ROCm", "gpu"),
    "MIGraphXExecutionProvider": ("MIGraphX", "gpu"),
    "DmlExecutionProvider": ("DirectML", "gpu"),
    "WebGpuExecutionProvider": ("WebGPU", "gpu"),
    "QNNExecutionProvider": ("QNN", "npu"),
    "VitisAIExecutionProvider": ("VitisAI", "npu"),
    "CANNExecutionProvider": ("CANN", "npu"),
    "OpenVINOExecutionProvider": ("OpenVINO", "other"),
    "CoreMLExecutionProvider": ("CoreML", "other"),
    "NnapiExecutionProvider": ("NNAPI", "other"),
}

# Sends the work to a service: not a device of this machine.
_REMOTE_PROVIDERS = frozenset({"AzureExecutionProvider"})


def _onnx_devices() -> list[Device]:
    """What this build of ONNX Runtime has code for; whether the hardware is there shows when a model is opened."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise RuntimeUnavailableError("onnxruntime is not installed")
    try:
        providers = list(importlib.import_module("onnxruntime").get_available_providers())
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise RuntimeUnavailableError(f"onnxruntime is installed but does not load: {error}") from error
    found = []
    for provider in providers:
        if provider not in _REMOTE_PROVIDERS:
            name, kind = _PROVIDERS.get(provider, (provider.removesuffix("ExecutionProvider"), "other"))
            found.append(
                Device(runtime="onnx", name=name, kind=kind, description=f"{provider}, part of this onnxruntime")
            )
    return found


_ASK: Mapping[str, Callable[[], list[Device]]] = {"llama": _llama_devices, "onnx": _onnx_devices}
