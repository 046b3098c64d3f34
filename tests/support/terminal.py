"""A program in a real terminal."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time

import pytest

pty = pytest.importorskip("pty", reason="terminals are a matter of POSIX")

WAIT_S = 40.0


class Terminal:
    """A program in a terminal of its own, and everything it wrote there."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        self.screen = ""
        self._seen = 0
        self._controller, terminal = pty.openpty()
        # A session of its own, so that the terminal becomes its controlling one and Ctrl-C a SIGINT.
        take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        take += "os.execv(sys.argv[1], sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", take, *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**env, "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(terminal)
        os.set_blocking(self._controller, False)

    def type(self, keys: str | bytes) -> None:
        os.write(self._controller, keys.encode() if isinstance(keys, str) else keys)

    def wait_for(self, pattern: str) -> str:
        """Wait until ``pattern`` shows up after what was waited for last; returns what it matched."""
        until = time.monotonic() + WAIT_S
        while True:
            found = self.find(pattern)
            if found is not None:
                return found
            assert time.monotonic() < until, f"no {pattern!r} after {self.screen[self._seen :]!r}"
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.screen!r}"
            time.sleep(0.01)

    def find(self, pattern: str) -> str | None:
        """What ``pattern`` matches after what was found last, if it is there already."""
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

    def exit_code(self) -> int:
        until = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            self._read()
            assert time.monotonic() < until, self.screen
            time.sleep(0.01)
        self._read()
        assert "Traceback" not in self.screen
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._controller)
