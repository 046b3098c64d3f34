"""A form that begins behind the thinking of an answer: until then any token may follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.decoding.constraint import Constraint, Cursor
from edgespec.interfaces.counted_text import common_prefix
from edgespec.interfaces.drawing import UintArray
from edgespec.text.conversation.thinking import ThinkingMarks
from edgespec.text.tokenizers.tokenizer import Tokenizer

# Before the end of a closing mark, at one byte a token.
_TOKENS_OF_A_MARK = 32


@dataclass(frozen=True, slots=True)
class AfterThinking:
    """``constraint`` behind the thinking of an answer: the prompt has begun it if ``inside``, else the model may."""

    constraint: Constraint
    marks: ThinkingMarks
    inside: bool
    tokenizer: Tokenizer

    def cursor(self) -> AfterThinkingCursor:
        """A new cursor, before the first token."""
        if self.marks.answer:  # it may think before that mark or not
            begin = self.marks.answer[0].encode()
            return AfterThinkingCursor(self.constraint.cursor(), [], begin, self.tokenizer)
        opening = [] if self.inside else self.tokenizer.encode(self.marks.opening, special=True)
        if opening and self.tokenizer.token_bytes(opening[0]) == b" ":
            del opening[0]  # some tokenizers put a blank before a text
        return AfterThinkingCursor(self.constraint.cursor(), opening, self.marks.closing.encode(), self.tokenizer)


class AfterThinkingCursor:
    """Follows the tokens of the opening mark, any tokens up to the closing mark, then the form's."""

    def __init__(self, form: Cursor, opening: list[int], closing: bytes, tokenizer: Tokenizer) -> None:
        self._form, self._opening, self._closing, self._tokenizer = form, opening, closing, tokenizer
        self._begins: int | None = None  # where the form begins; None: still thinking, or in the opening mark
        self._thought: list[int] = []  # tokens without the whole closing mark
        self._opened = 0  # tokens of the opening mark that the text has, if it begins with them

    def at(self, tokens: Sequence[int]) -> None:
        own = list(tokens)
        opening = self._opening
        self._opened = len(opening) if own[: len(opening)] == opening else len(own)
        if own[: self._opened] != opening[: self._opened]:
            self._begins = 0
        elif self._opened < len(opening):
            self._begins = None if own else 0
        else:
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
        if self._begins is not None:
            if self._may_open and list(tokens[:1]) == self._opening[:1]:
                return 1
            return self._form.allows(tokens)
        if self._opened < len(self._opening):
            return int(list(tokens[:1]) == [self._opening[self._opened]])
        return len(tokens)

    @property
    def _may_open(self) -> bool:
        return bool(self._opening) and self._begins == 0 and self._opened == 0

    @property
    def mask(self) -> UintArray | None:
        if self._begins is not None:
            mask = self._form.mask
            return mask if mask is None or not self._may_open else _with(mask, self._opening[0])
        if self._opened < len(self._opening):
            return _with(np.zeros(0, dtype=np.uint32), self._opening[self._opened])
        return None

    @property
    def forced(self) -> Sequence[int]:
        return () if self._begins is None or self._may_open else self._form.forced


def _with(mask: UintArray, token: int) -> UintArray:
    """The mask that allows this token too."""
    longer = np.zeros(max(len(mask), token // 32 + 1), dtype=np.uint32)
    longer[: len(mask)] = mask
    longer[token // 32] |= np.uint32(1 << token % 32)
    return longer
