"""Colours streaming Markdown. Only styles are added; the marks stay in the text."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edgespec.cli.terminal.code_colours import CodeColours
from edgespec.cli.terminal.terminal_text import Segment

_BOLD, _CODE, _MARK = "1", "36", "2"

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})([^\n]*)\n?$")
_MAYBE_FENCE = re.compile(r"[ \t]*(`{1,2}|~{1,2}|)$")
_HEADING = re.compile(r"#{1,6}[ \t]")

# Characters. A span is held back until its closing mark, which must follow on the same line within this distance:
# a phrase, or two thirds of a second of a small model's text.
_LONGEST_SPAN = 80

_UNITS = re.compile(r"\n|`+|\*+|[^\n`*]+")

# Longest line, in characters, that can be an opening fence.
_LONGEST_FENCE = 200

# Seconds after which an incomplete line of code is shown, so that a slow model visibly writes.
_PATIENCE_S = 0.3


@dataclass(slots=True)
class _Block:
    """An open block of code: the fence that closes it, and the colours of its language."""

    fence: str
    colours: CodeColours
    shown: int = 0  # characters of the current line


class Markdown:
    """Turns streaming Markdown into styled segments."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pending = ""
        self._line_begins = True
        self._block: _Block | None = None
        self._whole = self._heading = False
        self._shown_at = clock()
        self._resuming = False

    def resume(self, text: str) -> int:
        """Read text that is shown already, before the first ``feed``: it may end within a line or a block of code.

        Returns how many characters the next segments repeat of it.
        """
        self._resuming = True
        shown = sum(len(segment.text) for segment in self.feed(text))
        self._resuming = False
        return len(text) - shown

    def feed(self, text: str) -> list[Segment]:
        self._pending += text
        return list(self._segments(ended=False))

    def flush(self) -> list[Segment]:
        """The held-back segments, at the end of the text."""
        return list(self._segments(ended=True))

    def _segments(self, *, ended: bool) -> Iterator[Segment]:
        while self._pending:
            if self._block is not None:
                part = self._code_line(self._block, ended=ended)
            elif self._line_begins:
                part = self._line_start(ended=ended)
            else:
                part = self._inline(ended=ended)
            if part is None:
                return
            yield from part

    # --------------------------------------------------------------------------------------------- code

    def _code_line(self, block: _Block, *, ended: bool) -> list[Segment] | None:
        line, line_break, _ = self._pending.partition("\n")
        whole = bool(line_break) or ended
        if not whole and self._clock() - self._shown_at < _PATIENCE_S:
            return None
        closing = re.fullmatch(r"[ \t]*([`~]{3,})[ \t\r]*", line)
        if whole and closing and closing[1].startswith(block.fence):
            self._block = None
            self._pending = self._pending[len(line) + 1 :]
            return [Segment((line + line_break)[block.shown :], _MARK, whole=True)]
        if not whole and line.lstrip()[:1] in ("`", "~", ""):
            return None
        return self._coloured(block, line + line_break, partial=not whole)

    def _coloured(self, block: _Block, line: str, *, partial: bool) -> list[Segment] | None:
        # Colours of whole lines that are shown already would take 3 ms each.
        parts = [(line, "")] if self._resuming and not partial else block.colours.line(line)
        if partial and len(parts) > 1:
            parts.pop()  # the token may be incomplete
        text = "".join(part for part, _ in parts)
        segments, at = [], 0
        for part, style in parts:
            shown = part[max(0, block.shown - at) :]
            at += len(part)
            if shown:
                segments.append(Segment(shown, style, whole=True))
        self._shown_at = self._clock()
        if partial:
            block.shown = max(block.shown, len(text))
        else:
            block.shown = 0
            block.colours.end(line)
            self._pending = self._pending[len(line) :]
        return segments or None

    # -------------------------------------------------------------------------------------------- prose

    def _line_start(self, *, ended: bool) -> list[Segment] | None:
        line, line_break, _ = self._pending.partition("\n")
        if not line_break and not ended:
            if _MAYBE_FENCE.match(line) or (_FENCE.match(line) and len(line) < _LONGEST_FENCE):
                return None
            if re.fullmatch("#{1,6}", line):
                return None
        self._line_begins = False
        fence = _FENCE.match(line + line_break)
        if fence and line_break and not (fence[1][0] == "`" and "`" in fence[2]):
            language = re.match(r"\s*\{?\.?([\w+#-]*)", fence[2])
            self._block = _Block(fence[1], CodeColours(language[1] if language else ""))
            self._line_begins, self._shown_at = True, self._clock()
            self._pending = self._pending[len(line) + 1 :]
            return [Segment(line + line_break, _MARK, whole=True)]
        self._heading = bool(_HEADING.match(line))
        self._whole = line.startswith("|")
        return []

    def _inline(self, *, ended: bool) -> list[Segment] | None:
        unit = _UNITS.match(self._pending)
        assert unit is not None
        text, rest = unit.group(), self._pending[unit.end() :]
        style = _BOLD if self._heading else ""
        if text[0] == "`" or (text[0] == "*" and len(text) in (2, 3)):
            within, line_break, _ = rest[:_LONGEST_SPAN].partition("\n")
            closing = re.search(rf"(?<!`){text}(?!`)" if text[0] == "`" else rf"(?<=\S)\*{{{len(text)}}}", within)
            # More backticks of the same run may follow.
            undecided = closing is None or (text[0] == "`" and closing.end() == len(rest))
            if undecided and not line_break and len(rest) < _LONGEST_SPAN and not ended:
                return None
            if closing is not None and (text[0] == "`" or not within[0].isspace()):
                text += within[: closing.end()]
                style = _CODE if text[0] == "`" else _BOLD
        elif text[0] == "*" and not rest and not ended:
            return None
        self._pending = self._pending[len(text) :]
        self._line_begins = text == "\n"
        return [Segment(text, style, whole=self._whole)]
