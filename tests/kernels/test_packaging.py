"""Wheels as an installation builds them: their content, their tags, and what is missing after a failed build."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edgespec
from edgespec.errors import RuntimeUnavailableError
from edgespec.kernels import compile as compiling
from edgespec.runtimes.native import library as native_library
from edgespec.runtimes.onnx import providers
from tests.support.binaries import elf, mach_o, written

CHECKOUT = compiling.FOLDER.parents[1]
posix = pytest.mark.skipif(os.name == "nt", reason="the compilers of these tests are shell scripts")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The smallest checkout from which a wheel can be built."""
    tree = tmp_path / "tree"
    kernels = tree / "edgespec" / "kernels"
    kernels.mkdir(parents=True)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "edgespec/__init__.py"):
        shutil.copy(CHECKOUT / name, tree / name)
    for source in compiling.FOLDER.iterdir():
        if source.suffix in {".c", ".h", ".py"}:
            shutil.copy(source, kernels)
    return tree


def test_the_source_package_has_no_tests_because_it_lacks_what_they_import() -> None:
    build = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    assert not {"tests", "benchmarks", "scripts"} & set(build["targets"]["sdist"]["include"])


def compiler(folder: Path, content: bytes) -> str:
    """A fake compiler whose output is always ``content``, and which records its arguments."""
    made, script = folder / "made", folder / "cc"
    made.write_bytes(content)
    script.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >>{folder}/asked\n'
        'while [ $# -gt 0 ]; do case "$1" in -o|-output) out="$2"; shift;; esac; shift; done\n'
        f'if [ "$out" ]; then cp {made} "$out"; else echo aarch64-linux-gnu; fi\n',
        encoding="utf-8",
    )
    script.chmod(0o755)
    return str(script)


def build(tree: Path, **environment: str) -> tuple[Path, str]:
    """The wheel that the build makes, and the build's output."""
    out = tree.parent / "out"
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=tree,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel, done.stdout + done.stderr


def kernels_in(wheel: Path) -> set[str]:
    """The kernel files of a wheel that are not Python."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    return {name for name in names if name.startswith("edgespec/kernels/") and not name.endswith(".py")}


def with_digest(library: str) -> set[str]:
    return {f"edgespec/kernels/{library}", f"edgespec/kernels/{library}.sha256"}


@posix
@pytest.mark.parametrize(
    ("content", "tag"), [(elf(183), "linux_aarch64"), (mach_o(0x0100000C, (12, 3)), "macosx_12_0_arm64")]
)
def test_a_wheels_tag_is_the_platform_of_its_library(tree: Path, content: bytes, tag: str) -> None:
    wheel, _ = build(tree, CC=compiler(tree.parent, content))
    assert wheel.name.endswith(f"-py3-none-{tag}.whl")
    assert kernels_in(wheel) == with_digest(compiling.LIBRARY_NAME)
    assert not (tree / "edgespec" / "kernels" / compiling.LIBRARY_NAME).exists()  # the source folder stays unchanged


@posix
def test_a_cross_compiler_builds_its_target_processors_levels(tree: Path) -> None:
    build(tree, CC=compiler(tree.parent, elf(183)))
    asked = (tree.parent / "asked").read_text(encoding="utf-8")
    assert "level_neon_dotprod.c" in asked
    assert "level_avx2.c" not in asked


@posix
def test_a_wheel_can_be_built_from_read_only_sources(tree: Path) -> None:
    for path in sorted(tree.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(tree.rglob("*"))
    # An administrator may write bytecode there.
    wheel, _ = build(tree, CC=compiler(tree.parent, elf(62)), PYTHONDONTWRITEBYTECODE="1")
    assert kernels_in(wheel) == with_digest(compiling.LIBRARY_NAME)
    assert sorted(tree.rglob("*")) == before
    for path in tree.rglob("*"):
        path.chmod(0o755)


def test_a_build_in_an_unwritable_folder_returns_the_reason(tmp_path: Path) -> None:
    """For example an editable installation of a read-only checkout, which then succeeds without the library."""
    reason = compiling.build(tmp_path / "there is no such folder")
    assert reason is not None
    assert "there is no such folder" in reason


@posix
def test_without_a_compiler_the_wheel_is_pure_python_with_a_note(tree: Path) -> None:
    wheel, said = build(tree, CC="/nonexistent/cc")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert kernels_in(wheel) == {f"edgespec/kernels/{compiling.NOTE_NAME}"}
    assert "without its native runtime" in said
    with zipfile.ZipFile(wheel) as file:
        assert "/nonexistent/cc" in file.read(f"edgespec/kernels/{compiling.NOTE_NAME}").decode()


def test_a_library_compiled_earlier_is_packed_unchanged(tree: Path, tmp_path: Path) -> None:
    """scripts/build_wheels.py compiles for other systems."""
    library = tmp_path / "libedgespec_kernels.dll"
    written(library, b"of Windows")
    wheel, _ = build(tree, EDGESPEC_WHEEL_LIBRARY=str(library), EDGESPEC_WHEEL_PLATFORM="win_arm64", CC="/bin/false")
    assert wheel.name.endswith("-py3-none-win_arm64.whl")
    assert kernels_in(wheel) == with_digest("libedgespec_kernels.dll")


# ---------------------------------------------------------------------------------------------- for macOS


@posix
@pytest.mark.parametrize(
    ("environment", "asked", "oldest"),
    [
        ({"ARCHFLAGS": "-arch x86_64"}, ["x86_64"], True),
        ({"ARCHFLAGS": "-arch arm64 -arch x86_64", "MACOSX_DEPLOYMENT_TARGET": "12.3"}, ["arm64", "x86_64"], False),
        ({"ARCHFLAGS": ""}, [compiling.platform.machine()], True),
    ],
)
def test_macos_libraries_contain_the_processors_in_archflags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], asked: list[str], oldest: bool
) -> None:
    monkeypatch.delenv("MACOSX_DEPLOYMENT_TARGET", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command = compiler(tmp_path, b"library")
    (tmp_path / "lipo").symlink_to(command)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    compiling.compile_library(tmp_path / "libedgespec_kernels.dylib", compiler=command, system="darwin")
    lines = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    compiled = [line for line in lines if "level_portable.c" in line]
    assert sorted(line.split(" -arch ")[1].split()[0] for line in compiled) == sorted(asked)
    assert all(("-mmacosx-version-min=11.0" in line) == oldest for line in compiled)
    assert any(line.startswith("-create") for line in lines) == (len(asked) > 1)
    for line in lines:  # each processor gets only its levels
        assert ("level_neon_dotprod.c" not in line) or "-arch arm64" in line
        assert ("level_avx2.c" not in line) or "-arch x86_64" in line


# ------------------------------------------------------------------------------------------ in an installation


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernels folder of an installed wheel, without sources."""
    monkeypatch.setattr(native_library, "KERNELS", tmp_path)
    monkeypatch.setattr(native_library, "_load", native_library._load.__wrapped__)  # bypasses the cached real library
    return tmp_path


def test_a_library_for_another_processor_is_refused_with_both_names(folder: Path) -> None:
    other = 183 if compiling.platform.machine() == "x86_64" else 62
    written(folder / "libedgespec_kernels.so", elf(other))
    with pytest.raises(
        RuntimeUnavailableError, match=r"library is for (64-bit ARM|x86-64) on Linux, and this process is"
    ):
        native_library.load()


def test_a_library_for_another_system_is_refused_with_both_names(folder: Path) -> None:
    written(folder / "libedgespec_kernels.dylib", mach_o(0x0100000C, (11, 0)))
    if sys.platform == "darwin":
        pytest.skip("this system's own")
    with pytest.raises(RuntimeUnavailableError, match="is for 64-bit ARM on macOS, and this process is") as caught:
        native_library.load()
    assert caught.value.hint is not None
    assert "install the wheel for" in caught.value.hint


def test_without_sources_the_hint_does_not_suggest_compiling(folder: Path) -> None:
    with pytest.raises(RuntimeUnavailableError) as caught:
        native_library.load()
    assert caught.value.hint is not None
    assert "from its sources" in caught.value.hint
    (folder / "level_portable.c").write_text("", encoding="utf-8")
    with pytest.raises(RuntimeUnavailableError) as caught:
        native_library.load()
    assert caught.value.hint is not None
    assert caught.value.hint.endswith("and install edgespec again")


def test_a_read_only_checkout_is_named_as_the_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "level_portable.c").write_text("", encoding="utf-8")
    monkeypatch.setattr(native_library.os, "access", lambda path, mode: False)
    with pytest.raises(RuntimeUnavailableError, match="cannot be written") as caught:
        native_library.load()
    assert caught.value.hint == "make it writable and install edgespec again"


def test_the_runtime_looks_for_the_library_names_that_compiling_gives() -> None:
    assert set(native_library.LIBRARY_NAMES) == set(compiling.LIBRARY_NAMES.values())
    assert native_library.NOTE_NAME == compiling.NOTE_NAME
    assert native_library.DIGEST_SUFFIX == compiling.DIGEST_SUFFIX


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """What a hook tells PyInstaller, which is not needed here."""
    root = Path(edgespec.__file__).parent
    hooks = SimpleNamespace(
        collect_submodules=lambda *_, **__: [],
        collect_dynamic_libs=lambda name: [name],
        collect_data_files=lambda _, includes: [str(path) for glob in includes for path in root.glob(glob)],
        copy_metadata=lambda name: [f"{name}.dist-info"],
    )
    monkeypatch.setitem(sys.modules, "PyInstaller", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "PyInstaller.utils", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "PyInstaller.utils.hooks", hooks)
    return lambda name: runpy.run_path(str(root / "__pyinstaller" / name))


def test_a_frozen_application_gets_every_data_file_that_it_may_need(hook: Callable[[str], dict[str, Any]]) -> None:
    root, found = Path(edgespec.__file__).parent, hook("hook-edgespec.py")["datas"]
    left_out = {"bench", "kernels"}  # the sources of the kernels, and the suites of commands
    data = {path for path in root.rglob("*") if path.suffix not in ("", ".py", ".pyc") and path.is_file()}
    needed = {str(path) for path in data if path.relative_to(root).parts[0] not in left_out}
    assert needed - set(found) == {str(root / "py.typed")}
    assert {path.name for path in root.glob("kernels/*.sha256")} <= {Path(path).name for path in found}
    assert hook("hook-llama_cpp.py")["binaries"] == ["llama_cpp"]


@pytest.mark.parametrize("here", [True, False])
def test_a_frozen_application_gets_the_onnx_runtime_that_is_installed(
    hook: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: ModuleSpec("onnxruntime", None) if here else None)
    monkeypatch.setattr(providers, "installed_plugins", lambda: ["onnxruntime_ep_fast"])
    told = hook("hook-edgespec.py")
    assert told["hiddenimports"] == (["onnxruntime", "onnxruntime_ep_fast"] if here else [])
    assert ("onnxruntime_ep_fast" in told["binaries"]) == here
    assert ("onnxruntime-ep-fast.dist-info" in told["datas"]) == here
