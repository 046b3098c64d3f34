"""Compiles the kernels into one shared library without a Python ABI. Standard library only.

The build hook runs it on every installation; ``python edgespec/kernels/compile.py [FLAG ...]`` does the same by hand.
A machine without a working C compiler gets a note instead of a library, and edgespec says why it has no such runtime.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY_NAME = f"libedgespec_kernels{'.dylib' if sys.platform == 'darwin' else '.so'}"
NOTE_NAME = "not_built.txt"

# clang first: on these kernels version 19 was 4 to 16 % faster than GCC 12.
_COMPILERS = ("clang", "cc", "gcc")
_FLAGS = (
    "-std=c11",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    # The kernels promise bits: a product is rounded before it is added unless the source says fma.
    "-ffp-contract=off",
    # Some compilers reorder sums unless told otherwise, and so does a CC that was chosen for other programs.
    "-fno-fast-math",
    # sqrtf as an instruction; nobody here reads errno.
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
)
# Each level's file, the processors it is for, its flags, and the macro that tells the others it is there.
_X86, _ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
_LEVELS = (
    ("level_avx2.c", _X86, _AVX2, "EDGESPEC_HAS_AVX2"),
    ("level_avx_vnni.c", _X86, (*_AVX2, "-mavxvnni"), "EDGESPEC_HAS_AVX_VNNI"),
    ("level_avx512_vnni.c", _X86, (*_AVX2, *_AVX512), "EDGESPEC_HAS_AVX512_VNNI"),
    ("level_neon_dotprod.c", _ARM, ("-march=armv8.2-a+dotprod",), "EDGESPEC_HAS_NEON_DOTPROD"),
)
_LONGEST_SAID = 300  # characters of a compiler's message
_COMPILE_S = 300.0  # one file takes a second or two; this is a compiler that hangs


class CompileError(Exception):
    """Why there is no library, in one sentence."""


def compile_library(
    output: Path, *, compiler: str | None = None, machine: str | None = None, extra_flags: Sequence[str] = ()
) -> None:
    """Compile the sources beside this file and put the library at ``output``, all at once or not at all.

    ``compiler`` is a command, by default what CC says, else the first found; ``machine`` is what it compiles for, by
    default this one. A level that the compiler is too old for is left out. Raises CompileError.
    """
    command = _find_compiler(compiler)
    flags = [*_FLAGS, *extra_flags]
    levels = {name: (machines, own, macro) for name, machines, own, macro in _LEVELS}
    with (
        tempfile.TemporaryDirectory(dir=output.parent, prefix=".kernels-") as name,
        ThreadPoolExecutor(max_workers=os.cpu_count()) as pool,
    ):
        place = Path(name)
        begun: list[tuple[str, Future[Path]]] = []
        for source in sorted(FOLDER.glob("level_*.c")):
            machines, own, macro = levels.get(source.name, ((), (), ""))
            if not macro or (machine or platform.machine()) in machines:
                begun.append((macro, pool.submit(_compile, command, [*flags, *own], source, place)))
        objects: list[Path] = []
        for macro, level in begun:
            try:
                objects.append(level.result())
            except CompileError:
                if not macro:  # the level that runs everywhere
                    raise
                continue
            if macro:
                flags.append(f"-D{macro}")
        others = sorted(set(FOLDER.glob("*.c")) - set(FOLDER.glob("level_*.c")))
        objects += pool.map(lambda source: _compile(command, flags, source, place), others)
        library = place / output.name
        _run([*command, *flags, "-shared", "-o", os.fspath(library), *map(os.fspath, objects), "-lm"])
        library.replace(output)  # a process that has the old one open keeps it


def build_in_place(extra_flags: Sequence[str] = ()) -> str | None:
    """Put the library, or a note with the reason why there is none, beside this file; returns the reason."""
    library, note = FOLDER / LIBRARY_NAME, FOLDER / NOTE_NAME
    try:
        compile_library(library, extra_flags=extra_flags)
    except (CompileError, OSError) as error:
        reason = str(error)
        library.unlink(missing_ok=True)  # an older one would not fit the newer sources beside it
        note.write_text(f"{reason}\n", encoding="utf-8")
        return reason
    note.unlink(missing_ok=True)
    return None


def _find_compiler(compiler: str | None) -> list[str]:
    if sys.platform == "win32":
        raise CompileError("the kernels use POSIX threads and are not built on Windows yet")
    chosen = compiler or os.environ.get("CC", "")
    if chosen:
        return shlex.split(chosen)
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise CompileError(f"no C compiler was found ({', '.join(_COMPILERS)}) when edgespec was installed")


def _compile(command: Sequence[str], flags: Sequence[str], source: Path, place: Path) -> Path:
    made = place / f"{source.stem}.o"
    _run([*command, *flags, "-c", os.fspath(source), "-o", os.fspath(made)])
    return made


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_COMPILE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"the C compiler {command[0]!r} does not run: {error}") from error
    if done.returncode:
        said = " ".join(done.stderr.split())[:_LONGEST_SAID] or f"it ended with code {done.returncode}"
        raise CompileError(f"the C compiler {command[0]!r} failed: {said}")


if __name__ == "__main__":
    sys.exit(build_in_place(sys.argv[1:]))
