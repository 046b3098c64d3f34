"""llama.cpp's devices: listing them, and loading a model on exactly one of them.

llama-cpp-python does not bind ``ggml_backend_dev_*``, so this module does. The answers come from a driver: names may
be missing or repeated, memory may exceed what any machine has. So every answer is checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgespec.errors import RuntimeUnavailableError
from edgespec.runtimes.runtime import Device, DeviceKind

# ggml-backend.h's GGML_BACKEND_DEVICE_TYPE_*.
_KINDS: Mapping[int, DeviceKind] = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}

# ggml splits a graph over 16 backends at most (GGML_SCHED_MAX_BACKENDS); no machine has four times as many.
_MOST_DEVICES = 64

# A pebibyte; a byte count that underflowed below zero is far above it.
_MOST_BYTES = 2**50

_LONGEST_TEXT = 120

# Layers of a model, as llama.cpp counts them: more than any model has; llama.cpp clamps the number.
EVERYTHING = 999


def list_devices(*libraries: Any, with_memory: bool = True) -> tuple[Device, ...]:
    """The devices of every backend in the loaded ``libraries``, with the CPU; empty if they export no registry.

    Asking for memory may wake up a driver, and a driver that has lost its device may end the process. Without
    ``with_memory`` only names and kinds are read.
    """

    def bound(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function = getattr(next((each for each in libraries if hasattr(each, name)), None), name)
        function.restype, function.argtypes = result, list(arguments)
        return function  # type: ignore[no-any-return]

    try:
        count = bound("ggml_backend_dev_count", ctypes.c_size_t)
        get = bound("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
        name_of = bound("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
        description_of = bound("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
        kind_of = bound("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
        size = ctypes.POINTER(ctypes.c_size_t)
        memory_of = bound("ggml_backend_dev_memory", None, ctypes.c_void_p, size, size)
    except AttributeError:
        return ()  # a build that does not export the backend registry still has its CPU
    found: list[Device] = []
    taken = {"cpu"}  # "cpu" is always the processor, whatever a backend calls its devices
    for index in range(min(count(), _MOST_DEVICES)):
        handle = get(index)
        name = _text(name_of(handle)) if handle else ""
        if not name:
            continue  # a device without a name cannot be requested
        kind = _KINDS.get(kind_of(handle), "other")
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        if with_memory:
            memory_of(handle, ctypes.byref(free), ctypes.byref(total))
        free_bytes, total_bytes = _believable(free.value, total.value)
        first_cpu = kind == "cpu" and all(other.kind != "cpu" for other in found)
        found.append(
            Device(
                runtime="llama",
                name="cpu" if first_cpu else _unlike(name, taken),
                description=_text(description_of(handle)),
                kind=kind,
                free_bytes=free_bytes,
                total_bytes=total_bytes,
                handle=int(handle),
            )
        )
        taken.add(found[-1].name.lower())
    return tuple(found)


def find_device(devices: Sequence[Device], name: str) -> Device | None:
    """The device to put a model on, by its name in upper or lower case; None for the CPU.

    Raises RuntimeUnavailableError, whose hint names the devices that can hold a model.
    """
    if name.lower() == "cpu":
        return None
    found = next((device for device in devices if device.name.lower() == name.lower()), None)
    if found is not None and found.holds_models:
        return found
    known = ", ".join(["cpu", *(device.name for device in devices if device.holds_models)])
    problem = (
        f"this build of llama.cpp has no device {name!r}"
        if found is None
        else f"llama.cpp's device {found.name!r} ({found.kind}) cannot hold a model"
    )
    raise RuntimeUnavailableError(problem, hint=f"devices here: {known}; see `edgespec doctor`")


def place(params: Any, device: Device | None, gpu_layers: int | None) -> object:
    """Write into ``llama_model_params`` where a model is loaded: on that device, or (None) on the CPU alone.

    ``gpu_layers`` are counted as llama.cpp does, from the end, the output head included; None means all. The caller
    keeps the returned object until the model is loaded: native code reads it.
    """
    # Our list of devices, which ends with a null. Without a list llama.cpp takes every GPU of the build, also for a
    # model on the CPU, and keeps buffers for prompts there.
    devices = (ctypes.c_void_p * 2)(None if device is None else device.handle, None)
    params.devices = ctypes.cast(devices, ctypes.c_void_p)
    params.n_gpu_layers = 0 if device is None else EVERYTHING if gpu_layers is None else gpu_layers
    return devices


def _text(said: object) -> str:
    """A backend's name for something, safe to print; empty if there is none."""
    text = said.decode("utf-8", "replace") if isinstance(said, bytes) else ""
    return "".join(sign if sign.isprintable() else " " for sign in text[:_LONGEST_TEXT]).strip()


def _unlike(name: str, taken: set[str]) -> str:
    """The name, with a number appended if it is already taken."""
    chosen, number = name, 0
    while chosen.lower() in taken:
        number += 1
        chosen = f"{name}:{number}"
    return chosen


def _believable(free: int, total: int) -> tuple[int | None, int | None]:
    """(free, total) bytes, None for an implausible number; a backend that cannot tell reports zero of zero."""
    if not 0 < total <= _MOST_BYTES:
        return None, None
    return (free if free <= total else None), total
