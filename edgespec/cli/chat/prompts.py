"""Reads prompts: edited in a terminal, or line by line from a pipe."""

from __future__ import annotations

import contextlib
import select
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from edgespec.cli.terminal.interrupts import Interrupts
from edgespec.cli.terminal.output import decode_input, note

QUOTES = '"""'

# Shown before a prompt's first line, and before each further line.
FIRST, FURTHER = "> ", ". "


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt. Text between triple quotes (``quoted``) is never a command."""

    text: str
    quoted: bool = False


class Prompts(Protocol):
    """A source of prompts. ``drawn``: edgespec shows the typed keys, and the terminal does not."""

    drawn: bool

    def read(self, begun: str = "") -> Prompt | None:
        """The next prompt; None at the end. A line that is edited begins with ``begun``, which is else shown before.

        Raises InvalidRequestError for a line that is not UTF-8 (the caller may read the next line) and
        KeyboardInterrupt.
        """

    def held(self) -> AbstractContextManager[None]:
        """Within the block a drawn terminal shows no keys but those of a prompt; the next prompt gets the others."""

    def typed_ahead(self) -> bool:
        """Whether keys were typed that no prompt has received."""

    def unsend(self) -> None:
        """The keys that were typed ahead wait in the editor, and send nothing by themselves."""


class LinePrompts:
    """One prompt a line, or several lines between triple quotes; ``first`` and ``further`` are shown before them."""

    drawn = False

    def __init__(self, interrupts: Interrupts, first: str = "", further: str = "") -> None:
        self._interrupts = interrupts
        self._first, self._further = first, further

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()

    def typed_ahead(self) -> bool:
        with contextlib.suppress(OSError, ValueError):  # Windows cannot select on a console
            return bool(select.select([sys.stdin], [], [], 0)[0])
        return False

    def unsend(self) -> None:
        """The terminal has dropped the line."""

    def read(self, begun: str = "") -> Prompt | None:
        if begun and self._first:
            note(begun)
        line = self._read_line(self._first)
        if line is None or not line.lstrip().startswith(QUOTES):
            return None if line is None else Prompt(line)
        lines = [line]
        while (prompt := unquoted("\n".join(lines))) is None:
            following = self._read_line(self._further)
            if following is None:
                return Prompt(_between("\n".join(lines)), quoted=True)
            lines.append(following)
        return prompt

    def _read_line(self, asking: str) -> str | None:
        if asking and sys.stdout.isatty():
            try:
                return self._interrupts.read(lambda: input(asking))
            except UnicodeDecodeError as error:
                return decode_input(error.object)  # raises InvalidRequestError
            except EOFError:
                note("")
                return None
        if asking:
            sys.stderr.write(asking)
            sys.stderr.flush()
        line = self._interrupts.read(sys.stdin.buffer.readline)
        return decode_input(line).rstrip("\r\n") if line else None


def unquoted(text: str) -> Prompt | None:
    """``text`` as a prompt; None if the triple quotes at its start are not closed yet.

    Closing quotes end a line. If text follows that line, the text was pasted and the quotes are a part of it.
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
