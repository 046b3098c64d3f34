"""When the identity of a GPU's drivers changes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgespec.hardware.drivers import driver_identity, gpu_drivers

MAPS = "7f00-7f01 r-xp 00000000 08:01 42    /opt/cuda/lib64/libcublas.so.12.4.5.8\n7f02-7f03 r--p 0 0:0 0\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with a GPU of each kind."""

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")

    write("proc/driver/nvidia/version", "NVRM version: 550.54.14")
    write("sys/module/amdgpu/version", "6.7.0")
    write("usr/share/vulkan/icd.d/radeon.json", json.dumps({"ICD": {"library_path": "libvulkan_radeon.so"}}))
    write("usr/share/vulkan/icd.d/lvp.json", json.dumps({"ICD": {"library_path": "/opt/mesa/libvulkan_lvp.so"}}))
    write("usr/share/vulkan/icd.d/broken.json", "{")
    write("usr/lib/x86_64-linux-gnu/libvulkan_radeon.so", "driver")
    write("opt/mesa/libvulkan_lvp.so", "driver")
    write("proc/self/maps", MAPS)
    write("opt/cuda/lib64/libcublas.so.12.4.5.8", "kernels")
    return tmp_path


def test_unchanged_drivers_keep_their_identity(root: Path) -> None:
    first = driver_identity(root, {})
    assert driver_identity(root, {"HOME": "/root", "CUDA_VISIBLE_DEVICES": "0"}) == first
    (root / "unrelated").write_text("x")
    assert driver_identity(root, {}) == first
    assert len(first) == 12


def rewrite(path: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (root / path).write_text((root / path).read_text() + "\n")

    return change


def touch(path: str) -> Callable[[Path], None]:
    """Another file of the same size, as after a rebuilt package."""

    def change(root: Path) -> None:
        os.utime(root / path, ns=(1, 1))

    return change


@pytest.mark.parametrize(
    "change",
    [
        rewrite("proc/driver/nvidia/version"),
        rewrite("sys/module/amdgpu/version"),
        rewrite("usr/share/vulkan/icd.d/radeon.json"),
        rewrite("usr/lib/x86_64-linux-gnu/libvulkan_radeon.so"),
        touch("usr/lib/x86_64-linux-gnu/libvulkan_radeon.so"),
        touch("opt/mesa/libvulkan_lvp.so"),
        touch("opt/cuda/lib64/libcublas.so.12.4.5.8"),
    ],
)
def test_a_driver_update_changes_the_identity(root: Path, change: Callable[[Path], None]) -> None:
    before = driver_identity(root, {})
    change(root)
    assert driver_identity(root, {}) != before


@pytest.mark.parametrize(
    "name", ["GGML_CUDA_FORCE_MMQ", "GGML_VK_DISABLE_F16", "RADV_PERFTEST", "NVIDIA_TF32_OVERRIDE"]
)
def test_a_variable_that_chooses_kernels_changes_the_driver_identity(root: Path, name: str) -> None:
    assert len({driver_identity(root, environ) for environ in ({}, {name: "1"}, {name: "0"})}) == 3


def test_a_driver_named_by_a_variable_is_identified_by_its_file(root: Path) -> None:
    manifest, library = root / "own.json", root / "libown.so"
    manifest.write_text(json.dumps({"ICD": {"library_path": "./libown.so"}}))
    library.write_text("driver")
    environ = {"VK_ICD_FILENAMES": str(manifest)}
    before = driver_identity(root, environ)
    os.utime(library, ns=(1, 1))
    assert driver_identity(root, environ) != before


def test_a_driver_update_on_windows_changes_the_identity(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"0000": "31.0.15.5222", "0001": "32.0.101.6078"}

    def opened(key: object, name: str) -> nullcontext[str]:
        if name == "Properties":
            raise PermissionError("Access is denied")
        return nullcontext(name)

    def name_at(_key: object, index: int) -> str:
        try:
            return ["0000", "Properties", "0001"][index]
        except IndexError:
            raise OSError("No more data is available") from None

    registry = SimpleNamespace(
        HKEY_LOCAL_MACHINE=0,
        OpenKey=opened,
        EnumKey=name_at,
        QueryValueEx=lambda key, value: (versions[key], 1) if value == "DriverVersion" else None,
    )
    monkeypatch.setitem(sys.modules, "winreg", registry)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "platform", "win32")
    found = {driver_identity(root, {})}
    for name in versions:
        versions[name] += ".1"
        found.add(driver_identity(root, {}))
    assert len(found) == 3


def test_a_machine_without_gpu_drivers_has_a_stable_identity(tmp_path: Path) -> None:
    assert driver_identity(tmp_path, {}) == driver_identity(tmp_path, {})
    assert driver_identity() == driver_identity()
    assert gpu_drivers() == gpu_drivers()
