"""The instruction sets: their names and numbers, where each level runs, and equal bits from all of them."""

from __future__ import annotations

import ctypes
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import InvalidRequestError, RuntimeUnavailableError
from edgespec.hardware.machine import describe_machine
from edgespec.kernels import compile as compiling
from edgespec.runtimes.native.library import LEVELS, NativeLibrary, _sound_levels
from edgespec.runtimes.native.model import NativeSettings
from tests.kernels.conftest import FAST
from tests.support.kernel_calls import TYPES
from tests.support.loading import load_native
from tests.support.tiny_gguf import write_tiny_gguf

# The /proc/cpuinfo name of the newest feature that each level needs.
FLAGS = {"avx2": "avx2", "avx-vnni": "avx_vnni", "avx512-vnni": "avx512_vnni", "neon-dotprod": "asimddp"}


def test_level_names_and_numbers_match_the_library(library: NativeLibrary) -> None:
    header = (compiling.FOLDER / "edgespec_kernels.h").read_text(encoding="utf-8")
    found = re.search(r"enum es_level \{ (.*), ES_LEVELS \};", header)
    assert found is not None
    assert found[1].split(", ") == [f"ES_{name.upper().replace('-', '_')}" for name in LEVELS]
    assert list(LEVELS.values()) == list(range(len(LEVELS)))
    for name in library.levels:
        assert library.api.es_level_name(LEVELS[name]).decode() == name


def test_every_level_has_a_source_file_and_a_list_of_processors() -> None:
    files = {path.name for path in compiling.FOLDER.glob("level_*.c")}
    assert files == {f"level_{name.replace('-', '_')}.c" for name in LEVELS}
    assert {f"level_{name}.c" for name in ("portable",)} | {file for file, *_ in compiling._LEVELS} == files
    told = (compiling.FOLDER / "cpu.c").read_text(encoding="utf-8")
    for _, machines, flags, macro in compiling._LEVELS:
        assert machines
        assert flags
        assert f"#if defined({macro})" in told


def test_level_numbers_beyond_the_last_do_not_exist(library: NativeLibrary) -> None:
    for number in (-1, len(LEVELS), 99):
        assert library.api.es_level_name(number) is None
        assert not library.api.es_level_runs(number)


def test_levels_of_another_processor_family_do_not_exist(library: NativeLibrary) -> None:
    others = set(LEVELS) - {"portable", *FAST}
    assert others
    assert not others & set(library.levels)
    assert all(library.api.es_level_name(LEVELS[name]) is None for name in others)


@pytest.mark.skipif(platform.system() != "Linux", reason="the system does not list the processor's features")
def test_levels_that_run_match_the_features_the_system_reports(library: NativeLibrary) -> None:
    here = describe_machine().isa
    expected = {name for name in FAST if FLAGS[name] in here}
    found = set(library.levels) - {"portable"}
    assert found <= expected
    assert found | set(library.left_out) == expected
    assert expected - found <= {"avx-vnni"}, "compilers before 2021 do not know avx-vnni"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("levels") / "tiny.gguf", width=128, quant="Q4_0")


def test_a_requested_level_is_used_and_gives_the_portable_bits(tiny: Path, level: str) -> None:
    """At every width and with a long context, the rows equal the portable level's."""
    rows = []
    for name in ("portable", level):
        with load_native(tiny, NativeSettings(level=name)) as model, model.open(300) as sequence:
            assert model.facts.settings == {"level": name}
            sequence.forward([7 * i % 100 for i in range(270)], 0)
            for width in range(1, 10):
                done = sequence.forward(list(range(width)), width)
                rows.append(done.logits(width - 1).tobytes())
                sequence.rewind(270)
    assert rows[:9] == rows[9:]


class Broken:
    """The library with a level that gives one wrong bit, in products of a type with this many inputs or more."""

    def __init__(self, library: NativeLibrary, level: str, number: int, inputs: int) -> None:
        self._api, self._broken = library.api, (LEVELS[level], number, inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def es_multiply(self, matrix: Any, x: int, inputs: int, y: int, level: int) -> None:
        self._api.es_multiply(matrix, x, inputs, y, level)
        broken, number, least = self._broken
        if level == broken and matrix._obj.type == number and inputs >= least:
            ctypes.c_uint8.from_address(y + 4 * (inputs * matrix._obj.rows - 1)).value ^= 1


@pytest.mark.parametrize("inputs", [1, 32])
def test_a_level_with_one_wrong_bit_is_left_out(library: NativeLibrary, inputs: int) -> None:
    """With few inputs, and where two tiles are multiplied at a time."""
    wanted = list(library.levels)
    for level in wanted[1:]:
        found = _sound_levels(Broken(library, level, TYPES["Q6_K"], inputs), wanted)
        assert found == tuple(name for name in wanted if name != level)


def test_an_unavailable_level_is_refused(tiny: Path, library: NativeLibrary) -> None:
    with pytest.raises(InvalidRequestError, match="unknown level 'sse'") as caught:
        load_native(tiny, NativeSettings(level="sse"))
    assert caught.value.hint == f"one of auto, {', '.join(LEVELS)}"
    missing = next(name for name in LEVELS if name not in library.levels)
    with pytest.raises(RuntimeUnavailableError, match=f"cannot run {missing}"):
        load_native(tiny, NativeSettings(level=missing))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the sanitizer is tried on Linux only")
def test_the_threads_of_a_forward_have_no_data_race(
    tmp_path: Path, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards of every type on 1, 4 and 7 threads, one level against portable C, under the thread sanitizer."""
    fast = [level for level in compiling._LEVELS if level[0] in {"level_avx2.c", "level_neon_dotprod.c"}]
    monkeypatch.setattr(compiling, "_LEVELS", fast)  # one level is enough, since each takes long to build
    flags = ["-fsanitize=thread", "-g", "-O1"]
    built, program = tmp_path / compiling.LIBRARY_NAME, tmp_path / "compare"
    try:
        compiling.compile_library(built, extra_flags=flags)
    except compiling.CompileError as error:
        pytest.skip(f"the compiler has no thread sanitizer: {error}")
    source = Path(__file__).with_name("compare_levels.c")
    command = [*compiling._find_compiler(None), "-std=c11", *flags, f"-I{compiling.FOLDER}", source, "-o", program]
    subprocess.run([*command, built, "-lm", f"-Wl,-rpath,{tmp_path}"], check=True)
    done = subprocess.run([program, "forwards"], capture_output=True, text=True, check=False, timeout=300)
    if done.returncode == 2 and "no level but the portable one" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING: ThreadSanitizer" not in done.stderr
