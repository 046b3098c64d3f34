"""Output: answers and JSON go to stdout, everything else to stderr, without colours unless it is a terminal."""

from __future__ import annotations

import importlib
import io
import json
import logging
import math
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TextIO, TypeVar

from edgespec import errors
from edgespec.cli.terminal.interrupts import Interrupts
from edgespec.errors import ESCAPES, EdgespecError, InvalidRequestError
from edgespec.files.disk import counted, in_utf_8, megabytes
from edgespec.files.progress import Job, Loading, ProgressEvent, follow

SCHEMA_VERSION = 1

# What the levels of exactness promise.
EXACTNESS_WORDS = {
    "W": "same text as without guessing",
    "N": "may differ in rare ties",
    "D": "not checked on this machine",
}

T = TypeVar("T")

# Seconds between progress lines without a terminal, so that a log stays readable.
_PLAIN_INTERVAL_S = 10.0

# At four characters a token, enough for a context of four million tokens.
MOST_INPUT_BYTES = 16_000_000

# A piped file arrives sooner. After this many seconds, a message says that stdin is awaited.
_PATIENCE_S = 3.0

# Messages hold texts of files and models: what a terminal would execute is shown as in errors. Lines stay lines.
HARMLESS = {code: shown for code, shown in ESCAPES.items() if chr(code) not in "\n\t"}

_OBEY_CODES = 4  # ENABLE_VIRTUAL_TERMINAL_PROCESSING, of a console's mode

# Lines are wrapped to at least this many columns.
NARROWEST = 20

_WORDS = re.compile(r" +|[^ ]+")

# What a line shows of a longer text.
_SHORT_CELLS = 60


@dataclass(slots=True)
class State:
    """The shared options, the signals, and whether the JSON object was printed (``answered``)."""

    debug: bool = False
    offline: bool = False
    json: bool = False
    less: bool = False  # --quiet
    verbose: bool = False
    answered: bool = False
    interrupts: Interrupts = field(default_factory=Interrupts)

    @property
    def quiet(self) -> bool:
        """Whether progress is hidden: with ``--quiet`` or ``--json``, unless ``--debug`` is given too."""
        return (self.json or self.less) and not self.debug

    def progress(self, *, loading: bool = True) -> ProgressPrinter:
        """Shows the progress of an operation, which a signal ends.

        Without ``loading`` the loading of models is shown on a terminal alone, unless --verbose is given.
        """
        loading = loading or self.verbose or sys.stderr.isatty()
        return ProgressPrinter(
            quiet=self.quiet, loading=loading, names_mirrors=self.debug, interrupts=self.interrupts
        )


def prepare_streams() -> bool:
    """Make the standard streams usable; False if stdout is closed.

    A character that the output's encoding lacks becomes ``?``. A file or pipe gets UTF-8 on Windows too, unless
    PYTHONIOENCODING is set. A closed stdin reads as empty.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115
    if sys.stdout is None:
        return False
    if isinstance(sys.stdout, io.TextIOWrapper):
        ansi = sys.platform == "win32" and not sys.stdout.isatty() and "PYTHONIOENCODING" not in os.environ
        sys.stdout.reconfigure(encoding="utf-8" if ansi else None, errors="replace")
    return True


def print_json(value: dict[str, Any]) -> None:
    """Print one object on one line of stdout. Numbers that are not finite become null (not measured)."""
    # ASCII escapes keep every character in an output encoding other than UTF-8.
    everything = sys.stdout.encoding.lower().replace("-", "") == "utf8"
    whole = {"schema_version": SCHEMA_VERSION, **_finite(value)}
    sys.stdout.write(json.dumps(whole, ensure_ascii=not everything, allow_nan=False) + "\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_error(error: EdgespecError, *, as_json: bool) -> None:
    """Print an error and its hint on stderr, and with ``as_json`` also as an object on stdout."""
    note(f"edgespec: {error.message}")
    if error.hint:
        note(f"hint: {error.hint}")
    if as_json:
        public = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in errors.__all__)
        print_json({"error": {"type": public, "message": error.message, "hint": error.hint}})


def decode_input(data: bytes) -> str:
    """Decode bytes from stdin, without a byte order mark. Raises InvalidRequestError if they are not UTF-8."""
    try:
        return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        convert = "save it as UTF-8, and in cmd.exe run `chcp 65001` first"
        if sys.platform != "win32":
            convert = "convert it first, for example with iconv"
        raise InvalidRequestError(f"stdin is not UTF-8 text (byte {error.start})", hint=convert) from error


def read_input(interrupts: Interrupts) -> str:
    """Read all of stdin as text. After ``_PATIENCE_S``, a message on stderr says that stdin is awaited.

    Raises InvalidRequestError if stdin is longer than any prompt, binary, or neither UTF-8 nor marked as UTF-16.
    """
    waiting = threading.Timer(_PATIENCE_S, _say_what_is_awaited)
    waiting.daemon = True
    waiting.start()
    try:
        data = interrupts.read(lambda: sys.stdin.buffer.read(MOST_INPUT_BYTES + 1))
    finally:
        waiting.cancel()
    if len(data) > MOST_INPUT_BYTES:
        raise InvalidRequestError(
            f"stdin holds more than {megabytes(MOST_INPUT_BYTES)}", hint="no model can read this much; give a part"
        )
    data = in_utf_8(data)
    if (zero := data.find(0)) >= 0:
        raise InvalidRequestError(
            f"stdin is not text (a zero at byte {zero})", hint="give a text file, or only the text of a document"
        )
    return decode_input(data)


def _say_what_is_awaited() -> None:
    note("waiting for the end of stdin; add `</dev/null` to read nothing from stdin", dim=True)


def note(message: str, *, dim: bool = False, hang: int | None = None) -> None:
    """Print a message on stderr, wrapped between words on a terminal.

    Continuation lines are indented by ``hang`` columns if there is room, else by two more than the first line.
    """
    message, columns = message.translate(HARMLESS), stderr_columns()
    if columns is not None:
        message = "\n".join(_wrapped(line, columns, hang) for line in message.split("\n"))
    if dim and stderr_is_rich():
        message = f"\x1b[2m{message}\x1b[0m"
    print(message, file=sys.stderr, flush=True)


def show(line: str) -> None:
    """Print a line on stdout, wrapped between words on a terminal."""
    line = line.translate(HARMLESS)
    print(_wrapped(line, shutil.get_terminal_size().columns, None) if sys.stdout.isatty() else line)


def about(seconds: float) -> str:
    """A duration in words, rounded up to minutes."""
    return "less than a minute" if seconds < 60 else f"about {counted(math.ceil(seconds / 60), 'minute')}"


def time_left(seconds: float) -> str:
    """For example ``9 s`` or ``1 min 30 s``; at least one second."""
    left_s = max(1, round(seconds))
    return f"{left_s // 60} min {left_s % 60} s" if left_s >= 60 else f"{left_s} s"


def _wrapped(line: str, columns: int, hang: int | None) -> str:
    """The line wrapped to ``columns``; see ``note`` for ``hang``."""
    indent = " " * (len(line) - len(line.lstrip()) + 2 if hang is None or hang > columns - NARROWEST else hang)
    return "\n".join(wrapped(line, columns, indent))


def cells(text: str) -> int:
    """The columns of a terminal that a text takes: a Chinese character takes two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # here: rarely needed

    return cell_len(text)


def padded(text: str, columns: int) -> str:
    """The text with blanks up to that many columns of a table."""
    return text + " " * (columns - cells(text))


def wrapped(line: str, columns: int, indent: str = "") -> list[str]:
    """The lines that a line takes, without blanks at their ends, broken between words and between ideographs."""
    line, columns = line.expandtabs(), max(NARROWEST, columns)
    if cells(line) <= columns:
        return [line.rstrip(" ")]
    units = _WORDS
    if not line.isascii():
        from edgespec.cli.terminal.terminal_text import UNBROKEN

        units = UNBROKEN
    lines, last = [], ""
    for unit in units.findall(line):
        if last.strip() and cells(last + unit) > columns:
            lines.append(last.rstrip(" "))
            last = indent + unit.lstrip(" ")
        else:
            last += unit
    return [*lines, last.rstrip(" ")]


def shortened(text: str) -> str:
    """A text on one line. A longer one is cut between words where that leaves more than half of the line."""
    text = " ".join(text.split())
    if cells(text) <= _SHORT_CELLS:
        return text
    end = width = 0
    while (width := width + cells(text[end])) <= _SHORT_CELLS - 2 and end < len(text) - 1:
        end += 1
    words = text[: end + 1].rpartition(" ")[0]
    return f"{words} …" if 2 * cells(words) > _SHORT_CELLS else f"{text[:end]}…"


def stderr_columns() -> int | None:
    """Width of stderr's terminal in columns; None if stderr is not a terminal."""
    if not sys.stderr.isatty():
        return None
    if not os.environ.get("COLUMNS"):
        with suppress(OSError, ValueError):  # shutil measures stdout, which may be a pipe
            return os.get_terminal_size(sys.stderr.fileno()).columns or shutil.get_terminal_size().columns
    return shutil.get_terminal_size().columns


def stderr_is_rich() -> bool:
    """Whether stderr is a terminal that shows colours and progress bars."""
    return _is_rich(sys.stderr)


def stdout_is_rich() -> bool:
    """Whether stdout is a terminal that shows colours."""
    return _is_rich(sys.stdout)


def obeys_codes(stream: TextIO) -> bool:
    """Whether the stream is a terminal that obeys escape codes."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return False
    return sys.platform != "win32" or _console_obeys_codes(stream)


def _console_obeys_codes(stream: TextIO) -> bool:
    """Whether Windows' console obeys escape codes: the classic one shows them, until a program asks it to obey."""
    ctypes: Any = importlib.import_module("ctypes")
    msvcrt: Any = importlib.import_module("msvcrt")
    calls, mode = ctypes.windll.kernel32, ctypes.c_ulong()
    try:
        console = ctypes.c_void_p(msvcrt.get_osfhandle(stream.fileno()))
    except (OSError, ValueError):  # no descriptor
        return False
    if not calls.GetConsoleMode(console, ctypes.byref(mode)):
        return False
    return bool(mode.value & _OBEY_CODES or calls.SetConsoleMode(console, mode.value | _OBEY_CODES))


def _is_rich(stream: TextIO) -> bool:
    return obeys_codes(stream) and not os.environ.get("NO_COLOR")


def enable_native_log() -> None:
    """Show the library's and the native code's log on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger = logging.getLogger("edgespec")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)


class ProgressPrinter:
    """Shows the progress of loading and downloads: a bar on a terminal, else a line every few seconds.

    Used in a block, at whose end the bar is removed. A signal of ``interrupts`` ends the operation at its next event.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        loading: bool = True,
        names_mirrors: bool = False,
        interrupts: Interrupts | None = None,
        say: Callable[[str], None] = note,
    ) -> None:
        """``quiet`` shows nothing; without ``loading`` only downloads are shown. ``names_mirrors`` names
        the packages that mirrors are in. ``say`` prints a line.
        """
        self._quiet, self._loading, self._names_mirrors = quiet, loading, names_mirrors
        self._interrupts = interrupts or Interrupts()
        self._say = say
        self._bar: Any = None
        self._task: Any = None
        self._label = ""
        self._last_line_at = 0.0

    def __call__(self, event: Loading | ProgressEvent) -> None:
        self._interrupts.check()
        if self._quiet:
            return
        if isinstance(event, Loading):
            if not self._loading:
                return
            self._show(event.stage, event.fraction, None, None)
            return
        if event.note is not None:
            self._finish()
            self._say(f"{event.source}: {event.note}")
            return
        fraction = event.done_bytes / event.total_bytes if event.total_bytes else None
        mirror = "==" in event.source and not self._names_mirrors
        source = "from a mirror" if mirror else event.source
        self._show(f"{event.stage} {source}", fraction, event.done_bytes, event.total_bytes)

    @property
    def job(self) -> Job:
        """A long operation that this printer follows."""
        return Job(self, self._interrupts.pending)

    def follow(self, steps: Generator[float, None, T], label: str) -> T:
        """Run ``steps``, which yield the finished fraction, and return their result."""
        return follow(steps, label, self)

    def _show(self, label: str, fraction: float | None, done: int | None, total: int | None) -> None:
        label = label.translate(HARMLESS)
        if stderr_is_rich():
            self._show_bar(label, fraction, done, total)
            return
        now = time.monotonic()
        if label != self._label or now - self._last_line_at >= _PLAIN_INTERVAL_S:
            amount = "" if done is None or not total else f" {done / 1e6:.0f} of {megabytes(total)}"
            percent = "" if fraction is None or amount else f" {100 * fraction:.0f} %"
            self._say(f"{label}{amount}{percent}")
            self._label, self._last_line_at = label, now

    def _show_bar(self, label: str, fraction: float | None, done: int | None, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn as SpeedColumn,
        )

        if label != self._label:
            self._finish()
            columns = [TextColumn("{task.description}", markup=False), BarColumn(bar_width=24)]
            if total:
                columns += [DownloadColumn(), SpeedColumn(), TimeRemainingColumn()]
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(label, total=total or (1.0 if fraction is not None else None))
            self._label = label
        whole = total or (1.0 if fraction is not None else None)
        self._bar.update(self._task, completed=done if total else fraction or 0.0, total=whole)

    @property
    def has_bar(self) -> bool:
        """Whether a bar stands in the terminal's last row."""
        return self._bar is not None

    def _finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._label = ""

    def __enter__(self) -> ProgressPrinter:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._finish()
