"""``edgespec doctor``: each thing it may find or miss, and how it says so."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgespec.architectures.table import ARCHITECTURES
from edgespec.calibration.measurement_store import save_bandwidth
from edgespec.cli.doctor import report as module
from edgespec.cli.terminal.interrupts import Interrupts
from edgespec.errors import RuntimeUnavailableError
from edgespec.files.home import Home
from edgespec.files.installation import install_command
from edgespec.hardware.bandwidth import BandwidthMeasurement, ThreadBandwidth
from edgespec.hardware.machine import Conditions, Machine
from edgespec.runtimes.native.tensors import TYPES
from edgespec.runtimes.runtime import Device, DeviceKind
from edgespec.runtimes.table import DeviceReport
from edgespec.store.web import UnreachableError
from tests.support.command_line import InProcess

GIB = 2**30
MACHINE = Machine(
    system="Linux x86_64",
    processor="A processor",
    isa=("avx", "avx2"),
    physical_cores=4,
    logical_cores=8,
    total_memory_bytes=16 * GIB,
    available_memory_bytes=8 * GIB,
    power_source="battery",
)
CPU = Device(runtime="llama", name="cpu", kind="cpu", description="A CPU", free_bytes=GIB, total_bytes=2 * GIB)
GPU = Device(runtime="llama", name="Vulkan0", kind="gpu", description="A GPU", free_bytes=GIB, total_bytes=2 * GIB)
DIRECTML = Device(runtime="onnx", name="DirectML", kind="gpu", description="DmlExecutionProvider")
MEASURED = BandwidthMeasurement(
    by_threads=(
        ThreadBandwidth(threads=1, best_bytes_per_s=13e9, median_bytes_per_s=12.34e9),
        ThreadBandwidth(threads=4, best_bytes_per_s=26e9, median_bytes_per_s=25e9),
    ),
    buffer_bytes=2**28,
)


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with llama.cpp and without ONNX Runtime."""
    monkeypatch.setattr(module, "_broken", lambda _interrupts: {})
    monkeypatch.setattr(module, "describe_machine", lambda: MACHINE)
    conditions = Conditions(temperature_c=61.4, load_average=0.25)
    monkeypatch.setattr(module, "describe_conditions", lambda: conditions)
    monkeypatch.setattr(module, "load", lambda: SimpleNamespace(version="1.2.3", build="1.2.3+ab"))
    devices(monkeypatch, CPU, GPU, onnx="onnxruntime is not installed")


def devices(monkeypatch: pytest.MonkeyPatch, *found: Device, **missing: str) -> None:
    monkeypatch.setattr(module, "list_devices", lambda _broken: DeviceReport(devices=found, missing=missing))


def test_doctor_prints_machine_memory_and_power(here: InProcess) -> None:
    report = here("doctor", "--json").json
    assert report["machine"] == MACHINE.as_json()
    assert report["conditions"] == {"temperature_c": 61.4, "load_average": 0.25}
    text = here("doctor").out
    assert "power      battery; temperature 61 °C, load 0.2\n" in text


def test_doctor_prints_unknown_values_as_not_known(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "describe_machine", lambda: Machine(**{**fields(MACHINE), "power_source": None}))  # type: ignore[arg-type]
    monkeypatch.setattr(module, "describe_conditions", Conditions)
    report = here("doctor", "--json").json
    assert report["machine"]["power_source"] is None
    assert report["conditions"] == {"temperature_c": None, "load_average": None}
    assert report["bandwidth"] == {"read_bytes_per_s": None}
    text = here("doctor").out
    assert "power      not known; temperature not measured, load not measured\n" in text
    assert "bandwidth  not measured\n" in text


def fields(machine: Machine) -> Mapping[str, object]:
    return {name: getattr(machine, name) for name in Machine.__slots__}


def test_doctor_lists_llama_cpp_devices(here: InProcess) -> None:
    result = here("doctor", "--json")
    assert result.code == 0
    llama = result.json["runtimes"]["llama"]
    assert llama == {
        "available": True,
        "version": "1.2.3",
        "build": "1.2.3+ab",
        "devices": [CPU.as_json(), GPU.as_json()],
        "reason": None,
        "hint": None,
    }
    text = here("doctor").out
    assert "llama.cpp  works: llama-cpp-python 1.2.3 (build 1.2.3+ab)\n" in text
    assert "  device   cpu: A CPU (cpu)\n" in text
    assert "  device   Vulkan0: A GPU (gpu, 1.0 of 2.0 GiB free)\n" in text


@pytest.mark.parametrize(
    ("kind", "name", "shown"),
    [
        ("igpu", "Vulkan1", "Vulkan1: It (igpu, in the machine's memory)"),
        ("gpu", "Metal", "Metal: It (gpu, in the machine's memory)"),
        ("accel", "BLAS", "BLAS: It (accel)"),
    ],
)
def test_a_gpu_that_shares_the_machines_memory_is_marked(
    here: InProcess, monkeypatch: pytest.MonkeyPatch, kind: DeviceKind, name: str, shown: str
) -> None:
    device = Device(runtime="llama", name=name, kind=kind, description="It", free_bytes=GIB, total_bytes=2 * GIB)
    devices(monkeypatch, device, onnx="none")
    assert f"  device   {shown}\n" in here("doctor").out
    (told,) = here("doctor", "--json").json["runtimes"]["llama"]["devices"]
    assert (told["kind"], told["memory"]) == (kind, "cpu")


def test_a_gpu_with_unknown_memory_is_listed_without_memory(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, Device(runtime="llama", name="Vulkan0", kind="gpu", description="It"), onnx="none")
    assert "  device   Vulkan0: It (gpu)\n" in here("doctor").out


def test_the_child_process_lists_devices_too() -> None:
    """A driver may end the process over that."""
    assert "devices()" in module._PROBES["llama"]
    assert "list_devices()" in module._PROBES["onnx"]


def without_kernels() -> None:
    raise RuntimeUnavailableError("there are no kernels", hint="compile them")


def test_doctor_succeeds_without_llama_cpp_if_the_kernels_work(
    here: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices(monkeypatch, DIRECTML, llama="it is not installed")
    with_onnx(monkeypatch)
    shown = here("doctor")
    assert shown.code == 0
    assert (
        "llama.cpp  missing: it is not installed; needed for GPUs and for files the native runtime cannot run"
        in shown.out
    )
    assert install_command("llama") in shown.out


def test_doctor_fails_without_llama_cpp_and_kernels(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, DIRECTML, llama="it is not installed")
    with_onnx(monkeypatch)
    monkeypatch.setattr("edgespec.runtimes.native.library.load", without_kernels)
    result = here("doctor", "--json")
    assert result.code == 1
    llama = result.json["runtimes"]["llama"]
    assert llama.keys() == {"available", "version", "build", "devices", "reason", "hint"}
    assert (llama["available"], llama["version"], llama["reason"]) == (False, None, "it is not installed")
    assert "pip install" in llama["hint"]
    assert result.json["problems"] == ["no runtime works: there are no kernels; it is not installed"]
    shown = here("doctor")
    assert shown.code == 1
    assert "problem: no runtime works" in shown.err


def test_doctor_succeeds_without_onnx_runtime(here: InProcess) -> None:
    result = here("doctor", "--json")
    assert result.code == 0
    assert result.json["runtimes"]["onnx"] == {
        "available": False,
        "version": None,
        "build": None,
        "devices": [],
        "reason": "onnxruntime is not installed",
        "hint": f"install it with `{install_command('onnx')}`",
        "broken_plugins": {},
    }
    text = here("doctor").out
    assert "onnx       missing: onnxruntime is not installed; needed only for exported ONNX models\n" in text
    assert install_command("onnx") in text


def test_doctor_says_why_the_native_runtime_is_missing(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(build="1+ab", levels=("portable", "avx512-vnni"), left_out={"avx2": "it is broken"})
    monkeypatch.setattr(module.native_library, "load", lambda: library)
    assert here("doctor", "--json").json["runtimes"]["native"] == {
        "available": True,
        "build": "1+ab",
        "levels": ["portable", "avx512-vnni"],
        "left_out": {"avx2": "it is broken"},
        "reason": None,
        "hint": None,
    }
    runs = f"           runs {', '.join(ARCHITECTURES)}\n           in {', '.join(TYPES)}\n"
    bits = "           IQ3 takes 4.4 bits a weight in memory, Q3_K 3.6\n"
    works = f"native     works: build 1+ab (avx512-vnni)\n{runs}{bits}  level    avx2 is left out: it is broken\n"
    assert works in here("doctor").out

    def missing() -> None:
        raise RuntimeUnavailableError("it did not compile", hint="install a compiler")

    monkeypatch.setattr(module.native_library, "load", missing)
    result = here("doctor", "--json")
    assert result.code == 0
    assert result.json["runtimes"]["native"] == {
        "available": False,
        "build": None,
        "levels": [],
        "left_out": {},
        "reason": "it did not compile",
        "hint": "install a compiler",
    }
    assert "native     missing: it did not compile\n           install a compiler\n" in here("doctor").out


def with_onnx(monkeypatch: pytest.MonkeyPatch, **broken: str) -> None:
    library = SimpleNamespace(version="1.23.0", build="1.23.0+cd")
    monkeypatch.setattr(
        module,
        "onnx_providers",
        SimpleNamespace(load=lambda: library, broken_plugins=lambda: broken, install_hint=lambda: "install it"),
    )


def test_doctor_lists_an_installed_onnx_runtime(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, CPU, DIRECTML)
    with_onnx(monkeypatch, onnxruntime_ep_odd="it finds no device")
    onnx = here("doctor", "--json").json["runtimes"]["onnx"]
    assert (onnx["available"], onnx["version"], onnx["reason"]) == (True, "1.23.0", None)
    assert onnx["devices"] == [DIRECTML.as_json()]
    assert onnx["broken_plugins"] == {"onnxruntime_ep_odd": "it finds no device"}
    text = here("doctor").out
    assert "onnx       works: onnxruntime 1.23.0 (build 1.23.0+cd)\n" in text
    assert "  device   DirectML: DmlExecutionProvider (gpu)\n" in text
    assert "  plugin   onnxruntime_ep_odd cannot be used: it finds no device\n" in text


def test_doctor_reports_settings_of_the_hub_that_cannot_be_used(
    here: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise UnreachableError("a time is not a number", hint="correct it")

    monkeypatch.setattr(module, "hub_settings", fail)
    monkeypatch.setenv("HF_HUB_CACHE", "/cache")
    report = here("doctor", "--json").json
    assert report["problems"] == ["a time is not a number: correct it"]
    assert report["disk"]["hub_cache"] == "/cache"
    monkeypatch.setenv("HF_HUB_CACHE", "~no-such-user/cache")
    report = here("doctor", "--json").json
    assert report["problems"] == [
        "the hub's cache ~no-such-user/cache is not an absolute path: set HF_HOME to an absolute path"
    ]
    assert report["disk"]["hub_cache"] is None


def test_doctor_shows_a_stored_bandwidth(here: InProcess) -> None:
    save_bandwidth(here.home / "measurements", MACHINE, MEASURED)
    assert here("doctor", "--json").json["bandwidth"] == MEASURED.as_json()
    assert "bandwidth  25.0 GB/s read (by threads: 12.3 with 1, 25.0 with 4)\n" in here("doctor").out


def test_doctor_hides_a_bandwidth_of_another_power_source(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    save_bandwidth(here.home / "measurements", MACHINE, MEASURED)
    monkeypatch.setattr(module, "describe_machine", lambda: Machine(**{**fields(MACHINE), "power_source": "mains"}))  # type: ignore[arg-type]
    assert here("doctor", "--json").json["bandwidth"] == {"read_bytes_per_s": None}


def test_doctor_treats_a_damaged_store_as_empty(here: InProcess) -> None:
    folder: Path = here.home / "measurements"
    save_bandwidth(folder, MACHINE, MEASURED)
    next(folder.iterdir()).write_text("{", encoding="utf-8")
    assert here("doctor", "--json").json["bandwidth"] == {"read_bytes_per_s": None}


# ------------------------------------------------------------------------------------- trying in a child first


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (0, None),
        (1, None),  # an exception: loading here raises it again and knows its words
        (-4, "its native code was killed by signal 4 (wrong CPU build?)"),
        (0xC000001D, "its native code ended with code 0xc000001d (wrong CPU build?)"),
    ],
)
def test_a_crash_of_the_child_process_marks_the_runtime_as_missing(
    monkeypatch: pytest.MonkeyPatch, code: int, reason: str | None
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(module, "_exit_code", lambda *_how: code)
    assert module._broken(Interrupts()) == ({} if reason is None else {"llama": reason, "onnx": reason})


@pytest.mark.parametrize("error", [OSError("no process"), subprocess.TimeoutExpired("python", 60)])
def test_a_child_process_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.undo()

    def fail(*_how: object) -> int:
        raise error

    monkeypatch.setattr(module, "_exit_code", fail)
    assert module._broken(Interrupts())["llama"].startswith("the check could not run: ")


@pytest.mark.parametrize(("script", "code"), [("", 0), ("import os; os._exit(7)", 7), ("raise ValueError", 1)])
def test_the_exit_code_of_a_child_process_is_known_and_its_output_is_not_shown(
    script: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert module._exit_code(f"print('loud')\n{script}", Interrupts()) == code
    assert capfd.readouterr() == ("", "")


def test_a_file_in_the_current_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ctypes.py").write_text("import os; os._exit(7)")
    monkeypatch.chdir(tmp_path)
    assert module._exit_code("import ctypes", Interrupts()) == 0


def test_a_home_with_a_name_that_is_too_long_has_no_size() -> None:
    assert module._size(Path("x" * 300)) == 0
    assert module._disk(Home(Path("/") / ("x" * 300)), [])["models_bytes"] == 0


def test_a_child_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROBE_TIMEOUT_S", 0.1)
    with pytest.raises(subprocess.TimeoutExpired):
        module._exit_code("import time; time.sleep(600)", Interrupts())


@pytest.mark.skipif(sys.platform == "win32", reason="a signal is sent")
def test_a_signal_ends_the_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with Interrupts().installed() as interrupts:
        threading.Timer(0.2, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            module._exit_code("import time; time.sleep(600)", interrupts)


def test_crashes_of_the_child_process_are_passed_to_the_device_list(
    here: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Mapping[str, str]] = []

    def listed(broken: Mapping[str, str]) -> DeviceReport:
        asked.append(broken)
        return DeviceReport(devices=(), missing={**broken, "onnx": "none"})

    monkeypatch.setattr(module, "_broken", lambda _interrupts: {"llama": "killed"})
    monkeypatch.setattr(module, "list_devices", listed)
    here("doctor")
    assert asked == [{"llama": "killed"}]
