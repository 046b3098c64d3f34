"""Copying from texts in files: answers of earlier conversations, and the user's own text.

Sources: REST (He et al., 2023) for an index of text, SuffixDecoding (Oliaro et al., 2024) for earlier answers, and
Hierarchy Drafting (Cho et al., 2025) for asking both next to the conversation. The index is files/stored_text.py.
"""

from __future__ import annotations

from collections.abc import Callable

from edgespec.drafters.lookup import LookupDraftState
from edgespec.drafters.text_index import Match
from edgespec.files.stored_text import StoredText
from edgespec.interfaces.drafting import DraftRequest, TokenChooser

HISTORY, DATASTORE = "history", "datastore"
KINDS = (HISTORY, DATASTORE)

# The deepest chain that a profile can ask for (profiles/layers.py).
_MOST_COPIED = 16


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
    """What follows the matches of the latest text. A newer stored text replaces the old one between two texts.

    Stored text may hold answers that were drawn with this answer's noise. Where acceptance depends on that noise
    there are no guesses, so that the text keeps its distribution.
    """

    is_quick = False  # 0.03 ms in millions of tokens: for the ends of the text and of a chain, not for each token

    def __init__(self, text: Callable[[], StoredText | None], chooser: TokenChooser) -> None:
        self._latest = text
        self._chooser = chooser
        self._text: StoredText | None = None
        self._following: list[int | None] = []  # continuations of the matches so far, a None after each

    def follow(self, tokens: list[int]) -> None:
        """Take the current text."""
        self._text = None if self._chooser.reuses_noise else self._latest()
        self._following.clear()

    def matches(self, tail: list[int]) -> list[Match]:
        if self._text is None:
            return []
        length, continuations = self._text.continuations(tail, _MOST_COPIED)
        found = []
        for tokens in continuations:
            found.append((len(self._following), length))
            self._following += [*tokens, None]
        return found

    def after(self, position: int) -> int | None:
        return self._following[position] if position < len(self._following) else None

    def copy(self, position: int, count: int) -> list[int]:
        copied = []
        for token in self._following[position : position + count]:
            if token is None:
                break
            copied.append(token)
        return copied

    def clear(self) -> None:
        self._text = None
        self._following.clear()
