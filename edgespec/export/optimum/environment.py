"""A separate Python environment with Optimum: created once under the home, or given by the user.

Optimum pins transformers and the hub's client to versions that conflict with edgespec's, and installs PyTorch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from edgespec.errors import DownloadError, EdgespecError, reason_of
from edgespec.export.optimum.process import POLL_S, check_interpreter, end_group, last_line, start_group
from edgespec.files.atomic import remove_stale_temporaries, rename, sync_folder, temporary_name, write_json
from edgespec.files.disk import disk_errors, require_space
from edgespec.files.home import Home
from edgespec.files.progress import QUIET, Job

# Versions tested together. onnxruntime's 4-bit quantizer needs onnx-ir.
TORCH = "torch==2.13.0"
PINS = ("optimum-onnx[onnxruntime]==0.1.0", "transformers==4.57.6", "accelerate==1.15.0", "onnx-ir==1.1.0", TORCH)

# The build without CUDA (0.2 GB instead of 3), if the user's package index has it.
_TORCH_FOR_CPU = f"{TORCH}+cpu"

MARKER = "complete.json"

# Size of the installed packages (1.3 GB on Linux with the CPU build of PyTorch) plus pip's temporary copies.
_NEEDED_BYTES = 2_500_000_000

# Half an hour: a download of PyTorch over a slow line. After a longer wait the user should check the other process.
LOCK_TIMEOUT_S = 1800.0

_NO_SUCH_VERSION = re.compile(r"No matching distribution found|Could not find a version")
_CREDENTIALS = re.compile(r"://[^/@\s]+@")

Runner: TypeAlias = Callable[[Sequence[str], Path, Callable[[], None]], tuple[int, bytes]]
"""Runs a command to its end: (command, folder for its temporary files, callback called ten times a second) to (exit
code, the tail of its output)."""


def environment_folder(home: Home) -> Path:
    """The path of the environment for this Python, whether it exists or not."""
    told = json.dumps([*PINS, sys.version_info[:2]])
    return home.tools / f"optimum-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def find_environment(home: Home) -> Path | None:
    """The interpreter of the environment; None if the environment is missing or incomplete."""
    folder = environment_folder(home)
    python = _python_in(folder)
    return python if (folder / MARKER).is_file() and python.exists() else None


def prepare_environment(
    home: Home,
    *,
    run: Runner | None = None,
    download: bool = True,
    job: Job = QUIET,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> Path:
    """The interpreter of the environment, which is created if missing.

    The environment appears complete or not at all; a second process waits for the first. Raises DownloadError with
    pip's reason, or if it is missing and may not ``download``, DiskSpaceError, CancelledError, StoreLockedError,
    EdgespecError.
    """
    if (found := find_environment(home)) is not None:
        return found
    if not download:
        raise DownloadError(
            "the environment for Optimum is not on this machine, and offline was asked for",
            hint="give an interpreter that has Optimum with --python PATH, or run it once without --offline",
        )
    run = run or run_logged
    folder = environment_folder(home)
    home.create(home.tools)
    doing = "creating the environment for Optimum"
    with home.locked("optimum-environment", doing, job, timeout_s=lock_timeout_s):
        if (found := find_environment(home)) is not None:  # another process has created it
            return found
        remove_stale_temporaries(home.tools)
        require_space(home.tools, _NEEDED_BYTES, "an environment for Optimum")
        stage = home.tools / temporary_name(folder.name)
        try:
            with disk_errors(stage, _NEEDED_BYTES):
                _build(stage, run, job)
                write_json(stage / MARKER, {"pins": PINS})
                shutil.rmtree(folder, ignore_errors=True)  # an environment without the marker is incomplete
                rename(stage, folder)
                sync_folder(home.tools)
        except OSError as error:
            raise EdgespecError(
                f"the environment for Optimum cannot be created at {folder}: {reason_of(error)}",
                hint="give the command your own interpreter with --python",
            ) from error
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    return _python_in(folder)


def _python_in(folder: Path) -> Path:
    return folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python"


def _build(stage: Path, run: Runner, job: Job) -> None:
    def watch(stage_name: str) -> Callable[[], None]:
        def tick() -> None:
            job.check("creating the environment for Optimum was cancelled; nothing was kept")
            job.tell(stage_name, "Optimum")

        tick()
        return tick

    if not sys.executable:
        raise EdgespecError(
            "this Python does not know its own executable, so it cannot create an environment",
            hint="give the command an interpreter that has Optimum with --python",
        )
    # Temporary files go to the disk whose space was checked: the system's folder may be too small for PyTorch.
    scratch = stage / "tmp"
    scratch.mkdir(parents=True)
    # Isolated, as the worker: with -m alone, a venv.py in the working directory would run.
    create = [sys.executable, "-I", "-m", "venv", os.fspath(stage)]
    code, said = run(create, scratch, watch("creating an environment for"))
    if code:
        raise EdgespecError(
            f"python -m venv failed: {last_line(said)}",
            hint="install this Python's venv module, or give an interpreter that has Optimum with --python",
        )
    python = _python_in(stage)
    install = [os.fspath(python), "-I", "-m", "pip", "install", "--only-binary=:all:", "--no-input"]
    install += ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "off"]
    for_cpu = [_TORCH_FOR_CPU if pin == TORCH else pin for pin in PINS]
    code, said = run([*install, *for_cpu], scratch, watch("installing"))
    if code and for_cpu != list(PINS) and _NO_SUCH_VERSION.search(said.decode("utf-8", "replace")):
        code, said = run([*install, *PINS], scratch, watch("installing"))
    if code:
        raise DownloadError(
            f"pip could not install Optimum: {_reason(said)}",
            hint="try again with a network, or give an interpreter that has Optimum with --python",
        )
    check_interpreter(python, Job(cancelled=job.cancelled))
    shutil.rmtree(scratch, ignore_errors=True)


def _reason(said: bytes) -> str:
    """The last error of pip, else the last line of its output."""
    text = _CREDENTIALS.sub("://", said.decode("utf-8", "replace"))
    errors = [line.removeprefix("ERROR: ") for line in text.splitlines() if line.startswith("ERROR: ")]
    return last_line((errors[-1] if errors else text).encode())


def run_logged(command: Sequence[str], scratch: Path, tick: Callable[[], None]) -> tuple[int, bytes]:
    """Run a command as a Runner; an exception of ``tick`` kills the command and all processes it started."""
    with tempfile.TemporaryFile() as log:
        process = start_group(command, stderr=log, merged=True, scratch=scratch)
        try:
            while process.poll() is None:
                tick()
                with contextlib.suppress(Exception):
                    process.wait(POLL_S)
        finally:
            end_group(process)
        log.seek(0)
        return process.returncode, log.read()[-64 * 1024 :]
