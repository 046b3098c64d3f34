"""Text for a terminal as it streams: words wrap at the edge, colours are added, and nothing in it is obeyed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rich.cells import cell_len

_RESET = "\x1b[0m"

# Shown for guessed tokens: a grey that text can be read on in light and dark terminals, since both colours are set.
_SHADE, _SHADED_TEXT = "48;5;238", "38;5;252"

# Control characters as the pictures that Unicode has for them; those of C1, which terminals obey too, have none.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t\r"}
_PICTURES |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}
_LONE_RETURN = re.compile(r"\r(?!\n)")

# Scripts that break lines between any two characters.
_IDEOGRAPHS = "\u2e80-\u303f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uff60"
_IDEOGRAPH = re.compile(f"[{_IDEOGRAPHS}]")
# Marks that end a phrase there, and begin no line.
_CLOSING = frozenset("、。，．：；？！）」』】》〉〕")
_UNITS = re.compile(rf"\r?\n|[ \t]|[{_IDEOGRAPHS}]|[^\s{_IDEOGRAPHS}]+|\s")

_TAB = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """Text in one style: the parameters of SGR, "" for none. Lines of ``whole`` text are left to the terminal to
    break, so that copying them gives what was written."""

    text: str
    style: str = ""
    whole: bool = False


class Harmless:
    """Replaces what a terminal would obey, a character for a character."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        text, self._held = self._held + text, ""
        if text.endswith("\r"):  # the end of a line, if a line feed follows
            text, self._held = text[:-1], "\r"
        return _LONE_RETURN.sub("\u240d", text.translate(_PICTURES))

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text.replace("\r", "\u240d")


class TerminalText:
    """What to write to a terminal, for segments that come bit by bit.

    A word is held back until it is whole. Where it does not fit it begins a new line; a space beyond the edge becomes
    the new line. Nothing else is added but colours. ``columns`` is asked each time, since windows change their size.
    """

    def __init__(self, columns: Callable[[], int], *, colours: bool) -> None:
        self._columns = columns
        self._colours = colours
        self._at = 0  # cells of the line that are taken
        self._word: list[Segment] = []
        self._word_cells = 0
        self._too_long = False  # the word at hand is longer than a line: its rest is not held back
        self._guessed: deque[tuple[int, bool]] = deque()
        self._style = ""

    def mark(self, characters: int, *, guessed: bool) -> None:
        """So many of the characters that come next, after those marked before, are guessed ones or are not."""
        if characters:
            self._guessed.append((characters, guessed))

    def write(self, segments: Iterable[Segment]) -> str:
        """What is to be written now; the rest is held back."""
        return "".join(piece for segment in segments for piece in self._pieces(segment)) + self._plain()

    def flush(self) -> str:
        """What was held back."""
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
        if self._at + cells <= self._columns():
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
        """Where the cursor is after text that the terminal broke."""
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
        """How many of the next characters are alike, at most so many, and whether they are guessed; counted off."""
        if not self._guessed:
            return most, False
        count, guessed = self._guessed.popleft()
        if count > most:
            self._guessed.appendleft((count - most, guessed))
        return min(count, most), guessed

    def _plain(self) -> str:
        """Ends the style that is set."""
        if not self._style:
            return ""
        self._style = ""
        return _RESET
