"""Answers in a model's own words for whole programs: the real server and a tiny model, whose text is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias
from unittest.mock import patch

from edgespec.text.conversation.answer_parts import AnswerParts, AnswerText
from edgespec.text.conversation.conversation import Conversation, Turn
from edgespec.text.conversation.ends import Ends

# The chunks of the answer to a prompt, as the template wrote it, to a request with or without tools.
Script: TypeAlias = Callable[[str, bool], Sequence[str]]


class _Scripted(AnswerText):
    """One chunk for each token, and the end of the answer with the last."""

    def __init__(self, own: AnswerText, chunks: Sequence[str]) -> None:
        """``own`` is what would read the model's text."""
        self.__dict__.update(own.__dict__)
        self._left = list(chunks)

    def feed(self, token: int, held: int = 0) -> tuple[str, bool]:
        return self._left.pop(0), not self._left

    def flush(self) -> str:
        return ""


@contextmanager
def scripted(script: Script) -> Iterator[None]:
    """Every answer is what the script says, until the end of the block."""
    own = Conversation.parts

    def parts(self: Conversation, turn: Turn, ends: Ends) -> AnswerParts:
        found = own(self, turn, ends)
        found._text = _Scripted(found._text, script(turn.text, turn.tools is not None))
        return found

    with patch.object(Conversation, "parts", parts):
        yield
