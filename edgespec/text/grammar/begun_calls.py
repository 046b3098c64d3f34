"""Calls in an answer that need not have any: all tokens may come until a call begins, then those of its grammar."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from edgespec.decoding.constraint import Cursor
from edgespec.errors import ConstraintError
from edgespec.interfaces.counted_text import common_prefix
from edgespec.interfaces.drawing import UintArray
from edgespec.text.conversation.call_formats import Mark
from edgespec.text.conversation.thinking import ThinkingMarks
from edgespec.text.tokenizers.tokenizer import Tokenizer

# Characters before the name in a call without marks: its beginning is looked for in each token's text.
_LONGEST_HEAD = 200
# Directly in front of a mark it says that the text is about it. A quote behind a word or a stop ends something else.
_OPENING_QUOTE = re.compile(r"""[\s(\[{]?[`"']""", re.ASCII)
_BEFORE_MARK = 2


class CallCursor(Cursor, Protocol):
    """A cursor of the grammar of a call, whose first token holds the beginning of the call's mark."""

    @property
    def complete(self) -> bool:
        """Whether the call is complete here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunCalls:
    """The constraint of an answer that may call tools.

    ``marks`` begin a call anywhere but behind an opening quote, if a name in them is one of ``names``, and a text
    that fits ``bare``, if there is one, where the answer begins.
    ``begin`` gives the cursor of a call, which is bare or not: None binds nothing. Between the marks of
    ``thinking``, which the prompt has opened if ``inside``, no call begins.
    """

    marks: tuple[str, ...]
    names: frozenset[str]
    bare: re.Pattern[str] | None
    begin: Callable[[bool], CallCursor | None]
    thinking: ThinkingMarks | None
    inside: bool
    tokenizer: Tokenizer

    def cursor(self) -> BegunCallsCursor:
        """A new cursor, before the first token."""
        return BegunCallsCursor(self)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the answer stands behind one of its tokens.

    Outside of calls ``text`` is that of the tokens from ``first`` on: what may become a mark, and two characters
    before it. In a call ``first`` is its first token.
    ``thinks``: in thinking. ``said``: there was text outside of calls and thinking.
    """

    first: int
    text: str = ""
    thinks: bool = False
    said: bool = False
    in_call: bool = False
    bare: bool = False


class BegunCallsCursor:
    """Follows an answer's tokens: free ones, and those of calls."""

    def __init__(self, form: BegunCalls) -> None:
        self._form = form
        self._marks = tuple(Mark(_as_bytes(mark)) for mark in form.marks)
        thinking = form.thinking
        self._opening = None if thinking is None else _as_bytes(thinking.opening)
        self._closing = "" if thinking is None else _as_bytes(thinking.closing)
        self._thinks_again = thinking is not None and bool(thinking.answer)
        opening = (Mark(self._opening),) if self._thinks_again and self._opening else ()
        self._watched = (*self._marks, *opening)
        self._firsts = frozenset(mark.parts[0][0] for mark in self._watched)
        self._tokens: list[int] = []
        self._places = [_Place(0, thinks=form.inside)]  # one more than tokens
        self._cursors: dict[bool, CallCursor | None] = {}

    def at(self, tokens: Sequence[int]) -> None:
        shared = common_prefix(self._tokens, list(tokens))
        self._back_to(shared)
        for token in tokens[shared:]:
            if token in self._form.tokenizer.stop_ids:
                break
            self._add(token)

    def allows(self, tokens: Sequence[int]) -> int:
        length, found = len(self._tokens), 0
        for token in tokens:
            cursor = self._bound()
            if cursor is not None and not cursor.allows([token]):
                break
            found += 1
            if found == len(tokens) or token in self._form.tokenizer.stop_ids:
                break
            self._add(token)
        self._back_to(length)
        return found

    @property
    def mask(self) -> UintArray | None:
        cursor = self._bound()
        return None if cursor is None else cursor.mask

    @property
    def forced(self) -> Sequence[int]:
        cursor = self._bound()
        return () if cursor is None else cursor.forced

    def _back_to(self, length: int) -> None:
        del self._tokens[length:], self._places[length + 1 :]

    def _add(self, token: int) -> None:
        """Go behind one more token. Raises ConstraintError if a call does not allow it."""
        place = self._places[-1]
        self._tokens.append(token)
        try:
            self._places.append(self._within(place) if place.in_call else self._outside(place, token))
        except ConstraintError:
            self._tokens.pop()
            raise

    # ------------------------------------------------------------------------------------------------- calls

    def _bound(self) -> CallCursor | None:
        """The cursor of the call in progress; None: any token may follow."""
        place = self._places[-1]
        return self._at_call(place) if place.in_call else None

    def _at_call(self, place: _Place) -> CallCursor | None:
        if place.bare not in self._cursors:
            self._cursors[place.bare] = self._form.begin(place.bare)
        cursor = self._cursors[place.bare]
        if cursor is not None:
            cursor.at(self._tokens[place.first :])
        return cursor

    def _within(self, place: _Place) -> _Place:
        cursor = self._at_call(place)
        return _Place(len(self._tokens), said=place.said) if cursor is None or cursor.complete else place

    def _begun(self, place: _Place) -> _Place:
        """The place in a call that begins at the place's first token.

        Outside of calls if its tokens are none of its grammar: one may hold the end of the mark and another word.
        """
        try:
            return self._within(replace(place, text="", in_call=True))
        except ConstraintError:
            return _Place(len(self._tokens), said=True)

    # ---------------------------------------------------------------------------------------------- other text

    def _outside(self, place: _Place, token: int) -> _Place:
        own = self._written(token)
        text, behind = place.text + own, len(self._tokens)
        if place.thinks:
            if self._closing in text:
                return _Place(behind, said=place.said)
            return replace(place, text=text[-len(self._closing) :])
        if place.said and len(own) >= _BEFORE_MARK and self._firsts.isdisjoint(text):  # almost all tokens
            return _Place(behind - 1, own, said=True)
        if self._opens_thinking(text, said=place.said):
            return _Place(behind, thinks=True, said=place.said)
        begun = self._mark_in(text, len(place.text))
        if begun is not None:
            return self._begun(_Place(self._token_of(place.first, begun), said=place.said))
        bare = self._form.bare
        if bare is not None and not place.said and bare.match(text):
            return self._begun(_Place(place.first, bare=True))
        if not place.said and self._may_begin(text):
            return replace(place, text=text)
        kept = min(mark.begun_at(text) for mark in self._watched) - _BEFORE_MARK
        first = self._token_of(place.first, max(0, kept))
        return _Place(first, "".join(map(self._written, self._tokens[first:])), said=True)

    def _mark_in(self, text: str, read: int) -> int | None:
        """Where the first mark is that begins a call and ends behind the ``read`` characters; None without one."""
        places = (
            found.start()
            for mark in self._marks
            for found in mark.each_in(text)
            if found.end() > read and self._form.names.issuperset(found.groups())
        )
        quoted = _OPENING_QUOTE.fullmatch
        return min((at for at in places if not quoted(text[max(0, at - _BEFORE_MARK) : at])), default=None)

    def _opens_thinking(self, text: str, *, said: bool) -> bool:
        if self._opening is None:
            return False
        return self._opening in text if self._thinks_again else not said and text.lstrip().startswith(self._opening)

    def _may_begin(self, text: str) -> bool:
        """Whether the first text of an answer may become thinking, or a call without marks."""
        begun = text.lstrip()
        thinks = self._opening is not None and self._opening.startswith(begun)
        return len(text) < _LONGEST_HEAD and (thinks or (self._form.bare is not None and begun[:1] in ("", "{", "`")))

    def _token_of(self, first: int, character: int) -> int:
        """The token that holds a character of the text from the token ``first`` on."""
        for place, token in enumerate(self._tokens[first:], first):
            character -= len(self._written(token))
            if character < 0:
                return place
        return len(self._tokens)

    def _written(self, token: int) -> str:
        control = self._form.tokenizer.control_token(token)
        own = self._form.tokenizer.token_bytes(token) if control is None else control.text.encode()
        return own.decode("latin-1")


def _as_bytes(text: str) -> str:
    """The text with one character for each byte, as tokens may hold a part of a character."""
    return text.encode().decode("latin-1")
