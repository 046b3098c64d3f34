"""Which characters of a rendering the template itself wrote; all others came from messages.

Only the template's own characters may form a control token's name, whatever the template removes, changes or joins.
``Written`` is text with an origin for each character. Text of any other type counts as said in a message, so an
operation that drops origins makes a control token too few, never one too many.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO
from typing import Self, SupportsIndex

OWN, SAID = "o", "s"


class Written(str):
    """Text with characters of the template's own. ``origins`` has OWN or SAID for each character.

    Methods that are not defined here return a plain str.
    """

    __slots__ = ("origins",)
    origins: str

    def __new__(cls, text: str, origins: str) -> Self:
        made = super().__new__(cls, text)
        made.origins = origins
        return made

    def __str__(self) -> str:
        return self  # jinja calls str() of all that it prints

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return traced(str.__getitem__(self, key), self.origins[key])

    def __mul__(self, times: SupportsIndex) -> str:
        return traced(str.__mul__(self, times), self.origins * times)

    def lstrip(self, characters: str | None = None, /) -> str:
        return self[len(self) - len(str.lstrip(self, characters)) :]

    def rstrip(self, characters: str | None = None, /) -> str:
        return self[: len(str.rstrip(self, characters))]

    def strip(self, characters: str | None = None, /) -> str:
        return self.lstrip(characters).rstrip(characters)

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(str.removesuffix(self, suffix))]

    def partition(self, separator: str, /) -> tuple[str, str, str]:
        before, between, after = self._neighbours(str.partition(self, separator), "")
        return before, between, after

    def rpartition(self, separator: str, /) -> tuple[str, str, str]:
        before, between, after = self._neighbours(str.rpartition(self, separator), "")
        return before, between, after

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._neighbours(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._neighbours(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._neighbours(str.splitlines(self, keepends), None)

    def upper(self) -> str:
        return self._cased(str.upper(self))

    def lower(self) -> str:
        return self._cased(str.lower(self))

    def title(self) -> str:
        return self._cased(str.title(self))

    def capitalize(self) -> str:
        return self._cased(str.capitalize(self))

    def _cased(self, changed: str) -> str:
        # A character becomes one or more in another case: if there are as many as before, each became one.
        return traced(changed, self.origins) if len(changed) == len(self) else changed

    def _neighbours(self, parts: Iterable[str], between: str | None) -> list[str]:
        """The parts with their origins. They follow each other, with ``between`` or (None) blanks between them."""
        found, at = list[str](), 0
        for part in parts:
            # No part begins with blanks that separate parts, but for the first: its first occurrence is the part.
            begin = self.find(part, at) if between is None else at
            end = begin + len(part)
            found.append(traced(part, self.origins[begin:end]))
            at = end + len(between or "")
        return found


def traced(text: str, origins: str) -> str:
    """The text with these origins; plain if none of it is the template's own."""
    return Written(text, origins) if OWN in origins else text


def written(text: str) -> str:
    """The text as the template's own."""
    return traced(text, OWN * len(text))


def origins_of(text: str) -> str:
    """OWN or SAID for each character."""
    return text.origins if isinstance(text, Written) else SAID * len(text)


def joined(parts: Iterable[str], separator: str = "") -> str:
    """``separator.join(parts)``."""
    parts = list(parts)
    text = str.join(separator, parts)
    if Written not in map(type, (separator, *parts)):
        return text
    return traced(text, origins_of(separator).join(map(origins_of, parts)))


def replaced(text: str, old: str, new: str, times: int) -> str:
    """``text`` with ``new`` in place of the first ``times`` of ``old``, of which there are as many.

    Between single characters (``old`` is "") origins are dropped.
    """
    made = str.replace(text, old, new, times)
    if not old or Written not in (type(text), type(new)):
        return made
    before, inside, origins, at = origins_of(text), origins_of(new), StringIO(), 0
    for _ in range(times):  # not by split(): its pieces take a hundred bytes each
        found = text.find(old, at)
        origins.write(before[at:found] + inside)
        at = found + len(old)
    return traced(made, origins.getvalue() + before[at:])
