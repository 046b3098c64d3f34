"""The history of prompts: a file with one prompt a line that only the user may read."""

from __future__ import annotations

import contextlib
import os
import re

from edgespec.errors import EdgespecError
from edgespec.files.atomic import replacing
from edgespec.files.home import Home

# Prompts kept, as in bash.
KEPT = 500

# Replaces line breaks within a prompt, because a line break ends a prompt in the file.
_BREAK = "\u2028"

# First line of files written by libedit (macOS), which escapes blanks and backslashes in octal.
_LIBEDIT = "_HiStOrY_V2_"


class PromptHistory:
    """The prompts, oldest first. Each is written as soon as it is entered, so that a crash loses none."""

    def __init__(self, user_home: Home) -> None:
        self._user_home = user_home
        self.prompts = self._read()

    def add(self, prompt: str) -> None:
        """Add a prompt, and write it to the file if the home is writable."""
        if not prompt.strip() or prompt == (self.prompts[-1] if self.prompts else None):
            return
        self.prompts.append(prompt)
        with contextlib.suppress(OSError, EdgespecError):
            self._user_home.create(self._user_home.root)
            number = os.open(self._user_home.history, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(number, "w", encoding="utf-8", errors="replace", newline="\n") as file:
                file.write(_as_line(prompt))

    def _read(self) -> list[str]:
        path = self._user_home.history
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return []
        libedit = lines[0] == _LIBEDIT
        if libedit:
            lines = [re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line) for line in lines[1:]]
        prompts = [line.replace(_BREAK, "\n") for line in lines if line.strip()]
        with contextlib.suppress(OSError, EdgespecError):
            if libedit or len(prompts) > 2 * KEPT:
                with replacing(path, private=True) as file:
                    file.write("".join(map(_as_line, prompts[-KEPT:])).encode())
            path.chmod(0o600)
        return prompts[-KEPT:]


def _as_line(prompt: str) -> str:
    return prompt.replace("\r\n", "\n").replace("\r", "\n").replace("\n", _BREAK) + "\n"
