"""Streams text to a terminal: wraps words, adds colours, and replaces control characters."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rich.cells import cell_len

_RESET = "\x1b[0m"

# Background and text colour of guessed tokens: readable in light and dark terminals, because both are set.
_SHADE, _SHADED_TEXT = "48;5;238", "38;5;252"

# Replacements of control characters: Unicode's control pictures, or U+FFFD for C1 characters and those that change
# the direction of a line, which have none.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t\r"}
_PICTURES |= {0x7F: 0x2421}
_PICTURES |= dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)
_LONE_RETURN = re.compile(r"\r(?!\n)")

# Scripts in which a line may break between any two characters.
_IDEOGRAPHS = "\u2e80-\u303f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uff60"
_IDEOGRAPH = re.compile(f"[{_IDEOGRAPHS}]")
# Punctuation of these scripts that must not start a line.
_CLOSING = frozenset("、。，．：；？！）」』】》〉〕")
_UNITS = re.compile(rf"\r?\n|[ \t]|[{_IDEOGRAPHS}]|[^\s{_IDEOGRAPHS}]+|\s")
# What stays on one line of a message.
UNBROKEN = re.compile(rf" +|(?:[{_IDEOGRAPHS}]|[^ {_IDEOGRAPHS}]+)[{''.join(sorted(_CLOSING))}]*")

_TAB = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """Text in one style: the parameters of SGR, "" for none. The terminal itself breaks the lines of ``whole`` text,
    so that copied text has no added line breaks."""

    text: str
    style: str = ""
    whole: bool = False


class Harmless:
    """Replaces control characters that a terminal would execute, one character by one."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        text, self._held = self._held + text, ""
        if text.endswith("\r"):  # ends a line if a line feed follows
            text, self._held = text[:-1], "\r"
        return _LONE_RETURN.sub("\u240d", text.translate(_PICTURES))

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text.replace("\r", "\u240d")


class TerminalText:
    """Turns streaming segments into output for a terminal.

    A word is held back until it is complete. A word that does not fit starts a new line, and a space beyond the edge
    is replaced by a line break. Only colours are added otherwise. ``columns`` is called each time, because windows
    change their size.
    """

    def __init__(self, columns: Callable[[], int], *, colours: bool) -> None:
        self._columns = columns
        self._colours = colours
        self._at = 0  # cells used in the current line
        self._word: list[Segment] = []
        self._word_cells = 0
        self._too_long = False  # the current word is longer than a line: its rest is not held back
        self._guessed: deque[tuple[int, bool]] = deque()
        self._style = ""

    def mark(self, characters: int, *, guessed: bool) -> None:
        """Say of the next ``characters``, after those marked before, whether they are guessed."""
        if characters:
            self._guessed.append((characters, guessed))

    def write(self, segments: Iterable[Segment]) -> str:
        """The output for now. An incomplete word is held back."""
        return "".join(piece for segment in segments for piece in self._pieces(segment)) + self._plain()

    def flush(self) -> str:
        """The held-back output."""
        return "".join(self._end_word()) + self._plain()

    def _pieces(self, segment: Segment) -> Iterator[str]:
        if segment.whole:
            yield from self._end_word()
            yield from self._styled(segment.text, segment.style)
            self._advance(segment.text)
            return
        for unit in _UNITS.findall(segment.text):
            if unit.endswith("\n"):
                yield from self._end_word()
                yield from self._styled(unit, "")
                self._at = 0
            elif unit.isspace():
                yield from self._end_word()
                yield from self._space(unit, segment.style)
            else:
                yield from self._part_of_word(unit, segment.style)

    def _space(self, space: str, style: str) -> Iterator[str]:
        cells = _TAB - self._at % _TAB if space == "\t" else cell_len(space)
        if self._at + cells <= self._columns() or space not in " \t":  # lines do not break at others
            yield from self._styled(space, style)
            self._at += cells
        else:
            self._taken(1)
            yield self._plain() + "\n"
            self._at = 0

    def _part_of_word(self, part: str, style: str) -> Iterator[str]:
        breaks = _IDEOGRAPH.match(part) or (self._word and _IDEOGRAPH.match(self._word[-1].text))
        if breaks and part not in _CLOSING:
            yield from self._end_word()
        self._word.append(Segment(part, style))
        self._word_cells = cell_len("".join(each.text for each in self._word))
        if self._too_long or self._word_cells > self._columns():
            yield from self._put_word()
            self._too_long = True

    def _end_word(self) -> Iterator[str]:
        yield from self._put_word()
        self._too_long = False

    def _put_word(self) -> Iterator[str]:
        if self._at and not self._too_long and self._at + self._word_cells > self._columns():
            yield self._plain() + "\n"
            self._at = 0
        for part in self._word:
            yield from self._styled(part.text, part.style)
            self._advance(part.text)
        self._word, self._word_cells = [], 0

    def _advance(self, text: str) -> None:
        """Update the cursor's position after text whose lines the terminal broke."""
        _, line_break, line = text.rpartition("\n")
        if line_break:
            self._at = 0
        for number, part in enumerate(line.split("\t")):
            if number:
                self._at += _TAB - self._at % _TAB
            self._at += cell_len(part)
        columns = self._columns()
        if self._at > columns:
            self._at = (self._at - 1) % columns + 1

    # ------------------------------------------------------------------------------------------- colours

    def _styled(self, text: str, style: str) -> Iterator[str]:
        while text:
            count, guessed = self._taken(len(text))
            part, text = text[:count], text[count:]
            if not self._colours:
                yield part
                continue
            shaded = guessed and not part.isspace()
            full = f"{style or _SHADED_TEXT};{_SHADE}" if shaded else style
            if full != self._style:
                yield f"{self._plain()}\x1b[{full}m" if full else self._plain()
                self._style = full
            yield part

    def _taken(self, most: int) -> tuple[int, bool]:
        """Take up to ``most`` characters with the same mark: their number, and whether they are guessed."""
        if not self._guessed:
            return most, False
        count, guessed = self._guessed.popleft()
        if count > most:
            self._guessed.appendleft((count - most, guessed))
        return min(count, most), guessed

    def _plain(self) -> str:
        """The code that ends the current style, if there is one."""
        if not self._style:
            return ""
        self._style = ""
        return _RESET
