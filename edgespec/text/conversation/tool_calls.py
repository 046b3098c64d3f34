"""Separates the calls of tools from an answer's text, which comes in chunks.

A call is given once it is complete and valid; until then its text is held back. The name must be one of the request's
tools and the arguments a JSON object. A call that is not valid is text: no character of an answer is lost, except the
blanks next to a call and the marks around it.
"""

from __future__ import annotations

import re

from edgespec.text.conversation.call_formats import CallFormat
from edgespec.text.conversation.call_reader import (
    CallReader,
    Found,
    Held,
    Known,
    NoCallError,
    Reading,
    blank_end,
)
from edgespec.text.conversation.literals import BLANKS
from edgespec.text.conversation.pieces import Piece, ToolCall, joined, overlap

# Calls in one answer; their ids end in the number. Text of further calls is text.
MOST_CALLS = 100
# Attempts that read more than ``_SHORT`` characters and found no call. Each may read the rest of the answer; after
# them all text is text.
_MOST_FAILED = 20
# Text in which the beginning of a call must show what it is.
_SHORT = 200


class CallText:
    """Separates calls from the text of an answer that arrives in chunks."""

    def __init__(self, form: CallFormat, known: Known, *, ids: str, bare: bool = True) -> None:
        """``ids``: seven letters and digits with which the ids of all calls begin.

        Without ``bare`` calls have marks in every format.
        """
        self._format = form
        self._ids = ids
        self._openings = re.compile("|".join(map(re.escape, form.openings)))
        self._longest = max(map(len, form.openings))
        self._held = Held()
        self._reader = CallReader(form, known, self._held)
        self._at = 0  # text before it has been given
        self._attempt: Reading[Found] | None = None
        self._calls = 0
        self._failed = 0
        self._bare = bare and form.bare  # until text is given
        self._after_call = False  # blanks are dropped until text comes

    def feed(self, text: str) -> list[Piece]:
        """The text and the calls that are certain, in order."""
        self._held.add(text)
        pieces = list[Piece]()
        while self._attempt is not None or self._begin(pieces):
            if not self._go_on(pieces):
                return joined(pieces)
        self._held.text, self._at = self._held.text[self._at :], 0
        return joined(pieces)

    def flush(self) -> list[Piece]:
        """What was held back, once all text has come, or all text in front of a mark that no call has."""
        self._held.final = True
        pieces = self.feed("")
        self._held.final = False
        return pieces

    @property
    def count(self) -> int:
        """The calls that were given."""
        return self._calls

    def _begin(self, pieces: list[Piece]) -> bool:
        """Give text up to where a call may begin; False without one."""
        if self._after_call and (blanks := self._blanks()):
            pieces.append(Piece(self._taken(blanks)))
        text, final = self._held.text, self._held.final
        start = self._opening()
        until = start if start is not None else len(text)
        if start is None and not final and not self._only_text:
            until -= overlap(text[max(self._at, until - self._longest) :], self._format.openings)
        if not (final and start is None):
            until = self._at + len(text[self._at : until].rstrip(BLANKS))
        self._say(pieces, until - self._at)
        if start is None:
            return False
        self._attempt = self._read(self._at + self._blanks())
        return True

    @property
    def _only_text(self) -> bool:
        """Whether no further call is looked for."""
        return self._failed > _MOST_FAILED or self._calls == MOST_CALLS

    def _opening(self) -> int | None:
        """Where a call may begin; None without one."""
        text, begun = self._held.text, self._at + self._blanks()
        if self._only_text:
            return None
        if self._bare and text[begun : begun + 1] in ("{", "`"):
            return begun
        found = self._openings.search(text, self._at)
        return None if found is None else found.start()

    def _read(self, at: int) -> Reading[Found]:
        marked = self._openings.match(self._held.text, at) is not None
        return self._reader.block(at) if marked else self._reader.bare(at)

    def _go_on(self, pieces: list[Piece]) -> bool:
        """Read on in the attempt; False if more text must come."""
        assert self._attempt is not None
        try:
            next(self._attempt)
        except StopIteration as read:
            end, calls = read.value
        except NoCallError:
            end, calls = 0, []
        else:
            return False
        self._attempt = None
        if not calls or self._calls + len(calls) > MOST_CALLS:
            self._failed += self._held.read - self._at > _SHORT
            self._say(pieces, self._blanks() + 1)
            return True
        raw = self._taken(end - self._at)
        for name, arguments in calls:
            call = ToolCall(self._calls, f"{self._ids}{self._calls:02d}", name, arguments)
            pieces.append(Piece(raw, call=call))
            self._calls, raw = self._calls + 1, ""
        self._after_call = True
        return True

    def _blanks(self) -> int:
        return blank_end(self._held.text, self._at) - self._at

    def _taken(self, length: int) -> str:
        self._at += length
        return self._held.text[self._at - length : self._at]

    def _say(self, pieces: list[Piece], length: int) -> None:
        if length:
            text = self._taken(length)
            pieces.append(Piece(text, text))
            self._after_call = False
            self._bare = self._bare and not text.strip(BLANKS)
