"""Builds edgespec's wheels for every system on one machine: `python scripts/build_wheels.py` puts them into dist/.

The kernels are cross-compiled by zig's C compiler, which comes as a Python package with the C libraries of all these
systems. It, the build backend and a reader of binaries are installed into build/wheel-tools the first time (100 MB);
nothing else is needed but Python and pip. Levels and flags are those of local builds, in edgespec/kernels/compile.py.

    --only TAG      build these wheels alone, by a part of their tag; may be repeated
    --check         then check each as far as this machine can: see docs/kernels.md
    --sysroot DIR   where an emulator finds another system's C library; may be repeated
    --draws N       compare N draws of tokens; default: 3000
    --programs DIR  keep each library in DIR/TAG with the programs that try it, for machines that can run them
    --run DIR/TAG   build nothing, run these programs and compare their digest with that of the machine they came from
    --json          print what came of it as one object
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
KERNELS = CHECKOUT / "edgespec" / "kernels"
TOOLS = CHECKOUT / "build" / "wheel-tools"
# Pinned: another compiler makes another library, and so another build in every numeric class.
REQUIREMENTS = ("ziglang==0.17.1", "hatchling==1.27.0", "lief==1.0.0")
# Without what only debuggers read, which is three quarters of the size. The compiler is known, so it may not warn.
EXTRA_FLAGS = ("-g0", "-s", "-Werror")
TEST_PROGRAMS = ("compare_levels", "pool_check")  # of tests/kernels
DIGEST_NAME = "digest"
CHECK_S = 1800.0  # an emulator takes a minute


@dataclass(frozen=True)
class Platform:
    """A wheel's tag, what compile.py calls its system and processor, and what zig does."""

    tag: str
    system: str
    machine: str
    target: str


# The C libraries are the oldest that Python 3.11 and later are commonly built for, macOS the first for ARM.
PLATFORMS = (
    Platform("manylinux_2_17_x86_64", "linux", "x86_64", "x86_64-linux-gnu.2.17"),
    Platform("manylinux_2_17_aarch64", "linux", "aarch64", "aarch64-linux-gnu.2.17"),
    Platform("musllinux_1_2_x86_64", "linux", "x86_64", "x86_64-linux-musl"),
    Platform("musllinux_1_2_aarch64", "linux", "aarch64", "aarch64-linux-musl"),
    Platform("macosx_11_0_arm64", "darwin", "arm64", "aarch64-macos.11.0"),
    Platform("macosx_11_0_x86_64", "darwin", "x86_64", "x86_64-macos.11.0"),
    Platform("win_amd64", "win32", "x86_64", "x86_64-windows-gnu"),
    Platform("win_arm64", "win32", "arm64", "aarch64-windows-gnu"),
)

# What a library may ask of a system: what every installation has.
ALLOWED = {
    "manylinux": r"lib(c|m|pthread)\.so\.\d|ld-linux-(x86-64|aarch64)\.so\.\d",
    "musllinux": r"libc\.so",
    "macosx": r"/usr/lib/libSystem\.B\.dylib",
    "win": r"(?i)kernel32\.dll|ntdll\.dll|api-ms-win-(crt|core)-[a-z0-9-]+\.dll",
}
NEWEST_GLIBC = (2, 17)
# What tests/kernels/pool_check.c is asked and answers: steps in turn, a cancel in the seventh, each item once, and
# two pools in parallel.
POOL_ANSWERS = (
    (("steps", "1"), ("0 0",)),
    (("steps", "7"), ("0 0",)),
    (("cancel", "3"), ("7 7 7 39 39 39",)),
    (("sharing", "3"), ("0 0",)),
    (("crowd", "2"), ("0", "2")),
)
# What zig's linker puts among a library's symbols on macOS.
LINKERS_OWN = {"_mh_dylib_header", "__dso_handle"}


@dataclass
class Result:
    """What is known of one wheel.

    `checked` is "run", "emulated", "linked" or "built"; `why` says what prevented a stronger check.
    """

    tag: str
    wheel: str
    wheel_bytes: int
    library_bytes: int
    library_sha256: str
    checked: str = "built"
    why: str = ""
    digest: str = ""
    levels: list[str] = field(default_factory=list)


class WheelError(Exception):
    """A wheel that cannot be built, or is not what it should be, in one sentence."""


def say(text: str) -> None:
    print(f"wheels: {text}", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------- tools


def install_tools() -> None:
    stamp = TOOLS / "requirements"
    wanted = " ".join(REQUIREMENTS)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    say(f"installing {', '.join(REQUIREMENTS)} into {TOOLS.relative_to(CHECKOUT)} …")
    shutil.rmtree(TOOLS, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(TOOLS)]
    done = subprocess.run([*command, *REQUIREMENTS], capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelError(f"the tools cannot be installed: {' '.join(done.stderr.split())[-300:]}")
    stamp.write_text(wanted, encoding="utf-8")


def zig(*words: str) -> list[str]:
    program = TOOLS / "ziglang" / ("zig.exe" if os.name == "nt" else "zig")
    return [str(program), *words]


def run(command: list[str], *, where: Path = CHECKOUT, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=where,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=CHECK_S,
    )
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())[-500:]
        raise WheelError(f"{Path(command[0]).name} ended with {done.returncode}: {said}")
    return done.stdout.strip()


def load(path: Path) -> ModuleType:
    """A module of the kernels, without the package around it, whose dependencies are not needed here."""
    spec = importlib.util.spec_from_file_location(f"edgespec_kernels_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018 (a path of ours)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def digest_path(library: Path) -> Path:
    found: Path = load(KERNELS / "compile.py").digest_path(library)
    return found


def header_functions() -> set[str]:
    """The names that the library's header exports."""
    text = (KERNELS / "edgespec_kernels.h").read_text(encoding="utf-8")
    return set(re.findall(r"^ES_EXPORT\b[^;]*?\b(es_\w+)\(", text, re.MULTILINE))


def level_names(wanted: Platform) -> list[str]:
    """The levels that a library for that processor has to have."""
    sources = [f for f, machines, _, _ in load(KERNELS / "compile.py")._LEVELS if wanted.machine in machines]
    texts = ((KERNELS / name).read_text(encoding="utf-8") for name in ["level_portable.c", *sources])
    return [re.findall(r'\.name = "([\w-]+)"', text)[0] for text in texts]


# --------------------------------------------------------------------------------------------------- build


def build(wanted: Platform, place: Path, out: Path) -> tuple[Path, Path]:
    """The wheel in ``out``, and its library in ``place``."""
    compiling = load(KERNELS / "compile.py")
    library = place / compiling.LIBRARY_NAMES[wanted.system]
    compiler = zig("cc", "-target", wanted.target)
    try:
        compiling.compile_library(
            library, compiler=compiler, system=wanted.system, machine=wanted.machine, extra_flags=EXTRA_FLAGS
        )
    except compiling.CompileError as error:
        raise WheelError(f"{wanted.tag}: {error}") from error
    made = place / "wheel"
    run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(made)],
        EDGESPEC_WHEEL_LIBRARY=str(library),
        EDGESPEC_WHEEL_PLATFORM=wanted.tag,
        PYTHONPATH=str(TOOLS),
        SOURCE_DATE_EPOCH=os.environ.get("SOURCE_DATE_EPOCH", "1577836800"),  # the same bytes of the same sources
    )
    (wheel,) = made.glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(wheel, out / wheel.name)), library


# --------------------------------------------------------------------------------------------------- check


def check_content(wanted: Platform, wheel: Path, library: Path) -> None:
    """The wheel has the one tag, this library, no sources, and nothing of the machine that it was built on."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        tags = re.findall(r"^Tag: (.*)$", file.read(next(n for n in names if n.endswith("/WHEEL"))).decode(), re.M)
        kernels = {n for n in names if n.startswith("edgespec/kernels/") and not n.endswith(".py")}
        built = {f"edgespec/kernels/{each.name}": each.read_bytes() for each in (library, digest_path(library))}
        if kernels != set(built):
            raise WheelError(f"{wheel.name}: beside Python its kernels are {sorted(kernels)}")
        changed = any(file.read(name) != content for name, content in built.items())
        packed = file.read(f"edgespec/kernels/{library.name}")
    if tags != [f"py3-none-{wanted.tag}"] or not wheel.name.endswith(f"-py3-none-{wanted.tag}.whl"):
        raise WheelError(f"{wheel.name}: its tags are {tags}")
    if changed:
        raise WheelError(f"{wheel.name}: its library is not the one that was built")
    for place in (os.fsencode(CHECKOUT), os.fsencode(library.parent)):
        if place in packed:
            raise WheelError(f"{wheel.name}: its library names a folder of this machine, {os.fsdecode(place)}")


def check_linked(wanted: Platform, library: Path) -> None:
    """The library exports what the header says, for this processor, and needs only what every such system has."""
    sys.path.insert(0, str(TOOLS))
    try:
        import lief
    finally:
        sys.path.remove(str(TOOLS))
    found = load(KERNELS / "binary.py").read_binary(library)
    names = load(KERNELS / "binary.py")
    expected = (wanted.system, (names.machine_name(wanted.machine),))
    if found is None or (found.system, found.machines) != expected:
        raise WheelError(f"{wanted.tag}: the library is for {found}")
    lief.logging.disable()
    binary: Any = lief.parse(str(library))
    if isinstance(binary, lief.MachO.FatBinary):
        binary = binary.at(0)
    exported = {_plain(each.name, wanted.system) for each in binary.exported_functions} - LINKERS_OWN
    if exported != header_functions():
        raise WheelError(f"{wanted.tag}: exports differ from the header's: {sorted(exported ^ header_functions())}")
    content = library.read_bytes()
    missing = [name for name in level_names(wanted) if name.encode() + b"\0" not in content]
    if missing:
        raise WheelError(f"{wanted.tag}: the library has no level {', '.join(missing)}")
    allowed = next(pattern for kind, pattern in ALLOWED.items() if wanted.tag.startswith(kind))
    strange = [name for name in _needed(binary, wanted.system) if not re.fullmatch(allowed, name)]
    if strange:
        raise WheelError(f"{wanted.tag}: the library needs {', '.join(strange)}")
    if wanted.tag.startswith("manylinux"):
        versions = {tuple(map(int, v.split("."))) for v in _glibc_versions(binary)}
        if not versions or max(versions) > NEWEST_GLIBC:
            raise WheelError(f"{wanted.tag}: the library needs glibc {max(versions, default=None)}")
    if wanted.system == "darwin":
        if wanted.machine == "arm64" and not binary.has_code_signature:
            raise WheelError(f"{wanted.tag}: the library is not signed, and macOS refuses such on ARM")
        if found.least_macos != (11, 0):
            raise WheelError(f"{wanted.tag}: the library needs macOS {found.least_macos}")


def _plain(name: str, system: str) -> str:
    return name.removeprefix("_") if system == "darwin" else name


def _needed(binary: Any, system: str) -> list[str]:
    """The libraries that it asks for; on macOS its own name is among them."""
    names = [str(getattr(each, "name", each)) for each in binary.libraries]
    return [name for name in names if system != "darwin" or not name.startswith("@rpath/")]


def _glibc_versions(binary: Any) -> list[str]:
    needed = (
        each.name for required in binary.symbols_version_requirement for each in required.get_auxiliary_symbols()
    )
    return [name.removeprefix("GLIBC_") for name in needed if re.fullmatch(r"GLIBC_[\d.]+", name)]


def compile_test(wanted: Platform, library: Path, name: str, *, calls_library: bool) -> Path:
    """A program of tests/kernels for that system, linked with the library in its folder or with the sources in it."""
    program = library.parent / (f"{name}.exe" if wanted.system == "win32" else name)
    command = [*zig("cc"), "-target", wanted.target, "-std=c11", "-O1", "-ffp-contract=off", f"-I{KERNELS}"]
    command += ["-DOLD_C_LIBRARY"]
    command += [str(CHECKOUT / "tests" / "kernels" / f"{name}.c"), "-o", str(program)]
    if wanted.system == "win32":
        command += [str(library)] if calls_library else []
    else:
        command += ["-pthread", "-lm"]
        if calls_library:
            where = "@loader_path" if wanted.system == "darwin" else "$ORIGIN"
            command += ["-L", str(library.parent), "-ledgespec_kernels", f"-Wl,-rpath,{where}"]
    run(command)
    return program


def runner(wanted: Platform, sysroots: list[Path]) -> tuple[list[str] | None, str]:
    """The command that runs that system's programs here ([]: none is needed), and how it counts; or None and why."""
    here = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    machine = {"arm64": "aarch64"}.get(wanted.machine, wanted.machine)
    if wanted.system == "win32":
        if sys.platform == "win32":
            return ([], "run") if here.lower() in (machine, "amd64") else (None, f"this is no {machine} Windows")
        if machine != "x86_64" or here != "x86_64":
            return None, "nothing here runs programs of Windows for ARM"
        wine = shutil.which("wine64") or shutil.which("wine") or _debian_wine()
        return ([wine], "emulated") if wine else (None, "wine was not found")
    if wanted.system == "darwin":
        fits = sys.platform == "darwin" and here == machine
        return ([], "run") if fits else (None, "nothing here runs programs of macOS")
    if sys.platform != "linux":
        return None, "nothing here runs programs of Linux"
    loader = {
        "manylinux_2_17_x86_64": "lib64/ld-linux-x86-64.so.2",
        "manylinux_2_17_aarch64": "lib/ld-linux-aarch64.so.1",
        "musllinux_1_2_x86_64": "lib/ld-musl-x86_64.so.1",
        "musllinux_1_2_aarch64": "lib/ld-musl-aarch64.so.1",
    }[wanted.tag]
    roots = [*sysroots, Path(f"/usr/{machine}-linux-gnu"), Path(f"/usr/{machine}-linux-musl"), Path("/")]
    root = next((folder for folder in roots if (folder / loader).exists()), None)
    if root is None:
        return None, f"{Path(loader).name} was not found"
    if machine == here:
        return ([] if root == Path("/") else [str(root / loader)]), "run"
    emulator = shutil.which(f"qemu-{machine}") or shutil.which(f"qemu-{machine}-static")
    return ([emulator, "-L", str(root)], "emulated") if emulator else (None, f"qemu-{machine} was not found")


def _debian_wine() -> str | None:
    """Debian's package wine64 puts nothing on the path."""
    path = Path("/usr/lib/wine/wine64")
    return str(path) if path.exists() else None


def compile_tests(wanted: Platform, library: Path) -> tuple[Path, Path]:
    """What compares all levels through the library, and what tries the pool of threads."""
    compare, pool = TEST_PROGRAMS
    return (
        compile_test(wanted, library, compare, calls_library=True),
        compile_test(wanted, library, pool, calls_library=False),
    )


def compute(programs: tuple[Path, Path], begins: list[str], draws: int) -> tuple[str, list[str]]:
    """Run the programs. Returns the digest of what was computed, and the levels that computed it."""
    compare, pool = programs
    said = run([*begins, str(compare), str(draws)], where=compare.parent, WINEDEBUG="-all")
    found = re.search(r"^digest (\w+)$", said, re.MULTILINE)
    if found is None:
        raise WheelError(f"{compare} prints no digest: {said[-300:]!r}")
    digest = found[1]
    levels = [line.partition(":")[0] for line in said.splitlines() if "comparisons" in line]
    for question, answers in POOL_ANSWERS:
        said = run([*begins, str(pool), *question], where=pool.parent, WINEDEBUG="-all")
        if said not in answers:
            raise WheelError(f"{pool}: the pool of threads answers {said!r} to {' '.join(question)}")
    return digest, levels


def run_elsewhere(place: Path, draws: int) -> None:
    """Run programs that another machine built for this one. Raises WheelError if the bits are others than there."""
    compare, pool = (next(iter(sorted(place.resolve().glob(f"{name}*"))), None) for name in TEST_PROGRAMS)
    if compare is None or pool is None:
        raise WheelError(f"{place} has no programs")
    for program in (compare, pool):
        program.chmod(0o755)
    digest, levels = compute((compare, pool), [], draws)
    told = place.resolve().parent / DIGEST_NAME
    print(f"{place.name}: digest {digest} ({', '.join(levels)})")
    if told.exists() and digest != told.read_text(encoding="utf-8").strip():
        raise WheelError(f"{place.name} computes other bits than where it was built: {told.read_text().strip()}")


# ---------------------------------------------------------------------------------------------------- main


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", action="append", default=[], metavar="TAG")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "dist", metavar="DIR")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--sysroot", type=Path, action="append", default=[], metavar="DIR")
    parser.add_argument("--draws", type=int, default=3000, metavar="N")
    parser.add_argument("--programs", type=Path, metavar="DIR")
    parser.add_argument("--run", type=Path, metavar="DIR/TAG")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def one(wanted: Platform, options: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory(prefix="edgespec-wheel-") as name:
        say(f"building {wanted.tag} …")
        wheel, library = build(wanted, Path(name), options.out)
        content = library.read_bytes()
        result = Result(
            tag=wanted.tag,
            wheel=wheel.name,
            wheel_bytes=wheel.stat().st_size,
            library_bytes=len(content),
            library_sha256=hashlib.sha256(content).hexdigest(),
        )
        programs = compile_tests(wanted, library) if options.check or options.programs else None
        if programs and options.check:
            check_content(wanted, wheel, library)
            check_linked(wanted, library)
            begins, how = runner(wanted, options.sysroot)
            if begins is None:
                result.checked, result.why = "linked", how
            else:
                result.checked = how
                result.digest, result.levels = compute(programs, begins, options.draws)
        if programs and options.programs:
            place = options.programs / wanted.tag
            place.mkdir(parents=True, exist_ok=True)
            for each in (library, digest_path(library), *programs):
                shutil.copy(each, place)
        return result


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    if options.run:
        try:
            run_elsewhere(options.run, options.draws)
        except (WheelError, OSError, subprocess.TimeoutExpired) as error:
            say(str(error))
            return 1
        return 0
    wanted = [each for each in PLATFORMS if not options.only or any(part in each.tag for part in options.only)]
    if not wanted:
        say(f"no wheel's tag has {' or '.join(options.only)} in it; there are {', '.join(p.tag for p in PLATFORMS)}")
        return 2
    try:
        install_tools()
        results = [one(each, options) for each in wanted]
    except (WheelError, OSError, subprocess.TimeoutExpired) as error:
        say(str(error))
        return 1
    digests = {result.digest for result in results if result.digest}
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        for r in results:
            told = f"digest {r.digest} ({', '.join(r.levels)})" if r.digest else r.why
            print(f"{r.tag:24} {r.wheel_bytes:8} bytes, library {r.library_bytes:7}  {r.checked}  {told}".rstrip())
    if options.programs and len(digests) == 1:
        (options.programs / DIGEST_NAME).write_text(f"{digests.pop()}\n", encoding="utf-8")
    if len(digests) > 1:
        say(f"the wheels compute different bits: {', '.join(sorted(digests))}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
