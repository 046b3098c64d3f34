"""The parent's end of a worker process: starts it, sends requests, detects a hung process, and reaps it.

One thread reads the child's answers, another its stderr. Both block, while the caller waits for its answer with a
deadline: a wait on a pipe with a deadline would not be portable.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections import abc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from edgespec.errors import ClosedError, MemoryLimitError, RuntimeUnavailableError, WorkerLostError
from edgespec.runtimes.process.deadlines import Deadlines
from edgespec.runtimes.process.frames import Frame, encode_frame, read_frame, rebuild_error
from edgespec.runtimes.thread import start_thread, take

# After a deadline the answer may already lie in the pipe, if the parent was stopped (Ctrl-Z): the reader gets this
# long to deliver it. Reading a pipe takes microseconds, scheduling on a busy machine some tenths of a second.
_GRACE_S = 0.5

# The longest wait between two looks at the clock. If one takes longer than it should, the machine slept, or the whole
# container was stopped, the child as well.
_LOOK_S = 1.0

# How long a killed process may take to end; a process stuck in a driver takes longer, and is then left behind.
_REAP_S = 5.0

_STDERR_BYTES = 4096  # a native abort prints its reason in its last lines, together with a stack of addresses
_LAST_WORDS_CHARACTERS = 200  # of the last line, in a hint


_PIPE_BYTES = 4096  # what every pipe holds; Windows' pipes hold no more by default


class _Mark:
    """What an inbox holds besides frames."""


_CANCEL: Final = _Mark()
_LOST: Final = _Mark()


class Inbox:
    """Where one waiting thread finds its answers, and learns of a cancel.

    ``set`` raises and lowers its cancel flag. ``set`` takes no lock and allocates next to nothing: a signal handler
    may call it at any instruction of the interrupted thread.
    """

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Frame | _Mark] = queue.SimpleQueue()
        self.raised = False

    def set(self, raised: bool) -> None:
        before, self.raised = self.raised, raised
        if raised and not before:
            self.queue.put(_CANCEL)


class WorkerLink:
    """A running worker process. Thread-safe. A lost process stays lost; ``close`` is still needed."""

    def __init__(
        self,
        *,
        name: str,
        command: abc.Sequence[str] | None,
        environment: abc.Mapping[str, str],
        deadlines: Deadlines,
    ) -> None:
        """Start the process. Raises RuntimeUnavailableError or MemoryLimitError if that is not possible."""
        self.deadlines = deadlines
        self._name = name
        self._process = _start(command, environment)
        self.pid = self._process.pid
        self._issued = 0
        self._waiting: dict[int, Inbox] = {}
        # Reentrant: an unreferenced model may be collected while the lock is held, and closes this link.
        self._write_lock = threading.RLock()
        self._state_lock = threading.RLock()
        self._lost: str | None = None
        self._closed = False
        self._stderr = b""
        self._stderr_reader = threading.Thread(target=self._keep_stderr, name="edgespec-worker-stderr", daemon=True)
        self._reader = threading.Thread(target=self._read, name="edgespec-worker-reader", daemon=True)
        try:
            for thread in (self._stderr_reader, self._reader):
                start_thread(thread)
        except MemoryLimitError:
            self._kill()
            self._process.wait()
            raise

    @property
    def lost(self) -> str | None:
        """Why the process cannot be used any more; None while it can."""
        return self._lost

    # ------------------------------------------------------------------------------------------------- asking

    def request(
        self,
        header: abc.Mapping[str, Any],
        body: bytes = b"",
        *,
        timeout_s: float,
        inbox: Inbox | None = None,
        cancel: abc.Mapping[str, Any] | None = None,
    ) -> tuple[int, Frame]:
        """Send a request and wait: returns the request's number and the answer.

        If ``inbox`` is cancelled during the wait, ``cancel`` is sent once, with that number as its ``forward``, and
        the answer must come within ``cancel_s``. Raises what the child raised, WorkerLostError, ClosedError.
        """
        inbox = Inbox() if inbox is None else inbox
        with self._state_lock:
            self._issued += 1
            number = self._issued
        self._waiting[number] = inbox
        try:
            self.check()  # once registered: a loss from now on is reported to this inbox
            self.send({**header, "id": number}, body)
            answer = self._wait(number, inbox, time.monotonic() + timeout_s, cancel)
        finally:
            self._waiting.pop(number, None)
        if "error" in answer.header:
            error = rebuild_error(answer.header["error"])
            if error is None:
                self.lose(f"it failed with an internal error: {_described(answer.header['error'])}")
                raise self.lost_error()
            try:
                raise error
            finally:
                del error  # an exception whose own frame holds it would keep the callers' objects alive
        return number, answer

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A context for parsing an answer: an invalid answer ends the process. Raises WorkerLostError."""
        try:
            yield
        except WorkerLostError as error:
            self.lose(error.message)
            raise self.lost_error() from None

    def _wait(self, number: int, inbox: Inbox, deadline: float, cancel: abc.Mapping[str, Any] | None) -> Frame:
        told = False
        while True:
            item: Frame | _Mark | None = None
            begun = time.monotonic()
            late = begun >= deadline
            wait_s = _GRACE_S if late else min(_LOOK_S, deadline - begun)
            with contextlib.suppress(queue.Empty):
                item = take(inbox.queue, wait_s)
            deadline += max(0.0, time.monotonic() - begun - wait_s)
            if item is None:
                if late:
                    self.lose("it does not answer" if not told else "it does not answer to a cancel")
                    raise self.lost_error()
            elif isinstance(item, Frame):
                if item.header["id"] == number:
                    return item
            elif item is _LOST:
                if self._lost is not None or self._closed:
                    raise self.lost_error()
            elif inbox.raised and not told:  # otherwise the flag was lowered again in the meantime
                told = True
                deadline = min(deadline, time.monotonic() + self.deadlines.cancel_s)
                if cancel is not None:
                    self.send({**cancel, "forward": number})

    def send(self, header: abc.Mapping[str, Any], body: bytes = b"") -> None:
        """Write one frame without waiting for an answer. Raises WorkerLostError, ForwardError (too large).

        Every Sequence has one open request at a time, of about a kilobyte: the pipe holds the requests even if the
        child does not read, so a write does not block. If it does block, the deadline of a request in the pipe ends
        the write.
        """
        frame = memoryview(encode_frame(header, body))
        stdin = self._process.stdin
        assert stdin is not None
        try:
            with self._write_lock, self._watched(len(frame)):
                while frame:
                    frame = frame[stdin.write(frame) :]
        except (OSError, ValueError):  # ValueError: closed on this side
            self._reader.join(_REAP_S)  # learns how the process ended
            self.lose("it no longer reads requests")
            raise self.lost_error() from None

    def _watched(self, size: int) -> contextlib.AbstractContextManager[object]:
        """A timer for a frame that alone may fill the pipe (a request to load may): it ends a blocked write."""
        if size <= _PIPE_BYTES:
            return contextlib.nullcontext()
        stuck = threading.Timer(self.deadlines.answer_s, self.lose, ["it does not read"])
        stuck.daemon = True
        stuck.start()
        stack = contextlib.ExitStack()
        stack.callback(stuck.cancel)
        return stack

    def check(self) -> None:
        """Raises ClosedError or WorkerLostError if the process cannot be used."""
        if self._closed or self._lost is not None:
            raise self.lost_error()

    def lost_error(self) -> WorkerLostError | ClosedError:
        """A fresh exception for a caller that needs the process."""
        if self._closed:
            return ClosedError(f"model {self._name} is closed")
        stderr = self._stderr.decode("utf-8", "replace")
        words = [line.strip() for line in stderr.splitlines() if line.strip()]
        return WorkerLostError(
            f"the worker process of {self._name} is lost: {self._lost}",
            stderr=stderr,
            hint=f"its last output: {words[-1][:_LAST_WORDS_CHARACTERS]}" if words else None,
        )

    # ------------------------------------------------------------------------------------------------- the end

    def lose(self, reason: str) -> None:
        """Mark the process as lost and kill it. The first reason is kept."""
        with self._state_lock:
            if self._lost is None:
                self._lost = reason
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()  # does nothing after it was reaped
        # An application in one file starts another process, which serves and ends at the end of its input.
        if self._write_lock.acquire(blocking=False):  # it may be held by a write that is stuck
            try:
                self._close_stdin()
            finally:
                self._write_lock.release()

    def abandon(self) -> None:
        """Kill the process, from any thread, without waiting: callers that wait for an answer are notified
        immediately.
        """
        with self._state_lock:
            self._closed = True
        self._kill()

    def close(self) -> None:
        """End the process, reap it, close the pipes. Idempotent; waits at most a few seconds."""
        with self._state_lock:
            self._closed = True
        self._close_stdin()  # the child ends at the end of its input
        if threading.current_thread() is not self._reader:
            self._reader.join(self.deadlines.close_s)
        if self._reader.is_alive():
            self._kill()
            if threading.current_thread() is not self._reader:
                self._reader.join(_REAP_S)

    def _close_stdin(self) -> None:
        assert self._process.stdin is not None
        with self._write_lock, contextlib.suppress(OSError):
            self._process.stdin.close()

    def _read(self) -> None:
        """The reader thread: deliver every answer to its inbox, and clean up at the end of the stream."""
        assert self._process.stdout is not None
        stream = io.BufferedReader(self._process.stdout)  # type: ignore[type-var]
        try:
            while (frame := read_frame(stream)) is not None:
                number = frame.integer("id")
                inbox = self._waiting.pop(number, None)
                if inbox is not None:
                    inbox.queue.put(frame)
                elif number > self._issued:  # otherwise the caller was interrupted
                    raise WorkerLostError(f"it answered request {number}, which was never made")
                del frame, inbox
        except WorkerLostError as error:
            self.lose(error.message)
        code = self._reap()
        self._stderr_reader.join(_GRACE_S)  # for its last output
        self.lose(_ending(code))
        self._close_stdin()
        stream.close()
        for waiting in list(self._waiting.values()):
            waiting.queue.put(_LOST)

    def _reap(self) -> int | None:
        for wait_s in (self.deadlines.close_s, _REAP_S):
            try:
                return self._process.wait(wait_s)
            except subprocess.TimeoutExpired:  # it closed its pipe, but lives
                self._kill()
        return None

    def _keep_stderr(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        with stderr, contextlib.suppress(OSError):
            while text := stderr.read(_STDERR_BYTES):
                self._stderr = (self._stderr + text)[-_STDERR_BYTES:]


def _start(command: abc.Sequence[str] | None, environment: abc.Mapping[str, str]) -> subprocess.Popen[bytes]:
    if command is None:
        # A frozen application's executable is the application: this command would start the application again.
        if not sys.executable or getattr(sys, "frozen", False):
            raise RuntimeUnavailableError(
                "this application has no Python interpreter to start a worker process with",
                hint="give WorkerSettings a command that calls edgespec.runtimes.process.worker.main()",
            )
        # -P: with -m alone, modules would be looked for in the working directory first.
        command = [sys.executable, "-P", "-m", "edgespec.runtimes.process.worker"]
    # A separate group: Ctrl-C in a terminal reaches a whole group, also before the child can ignore the signal.
    own_group: dict[str, Any] = {"process_group": 0}
    if sys.platform == "win32":
        own_group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            list(command),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            env={**os.environ, **_module_path(), **environment},
            **own_group,
        )
    except (OSError, ValueError) as error:
        raise RuntimeUnavailableError(f"a worker process cannot be started: {error}") from error


def _module_path() -> dict[str, str]:
    """How the child finds this package if it is not installed, as in a source tree."""
    root = str(Path(__file__).resolve().parents[3])
    if root in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))}


def _ending(code: int | None) -> str:
    if code is None:
        return "it cannot be killed"
    if code >= 0:
        return f"it ended with exit status {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"


def _described(described: object) -> str:
    if not isinstance(described, dict):
        return "the reason is unknown"
    return f"{described.get('class')}: {described.get('message')}"[:_LAST_WORDS_CHARACTERS]
