"""Shared by the tests on a second device: when they run, which device is used, and llama.cpp's buffers on it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgespec.runtimes.llama.library import load
from edgespec.runtimes.runtime import Device

needs_vulkan = pytest.mark.skipif(
    not os.environ.get("EDGESPEC_TEST_VULKAN"), reason="needs llama.cpp's Vulkan backend: `make test-vulkan`"
)

NATIVE_LOG = "edgespec.native"

# "load_tensors:      Vulkan0 model buffer size =   0.31 MiB", and the same of "KV", "compute" and "output" buffers.
_BUFFER = re.compile(r"(\S+)\s+(?:model|KV|RS|compute|output)\s+buffer size\s*=\s*([\d.]+) MiB")


def second_device() -> Device:
    """The first Vulkan device in the current list."""
    found = [device for device in load().devices() if device.name.startswith("Vulkan") and device.holds_models]
    assert found, f"no Vulkan device among {[device.name for device in load().devices()]}"
    return found[0]


def buffers(records: Sequence[logging.LogRecord]) -> dict[str, float]:
    """MiB of each kind of buffer in llama.cpp's log, summed up: weights, caches, working buffers."""
    found: dict[str, float] = {}
    for record in records:
        match = _BUFFER.search(record.getMessage()) if record.name == NATIVE_LOG else None
        if match is not None:
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def on_device(found: dict[str, float], name: str) -> float:
    """MiB of buffers on the device, including those shared with the host."""
    return sum(size for kind, size in found.items() if kind.startswith(name.rstrip("0123456789")))


UNSEEN = "only the threads of a device in software can be seen, and only on Linux"


def shows_threads(device: Device) -> bool:
    """Whether the device runs its own threads, which show that it was opened."""
    return "llvmpipe" in device.description and Path("/proc/self/task").is_dir()


def driver_threads(pid: int) -> int:
    """The number of a process's threads of the software device; none if it never opened the device."""
    names = [entry.read_text() for entry in Path(f"/proc/{pid}/task").glob("*/comm")]
    return sum(name.startswith("llvmpipe") for name in names)
