"""Who guessed the characters of an answer, for clients that ask: the tokens of what is sent to them."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from edgespec.engine.events import Text

# Characters that came with a token, and the drafter that guessed it, None if the token is the target's own.
GuessedText: TypeAlias = tuple[int, str | None]


class Guessed:
    """The tokens of one answer, aligned with its texts as they are sent: without marks of thinking.

    A text may have characters of tokens that came earlier or later. Those of a token that is cut count in both parts.
    """

    def __init__(self) -> None:
        self._tokens = deque[GuessedText]()  # whose characters were not sent

    def of(self, event: Text) -> tuple[GuessedText, ...]:
        """The tokens of what is sent of the event. The lengths add up to it."""
        self._tokens.extend((len(each.text), each.guessed_by) for each in event.tokens)
        found = self._taken(len(event.text))
        if event.reasoning is None:
            return tuple(found)
        thought, start = event.reasoning, event.text.find(event.reasoning)
        if start >= 0:
            return tuple(_within(found, start, start + len(thought)))
        own = thought.lstrip()  # a further thought stands apart by blanks that the model did not write
        start = event.text.find(own)
        return (len(thought) - len(own), None), *_within(found, start, start + len(own))

    def _taken(self, length: int) -> list[GuessedText]:
        found = list[GuessedText]()
        while self._tokens and (length or not self._tokens[0][0]):
            characters, source = self._tokens.popleft()
            if characters > length:
                self._tokens.appendleft((characters - length, source))
                characters = length
            length -= characters
            found.append((characters, source))
        return [*found, (length, None)] if length else found


def _within(tokens: list[GuessedText], start: int, end: int) -> list[GuessedText]:
    """The characters from ``start`` to ``end`` only; tokens without any are left out."""
    found, at = list[GuessedText](), 0
    for characters, source in tokens:
        inside = min(at + characters, end) - max(at, start)
        at += characters
        if inside > 0:
            found.append((inside, source))
    return found
