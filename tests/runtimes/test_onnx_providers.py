"""Which execution providers are listed, and their names; onnxruntime and plugins are faked where needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from edgespec.errors import RuntimeUnavailableError
from edgespec.files.installation import install_command
from edgespec.runtimes.onnx import providers as onnx_providers
from edgespec.runtimes.onnx.providers import broken_plugins, find_provider, list_devices, load


def forget() -> None:
    onnx_providers._load.cache_clear()
    onnx_providers._discover.cache_clear()


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    forget()
    yield
    forget()


def ep_device(ep_name: str, hardware: str, vendor: str = "Maker") -> Any:
    return SimpleNamespace(
        ep_name=ep_name, device=SimpleNamespace(type=SimpleNamespace(name=hardware), vendor=vendor)
    )


@dataclass
class FakeRuntime:
    """The part of the onnxruntime module about providers. ``libraries``: the devices that registering a path adds."""

    providers: list[str] = field(default_factory=lambda: ["CPUExecutionProvider"])
    libraries: dict[str, list[Any]] = field(default_factory=dict)
    devices: list[Any] = field(default_factory=lambda: [ep_device("CPUExecutionProvider", "CPU")])
    registered: list[str] = field(default_factory=list)
    __version__: str = "1.31.1"
    telemetry: bool = True

    def get_build_info(self) -> str:
        return "ORT Build Info: made up"

    def get_available_providers(self) -> list[str]:
        return self.providers

    def get_ep_devices(self) -> list[Any]:
        return list(self.devices)

    def register_execution_provider_library(self, _name: str, path: str) -> None:
        self.registered.append(path)
        self.devices += self.libraries[path]

    def disable_telemetry_events(self) -> None:
        self.telemetry = False


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(onnx_providers.importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(onnx_providers, "installed_plugins", list)
    return fake


def install(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(onnx_providers, "installed_plugins", lambda: [module.__name__ for module in modules])


def plugin(name: str, ep_name: str) -> ModuleType:
    module: Any = ModuleType(name)
    module.get_ep_name = lambda: ep_name
    module.get_library_path = lambda: f"/{name}.so"
    return module  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------ the library


def test_the_installed_onnxruntime_loads_and_identifies_its_build() -> None:
    library = load()
    assert library.build.startswith(f"{library.version}+")
    assert library is load()
    assert find_provider("cpu").provider == "CPUExecutionProvider"
    devices = list_devices()
    assert (devices[0].name, devices[0].kind) == ("cpu", "cpu")
    assert len({device.name for device in devices}) == len(devices)
    assert "Azure" not in {device.name for device in devices}


def test_a_missing_onnxruntime_raises_with_an_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # type: ignore[arg-type]
    for use in (load, list_devices, broken_plugins, lambda: find_provider("cpu"), lambda: find_provider("CUDA")):
        with pytest.raises(RuntimeUnavailableError, match="not installed") as raised:
            use()
        assert install_command("onnx") in (raised.value.hint or "")


def test_an_onnxruntime_that_does_not_load_raises_the_reason(
    monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime
) -> None:
    def broken() -> str:
        raise OSError("libstdc++ is too old")

    monkeypatch.setattr(runtime, "get_build_info", broken)
    with pytest.raises(RuntimeUnavailableError, match="libstdc"):
        load()
    monkeypatch.setitem(sys.modules, "onnxruntime", ModuleType("onnxruntime"))  # a folder that pip left behind
    with pytest.raises(RuntimeUnavailableError, match="does not load"):
        load()


@pytest.mark.parametrize(("version", "enough"), [("1.21.3", False), ("0.9", False), ("1.22.0", True), ("2.0", True)])
def test_an_onnxruntime_that_is_too_old_is_refused(runtime: FakeRuntime, version: str, enough: bool) -> None:
    runtime.__version__ = version
    if enough:
        assert load().version == version
        return
    with pytest.raises(RuntimeUnavailableError, match=version):
        load()


def test_onnxruntimes_telemetry_is_disabled(runtime: FakeRuntime) -> None:
    load()
    assert not runtime.telemetry


# ---------------------------------------------------------------------------------------------------- built in


def test_built_in_providers_have_the_names_of_the_command_line(runtime: FakeRuntime) -> None:
    runtime.providers = [
        "DmlExecutionProvider",
        "AzureExecutionProvider",
        "BrandNewExecutionProvider",
        "CPUExecutionProvider",
    ]
    assert [(each.name, each.kind) for each in list_devices()] == [
        ("cpu", "cpu"),
        ("DirectML", "gpu"),
        ("BrandNew", "other"),
    ]
    assert find_provider("directml").provider == "DmlExecutionProvider"
    assert find_provider("DmlExecutionProvider").name == "DirectML"
    assert broken_plugins() == {}


def test_an_unknown_provider_raises_with_the_available_names(runtime: FakeRuntime) -> None:
    runtime.providers.append("DmlExecutionProvider")
    with pytest.raises(RuntimeUnavailableError, match="'npu9'") as raised:
        find_provider("npu9")
    assert "cpu, DirectML" in (raised.value.hint or "")


# ----------------------------------------------------------------------------------------------------- plugins


def test_one_plugin_may_offer_several_devices(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    vino, gpu = "OpenVINOExecutionProvider", "WebGpuExecutionProvider"
    devices = [ep_device(vino, "CPU"), ep_device(vino, "GPU"), ep_device(vino, "GPU", ""), ep_device(vino, "NPU")]
    runtime.libraries = {"/onnxruntime_ep_vino.so": devices, "/onnxruntime_ep_web.so": [ep_device(gpu, "GPU")]}
    install(monkeypatch, plugin("onnxruntime_ep_vino", vino), plugin("onnxruntime_ep_web", gpu))
    found = list_devices()
    assert [(each.name, each.kind) for each in found] == [
        ("cpu", "cpu"),
        ("OpenVINO-CPU", "cpu"),
        ("OpenVINO-GPU", "gpu"),
        ("OpenVINO-GPU:1", "gpu"),
        ("OpenVINO-NPU", "npu"),
        ("WebGPU", "gpu"),
    ]
    assert find_provider("openvino-gpu:1").ep_devices == (devices[2],)
    assert all("onnxruntime_ep_vino" in str(each.plugin) for each in found[1:5])
    assert found[0].plugin is None
    assert list_devices() is found
    assert runtime.registered == ["/onnxruntime_ep_vino.so", "/onnxruntime_ep_web.so"]  # once


def test_one_plugin_may_offer_several_providers(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = plugin("onnxruntime_ep_two", "unused")
    module.get_ep_names = lambda: ["QNNExecutionProvider", "VitisAIExecutionProvider"]
    runtime.libraries = {
        "/onnxruntime_ep_two.so": [
            ep_device("QNNExecutionProvider", "NPU"),
            ep_device("VitisAIExecutionProvider", "NPU"),
        ]
    }
    install(monkeypatch, module)
    assert [each.name for each in list_devices()] == ["cpu", "QNN", "VitisAI"]


def test_an_already_registered_plugin_is_not_registered_again(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.devices.append(ep_device("QNNExecutionProvider", "NPU"))
    install(monkeypatch, plugin("onnxruntime_qnn", "QNNExecutionProvider"))
    assert find_provider("QNN").kind == "npu"
    assert runtime.registered == []


def test_finding_the_cpu_provider_registers_no_plugin(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, plugin("onnxruntime_qnn", "QNNExecutionProvider"))
    assert find_provider("CPU").name == "cpu"
    assert runtime.registered == []


def test_a_plugin_that_fails_is_reported_with_the_reason(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.libraries = {"/onnxruntime_ep_without.so": []}
    install(
        monkeypatch,
        plugin("onnxruntime_ep_gone", "GoneExecutionProvider"),  # its library is not there: a KeyError
        plugin("onnxruntime_ep_without", "LonelyExecutionProvider"),
        ModuleType("onnxruntime_ep_empty"),
    )
    assert [each.name for each in list_devices()] == ["cpu"]
    reasons = broken_plugins()
    assert set(reasons) == {"onnxruntime_ep_gone", "onnxruntime_ep_without", "onnxruntime_ep_empty"}
    assert "none of its devices" in reasons["onnxruntime_ep_without"]
    with pytest.raises(RuntimeUnavailableError) as raised:
        find_provider("Lonely")
    assert "onnxruntime_ep_without: it finds none of its devices" in (raised.value.hint or "")


def test_plugins_are_found_by_the_name_of_their_module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("onnxruntime_ep_zebra", "onnxruntime_qnn", "onnxruntime_genai"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    found = onnx_providers.installed_plugins()
    assert {"onnxruntime_ep_zebra", "onnxruntime_qnn"} <= set(found)
    assert "onnxruntime_genai" not in found
