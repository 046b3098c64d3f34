"""Which devices the runtimes installed here can compute on, and why a runtime is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from edgespec.errors import RuntimeUnavailableError
from edgespec.runtimes.llama import library as llama_library
from edgespec.runtimes.onnx import providers as onnx_providers

DeviceKind = Literal["cpu", "gpu", "igpu", "npu", "accel", "other"]

# Metal calls its device a GPU; Apple's processors have one memory for both.
_UNIFIED = ("Metal", "MTL")

_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Something a runtime can compute on. ``name`` is the runtime's own; bytes are None where it does not tell.

    ``igpu`` is a GPU in the processor, ``accel`` a library beside it (a BLAS, say) that holds no models.
    """

    runtime: str
    name: str
    kind: DeviceKind
    description: str
    free_bytes: int | None = None
    total_bytes: int | None = None

    @property
    def memory(self) -> str:
        """The device whose memory it uses: its own, or the machine's ("cpu")."""
        apart = self.kind == "gpu" and not self.name.startswith(_UNIFIED)
        return self.name if apart else "cpu"

    @property
    def holds_models(self) -> bool:
        """Whether a model can be put there by name."""
        return self.kind in ("gpu", "igpu", "npu")

    def as_json(self) -> dict[str, Any]:
        """Every field as it is, and whose ``memory`` it uses."""
        return {
            "runtime": self.runtime,
            "name": self.name,
            "kind": self.kind,
            "description": self.description,
            "free_bytes": self.free_bytes,
            "total_bytes": self.total_bytes,
            "memory": self.memory,
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


_LLAMA_KINDS: Mapping[str, DeviceKind] = {"cpu": "cpu", "gpu": "gpu", "igpu": "igpu", "accel": "accel"}


def llama_gpus() -> tuple[Device, ...]:
    """The GPUs llama.cpp can put a model on, in its own order, those in the processor last.

    Raises RuntimeUnavailableError.
    """
    found = [device for device in llama_devices() if device.holds_models]
    return tuple(sorted(found, key=lambda device: device.kind == "igpu"))


def llama_devices(*, with_memory: bool = True) -> list[Device]:
    """What llama.cpp's backends list; without ``with_memory`` no driver is woken up to be asked for bytes.

    Raises RuntimeUnavailableError.
    """
    return [_llama_device(device) for device in llama_library.load().devices(with_memory=with_memory)]


def _llama_device(native: llama_library.Device) -> Device:
    told = native.total_bytes is not None and native.total_bytes > 0  # zero of zero is what nobody knows
    return Device(
        runtime="llama",
        name=native.name,
        kind=_LLAMA_KINDS.get(native.kind, "other"),
        description=native.description,
        free_bytes=native.free_bytes if told else None,
        total_bytes=native.total_bytes if told else None,
    )


def _onnx_devices() -> list[Device]:
    """Providers, those of plugins too. One that is built in has code; its hardware shows when a model is loaded."""
    return [
        Device(runtime="onnx", name=provider.name, kind=provider.kind, description=provider.description)
        for provider in onnx_providers.list_devices()
    ]


_ASK: Mapping[str, Callable[[], list[Device]]] = {"llama": llama_devices, "onnx": _onnx_devices}
