"""A native library that lists arbitrary devices in the manner of ggml's registry, including wrong answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.runtimes.runtime import Device, DeviceKind

CPU, GPU, IGPU, ACCEL = 0, 1, 2, 3


@dataclass(frozen=True)
class Native:
    """A backend's description of one device."""

    name: bytes | None = b"Vulkan0"
    kind: int = GPU
    description: bytes | None = b"a card"
    free: int = 3
    total: int = 8


class NativeLibrary:
    """Handles are 100, 101, ...; ``count`` and ``null_handles`` falsify the list. It counts memory queries."""

    def __init__(self, *devices: Native, count: int | None = None, null_handles: bool = False) -> None:
        self.memory_questions = 0

        def device(handle: int) -> Native:
            return devices[handle - 100]

        def memory(handle: int, free: Any, total: Any) -> None:
            self.memory_questions += 1
            free._obj.value, total._obj.value = device(handle).free, device(handle).total

        self.ggml_backend_dev_count = lambda: len(devices) if count is None else count
        self.ggml_backend_dev_get = lambda index: None if null_handles or index >= len(devices) else 100 + index
        self.ggml_backend_dev_name = lambda handle: device(handle).name
        self.ggml_backend_dev_description = lambda handle: device(handle).description
        self.ggml_backend_dev_type = lambda handle: device(handle).kind
        self.ggml_backend_dev_memory = memory


def gpu(
    name: str = "Vulkan0", *, kind: DeviceKind = "gpu", free: int | None = 2**33, total: int | None = 2**34
) -> Device:
    """A listed device without a driver."""
    return Device(
        runtime="llama",
        name=name,
        description=f"the {name}",
        kind=kind,
        free_bytes=free,
        total_bytes=total,
        handle=0xABC0 + len(name),
    )
