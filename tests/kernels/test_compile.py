"""The build of the kernels: a library, or the reason for its absence."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import RuntimeUnavailableError
from edgespec.interfaces.drawing import MOST_DRAWN
from edgespec.interfaces.model import PREFILL_CHUNK_TOKENS
from edgespec.kernels import compile as compiling
from edgespec.runtimes.native import library as native_library
from edgespec.runtimes.sequence import MAX_SCORED_ROWS
from tests.support.binaries import written


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to which a build writes its library or its note."""
    monkeypatch.setattr(native_library, "KERNELS", tmp_path)
    monkeypatch.setattr(native_library, "_load", native_library._load.__wrapped__)  # bypasses the cached real library
    return tmp_path


def sources_in(folder: Path, *, broken: bool = False) -> None:
    for source in compiling.FOLDER.iterdir():
        if source.suffix in {".c", ".h", ".py"}:
            (folder / source.name).write_bytes(source.read_bytes())
    if broken:
        for source in folder.glob("*.c"):
            source.write_text("#error on purpose\n", encoding="utf-8")


# For tests of what is built rather than its speed: takes an eighth of the time.
QUICKLY = "-O0"


def build(folder: Path, *flags: str, **environment: str) -> str:
    """Build in ``folder`` in a separate process; returns the output."""
    done = subprocess.run(
        [sys.executable, "-I", str(folder / "compile.py"), *flags],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.strip()


@pytest.fixture(scope="module")
def compiler() -> str:
    try:
        return " ".join(compiling._find_compiler(None))
    except compiling.CompileError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("compiler", ["/bin/false", "/nonexistent/cc", "sh -c 'echo no licence >&2; exit 3'"])
def test_without_a_compiler_a_note_gives_the_runtimes_error_message(folder: Path, compiler: str) -> None:
    sources_in(folder)
    (folder / compiling.LIBRARY_NAME).write_bytes(b"of older sources")
    compiling.write_digest(folder / compiling.LIBRARY_NAME)
    said = build(folder, CC=compiler)
    assert compiler.split()[0] in said
    assert not list(folder.glob(f"{compiling.LIBRARY_NAME}*"))
    with pytest.raises(RuntimeUnavailableError, match="native runtime is missing") as caught:
        native_library.load()
    assert said in caught.value.message
    assert caught.value.hint is not None


def test_a_failed_build_makes_a_library_useless_that_windows_does_not_delete(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, unlink = folder / compiling.LIBRARY_NAME, Path.unlink
    library.write_bytes(b"of older sources")
    compiling.write_digest(library)

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if path == library:
            raise PermissionError("it is loaded")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)
    monkeypatch.setenv("CC", "/nonexistent/cc")
    assert "does not run" in str(compiling.build(folder))
    assert {path.name for path in folder.iterdir()} == {library.name, compiling.NOTE_NAME}
    with pytest.raises(RuntimeUnavailableError, match="damaged or incomplete"):
        native_library.load()


def test_a_compiler_error_is_quoted_in_the_note(folder: Path, compiler: str) -> None:
    sources_in(folder, broken=True)
    assert "on purpose" in build(folder, QUICKLY)


def test_the_builds_flags_override_fast_math_in_the_compiler_command(tmp_path: Path, compiler: str) -> None:
    command = [*compiler.split(), "-ffast-math"]
    portable = compiling.FOLDER / "level_portable.c"
    flags = [*compiling._FLAGS, QUICKLY]
    assert compiling._compile(command, flags, portable, tmp_path).is_file()
    without = [flag for flag in flags if flag != "-fno-fast-math"]
    with pytest.raises(compiling.CompileError, match="added as they are written"):
        compiling._compile(command, without, portable, tmp_path)


def test_without_library_and_note_the_runtime_is_reported_missing(folder: Path) -> None:
    with pytest.raises(RuntimeUnavailableError, match="was not built"):
        native_library.load()


def test_a_file_that_is_not_a_library_is_refused(folder: Path) -> None:
    written(folder / native_library.LIBRARY_NAMES[0], b"no library")
    with pytest.raises(RuntimeUnavailableError, match="does not load"):
        native_library.load()


def too_old_for(option: str, compiler: str, place: Path) -> str:
    """A compiler that does not know ``option``."""
    script = place / "old-cc"
    script.write_text(f'#!/bin/sh\ncase "$*" in *{option}*) exit 1;; esac\nexec {compiler} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return str(script)


@pytest.mark.slow
def test_a_level_that_an_old_compiler_cannot_build_is_left_out(
    folder: Path, compiler: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sources_in(folder)
    before = set(folder.iterdir())
    (folder / compiling.NOTE_NAME).write_text("an old failure", encoding="utf-8")
    old = too_old_for("-mavxvnni", compiler, tmp_path_factory.mktemp("bin"))
    assert build(folder, QUICKLY, CC=old) == ""
    assert {path.name for path in set(folder.iterdir()) - before} == {
        compiling.LIBRARY_NAME,
        compiling.digest_path(folder / compiling.LIBRARY_NAME).name,
    }, "a build leaves only a library and its digest"
    here, found = native_library.load_from(real_library()), native_library.load()
    assert found.levels == tuple(name for name in here.levels if name != "avx-vnni")
    assert here.left_out == {}
    assert list(found.left_out) == [name for name in here.levels if name == "avx-vnni"]
    assert all("newer" in reason for reason in found.left_out.values())


def real_library() -> Path:
    place = compiling.FOLDER / compiling.LIBRARY_NAME
    if not place.exists():
        pytest.skip("edgespec was installed without a C compiler")
    return place


@pytest.fixture
def copied(folder: Path) -> Path:
    """A copy of the real library, in the folder where the runtime looks for it, with its digest."""
    for each in (real_library(), compiling.digest_path(real_library())):
        shutil.copy(each, folder)
    return folder / compiling.LIBRARY_NAME


def refused() -> RuntimeUnavailableError:
    with pytest.raises(RuntimeUnavailableError, match="is damaged or incomplete") as caught:
        native_library.load()
    return caught.value


def test_a_library_with_another_interface_version_is_refused(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "ABI", 77)
    with pytest.raises(RuntimeUnavailableError, match=r"interface \d+ and edgespec needs 77"):
        native_library.load()


def test_a_copied_library_with_its_digest_loads(copied: Path) -> None:
    assert native_library.load().build == native_library.load_from(real_library()).build


@pytest.mark.parametrize("tenths", range(10))
def test_a_truncated_library_is_refused_before_its_code_runs(copied: Path, tenths: int) -> None:
    copied.write_bytes(copied.read_bytes()[: copied.stat().st_size * tenths // 10])
    refused()


def test_a_library_with_a_flipped_bit_is_refused_before_its_code_runs(copied: Path) -> None:
    whole, chance = copied.read_bytes(), random.Random(1)
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        copied.write_bytes(damaged)
        refused()


@pytest.mark.parametrize("content", [None, b"", b"\xff\x00", b"0" * 64])
def test_a_library_whose_digest_is_missing_or_damaged_is_refused(copied: Path, content: bytes | None) -> None:
    noted = compiling.digest_path(copied)
    noted.unlink()
    if content is not None:
        noted.write_bytes(content)
    assert str(noted) in refused().message


def test_the_hint_of_a_damaged_library_is_the_command_that_replaces_it(copied: Path) -> None:
    copied.write_bytes(b"")
    assert "pip install --force-reinstall" in str(refused().hint)
    sources_in(copied.parent)
    assert str(refused().hint) == f'compile it again: python "{copied.parent / "compile.py"}"'


def test_a_frozen_applications_library_is_loaded_without_a_digest(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyInstaller signs libraries on macOS, and strips or packs them on request."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    build = native_library.load_from(copied).build
    with copied.open("ab") as file:
        file.write(b"signature")
    assert native_library.load_from(copied).build == build  # or each release would discard what was saved
    compiling.digest_path(copied).unlink()
    assert native_library.load_from(copied).build != build
    assert "portable" in native_library.load().levels


@pytest.mark.slow
def test_doctor_without_another_runtime_reports_a_damaged_library_and_ends_with_code_1(copied: Path) -> None:
    copied.write_bytes(copied.read_bytes()[:60_000])
    code = (
        "import pathlib, sys\n"
        "from edgespec.runtimes.native import library\n"
        f"library.KERNELS = pathlib.Path({str(copied.parent)!r})\n"
        "sys.modules['llama_cpp'] = None\n"
        "from edgespec.cli import main\n"
        "sys.argv = ['edgespec', 'doctor']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the native runtime's library is damaged" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_cross_compiled_library_has_the_target_machines_levels(tmp_path: Path, compiler: str) -> None:
    """The caller names the machine, since a cross compiler's target is not visible; other levels are not tried."""
    made = tmp_path / compiling.LIBRARY_NAME
    compiling.compile_library(made, compiler=compiler, machine="riscv64", extra_flags=[QUICKLY])
    assert native_library.load_from(made).levels == ("portable",)


class Broken:
    """The library with a level that changes the last bit of the last score, or of the last attention output."""

    def __init__(self, api: Any, level: int, name: str) -> None:
        self._api, self._level, self._name = api, level, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def es_multiply(self, matrix: Any, x: int, rows: int, y: int, level: int) -> int:
        code = int(self._api.es_multiply(matrix, x, rows, y, level))
        self._spoil("es_multiply", y + 4 * (16 * rows - 1), level)
        return code

    def es_attend(self, *arguments: Any) -> int:
        code = int(self._api.es_attend(*arguments))
        self._spoil("es_attend", arguments[10] + 4 * (arguments[3] * arguments[6] - 1), arguments[11])
        return code

    def _spoil(self, name: str, address: int, level: int) -> None:
        if (name, level) == (self._name, self._level):
            last = ctypes.c_int32.from_address(address)
            last.value ^= 1


@pytest.mark.parametrize("name", ["es_multiply", "es_attend"])
def test_a_level_with_different_bits_is_not_offered(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    levels = native_library.load_from(real_library()).levels
    if len(levels) == 1:
        pytest.skip("only the portable level runs here")
    real = native_library._Calls
    for broken in levels[1:]:
        number = native_library.LEVELS[broken]
        monkeypatch.setattr(native_library, "_Calls", lambda path, number=number: Broken(real(path), number, name))
        found = native_library.load_from(real_library())
        assert found.levels == tuple(level for level in levels if level != broken)
        assert list(found.left_out) == [broken]
        assert "portable C" in found.left_out[broken]


def test_the_librarys_limits_match_those_of_the_runtime() -> None:
    """forward.c's limits equal the limits to which requests are cut."""
    header = (compiling.FOLDER / "edgespec_kernels.h").read_text(encoding="utf-8")
    assert f"ES_MOST_TOKENS = {PREFILL_CHUNK_TOKENS}," in header
    assert f"ES_MOST_SCORED = {MAX_SCORED_ROWS}," in header
    assert f"ES_MOST_THREADS = {native_library.MOST_THREADS} " in header
    assert f"ES_MOST_ENTRIES = {native_library.MOST_ENTRIES}," in header
    assert f"ES_MOST_DRAWN = {MOST_DRAWN} " in header
    assert f"#define ES_ABI {native_library.ABI}\n" in header
