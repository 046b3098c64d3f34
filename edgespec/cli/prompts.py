"""Reading prompts: typed and edited in a terminal, line by line from a pipe."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol

from edgespec.cli.output import decode_input, note

QUOTES = '"""'

# What a prompt begins with, and each of its further lines.
FIRST, FURTHER = "> ", ". "


@dataclass(frozen=True, slots=True)
class Prompt:
    """What was asked. What stood between triple quotes (``quoted``) is no command."""

    text: str
    quoted: bool = False


class Prompts(Protocol):
    """Where prompts come from. ``drawn``: keys are shown by us, whenever they were typed, and not by the terminal."""

    drawn: bool

    def read(self) -> Prompt | None:
        """The next prompt; None where no more come. Raises InvalidRequestError for a line that is no text: the next
        one may be. Raises KeyboardInterrupt."""


class LinePrompts:
    """A prompt a line, or several lines between two triple quotes; each line is asked for with a few characters."""

    drawn = False

    def __init__(self, first: str = "", further: str = "") -> None:
        self._first, self._further = first, further

    def read(self) -> Prompt | None:
        line = _read_line(self._first)
        if line is None or not line.lstrip().startswith(QUOTES):
            return None if line is None else Prompt(line)
        lines = [line]
        while (prompt := unquoted("\n".join(lines))) is None:
            following = _read_line(self._further)
            if following is None:
                return Prompt(_between("\n".join(lines)), quoted=True)
            lines.append(following)
        return prompt


def unquoted(text: str) -> Prompt | None:
    """The prompt that ``text`` is; None where it begins with triple quotes that are not closed yet.

    They are closed at the end of a line. Where text comes after that, it was pasted, and they belong to it.
    """
    begun = text.lstrip()
    if not begun.startswith(QUOTES):
        return Prompt(text)
    lines = begun.removeprefix(QUOTES).split("\n")
    closed = next((number for number, line in enumerate(lines) if line.rstrip().endswith(QUOTES)), None)
    if closed is None:
        return None
    if any(line.strip() for line in lines[closed + 1 :]):
        return Prompt(text)
    return Prompt(_between(text), quoted=True)


def _between(text: str) -> str:
    return text.strip().removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


def _read_line(asking: str) -> str | None:
    if asking and sys.stdout.isatty():
        try:
            return input(asking)
        except UnicodeDecodeError as error:
            return decode_input(error.object)  # says what is wrong with it
        except EOFError:
            note("")
            return None
    if asking:
        sys.stderr.write(asking)
        sys.stderr.flush()
    line = sys.stdin.buffer.readline()
    return decode_input(line).rstrip("\r\n") if line else None
