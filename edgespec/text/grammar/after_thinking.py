"""A form behind the thinking of an answer: until then any token may follow that does not end the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from edgespec.decoding.constraint import Constraint, Cursor
from edgespec.errors import ConstraintError
from edgespec.interfaces.counted_text import common_prefix
from edgespec.interfaces.drawing import UintArray
from edgespec.text.conversation.thinking import ThinkingMarks
from edgespec.text.tokenizers.tokenizer import Tokenizer

# Before the end of a closing mark, at one byte a token.
_TOKENS_OF_A_MARK = 64


@dataclass(frozen=True, slots=True)
class AfterThinking:
    """``constraint`` behind the thinking of an answer: the prompt has begun it if ``inside``, else the model may."""

    constraint: Constraint
    marks: ThinkingMarks
    inside: bool
    tokenizer: Tokenizer

    def cursor(self) -> AfterThinkingCursor:
        """A new cursor, before the first token."""
        opening = [] if self.inside else tokens_of(self.marks.opening, self.tokenizer)
        return AfterThinkingCursor(self.constraint.cursor(), opening, self.marks.end.encode(), self.tokenizer)


class AfterThinkingCursor:
    """Follows the tokens of the opening mark, any tokens up to the closing mark, then the form's."""

    def __init__(self, form: Cursor, opening: list[int], closing: bytes, tokenizer: Tokenizer) -> None:
        self._form, self._opening, self._closing, self._tokenizer = form, opening, closing, tokenizer
        self._begins: int | None = None  # where the form begins; None: still thinking, or in the opening mark
        self._next = list[int]()  # the rest of the opening mark, where it may follow
        self._thought: list[int] = []  # tokens without the whole closing mark

    def at(self, tokens: Sequence[int]) -> None:
        own, opening = list(tokens), self._opening
        begun = common_prefix(own, opening)
        self._begins, self._next = 0, opening[begun:] if begun == len(own) else []
        if self._next:
            try:  # the form may begin as the mark does
                self._form.at(own)
            except ConstraintError:
                self._begins = None
            return
        if begun == len(opening):
            self._begins = self._end_of_thinking(own)
        if self._begins is not None:
            self._form.at(own[self._begins :])

    def _end_of_thinking(self, tokens: list[int]) -> int | None:
        """The place behind the token that completes the closing mark."""
        clean = common_prefix(self._thought, tokens)
        begins, said = max(len(self._opening), clean - _TOKENS_OF_A_MARK), b""
        for place, token in enumerate(tokens[begins:], begins):
            said += self._bytes(token)
            if self._closing in said:
                self._thought = tokens[:place]
                return place + 1
        self._thought = tokens
        return None

    def _bytes(self, token: int) -> bytes:
        control = self._tokenizer.control_token(token)
        return self._tokenizer.token_bytes(token) if control is None else control.text.encode()

    def allows(self, tokens: Sequence[int]) -> int:
        by_form = 0 if self._begins is None else self._form.allows(tokens)
        opened = common_prefix(self._next, list(tokens))
        if opened < len(self._next) or self._begins is not None:
            return max(by_form, opened)
        ends = (place for place, token in enumerate(tokens) if token in self._tokenizer.stop_ids)
        return next(ends, len(tokens))

    @property
    def mask(self) -> UintArray | None:
        if self._begins is None:
            return _with(np.zeros(0, dtype=np.uint32), self._next[0]) if self._next else self._any
        mask = self._form.mask
        return mask if mask is None or not self._next else _with(mask, self._next[0])

    @cached_property
    def _any(self) -> UintArray:
        """The tokens that do not end the answer."""
        size = self._tokenizer.vocabulary_size
        allowed = np.ones(-(-size // 32) * 32, dtype=np.uint8)
        allowed[[*self._tokenizer.stop_ids, *range(size, len(allowed))]] = 0
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    @property
    def forced(self) -> Sequence[int]:
        if self._begins is None:
            return self._next
        return () if self._next else self._form.forced


@dataclass(frozen=True, slots=True)
class BehindMark:
    """``constraint`` behind one of several ``marks``, each its tokens."""

    constraint: Constraint
    marks: tuple[tuple[int, ...], ...]

    def cursor(self) -> BehindMarkCursor:
        """A new cursor, before the first token."""
        return BehindMarkCursor(self.constraint.cursor(), self.marks)


class BehindMarkCursor:
    """Follows the tokens of a mark, then the form's."""

    def __init__(self, form: Cursor, marks: tuple[tuple[int, ...], ...]) -> None:
        self._form, self._marks = form, marks
        self._left = marks  # the rest of each mark that may still come; nothing behind one

    def at(self, tokens: Sequence[int]) -> None:
        own = tuple(tokens)
        mark = next((each for each in self._marks if own[: len(each)] == each), None)
        self._left = () if mark is not None else tuple(e[len(own) :] for e in self._marks if e[: len(own)] == own)
        if mark is not None:
            self._form.at(own[len(mark) :])
        elif not self._left:
            raise ConstraintError(f"token {own[-1]} is not allowed by the form of the answer")

    def allows(self, tokens: Sequence[int]) -> int:
        if not self._left:
            return self._form.allows(tokens)
        return max(common_prefix(list(each), list(tokens)) for each in self._left)

    @property
    def mask(self) -> UintArray | None:
        if not self._left:
            return self._form.mask
        mask = np.zeros(0, dtype=np.uint32)
        for each in self._left:
            mask = _with(mask, each[0])
        return mask

    @property
    def forced(self) -> Sequence[int]:
        if not self._left:
            return self._form.forced
        (first, *others) = self._left
        return first[: min((common_prefix(list(first), list(each)) for each in others), default=len(first))]


def tokens_of(mark: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a mark in the middle of a text."""
    ids = tokenizer.encode(mark, special=True)
    return ids[1:] if tokenizer.token_bytes(ids[0]) == b" " else ids  # some put a blank before a text


def _with(mask: UintArray, token: int) -> UintArray:
    """The mask that allows this token too."""
    longer = np.zeros(max(len(mask), token // 32 + 1), dtype=np.uint32)
    longer[: len(mask)] = mask
    longer[token // 32] |= np.uint32(1 << token % 32)
    return longer
