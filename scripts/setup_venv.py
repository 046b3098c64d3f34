"""Create or update ``.venv`` in this checkout. Called by scripts/setup.sh; standard library only.

Everything goes to stderr, stdin is never read. A finished setup leaves a stamp, so that the next start costs
milliseconds; an interrupted one leaves none, and the next start continues with what pip has already installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

CHECKOUT = Path(__file__).resolve().parent.parent
VENV = CHECKOUT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
# Made before anything else is written, so a .venv without it was not made by this script.
LOCK = VENV / "setup.lock"

WANTED = "{}.{}".format(*sys.version_info[:2])
GB = 1_000_000_000
# Without the development tools the environment is about 0.15 GB, pip's cache and downloads another 0.1 GB.
VENV_BYTES = GB // 2
# What developing needs is about 0.6 GB, with pip's cache and downloads.
DEV_VENV_BYTES = 3 * GB // 2
# pip compiles llama-cpp-python in the temporary folder: sources, object files, wheel, and cmake where it is not
# installed; a GPU backend asked for in CMAKE_ARGS takes most of it.
BUILD_BYTES = 5 * GB // 2
# The default chat's target (1.12 GB) and its drafter (0.49 GB), and room for measurements.
MODELS_BYTES = 2 * GB
NOTICE_EVERY_S = 30.0

# What pip's log says when it is not our fault, and what helps; the first match wins.
KNOWN_FAILURES = (
    (("No space left on device",), "The disk is full: free some space and run it again."),
    (
        ("Failed building wheel", "CMake Error", "Failed to build"),
        "A package did not compile; the log has the compiler's own message. A prebuilt one spares the compiler: "
        "set EDGESPEC_LLAMA_WHEELS (see docs/start.md) and run it again.",
    ),
    (
        ("No matching distribution", "ConnectionError", "NewConnectionError", "Temporary failure", "ReadTimeout"),
        "pip could not get a package: check the network, the proxy or pip's own configuration and run it again.",
    ),
)


def say(text: str) -> None:
    """One line on stderr."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


def stop(text: str) -> NoReturn:
    """One sentence, then exit code 1."""
    say(text)
    sys.exit(1)


# ------------------------------------------------------------------------------------------------ stamps


def stamp_of() -> str:
    """Changes whenever a finished setup would have to be repeated.

    The checkout's own path is part of it because the scripts in ``.venv/bin`` name it: a moved checkout needs them
    written again.
    """
    digest = hashlib.sha256()
    kernels = CHECKOUT / "edgespec" / "kernels"  # compiled by the installation
    sources = sorted(path for path in kernels.glob("*") if path.suffix in {".c", ".h", ".py"})
    for path in (CHECKOUT / "pyproject.toml", Path(__file__), *CHECKOUT.glob("hatch_build.py"), *sources):
        digest.update(path.read_bytes())
    digest.update(os.fsencode(CHECKOUT))
    digest.update(WANTED.encode())
    return digest.hexdigest()


def stamp_path(extra: str) -> Path:
    return VENV / f"setup-{extra or 'base'}.stamp"


def is_current(extra: str) -> bool:
    try:
        written = stamp_path(extra).read_text(encoding="utf-8")
    except OSError:
        return False
    return written == stamp_of() and os.access(VENV_PYTHON, os.X_OK) and (VENV / "bin" / "edgespec").exists()


# ------------------------------------------------------------------------------------------------ checks


def nearest_existing(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())


def check_disk(*, builds_llama: bool) -> None:
    """Free space for the environment, for the build where it happens, and for the models."""
    if os.environ.get("EDGESPEC_SKIP_DISK_CHECK"):
        return
    needs = [(CHECKOUT, DEV_VENV_BYTES if builds_llama else VENV_BYTES, "Python packages")]
    if builds_llama:
        needs.append((Path(tempfile.gettempdir()), BUILD_BYTES, "compiling llama-cpp-python"))
    # A checkout that was set up before has most likely fetched its models, and the store checks again, exactly.
    if not stamp_path("").exists():
        store = os.environ.get("EDGESPEC_HOME") or os.environ.get("XDG_DATA_HOME") or os.environ.get("HOME") or "/"
        volume_of_store = nearest_existing(Path(store).absolute())
        if os.access(volume_of_store, os.W_OK):  # if not, the store has to be moved anyway, and says so itself
            needs.append((volume_of_store, MODELS_BYTES, "the default chat's two models"))
    taken: dict[int, int] = {}
    for place, need, purpose in needs:
        volume = place.stat().st_dev
        taken[volume] = taken.get(volume, 0) + need
        free = shutil.disk_usage(place).free
        if free < taken[volume]:
            stop(
                f"{place} has {free / GB:.1f} GB free where {taken[volume] / GB:.1f} GB are needed "
                f"({need / GB:.1f} GB of it for {purpose}); free some, or set EDGESPEC_SKIP_DISK_CHECK=1."
            )


def has_compiler(variable: str, names: tuple[str, ...]) -> bool:
    chosen = os.environ.get(variable, "").split()
    return any(shutil.which(name) for name in (*chosen[:1], *names))


def check_compilers(*, builds_llama: bool) -> None:
    """The kernels are compiled here; llama-cpp-python too, which is published as source, unless there is a wheel."""
    wanted = [("C", "CC", ("cc", "gcc", "clang"))]
    if builds_llama:
        wanted.append(("C++", "CXX", ("c++", "g++", "clang++")))
    missing = [what for what, variable, names in wanted if not has_compiler(variable, names)]
    if not missing and sys.platform == "darwin":
        # macOS has a cc that only opens a dialog until the command line tools are there.
        found = subprocess.run(["xcode-select", "-p"], capture_output=True, stdin=subprocess.DEVNULL, check=False)
        missing = [] if found.returncode == 0 else ["C"]
    if not missing:
        return
    what = " and ".join(missing)
    how = "(Debian, Ubuntu: build-essential; Fedora: gcc-c++; macOS: xcode-select --install)"
    if not builds_llama:
        stop(
            f"no C compiler found, and edgespec's kernels are compiled on installation; install one {how}, "
            "or set EDGESPEC_LLAMA_WHEELS (see docs/start.md) to run llama.cpp in their place."
        )
    if os.environ.get("EDGESPEC_LLAMA_WHEELS"):
        say(f"no {what} compiler here: this works only if EDGESPEC_LLAMA_WHEELS has a wheel for this machine.")
        return
    stop(
        f"no {what} compiler found, and llama-cpp-python is compiled on installation (about 5 minutes on 2 cores); "
        f"install one {how}, or set "
        "EDGESPEC_LLAMA_WHEELS to the prebuilt wheel index that llama-cpp-python's own README names."
    )


# --------------------------------------------------------------------------------------------- the steps


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One setup at a time in this checkout; a second one waits, says so, and usually finds the work done."""
    try:
        import fcntl
    except ImportError:
        stop(
            "this setup needs Linux, macOS or WSL; on Windows run pip install -e . in a virtual environment instead."
        )
    if (VENV / "pyvenv.cfg").exists() and not LOCK.exists() and python_of_venv() != WANTED:
        stop(f".venv is not from this setup and has no working Python {WANTED} with pip; move it away and run again.")
    try:
        VENV.mkdir(exist_ok=True)
        LOCK.touch()
        handle = LOCK.open("r+")
    except OSError as error:
        stop(f"cannot write to {VENV} ({error.strerror}); make the checkout writable, or clone it elsewhere.")
    # pip inherits it (see run_logged): should this process be killed, its pip still keeps others out until it ends.
    os.set_inheritable(handle.fileno(), True)
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another setup is running here (process {handle.read().strip() or '?'}); waiting for it to end.")
            fcntl.flock(handle, fcntl.LOCK_EX)
        handle.seek(0)
        handle.truncate()
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        yield


def run_logged(what: str, command: list[str], expectation: str = "") -> None:
    """Run ``command`` with its output in the log, and say every half minute that it is still running.

    It gets a new process group: pip does not pass signals on, and an interrupted setup must not leave a
    compiler running behind it.
    """
    env = {k: v for k, v in os.environ.items() if k not in {"PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX"}}
    # PIP_USER=1, from the environment or a pip.conf, would install outside .venv.
    env |= {"PIP_USER": "0", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    started = time.monotonic()
    say(f"{what}{expectation} …")
    with LOG.open("ab") as log:
        log.write(f"\n$ {' '.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=CHECKOUT,
            env=env,
            process_group=0,
            close_fds=False,  # for the lock's handle, the only inheritable one
        )
        try:
            while True:
                try:
                    status = process.wait(NOTICE_EVERY_S)
                    break
                except subprocess.TimeoutExpired:
                    minutes, seconds = divmod(round(time.monotonic() - started), 60)
                    say(f"{what}: still running after {minutes} min {seconds:02} s")
        except BaseException:
            end_group(process)
            raise
    if status != 0:
        explain_failure(what)


def end_group(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def explain_failure(what: str) -> NoReturn:
    text = LOG.read_text(encoding="utf-8", errors="replace")
    this_step = text.rpartition("\n$ ")[2]
    # Clipped, because pip lists every release there is when none fits.
    print("\n".join(line[:300] for line in this_step.splitlines()[-20:]), file=sys.stderr)
    say(f"{what} failed; the lines above are the end of {LOG}.")
    for signs, advice in KNOWN_FAILURES:
        if any(sign in this_step for sign in signs):
            stop(advice)
    stop("Running it again resumes where it stopped; `make clean` starts from nothing.")


def python_of_venv() -> str | None:
    """``major.minor`` of the interpreter in ``.venv`` if it runs and has pip, else None."""
    code = "import sys, importlib.util as u; print('{}.{}'.format(*sys.version_info) if u.find_spec('pip') else '')"
    try:
        found = subprocess.run([VENV_PYTHON, "-I", "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.strip() or None


def ensure_venv() -> None:
    if python_of_venv() == WANTED:
        return
    if (VENV / "pyvenv.cfg").exists():
        say(f".venv has no working Python {WANTED}: making it again.")
        # Emptied rather than removed: the lock and the log in it are in use.
        for entry in VENV.iterdir():
            if entry in (LOCK, LOG):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    # Inside a virtual environment, the interpreter it was made from: ours may be the one just emptied.
    base = getattr(sys, "_base_executable", None) or sys.executable
    check = subprocess.run([base, "-I", "-c", "import venv, ensurepip"], capture_output=True, check=False)
    if check.returncode != 0:
        stop(f"{base} has no venv module; install it (Debian, Ubuntu: python{WANTED}-venv) or set PYTHON to another.")
    run_logged(f"creating .venv with Python {sys.version.split()[0]}", [base, "-I", "-m", "venv", str(VENV)])


def llama_requirement() -> str:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return next(str(r) for r in project["optional-dependencies"]["llama"] if str(r).startswith("llama-cpp-python"))


def wants_llama(extra: str) -> bool:
    """Developing needs llama.cpp; who names prebuilt wheels of it wants it too."""
    return bool(extra) or bool(os.environ.get("EDGESPEC_LLAMA_WHEELS"))


def has_llama() -> bool:
    return any(VENV.glob("lib/python*/site-packages/llama_cpp_python-*.dist-info"))


def prebuilt_options() -> list[str]:
    source = os.environ.get("EDGESPEC_LLAMA_WHEELS")
    if not source:
        return []
    where = ["--find-links", source] if Path(source).is_dir() else ["--extra-index-url", source]
    # Without it pip would compile a source release that is newer than the newest wheel.
    return ["--prefer-binary", *where]


def install(extra: str) -> None:
    pip = [str(VENV_PYTHON), "-I", "-m", "pip", "install", "--progress-bar", "off"]
    if wants_llama(extra) and not has_llama():
        # On its own and first, so that an interruption after the compilation does not cost a second one.
        run_logged(
            "installing llama-cpp-python",
            [*pip, *prebuilt_options(), llama_requirement()],
            " (seconds if a wheel is available, about 5 minutes on 2 cores if it is compiled)",
        )
    target = f"{CHECKOUT}[{extra or 'serve'}]"  # the server's packages are small, and `edgespec serve` works as shown
    run_logged("installing edgespec and what it needs", [*pip, *prebuilt_options(), "--editable", target])


def set_up(extra: str) -> None:
    if is_current(extra):
        return
    with locked():
        if is_current(extra):
            return
        for path in VENV.glob("setup-*.stamp"):
            if path.read_text(encoding="utf-8") != stamp_of():
                path.unlink()
        builds_llama = wants_llama(extra) and not has_llama()
        check_disk(builds_llama=builds_llama)
        check_compilers(builds_llama=builds_llama)
        LOG.write_bytes(b"")
        ensure_venv()
        install(extra)
        for done in {extra, ""}:
            stamp_path(done).write_text(stamp_of(), encoding="utf-8")
        say("done.")


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["dev"]):
        stop("usage: scripts/setup.sh [dev]")

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, interrupt)
    try:
        set_up("dev" if arguments else "")
    except KeyboardInterrupt:
        say("interrupted; running it again resumes.")
        return 130
    except OSError as error:
        stop(f"{error}; `make clean` starts from nothing.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
