"""Copying from texts in files: answers of earlier conversations, and the user's own text.

Sources: REST (He et al., 2023) for an index of text, SuffixDecoding (Oliaro et al., 2024) for earlier answers, and
Hierarchy Drafting (Cho et al., 2025) for asking both next to the conversation. The index is files/stored_text.py.
"""

from __future__ import annotations

from collections.abc import Callable

from edgespec.drafters.lookup import LookupDraftState
from edgespec.files.stored_text import Match, StoredText
from edgespec.interfaces.drafting import DraftRequest, TokenChooser

HISTORY, DATASTORE = "history", "datastore"
KINDS = (HISTORY, DATASTORE)


class StoredTextDrafter:
    """Proposes what followed the longest match in stored text. ``text`` gives the current one, None without any."""

    def __init__(self, kind: str, text: Callable[[], StoredText | None]) -> None:
        self.kind = kind
        self._text = text

    def start(self, request: DraftRequest) -> LookupDraftState:
        return LookupDraftState(request, _Latest(self._text, request.chooser), self.kind)

    def close(self) -> None:
        """Do nothing: the owner of the texts closes them."""


class _Latest:
    """The stored text of the latest search: a newer text replaces it only when the next search begins.

    Stored text may hold answers that were drawn with this answer's noise. Where acceptance depends on that noise
    there are no guesses, so that the text keeps its distribution.
    """

    def __init__(self, text: Callable[[], StoredText | None], chooser: TokenChooser) -> None:
        self._latest = text
        self._chooser = chooser
        self._text: StoredText | None = None

    def follow(self, tokens: list[int]) -> None:
        """Take the current text."""
        self._text = None if self._chooser.reuses_noise else self._latest()

    def matches(self, tail: list[int]) -> list[Match]:
        return [] if self._text is None else self._text.matches(tail)

    def after(self, place: int) -> int | None:
        return None if self._text is None else self._text.after(place)

    def copy(self, place: int, count: int) -> list[int]:
        return [] if self._text is None else self._text.copy(place, count)

    def clear(self) -> None:
        self._text = None
