"""Compiles the kernels into one shared library without a Python ABI. Standard library only.

The build hook runs it on every installation; ``python edgespec/kernels/compile.py [FLAG ...]`` does the same by hand.
Without a working C compiler a note with the reason replaces the library, and edgespec reports that reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
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
LIBRARY_NAMES = {
    "linux": "libedgespec_kernels.so",
    "darwin": "libedgespec_kernels.dylib",
    "win32": "libedgespec_kernels.dll",
}
LIBRARY_NAME = LIBRARY_NAMES.get(sys.platform, LIBRARY_NAMES["linux"])
NOTE_NAME = "not_built.txt"
DIGEST_SUFFIX = ".sha256"

# clang first: on these kernels version 19 was 4 to 16 % faster than GCC 12.
_COMPILERS = ("clang", "cc", "gcc")
_FLAGS = (
    "-std=c11",
    "-O3",
    "-fvisibility=hidden",
    # The kernels' results are bit-exact: a product is rounded before it is added unless the source says fma.
    "-ffp-contract=off",
    # Some compilers reorder sums by default, and a CC from the environment may include such a flag.
    "-fno-fast-math",
    # sqrtf as an instruction; the kernels never read errno.
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
)
# Windows needs none of these: it has a thread API, relocatable code, and math in its C library.
_POSIX_FLAGS, _POSIX_LIBRARIES = ("-fPIC", "-pthread"), ("-lm",)
# The name by which a program finds the library, instead of the build folder.
_NAME_FOR_MACOS = f"-Wl,-install_name,@rpath/{LIBRARY_NAMES['darwin']}"
# Each level's file, its processors, its flags, and the macro that tells the other files that it was built.
_X86, _ARM = ("x86_64", "AMD64", "amd64"), ("aarch64", "arm64", "ARM64")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
_DOT_PRODUCTS = "-march=armv8.2-a+dotprod"
_LEVELS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], str], ...] = (
    ("level_avx2.c", _X86, _AVX2, "EDGESPEC_HAS_AVX2"),
    ("level_avx_vnni.c", _X86, (*_AVX2, "-mavxvnni"), "EDGESPEC_HAS_AVX_VNNI"),
    ("level_avx512_vnni.c", _X86, (*_AVX2, *_AVX512), "EDGESPEC_HAS_AVX512_VNNI"),
    ("level_neon_dotprod.c", _ARM, (_DOT_PRODUCTS,), "EDGESPEC_HAS_NEON_DOTPROD"),
)
# zig's compiler is clang, but refuses features in -march.
_FOR_ZIG = {_DOT_PRODUCTS: "-mcpu=generic+v8_2a+dotprod"}
# The oldest macOS to support, the first one for ARM, unless MACOSX_DEPLOYMENT_TARGET is set.
_LEAST_MACOS = "-mmacosx-version-min=11.0"
_LONGEST_SAID = 300  # characters of a compiler's message
_COMPILE_S = 1800.0  # a level takes up to a minute, with sanitizers on a busy machine 20; longer than that, it hangs


class CompileError(Exception):
    """Why there is no library, in one sentence."""


def compile_library(
    output: Path,
    *,
    compiler: str | Sequence[str] | None = None,
    system: str | None = None,
    machine: str | None = None,
    extra_flags: Sequence[str] = (),
) -> None:
    """Compile the sources in this folder and write the library to ``output`` atomically, and its digest next to it.

    ``compiler`` is a command, by default $CC, else the first one found. ``system``, as in ``sys.platform``, and
    ``machine`` are the target platform, by default this system and the compiler's own target; on macOS
    ARCHFLAGS, as one universal library. Levels that an old compiler cannot build are left out. Raises CompileError.
    """
    command, system = _find_compiler(compiler), system or sys.platform
    is_zig = Path(command[0]).stem == "zig" or "ziglang" in command
    flags = [*_FLAGS, *(() if system == "win32" else _POSIX_FLAGS), *extra_flags]
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".kernels-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if system != "darwin" or is_zig:
            library = _compile_for(machine or _machine_of(command), command, flags, system, is_zig, folder)
        else:
            machines = [machine] if machine else _architectures()
            oldest = [] if os.environ.get("MACOSX_DEPLOYMENT_TARGET") else [_LEAST_MACOS]
            library = _joined(
                [
                    _compile_for(
                        each, command, [*flags, "-arch", each, *oldest], system, is_zig, _made(folder / each)
                    )
                    for each in machines
                ],
                folder,
            )
        library.replace(output)  # a process that has the old file open keeps it
    write_digest(output)


def digest_path(library: Path) -> Path:
    """The file beside ``library`` with its SHA-256, in the form that ``sha256sum --check`` reads."""
    return library.with_name(library.name + DIGEST_SUFFIX)


def write_digest(library: Path) -> None:
    """Write the digest that ``library`` must have to be loaded: damaged code would kill the process."""
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    path = digest_path(library)
    new = path.with_name(f"{path.name}.new")
    new.write_text(f"{digest}  {library.name}\n", encoding="utf-8", newline="\n")
    new.replace(path)  # at no time is a part of it there


def _compile_for(
    machine: str, command: Sequence[str], common: Sequence[str], system: str, is_zig: bool, folder: Path
) -> Path:
    """Compile the library for one processor; returns its path in ``folder``."""
    flags = list(common)
    levels = {name: (machines, own, macro) for name, machines, own, macro in _LEVELS}
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        begun: list[tuple[str, Future[Path]]] = []
        for source in sorted(FOLDER.glob("level_*.c")):
            machines, own, macro = levels.get(source.name, ((), (), ""))
            if is_zig:
                own = tuple(_FOR_ZIG.get(flag, flag) for flag in own)
            if not macro or machine in machines:
                begun.append((macro, pool.submit(_compile, command, [*common, *own], source, folder)))
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
        objects += pool.map(lambda source: _compile(command, flags, source, folder), others)
    library = folder / LIBRARY_NAMES.get(system, LIBRARY_NAMES["linux"])
    rest = [*map(os.fspath, objects), *(() if system == "win32" else _POSIX_LIBRARIES)]
    if system == "darwin":
        rest.append(_NAME_FOR_MACOS)
    _run([*command, *flags, "-shared", "-o", os.fspath(library), *rest])
    return library


def _machine_of(command: Sequence[str]) -> str:
    """The compiler's target processor, which may differ from this one: CC=aarch64-linux-gnu-gcc."""
    try:
        said = _run([*command, "-dumpmachine"])
    except CompileError:
        return platform.machine()  # an unusual compiler; if it does not run at all, compiling fails
    return said.partition("-")[0].strip() or platform.machine()


def _architectures() -> list[str]:
    """The processors in ARCHFLAGS ("-arch arm64 -arch x86_64"), as for every macOS extension; else this process's."""
    words = shlex.split(os.environ.get("ARCHFLAGS", ""))
    asked = [value for flag, value in itertools.pairwise(words) if flag == "-arch"]
    return list(dict.fromkeys(asked)) or [platform.machine()]


def _joined(libraries: Sequence[Path], folder: Path) -> Path:
    if len(libraries) == 1:
        return libraries[0]
    joined = folder / libraries[0].name
    _run(["lipo", "-create", *map(os.fspath, libraries), "-output", os.fspath(joined)])
    return joined


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def build_in_place(extra_flags: Sequence[str] = ()) -> str | None:
    """Write the library, or a note with the reason for its absence, to this folder; returns the reason."""
    return build(FOLDER, extra_flags)


def build(folder: Path, extra_flags: Sequence[str] = ()) -> str | None:
    """Write the library, or a note with the reason for its absence, to ``folder``; returns the reason.

    A folder that is not writable gets no note either. Never raises.
    """
    library, note = folder / LIBRARY_NAME, folder / NOTE_NAME
    try:
        compile_library(library, extra_flags=extra_flags)
        note.unlink(missing_ok=True)
    except (CompileError, OSError) as error:
        reason = str(error)
        # An older library would not fit the newer sources. Without its digest it is not loaded, and Windows does not
        # delete one that a process has loaded.
        for older in (digest_path(library), library):
            with contextlib.suppress(OSError):
                older.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            note.write_text(f"{reason}\n", encoding="utf-8")
        return reason
    return None


def _find_compiler(compiler: str | Sequence[str] | None) -> list[str]:
    chosen = compiler or os.environ.get("CC", "")
    if not isinstance(chosen, str):
        return list(chosen)
    if chosen:
        return shlex.split(chosen, posix=os.name != "nt")
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise CompileError(f"no C compiler was found ({', '.join(_COMPILERS)}) when edgespec was installed")


def _compile(command: Sequence[str], flags: Sequence[str], source: Path, folder: Path) -> Path:
    made = folder / f"{source.stem}.o"
    _run([*command, *flags, "-c", os.fspath(source), "-o", os.fspath(made)])
    return made


def _run(command: Sequence[str]) -> str:
    """Run the compiler; returns its output. Raises CompileError."""
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
    return done.stdout


if __name__ == "__main__":
    sys.exit(build_in_place(sys.argv[1:]))
