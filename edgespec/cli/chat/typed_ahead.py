"""Keys that are typed while no prompt is edited: they are kept for the next prompt, and not shown."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

_MARK_PASTES, _NO_MARKS = "\x1b[?2004h", "\x1b[?2004l"
PASTE_BEGINS, PASTE_ENDS = "\x1b[200~", "\x1b[201~"

_AT_ONCE = 4096  # bytes of a read; a terminal on Linux holds no more

# Seconds after a read without a complete key, so that a closed terminal does not keep the thread busy.
_REST_S = 0.001


# Ctrl-C is obeyed, and the answer to an earlier editor's question for the cursor is not a key.
_NOT_KEPT = (Keys.ControlC, Keys.CPRResponse)


class TypedAhead:
    """Keeps keys for the editor's next prompt.

    Within ``held`` the terminal marks pasted text, shows no keys, and gives each key immediately to a thread. In line
    mode it would drop what is beyond 4096 bytes of a line. Ctrl-C stays a signal.
    """

    def __init__(self, keyboard: Input) -> None:
        self._keyboard = keyboard
        self._keys: list[KeyPress] = []
        self._thread: threading.Thread | None = None
        self._wake = -1  # a pipe's end to write to: the thread then ends

    def __bool__(self) -> bool:
        """Whether keys were typed that no prompt has received."""
        return bool(self._keys)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the keys that are typed within the block."""
        with _each_key() as gives_keys:
            if not gives_keys:  # on Windows, keys wait in the console and are not shown
                yield
                return
            self._keys += _typed_before()
            self._start()
            try:
                yield
            finally:
                self._stop()
                _write(_NO_MARKS)

    @contextmanager
    def given(self) -> Iterator[None]:
        """Within this block of ``held``, the editor reads the keys, and first those that were kept."""
        holding = self._thread is not None
        self._stop()
        store_typeahead(self._keyboard, self._keys)
        self._keys = []
        try:
            yield
        finally:
            if holding:
                self._start()

    def unsend(self) -> None:
        """The keys that were kept send nothing: an Enter among them starts a line, and one at the end is dropped."""
        with self.given():
            kept = get_typeahead(self._keyboard)
            kept = kept[:-1] if kept and kept[-1].key == Keys.ControlM else kept
            line = KeyPress(Keys.ControlJ, "\n")
            store_typeahead(self._keyboard, [line if press.key == Keys.ControlM else press for press in kept])

    def _start(self) -> None:
        _write(_MARK_PASTES)  # each editor switches the marks off at its end
        wakes, self._wake = os.pipe()
        thread = threading.Thread(target=self._read, args=(wakes,), name="edgespec-keys", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # the thread limit is reached: keys wait in the terminal
            os.close(wakes)
            os.close(self._wake)

    def _stop(self) -> None:
        if self._thread is not None:
            os.close(self._wake)
            self._thread.join()
            self._thread = None

    def _read(self, wakes: int) -> None:
        """Read keys until the other end of the pipe ``wakes`` is closed. The editor completes a torn paste."""
        number = self._keyboard.fileno()
        try:
            while wakes not in select.select([number, wakes], [], [])[0]:
                keys = self._keyboard.read_keys()
                if any(press.key == Keys.ControlC for press in keys):  # typed just before the editor ended
                    os.kill(os.getpid(), signal.SIGINT)
                self._keys += [press for press in keys if press.key not in _NOT_KEPT]
                if not keys:
                    select.select([wakes], [], [], _REST_S)
        finally:
            os.close(wakes)


def _write(text: str) -> None:
    with contextlib.suppress(OSError):  # a closed terminal is reported by what writes text
        sys.stdout.write(text)
        sys.stdout.flush()


def _typed_before() -> list[KeyPress]:
    """Keys typed in line mode, where pastes had no marks: several lines are one paste, which is not sent."""
    typed = b""
    with contextlib.suppress(OSError, ValueError):
        number = sys.stdin.fileno()
        while select.select([number], [], [], 0)[0] and (part := os.read(number, _AT_ONCE)):
            typed += part
    text = typed.replace(b"\0", b"").decode("utf-8", "surrogateescape")  # line mode keeps Ctrl-D as NUL
    if "\n" in text.removesuffix("\n") and PASTE_BEGINS not in text:
        text = f"{PASTE_BEGINS}{text}{PASTE_ENDS}"
    keys: list[KeyPress] = []
    parser = Vt100Parser(keys.append)
    parser.feed(text.replace("\n", "\r"))
    parser.flush()
    return keys


@contextmanager
def _each_key() -> Iterator[bool]:
    """Within the block the terminal gives each key immediately and unchanged, and does not show it.

    Gives whether it does: not on Windows, nor without a terminal. Ctrl-C does not drop the keys typed before it.
    """
    try:
        import termios
    except ImportError:
        yield False
        return
    try:
        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (OSError, ValueError, termios.error):
        yield False
        return
    changed = [*before[:6], list(before[6])]
    changed[0] &= ~(termios.ICRNL | termios.IXON)
    changed[3] = changed[3] & ~(termios.ECHO | termios.ICANON | termios.IEXTEN) | termios.NOFLSH
    changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
    termios.tcsetattr(number, termios.TCSANOW, changed)
    try:
        yield True
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(number, termios.TCSANOW, before)
