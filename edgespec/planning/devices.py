"""Which devices the runtimes installed here can compute on, and why a runtime is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from edgespec.errors import RuntimeUnavailableError
from edgespec.runtimes import llama_library, onnx_providers

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


def _onnx_devices() -> list[Device]:
    """Providers, those of plugins too. One that is built in has code; its hardware shows when a model is loaded."""
    return [
        Device(runtime="onnx", name=provider.name, kind=provider.kind, description=provider.description)
        for provider in onnx_providers.list_devices()
    ]


_ASK: Mapping[str, Callable[[], list[Device]]] = {"llama": _llama_devices, "onnx": _onnx_devices}
