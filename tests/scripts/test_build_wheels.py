"""scripts/build_wheels.py: what it checks of a wheel."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from edgespec.kernels import compile as compiling
from edgespec.runtimes.native import library as native_library
from scripts import build_wheels
from tests.support.binaries import elf, written

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = CHECKOUT / "scripts" / "build_wheels.py"


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    return build_wheels


def test_each_system_has_both_processors(wheels: ModuleType) -> None:
    found = {(re.split(r"_(?:x86|a)", each.tag)[0], each.machine) for each in wheels.PLATFORMS}
    systems = ("manylinux_2_17", "musllinux_1_2", "macosx_11_0", "win")
    arm = {"manylinux_2_17": "aarch64", "musllinux_1_2": "aarch64"}
    assert found == {pair for each in systems for pair in ((each, "x86_64"), (each, arm.get(each, "arm64")))}
    assert all(each.system in compiling.LIBRARY_NAMES for each in wheels.PLATFORMS)


def test_the_headers_functions_are_those_that_python_calls(wheels: ModuleType) -> None:
    assert wheels.header_functions() == {*native_library._LONG, *native_library._SHORT}


def test_a_library_has_every_level_of_its_processor(wheels: ModuleType) -> None:
    levels = [name for name in native_library.LEVELS if name != "portable"]
    x86 = [name for name in levels if name.startswith("avx")]
    for each in wheels.PLATFORMS:
        wanted = x86 if each.machine == "x86_64" else [name for name in levels if name not in x86]
        assert wheels.level_names(each) == ["portable", *wanted]


@pytest.mark.parametrize(
    ("kind", "allowed", "strange"),
    [
        ("manylinux", ["libc.so.6", "libm.so.6", "libpthread.so.0"], ["libgomp.so.1", "libc.so"]),
        ("musllinux", ["libc.so"], ["libc.so.6"]),
        ("macosx", ["/usr/lib/libSystem.B.dylib"], ["/usr/local/lib/libomp.dylib"]),
        ("win", ["KERNEL32.dll", "api-ms-win-crt-math-l1-1-0.dll"], ["libwinpthread-1.dll", "vcomp140.dll"]),
    ],
)
def test_what_a_library_may_need_of_a_system(
    wheels: ModuleType, kind: str, allowed: list[str], strange: list[str]
) -> None:
    assert all(re.fullmatch(wheels.ALLOWED[kind], name) for name in allowed)
    assert not any(re.fullmatch(wheels.ALLOWED[kind], name) for name in strange)


def packed(place: Path, *, tag: str = "win_amd64", library: bytes = elf(62), more: str | None = None) -> Path:
    wheel = place / "edgespec-0.1.0-py3-none-win_amd64.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("edgespec/kernels/__init__.py", "")
        file.writestr("edgespec/kernels/libedgespec_kernels.dll", library)
        file.write(place / "libedgespec_kernels.dll.sha256", "edgespec/kernels/libedgespec_kernels.dll.sha256")
        file.writestr("edgespec-0.1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: py3-none-{tag}\n")
        if more:
            file.writestr(more, "")
    return wheel


def test_a_wheels_content_is_checked(wheels: ModuleType, tmp_path: Path) -> None:
    wanted = next(each for each in wheels.PLATFORMS if each.tag == "win_amd64")
    library = tmp_path / "libedgespec_kernels.dll"
    written(library, elf(62))
    wheels.check_content(wanted, packed(tmp_path), library)
    with pytest.raises(wheels.WheelError, match="its tags are"):
        wheels.check_content(wanted, packed(tmp_path, tag="any"), library)
    with pytest.raises(wheels.WheelError, match="not the one that was built"):
        wheels.check_content(wanted, packed(tmp_path, library=elf(183)), library)
    with pytest.raises(wheels.WheelError, match=r"libedgespec_kernels\.so"):
        wheels.check_content(wanted, packed(tmp_path, more="edgespec/kernels/libedgespec_kernels.so"), library)
    with pytest.raises(wheels.WheelError, match=r"pool\.c"):
        wheels.check_content(wanted, packed(tmp_path, more="edgespec/kernels/pool.c"), library)
    written(library, elf(62) + str(tmp_path).encode())
    with pytest.raises(wheels.WheelError, match="names a folder of this machine"):
        wheels.check_content(wanted, packed(tmp_path, library=library.read_bytes()), library)


def program(place: Path, name: str, says: str) -> None:
    path = place / name
    path.write_text(f"#!/bin/sh\n{says}\n", encoding="utf-8")


@pytest.mark.skipif(sys.platform == "win32", reason="the programs of this test are shell scripts")
def test_programs_of_another_machine_have_to_compute_its_bits(wheels: ModuleType, tmp_path: Path) -> None:
    place = tmp_path / "some_tag"
    place.mkdir()
    program(place, "compare_levels", "echo 'avx2: 9 comparisons, the same bits'; echo digest abc")
    program(place, "pool_check", "case $1 in cancel) echo 7 7 7 39 39 39;; crowd) echo 2;; *) echo 0 0;; esac")
    (tmp_path / "digest").write_text("abc\n", encoding="utf-8")
    wheels.run_elsewhere(place, draws=1)
    (tmp_path / "digest").write_text("def\n", encoding="utf-8")
    with pytest.raises(wheels.WheelError, match="computes other bits"):
        wheels.run_elsewhere(place, draws=1)
    program(place, "pool_check", "echo 0 1")
    with pytest.raises(wheels.WheelError, match="the pool of threads answers '0 1'"):
        wheels.run_elsewhere(place, draws=1)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False)


def test_a_tag_that_there_is_not_is_a_usage_error() -> None:
    done = run("--only", "amiga")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no wheel's tag has amiga in it" in done.stderr
    assert "win_arm64" in done.stderr


def test_programs_that_there_are_not_are_an_error(tmp_path: Path) -> None:
    done = run("--run", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.strip().endswith("has no programs")
