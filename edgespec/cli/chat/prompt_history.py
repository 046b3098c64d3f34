"""The history of prompts: a file with one prompt a line that only the user may read."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from edgespec.errors import EdgespecError, StoreLockedError
from edgespec.files.atomic import replacing
from edgespec.files.home import Home

# Prompts kept, as in bash.
KEPT = 500

# Replaces line breaks within a prompt, because a line break ends a prompt in the file.
_BREAK = "\u2028"

# First line of files written by libedit (macOS), which escapes blanks and backslashes in octal.
_LIBEDIT = "_HiStOrY_V2_"

# Another chat writes a line, or the whole file, in milliseconds.
_LOCK_WAIT_S = 2.0


class PromptHistory:
    """The prompts, oldest first. Each is written as soon as it is entered, so that a crash loses none.

    Without ``keeps`` those of this chat are not written, and the file is not read.
    """

    def __init__(self, user_home: Home, *, keeps: bool = True) -> None:
        self._user_home, self._keeps = user_home, keeps
        self.prompts = self._read() if keeps else []

    def add(self, prompt: str) -> None:
        """Add a prompt, and write it to the file if it is kept and the home is writable."""
        if not prompt.strip() or prompt == (self.prompts[-1] if self.prompts else None):
            return
        self.prompts.append(prompt)
        if not self._keeps:
            return
        with contextlib.suppress(OSError, EdgespecError), self._alone():
            number = os.open(self._user_home.history, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(number, "w", encoding="utf-8", errors="replace", newline="\n") as file:
                file.write(_as_line(prompt))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock under which chats write the file, where there are locks. Raises EdgespecError, OSError."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError, StoreLockedError):
                lock = self._user_home.locked("prompts", "writing the prompts", timeout_s=_LOCK_WAIT_S)
                stack.enter_context(lock)
            yield

    def _read(self) -> list[str]:
        path = self._user_home.history
        prompts, libedit = _prompts_in(path)
        if prompts or libedit:
            with contextlib.suppress(OSError, EdgespecError):
                path.chmod(0o600)
                if libedit or len(prompts) > 2 * KEPT:
                    with self._alone(), replacing(path, private=True) as file:
                        prompts, _ = _prompts_in(path)  # with those that another chat has added by now
                        file.write("".join(map(_as_line, prompts[-KEPT:])).encode())
        return prompts[-KEPT:]


def _prompts_in(path: Path) -> tuple[list[str], bool]:
    """The prompts in the file, oldest first, and whether libedit wrote it."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return [], False
    libedit = lines[0] == _LIBEDIT
    if libedit:
        lines = [re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line) for line in lines[1:]]
    return [line.replace(_BREAK, "\n") for line in lines if line.strip()], libedit


def _as_line(prompt: str) -> str:
    return prompt.replace("\r\n", "\n").replace("\r", "\n").replace("\n", _BREAK) + "\n"
