"""Every runtime by its name, and the devices that runtimes can compute on here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from edgespec.errors import RuntimeUnavailableError
from edgespec.runtimes.llama.runtime import LlamaRuntime
from edgespec.runtimes.native.runtime import NativeRuntime
from edgespec.runtimes.onnx.runtime import OnnxRuntime
from edgespec.runtimes.runtime import Device, Runtime, Settings

RUNTIMES: dict[str, Runtime] = {each.name: each for each in (NativeRuntime(), LlamaRuntime(), OnnxRuntime())}

_NONE: Mapping[str, str] = MappingProxyType({})


def runtime_of(settings: Settings) -> Runtime:
    """The runtime that these settings are for."""
    return RUNTIMES[settings.runtime]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """The devices of the runtimes that work, and for each other runtime the reason why it does not work."""

    devices: tuple[Device, ...]
    missing: Mapping[str, str] = field(default_factory=dict)

    def of(self, runtime: str) -> tuple[Device, ...]:
        """The devices of one runtime."""
        return tuple(device for device in self.devices if device.runtime == runtime)


def list_devices(known_broken: Mapping[str, str] = _NONE) -> DeviceReport:
    """Ask every runtime for its devices.

    This loads native code, and a build for another processor can end the whole process. Runtimes in ``known_broken``
    (with the reason) are not loaded, but reported as missing.
    """
    devices: list[Device] = []
    missing: dict[str, str] = {}
    for name, runtime in RUNTIMES.items():
        if name in known_broken:
            missing[name] = known_broken[name]
            continue
        try:
            devices += runtime.list_devices()
        except RuntimeUnavailableError as error:
            missing[name] = error.message
    return DeviceReport(devices=tuple(devices), missing=MappingProxyType(missing))
