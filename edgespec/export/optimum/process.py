"""``optimum/worker.py`` as a child process of another Python: watched, understood line by line, and ended whole."""

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
    CancelledError,
    EdgespecError,
    InvalidRequestError,
    MemoryLimitError,
    RuntimeUnavailableError,
)
from edgespec.files.progress import Cancelled, ProgressCallback, ProgressEvent

WORKER = Path(__file__).with_name("worker.py")

# Often enough that a cancel feels immediate; a wake-up costs microseconds.
POLL_S = 0.1

# The worker says a few stages and one result. What says more is not our worker.
_MOST_LINES, _MOST_LINE_BYTES = 1000, 64 * 1024
_TAIL_BYTES = 64 * 1024
_LONGEST_SHOWN = 300  # characters of a foreign message

_GRACE_S = 2.0  # for the pipes of a process that was killed


def check_interpreter(
    python: Path, *, progress: ProgressCallback | None = None, cancelled: Cancelled | None = None
) -> Mapping[str, str]:
    """Versions of what ``python`` has for a conversion.

    Raises InvalidRequestError if it is no interpreter, RuntimeUnavailableError if something is missing there.
    """
    if not python.is_file() or not os.access(python, os.X_OK):
        raise InvalidRequestError(
            f"{python} is not a program that can be run",
            hint="give the path of a Python, for example .venv/bin/python",
        )
    return versions_in(run_worker(python, ["probe"], source=str(python), progress=progress, cancelled=cancelled))


def versions_in(result: Mapping[str, Any]) -> dict[str, str]:
    """The versions of packages that a result of the worker names."""
    versions = result.get("versions")
    found = versions if isinstance(versions, dict) else {}
    return {str(name)[:64]: str(value)[:64] for name, value in found.items()}


def run_worker(
    python: Path,
    arguments: Sequence[str],
    *,
    source: str,
    progress: ProgressCallback | None = None,
    cancelled: Cancelled | None = None,
) -> Mapping[str, Any]:
    """Run the worker under ``python``; returns its result. ``source`` is what progress and errors call the work.

    On any exception the process and all it started are gone. Raises CancelledError, RuntimeUnavailableError
    (something is missing there), InvalidRequestError (this model cannot be converted), MemoryLimitError,
    EdgespecError.
    """
    with tempfile.TemporaryFile() as log:
        try:
            # Isolated: neither our PYTHONPATH nor the working directory may lend it modules.
            process = start_group([os.fspath(python), "-I", os.fspath(WORKER), *arguments], stderr=log)
        except OSError as error:
            raise InvalidRequestError(
                f"{python} cannot be run: {error.strerror or error}", hint="give the path of a Python"
            ) from error
        answer = _listen(process, source, progress, cancelled)
        return _result(answer, process.returncode, _tail(log), python, source)


# ------------------------------------------------------------------------------------------------ processes


def start_group(
    command: Sequence[str], *, stderr: IO[bytes], merged: bool = False, scratch: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that leads a group of its own, with no stdin.

    ``merged`` sends its stdout to ``stderr`` too; ``scratch`` is where it has its temporary files (None: anywhere).
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
    """Kill the process and everything it started. Idempotent; nothing of theirs is worth a farewell."""
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
    """The last line of a tool's output that says something."""
    lines = [line.strip() for line in log.decode("utf-8", "replace").splitlines()]
    return next((line[:_LONGEST_SHOWN] for line in reversed(lines) if line), "it said nothing")


def _tail(log: IO[bytes]) -> bytes:
    log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
    return log.read()


# ------------------------------------------------------------------------------------------------ what is said


def _listen(
    process: subprocess.Popen[bytes], source: str, progress: ProgressCallback | None, cancelled: Cancelled | None
) -> Mapping[str, Any] | None:
    """Tell about the stages until the process has said its last; its answer, None if there was none."""
    assert process.stdout is not None
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    # A thread reads, because a pipe cannot be waited on together with a question to the caller, not on Windows.
    reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), name="edgespec-optimum", daemon=True)
    reader.start()
    answer: Mapping[str, Any] | None = None
    polls_left = round(_GRACE_S / POLL_S)
    try:
        while polls_left:
            if cancelled is not None and cancelled():
                raise CancelledError("the conversion was cancelled; nothing was written")
            try:
                line = lines.get(timeout=POLL_S)
            except queue.Empty:
                # What it started and left behind may hold the pipe open for ever.
                polls_left -= process.poll() is not None
                continue
            if line is None:
                break
            found = _parsed(line)
            if found is None:
                raise EdgespecError(
                    f"{source}: the converter's process said something that is no answer: {last_line(line)}",
                    hint="is the interpreter that was given a Python?",
                )
            stage = found.get("stage")
            if isinstance(stage, str) and progress is not None:
                progress(ProgressEvent(stage=stage[:80], source=source))
            if "result" in found or "error" in found:
                answer = found
        try:
            process.wait(_GRACE_S)  # so that its exit code is its own
        except subprocess.TimeoutExpired:
            if answer is None:
                raise EdgespecError(
                    f"{source}: the converter's process says more than it should and does not end",
                    hint="is the interpreter that was given a Python with Optimum?",
                ) from None
        return answer
    finally:
        end_group(process)
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
            raise _no_memory(source, "its process was killed, as systems do that run out of memory")
        raise EdgespecError(
            f"{source}: the conversion ended without an answer (exit code {code}): {last_line(log)}",
            hint=f"is {python} a Python with Optimum?",
        )
    kind, message = str(error.get("kind")), " ".join(str(error.get("message")).split())[:_LONGEST_SHOWN]
    if kind == "missing":
        raise RuntimeUnavailableError(
            f"{python} lacks what a conversion needs: {message}",
            hint="install optimum-onnx[onnxruntime], transformers, torch and onnx-ir there, or leave out --python",
        )
    if kind == "memory":
        raise _no_memory(source, message)
    if kind in ("unknown", "weights", "check"):
        raise InvalidRequestError(f"{source}: {message}", hint="`--to gguf` may know this architecture")
    raise EdgespecError(f"{source} could not be converted: {message}", hint=f"its last line: {last_line(log)}")


def _no_memory(source: str, reason: str) -> MemoryLimitError:
    return MemoryLimitError(
        f"{source} could not be converted: {reason}",
        needed_bytes=None,
        available_bytes=None,
        hint="close what else runs here, or export it on a machine with more memory",
    )
