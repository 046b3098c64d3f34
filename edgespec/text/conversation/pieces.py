"""Pieces of an answer: what each says, and the text that it was read from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call: the ``index``-th of its answer. ``arguments`` is a JSON object, as the model wrote it.

    ``id`` is nine letters and digits, which the templates of Mistral's models require.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """``raw`` is what the model wrote: the raw texts of all pieces are the whole answer.

    ``text`` leaves out calls and the blanks next to them. ``reasoning`` is what the text says of thinking, without
    marks and outer blanks; None for text outside thinking.
    """

    raw: str
    text: str = ""
    reasoning: str | None = None
    call: ToolCall | None = None


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbouring texts as one, and neighbouring thoughts. Takes time in proportion to their length."""
    groups = list[list[Piece]]()
    for piece in pieces:
        last = groups[-1][-1] if groups else None
        if last is None or last.call or piece.call or (last.reasoning is None) != (piece.reasoning is None):
            groups.append([])
        groups[-1].append(piece)
    return [_as_one(group) for group in groups]


def _as_one(pieces: Sequence[Piece]) -> Piece:
    first = pieces[0]
    if len(pieces) == 1:
        return first
    thought = None if first.reasoning is None else "".join(piece.reasoning or "" for piece in pieces)
    return Piece("".join(piece.raw for piece in pieces), "".join(piece.text for piece in pieces), thought)


def overlap(text: str, marks: Iterable[str]) -> int:
    """Length of the longest end of ``text`` that is the beginning of a mark, and not the whole mark."""
    longest = 0
    for mark in marks:
        lengths = range(min(len(mark) - 1, len(text)), longest, -1)
        longest = next((length for length in lengths if text.endswith(mark[:length])), longest)
    return longest
