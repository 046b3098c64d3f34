"""Prompts of earlier chats, a line each. Only the user may read the file."""

from __future__ import annotations

import contextlib
import os
import re

from edgespec.errors import EdgespecError
from edgespec.files.atomic import write_text
from edgespec.files.home import Home

# Prompts kept; bash keeps as many.
KEPT = 500

# Written in place of the line breaks of a prompt, which are its file's ends of prompts.
_BREAK = "\u2028"

# The first line of files that libedit wrote, on macOS; it spells blanks and backslashes in octal.
_LIBEDIT = "_HiStOrY_V2_"


class PromptHistory:
    """The prompts, oldest first. Each is written when it is entered, so that no end of the process loses one."""

    def __init__(self, place: Home) -> None:
        self._place = place
        self.prompts = self._read()

    def add(self, prompt: str) -> None:
        """Keep a prompt, as far as the home can be written."""
        if not prompt.strip() or prompt == (self.prompts[-1] if self.prompts else None):
            return
        self.prompts.append(prompt)
        with contextlib.suppress(OSError, EdgespecError):
            self._place.create(self._place.root)
            number = os.open(self._place.history, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(number, "w", encoding="utf-8", errors="replace", newline="\n") as file:
                file.write(_as_line(prompt))

    def _read(self) -> list[str]:
        path = self._place.history
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
                write_text(path, "".join(map(_as_line, prompts[-KEPT:])))
            path.chmod(0o600)
        return prompts[-KEPT:]


def _as_line(prompt: str) -> str:
    return prompt.replace("\r\n", "\n").replace("\r", "\n").replace("\n", _BREAK) + "\n"
