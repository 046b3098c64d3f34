"""llama.cpp's devices: what its backends list, and putting a model on one of them and nowhere else.

llama-cpp-python does not bind ``ggml_backend_dev_*``, so that is done here. What they say comes from a driver: names
may be missing or alike, memory may be more than any machine has. Nothing of it is taken at its word.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import RuntimeUnavailableError

# ggml-backend.h's GGML_BACKEND_DEVICE_TYPE_*.
_KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}

# Kinds that weights can be put on: "accel" only speeds up what the CPU holds.
_HOLDING = ("gpu", "igpu")

# ggml splits a graph over 16 backends at most (GGML_SCHED_MAX_BACKENDS); four times that is nobody's machine.
_MOST_DEVICES = 64

# A pebibyte; a sum that went below zero is far above it.
_MOST_BYTES = 2**50

_LONGEST_TEXT = 120

# Layers of a model, as llama.cpp counts them: more than any has, and llama.cpp clamps it.
EVERYTHING = 999


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device llama.cpp can compute on, by the name its backend gives it; no two of a list share one.

    ``kind`` is ``cpu``, ``gpu``, ``igpu`` (a GPU in the machine's own memory), ``accel`` (a library beside the CPU,
    such as a BLAS) or ``other``. Bytes are None where the backend does not tell, tells what cannot be, or was not
    asked.
    """

    name: str
    description: str
    kind: str
    free_bytes: int | None
    total_bytes: int | None
    handle: int

    @property
    def holds_models(self) -> bool:
        """Whether weights can be put there (the CPU aside, which needs no device for that)."""
        return self.kind in _HOLDING


def list_devices(library: Any, *, with_memory: bool = True) -> tuple[Device, ...]:
    """The devices of every backend in the loaded ``library``, the CPU among them; none where it exports no registry.

    Asking for memory may wake a driver up, and one that has lost its device may end the process over it: without
    ``with_memory`` nothing but names and kinds is asked for.
    """

    def bound(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function = getattr(library, name)
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
    taken = {"cpu"}  # whatever a backend calls its device, "cpu" is the processor
    for index in range(min(count(), _MOST_DEVICES)):
        handle = get(index)
        name = _text(name_of(handle)) if handle else ""
        if not name:
            continue  # nobody could ask for it
        kind = _KINDS.get(kind_of(handle), "other")
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        if with_memory:
            memory_of(handle, ctypes.byref(free), ctypes.byref(total))
        free_bytes, total_bytes = _believable(free.value, total.value)
        first_cpu = kind == "cpu" and all(other.kind != "cpu" for other in found)
        found.append(
            Device(
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
    """The device a model is put on, upper or lower case; None for the CPU, which is none.

    Raises RuntimeUnavailableError, whose hint names those that can hold a model.
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
    """Write into ``llama_model_params`` where a model goes: on that device, or (None) on no GPU of the build at all.

    ``gpu_layers`` are counted as llama.cpp does, from the end, the output head being one; None is everything. What
    is returned has to be kept until the model is loaded: native code reads it.
    """
    # A list of our own, which ends with a null: without one llama.cpp takes every GPU of the build, also for a model
    # that is meant for the CPU, and keeps buffers there for prompts.
    devices = (ctypes.c_void_p * 2)(None if device is None else device.handle, None)
    params.devices = ctypes.cast(devices, ctypes.c_void_p)
    params.n_gpu_layers = 0 if device is None else EVERYTHING if gpu_layers is None else gpu_layers
    return devices


def _text(said: object) -> str:
    """What a backend calls something, fit for a terminal; empty where it says nothing."""
    text = said.decode("utf-8", "replace") if isinstance(said, bytes) else ""
    return "".join(sign if sign.isprintable() else " " for sign in text[:_LONGEST_TEXT]).strip()


def _unlike(name: str, taken: set[str]) -> str:
    """The name, numbered if it is taken already."""
    chosen, number = name, 0
    while chosen.lower() in taken:
        number += 1
        chosen = f"{name}:{number}"
    return chosen


def _believable(free: int, total: int) -> tuple[int | None, int | None]:
    """(free, total) bytes, None for what cannot be; backends that cannot tell say zero of zero."""
    if not 0 < total <= _MOST_BYTES:
        return None, None
    return (free if free <= total else None), total
