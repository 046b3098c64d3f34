"""Lines of a log that are written by a thread."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
import threading
from collections.abc import Iterator

import pytest

from edgespec.cli.terminal.log_writer import CLOSE_S, MOST_CHARACTERS, MOST_LINES, LogWriter


class Pipe:
    """A stderr, and the end of it that a reader may read."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()

    def fileno(self) -> int:
        return self._writing

    def fill(self) -> int:
        """Write as much as fits. Returns the number of bytes."""
        os.set_blocking(self._writing, False)
        size = 0
        for step in (65536, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    size += os.write(self._writing, b"." * step)
        os.set_blocking(self._writing, True)
        return size

    def read(self, lines: int) -> list[str]:
        """The next lines."""
        data = b""
        while data.count(b"\n") < lines:
            assert select.select([self._reading], [], [], 20)[0]
            data += os.read(self._reading, 65536)
        return data.decode().splitlines()

    def close(self) -> None:
        for each in (self._reading, self._writing):
            with contextlib.suppress(OSError):
                os.close(each)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    found = Pipe()
    yield found
    found.close()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot wait for a pipe with select")
def test_a_line_waits_for_the_next_if_no_thread_can_be_started(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(sys, "stderr", pipe)
    log = LogWriter()
    with monkeypatch.context() as changed:
        changed.setattr(threading.Thread, "start", fail)
        log.write("first")
        log.close()
    log.write("second")
    assert pipe.read(2) == ["first", "second"]
    log.close()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes that do not block")
def test_a_reader_that_stops_reading_costs_lines_and_no_time(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", pipe)
    size = pipe.fill()
    log = LogWriter(most_lines=3, most_characters=20)
    log.write("first", "second", "third", "fourth", "fifth")  # 11 characters, then 16, then no room for two
    log.close(within_s=0.01)
    lines = pipe.read(4)
    assert lines == [
        "." * size + "first",
        "lines of the log that stderr did not take: 2",
        "second",
        "third",
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot wait for a pipe with select")
def test_long_lines_are_dropped(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", pipe)
    log = LogWriter(most_characters=10)
    log.write("x" * 11, "short")
    log.close()
    assert pipe.read(2) == ["short", "lines of the log that stderr did not take: 1"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot wait for a pipe with select")
def test_lines_that_a_full_disk_did_not_take_are_counted(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    write, full = os.write, ["first\n", "second\n", "lines of the log that stderr did not take: 2\n"]

    def write_or_fail(descriptor: int, data: bytes) -> int:
        if data.decode() in full:
            full.remove(data.decode())
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setattr(os, "write", write_or_fail)
    log = LogWriter()
    log.write("first", "second", "third", "fourth", "fifth")
    log.close()
    assert pipe.read(4) == ["third", "fourth", "lines of the log that stderr did not take: 2", "fifth"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot wait for a pipe with select")
@pytest.mark.parametrize(("has_bar", "begin"), [(True, "\r\x1b[2K"), (False, ""), (None, "")])
def test_a_line_takes_the_place_of_a_bar_that_stands(
    has_bar: bool | None, begin: str, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", pipe)
    log = LogWriter()
    if has_bar is not None:
        log.has_bar = lambda: bool(has_bar)
    log.write("serving m")
    log.close()
    assert "\r".join(pipe.read(1)) == f"{begin}serving m"


def test_a_closed_stderr_ends_nothing(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", pipe)
    pipe.close()
    log = LogWriter()
    log.write("a", "b")
    log.close()
    assert log._waiting == 0
    LogWriter().close()
    assert (log._most_lines, log._most_characters) == (MOST_LINES, MOST_CHARACTERS) == (1000, 4_000_000)
    assert CLOSE_S == 1.0
