"""Runs ``optimum/worker.py`` as a child process of another Python, parses its output and ends all its processes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from edgespec.errors import (
    EdgespecError,
    InvalidRequestError,
    MemoryLimitError,
    RuntimeUnavailableError,
    reason_of,
)
from edgespec.files.progress import QUIET, Job
from edgespec.runtimes.thread import start_thread

WORKER = Path(__file__).with_name("worker.py")

# Short enough that cancellation feels immediate; a wake-up takes microseconds.
POLL_S = 0.1

# The worker prints a few stages and one result; a program that prints more is not the worker.
_MOST_LINES, _MOST_LINE_BYTES = 1000, 64 * 1024
_TAIL_BYTES = 64 * 1024
_LONGEST_SHOWN = 300  # characters of a worker's message

_GRACE_S = 2.0  # for the pipes of a killed process


def check_interpreter(python: Path, job: Job = QUIET) -> Mapping[str, str]:
    """The versions of the packages for a conversion that ``python`` has.

    Raises InvalidRequestError if ``python`` is not an interpreter, RuntimeUnavailableError if a package is missing.
    """
    if not python.is_file() or not os.access(python, os.X_OK):
        raise InvalidRequestError(
            f"{python} is not a program that can be run",
            hint="give the path of a Python, for example .venv/bin/python",
        )
    return versions_in(run_worker(python, ["probe"], source=str(python), job=job))


def versions_in(result: Mapping[str, Any]) -> dict[str, str]:
    """The package versions in a result of the worker."""
    versions = result.get("versions")
    found = versions if isinstance(versions, dict) else {}
    return {str(name)[:64]: str(value)[:64] for name, value in found.items()}


def run_worker(python: Path, arguments: Sequence[str], *, source: str, job: Job = QUIET) -> Mapping[str, Any]:
    """Run the worker under ``python``; returns its result. ``source`` names the work in progress and errors.

    On any exception the worker and all processes it started are killed. Raises CancelledError,
    RuntimeUnavailableError (a package is missing), InvalidRequestError (this model cannot be converted),
    MemoryLimitError, EdgespecError.
    """
    with tempfile.TemporaryFile() as log:
        try:
            # Isolated: the worker must not import from PYTHONPATH or the working directory.
            process = start_group([os.fspath(python), "-I", os.fspath(WORKER), *arguments], stderr=log)
        except OSError as error:
            raise InvalidRequestError(
                f"{python} cannot be run: {reason_of(error)}", hint="give the path of a Python"
            ) from error
        answer = _listen(process, source, job)
        return _result(answer, process.returncode, _tail(log), python, source)


# ------------------------------------------------------------------------------------------------ processes


def start_group(
    command: Sequence[str], *, stderr: IO[bytes], merged: bool = False, scratch: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a process in a new process group, without stdin.

    ``merged`` also sends stdout to ``stderr``; ``scratch`` is the folder for temporary files (None: the default).
    """
    environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    if scratch is not None:
        environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), os.fspath(scratch))
    on_windows = {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
    own_group: dict[str, Any] = on_windows if os.name == "nt" else {"start_new_session": True}
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=stderr if merged else subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, **environment},
        **own_group,
    )


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all processes it started. Idempotent."""
    if os.name == "nt":
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        process.kill()
    process.wait()


def last_line(log: bytes) -> str:
    """The last non-empty line of a tool's output."""
    lines = [line.strip() for line in log.decode("utf-8", "replace").splitlines()]
    return next((line[:_LONGEST_SHOWN] for line in reversed(lines) if line), "no output")


def _tail(log: IO[bytes]) -> bytes:
    log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
    return log.read()


# ------------------------------------------------------------------------------------------------ the output


def _listen(process: subprocess.Popen[bytes], source: str, job: Job) -> Mapping[str, Any] | None:
    """Report the stages until the process closes its output; returns its answer, None without an answer."""
    assert process.stdout is not None
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    # A thread reads the pipe: Windows cannot wait for a pipe with a timeout for the cancellation check.
    reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), name="edgespec-optimum", daemon=True)
    answer: Mapping[str, Any] | None = None
    polls_left = round(_GRACE_S / POLL_S)
    try:
        start_thread(reader)
        while polls_left:
            job.check("the conversion was cancelled; nothing was written")
            try:
                line = lines.get(timeout=POLL_S)
            except queue.Empty:
                # Processes that the worker started may keep the pipe open.
                polls_left -= process.poll() is not None
                continue
            if line is None:
                break
            found = _parsed(line)
            if found is None:
                raise EdgespecError(
                    f"{source}: the converter's output is not an answer: {last_line(line)}",
                    hint="check that the given interpreter is a Python",
                )
            stage = found.get("stage")
            if isinstance(stage, str):
                job.tell(stage[:80], source)
            if "result" in found or "error" in found:
                answer = found
        try:
            process.wait(_GRACE_S)  # before the group is killed, so that the exit code is the worker's
        except subprocess.TimeoutExpired:
            if answer is None:
                raise EdgespecError(
                    f"{source}: the converter prints too much and does not end",
                    hint="check that the given interpreter is a Python with Optimum",
                ) from None
        return answer
    finally:
        end_group(process)
        if reader.ident is not None:  # it was started
            reader.join(_GRACE_S)
        if not reader.is_alive():
            process.stdout.close()


def _read_lines(stream: IO[bytes], lines: queue.SimpleQueue[bytes | None]) -> None:
    with contextlib.suppress(OSError, ValueError):
        for _ in range(_MOST_LINES):
            line = stream.readline(_MOST_LINE_BYTES)
            if not line:
                break
            lines.put(line)
    lines.put(None)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _result(answer: Mapping[str, Any] | None, code: int, log: bytes, python: Path, source: str) -> Mapping[str, Any]:
    result = None if answer is None else answer.get("result")
    if isinstance(result, dict):
        return result
    error = None if answer is None else answer.get("error")
    if not isinstance(error, dict):
        if code == -getattr(signal, "SIGKILL", 9):
            raise _no_memory(source, "the converter was killed, probably because the system ran out of memory")
        raise EdgespecError(
            f"{source}: the conversion ended without an answer (exit code {code}): {last_line(log)}",
            hint=f"check that {python} is a Python with Optimum",
        )
    kind, message = str(error.get("kind")), " ".join(str(error.get("message")).split())[:_LONGEST_SHOWN]
    if kind == "missing":
        raise RuntimeUnavailableError(
            f"{python} lacks packages for the conversion: {message}",
            hint="install optimum-onnx[onnxruntime], transformers, torch and onnx-ir there (packages in the user's "
            "site folder are not seen), or leave out --python",
        )
    if kind == "memory":
        raise _no_memory(source, message)
    if kind in ("unknown", "weights", "check"):
        raise InvalidRequestError(f"{source}: {message}", hint="try `--to gguf`, which may support this architecture")
    raise EdgespecError(f"{source} could not be converted: {message}", hint=f"its last line: {last_line(log)}")


def _no_memory(source: str, reason: str) -> MemoryLimitError:
    return MemoryLimitError(
        f"{source} could not be converted: {reason}",
        needed_bytes=None,
        available_bytes=None,
        hint="close other programs, or export on a machine with more memory",
    )
