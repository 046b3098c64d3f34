"""A program in a real terminal."""

from __future__ import annotations

import contextlib
import os
import re
import struct
import subprocess
import sys
import time

import pytest

pty = pytest.importorskip("pty", reason="terminals are a matter of POSIX")
fcntl = pytest.importorskip("fcntl", reason="terminals are a matter of POSIX")
termios = pytest.importorskip("termios", reason="terminals are a matter of POSIX")

# The beginning of an editable prompt: pasted text is marked, and the first line is drawn without wrapping.
EDITING = r"\x1b\[\?2004h(\x1b\[\?1l)?\x1b\[\?25l\x1b\[0m\x1b\[\?7l"

ESCAPE_CODE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")

CTRL_C = b"\x03"
AGAIN = "Ctrl-C again within 2 s"

WAIT_S = 60.0


class Terminal:
    """A program in a separate terminal, and its output.

    A ``dumb`` terminal gets no escape codes. In other terminals prompts are editable, and ``plain`` has the output
    without escape codes.
    """

    def __init__(
        self, arguments: list[str], env: dict[str, str], *, term: str = "dumb", columns: int | None = None
    ) -> None:
        self.screen = ""
        self._seen = 0
        self._controller, terminal = pty.openpty()
        self.resize(80 if columns is None else columns)
        # A new session, so that the terminal becomes its controlling one and Ctrl-C a SIGINT.
        take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        take += "os.execv(sys.argv[1], sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", take, *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            # This terminal does not answer queries for the cursor position.
            env={**env, "TERM": term, "PROMPT_TOOLKIT_NO_CPR": "1"},
            start_new_session=True,
        )
        os.close(terminal)
        os.set_blocking(self._controller, False)

    @property
    def plain(self) -> str:
        """The output so far, without escape codes and carriage returns."""
        self._read()
        return ESCAPE_CODE.sub("", self.screen).replace("\r", "")

    def resize(self, columns: int) -> None:
        """Change the width and notify the program."""
        fcntl.ioctl(self._controller, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))

    def type(self, keys: str | bytes) -> None:
        rest = keys.encode() if isinstance(keys, str) else keys
        while rest:
            with contextlib.suppress(BlockingIOError):  # the program reads more slowly
                rest = rest[os.write(self._controller, rest) :]

    def wait_for(self, pattern: str) -> str:
        """Wait until ``pattern`` appears after the last match; returns the match."""
        until = time.monotonic() + WAIT_S
        while True:
            found = self.find(pattern)
            if found is not None:
                return found
            assert time.monotonic() < until, f"no {pattern!r} after {self.screen[self._seen :]!r}"
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.screen!r}"
            time.sleep(0.01)

    def find(self, pattern: str) -> str | None:
        """The match of ``pattern`` after the last find, if it is there already."""
        self._read()
        found = re.compile(pattern).search(self.screen, self._seen)
        if found is None:
            return None
        self._seen = found.end()
        return found.group()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self._controller, 65536):
                self.screen += data.decode("utf-8", "replace")

    def exit_code(self, within_s: float = WAIT_S) -> int:
        until = time.monotonic() + within_s
        while self.process.poll() is None:
            self._read()
            assert time.monotonic() < until, self.screen
            time.sleep(0.01)
        self._read()
        assert "Traceback" not in self.screen
        return self.process.returncode

    def interrupt(self) -> float:
        """Press Ctrl-C at the prompt of a chat, which says what a second one does. Returns when it was pressed."""
        pressed_at = self._press_ctrl_c()
        assert self.process.poll() is None, self.screen
        return pressed_at

    def interrupt_again(self, first_at: float) -> int:
        """Press Ctrl-C for the second time (the first time was at ``first_at``); the exit code."""
        pressed_at = self._press_ctrl_c()
        if self.process.poll() is None:
            assert time.monotonic() - first_at > 2  # the machine was busy: this was a first time
            return self.interrupt_again(pressed_at)
        return self.exit_code()

    def _press_ctrl_c(self) -> float:
        """Press Ctrl-C, and wait until the chat has ended or said what a second one does. Returns when."""
        pressed_at, line_ended = time.monotonic(), False
        self.type(CTRL_C)
        while self.process.poll() is None and not self.find(AGAIN):
            assert time.monotonic() < pressed_at + WAIT_S, self.screen
            # Python notices a signal between a prompt and the wait for keys at the end of the line only.
            if not line_ended and time.monotonic() > pressed_at + 3:
                with contextlib.suppress(OSError):
                    self.type("\r")
                line_ended = True
            time.sleep(0.01)
        return pressed_at

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._controller)
