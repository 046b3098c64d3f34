"""llama.cpp's device list, with correct and false backends, and placing a model on exactly one device."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.errors import RuntimeUnavailableError
from edgespec.runtimes.llama.devices import EVERYTHING, find_device, list_devices, place
from edgespec.runtimes.llama.library import LlamaLibrary
from edgespec.runtimes.runtime import Device
from tests.support.native_devices import ACCEL, CPU, GPU, IGPU, Native, NativeLibrary, gpu


def names(*devices: Native) -> list[str]:
    return [device.name for device in list_devices(NativeLibrary(*devices))]


def test_a_devices_fields_come_from_its_backend() -> None:
    cpu, card = list_devices(NativeLibrary(Native(b"CPU", CPU, b"a processor", 5, 9), Native()))
    assert cpu == Device(
        runtime="llama", name="cpu", description="a processor", kind="cpu", free_bytes=5, total_bytes=9, handle=100
    )
    assert card == Device(
        runtime="llama", name="Vulkan0", description="a card", kind="gpu", free_bytes=3, total_bytes=8, handle=101
    )


@pytest.mark.parametrize(
    ("kind", "word", "holds"),
    [(CPU, "cpu", False), (GPU, "gpu", True), (IGPU, "igpu", True), (ACCEL, "accel", False), (7, "other", False)],
)
def test_backend_device_types_map_to_kinds(kind: int, word: str, holds: bool) -> None:
    (device,) = list_devices(NativeLibrary(Native(kind=kind)))
    assert (device.kind, device.holds_models) == (word, holds)


def test_a_build_without_a_registry_has_no_devices() -> None:
    assert list_devices(SimpleNamespace()) == ()
    half = NativeLibrary(Native())
    del half.ggml_backend_dev_memory
    assert list_devices(half) == ()


def test_windows_finds_the_registry_in_the_libraries_that_llama_cpp_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = {"ggml.dll": NativeLibrary(Native()), "ggml-base.dll": NativeLibrary(Native())}
    del loaded["ggml.dll"].ggml_backend_dev_name  # the two share the functions
    for name in ("llama.dll", *loaded):
        (tmp_path / name).touch()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: loaded[Path(path).name])
    api = SimpleNamespace(_lib=SimpleNamespace(_name=str(tmp_path / "llama.dll")))
    library = LlamaLibrary(api=api, version="", build="", has_tiles=False, log_bridge=None)
    assert library.devices() == ()
    monkeypatch.setattr(sys, "platform", "win32")
    assert [device.name for device in library.devices()] == ["Vulkan0"]


# --------------------------------------------------------------------------------- false answers of backends


@pytest.mark.parametrize("name", [None, b"", b"  ", b"\n\x00"])
def test_a_device_without_a_name_is_not_listed(name: bytes | None) -> None:
    assert names(Native(b"CPU", CPU), Native(name), Native(b"Vulkan1")) == ["cpu", "Vulkan1"]


def test_device_names_and_descriptions_are_made_safe_to_print() -> None:
    (device,) = list_devices(NativeLibrary(Native(b"Vul\x1b[31mkan\xff0", GPU, b"a\ncard" + b"x" * 10_000)))
    assert device.name == "Vul [31mkan�0"
    assert device.description.startswith("a cardxxx")
    assert len(device.description) < 200
    (nameless,) = list_devices(NativeLibrary(Native(description=None)))
    assert nameless.description == ""


def test_repeated_device_names_are_numbered() -> None:
    assert names(Native(), Native(), Native(b"VULKAN0")) == ["Vulkan0", "Vulkan0:1", "VULKAN0:2"]


def test_only_the_processor_is_called_cpu() -> None:
    assert names(Native(b"cpu", GPU), Native(b"Zen", CPU), Native(b"CPU", CPU)) == ["cpu:1", "cpu", "CPU:2"]


@pytest.mark.parametrize(
    ("free", "total", "expected"),
    [
        (0, 0, (None, None)),
        (5, 0, (None, None)),
        (0, 8, (0, 8)),
        (8, 8, (8, 8)),
        (9, 8, (None, 8)),  # a subtraction that underflowed
        (2**64 - 4096, 8, (None, 8)),
        (3, 2**64 - 1, (None, None)),
        (3, 2**50, (3, 2**50)),
        (3, 2**50 + 1, (None, None)),
    ],
)
def test_impossible_memory_figures_become_none(
    free: int, total: int, expected: tuple[int | None, int | None]
) -> None:
    (device,) = list_devices(NativeLibrary(Native(free=free, total=total)))
    assert (device.free_bytes, device.total_bytes) == expected


def test_implausible_device_counts_and_null_handles_are_ignored() -> None:
    assert len(list_devices(NativeLibrary(Native(), count=2**40))) == 1
    assert list_devices(NativeLibrary(Native(), null_handles=True)) == ()
    assert list_devices(NativeLibrary(Native(), count=0)) == ()


def test_drivers_are_asked_for_memory_only_if_the_caller_needs_it() -> None:
    library = NativeLibrary(Native(b"CPU", CPU), Native())
    assert all(device.total_bytes is None for device in list_devices(library, with_memory=False))
    assert library.memory_questions == 0
    assert all(device.total_bytes == 8 for device in list_devices(library))
    assert library.memory_questions == 2


# ---------------------------------------------------------------------------------------- one device only


def test_find_device_ignores_case_and_returns_none_for_the_cpu() -> None:
    devices = (gpu("cpu", kind="cpu"), gpu("Vulkan0"), gpu("Vulkan1", kind="igpu"))
    assert find_device(devices, "vulkan0") is devices[1]
    assert find_device(devices, "Vulkan1") is devices[2]
    for name in ("cpu", "CPU"):
        assert find_device(devices, name) is None
        assert find_device((), name) is None


@pytest.mark.parametrize(
    ("name", "says"), [("CUDA7", "no device 'CUDA7'"), ("blas", r"'BLAS' \(accel\) cannot hold a model")]
)
def test_an_unusable_device_name_raises_with_the_usable_names(name: str, says: str) -> None:
    devices = (gpu("cpu", kind="cpu"), gpu("Vulkan0"), gpu("BLAS", kind="accel"))
    with pytest.raises(RuntimeUnavailableError, match=says) as raised:
        find_device(devices, name)
    assert raised.value.hint == "devices here: cpu, Vulkan0; see `edgespec doctor`"


def handles(params: Any) -> list[int]:
    """The list that native code would read, up to its null."""
    found, pointer = [], ctypes.cast(params.devices, ctypes.POINTER(ctypes.c_void_p))
    while (handle := pointer[len(found)]) is not None:
        found.append(handle)
    return found


@pytest.mark.parametrize(("layers", "passed"), [(None, EVERYTHING), (7, 7), (0, 0)])
def test_a_model_is_placed_on_the_named_device_only(layers: int | None, passed: int) -> None:
    params, device = SimpleNamespace(devices=None, n_gpu_layers=None), gpu()
    kept = place(params, device, layers)
    assert handles(params) == [device.handle]
    assert params.n_gpu_layers == passed
    assert kept is not None


@pytest.mark.parametrize("layers", [None, 7])
def test_a_model_for_the_cpu_is_given_an_empty_list(layers: int | None) -> None:
    """Without a list llama.cpp would use every GPU of the build."""
    params = SimpleNamespace(devices=None, n_gpu_layers=None)
    kept = place(params, None, layers)
    assert params.devices.value
    assert handles(params) == []
    assert params.n_gpu_layers == 0
    assert kept is not None
