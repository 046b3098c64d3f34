"""Devices: how each runtime's list is translated, and what is reported for a missing runtime."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edgespec.errors import RuntimeUnavailableError
from edgespec.runtimes.llama import library as llama_library
from edgespec.runtimes.llama.runtime import LlamaRuntime
from edgespec.runtimes.onnx import providers as onnx_providers
from edgespec.runtimes.runtime import Device, DeviceKind
from edgespec.runtimes.table import DeviceReport, list_devices


def native(name: str, kind: DeviceKind, free: int | None = 1, total: int | None = 2) -> Device:
    return Device(
        runtime="llama", name=name, description=f"the {name}", kind=kind, free_bytes=free, total_bytes=total, handle=7
    )


@pytest.fixture(autouse=True)
def no_runtimes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make both runtimes unavailable, whatever is installed."""

    def missing() -> None:
        raise RuntimeUnavailableError("llama-cpp-python is not installed (no such module)", hint="install it")

    def missing_too() -> None:
        raise RuntimeUnavailableError("onnxruntime is not installed", hint="install it")

    monkeypatch.setattr(llama_library, "load", missing)
    monkeypatch.setattr(onnx_providers, "list_devices", missing_too)


def with_llama(monkeypatch: pytest.MonkeyPatch, *devices: Device) -> None:
    monkeypatch.setattr(llama_library, "load", lambda: SimpleNamespace(devices=lambda *, with_memory=True: devices))


def provider(name: str, kind: onnx_providers.ProviderKind = "cpu") -> onnx_providers.Provider:
    return onnx_providers.Provider(name=name, provider=f"{name}Provider", kind=kind, description=f"the {name}")


def with_onnx(monkeypatch: pytest.MonkeyPatch, *providers: onnx_providers.Provider) -> None:
    monkeypatch.setattr(onnx_providers, "list_devices", lambda: providers)


def test_missing_runtimes_are_reported_with_reasons() -> None:
    report = list_devices()
    assert report.devices == ()
    assert report.missing == {
        "llama": "llama-cpp-python is not installed (no such module)",
        "onnx": "onnxruntime is not installed",
    }


def test_the_devices_of_one_runtime_are_reported_if_the_other_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with_llama(monkeypatch, native("X0", "gpu"))
    report = list_devices()
    assert report.devices == (native("X0", "gpu"),)
    assert set(report.missing) == {"onnx"}


def test_onnx_providers_become_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with_onnx(monkeypatch, provider("cpu"), provider("OpenVINO-NPU", "npu"))
    cpu, npu = list_devices().devices
    assert npu == Device(runtime="onnx", name="OpenVINO-NPU", kind="npu", description="the OpenVINO-NPU")
    assert (cpu.name, cpu.kind) == ("cpu", "cpu")


def test_a_runtime_known_to_be_broken_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fatal() -> None:
        raise AssertionError("this would have killed the process")

    monkeypatch.setattr(llama_library, "load", fatal)
    with_onnx(monkeypatch, provider("cpu"))
    report = list_devices({"llama": "killed by signal 4"})
    assert report.missing == {"llama": "killed by signal 4"}
    assert [device.runtime for device in report.devices] == ["onnx"]
    assert list_devices({"llama": "a", "onnx": "b"}) == DeviceReport(devices=(), missing={"llama": "a", "onnx": "b"})


def test_devices_can_be_selected_by_runtime_and_written_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    with_llama(monkeypatch, native("cpu", "cpu"), native("Vulkan0", "gpu", 3, 4))
    with_onnx(monkeypatch, provider("cpu"))
    report = list_devices()
    assert report.missing == {}
    assert [device.name for device in report.of("llama")] == ["cpu", "Vulkan0"]
    assert report.of("native") == ()
    assert report.of("llama")[1].as_json() == {
        "runtime": "llama",
        "name": "Vulkan0",
        "kind": "gpu",
        "description": "the Vulkan0",
        "free_bytes": 3,
        "total_bytes": 4,
        "memory": "Vulkan0",
    }


@pytest.mark.parametrize(
    ("name", "kind", "memory", "holds"),
    [
        ("cpu", "cpu", "cpu", False),
        ("Vulkan0", "gpu", "Vulkan0", True),
        ("Vulkan1", "igpu", "cpu", True),
        ("Metal", "gpu", "cpu", True),
        ("MTL0", "gpu", "cpu", True),
        ("BLAS", "accel", "cpu", False),
        ("OpenVINO-NPU", "npu", "cpu", True),
        ("OpenVINO", "other", "cpu", False),
    ],
)
def test_a_device_names_whose_memory_it_uses(name: str, kind: str, memory: str, holds: bool) -> None:
    device = Device(runtime="llama", name=name, kind=kind, description="")  # type: ignore[arg-type]
    assert (device.memory, device.holds_models) == (memory, holds)


def test_gpus_lists_graphics_devices_with_integrated_ones_last(monkeypatch: pytest.MonkeyPatch) -> None:
    with_llama(
        monkeypatch, native("Vulkan0", "igpu"), native("cpu", "cpu"), native("CUDA0", "gpu"), native("BLAS", "accel")
    )
    assert [gpu.name for gpu in LlamaRuntime().gpus()] == ["CUDA0", "Vulkan0"]


def test_devices_can_be_listed_without_asking_drivers_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def devices(*, with_memory: bool = True) -> tuple[Device, ...]:
        asked.append(with_memory)
        return (native("Vulkan0", "gpu", None, None),)

    monkeypatch.setattr(llama_library, "load", lambda: SimpleNamespace(devices=devices))
    runtime = LlamaRuntime()
    assert runtime.find_device("CPU", 1) == runtime.find_device("cpu", 1) == "cpu"
    assert not runtime.has_own_memory("cpu")
    assert asked == [], "no driver is asked about the processor"
    assert runtime.find_device("vulkan0", 1) == "Vulkan0"
    assert runtime.has_own_memory("vulkan0")
    assert [device.total_bytes for device in runtime.list_devices()] == [None]
    assert asked == [False, False, True]


def test_a_device_without_memory_and_an_empty_report_have_defaults() -> None:
    device = Device(runtime="onnx", name="cpu", kind="cpu", description="")
    assert (device.free_bytes, device.total_bytes) == (None, None)
    assert DeviceReport(devices=(device,)).missing == {}


def test_the_installed_llama_cpp_lists_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert any(device.name == "cpu" and device.kind == "cpu" for device in list_devices().of("llama"))
