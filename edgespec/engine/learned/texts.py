"""Texts in EDGESPEC_HOME that a loaded target copies from: the history of answers, and the user's own text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.drafters.stored import DATASTORE, HISTORY, StoredTextDrafter
from edgespec.engine.learned.answers import KeptAnswers
from edgespec.errors import EdgespecError
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.gguf.vocabulary import vocabulary_digest
from edgespec.files.home import Home
from edgespec.files.stored_text import open_or_set_aside
from edgespec.profiles.profile import Profile

LEARNED = "the index of learned text"


def learned_path(home: Home, vocabulary: bytes) -> Path:
    """The index of the user's own text for models with this vocabulary."""
    return home.learned / f"{vocabulary.hex()}.text"


@dataclass(frozen=True, slots=True)
class StoredTexts:
    """The drafters that copy from stored texts, the history to add answers to, and notices about damaged files."""

    drafters: tuple[StoredTextDrafter, ...] = ()
    answers: KeptAnswers | None = None
    notices: tuple[str, ...] = ()

    @classmethod
    def open(cls, profile: Profile, home: Home, header: GgufHeader) -> StoredTexts:
        """Open what the profile asks for; nothing if a file cannot be used. Raises nothing."""
        # "auto" is on in the commands that answer people, which replace it by true, and off for applications.
        keeps, learns = profile.history is True, profile.learned is True and home.learned.is_dir()
        if not profile.lookup or not (keeps or learns):
            return cls()
        try:
            vocabulary, size = vocabulary_digest(header), header.vocabulary_size
        except EdgespecError:  # the file changed while it was loaded; loading reports it
            return cls()
        drafters, notices, answers = [], [], None
        if keeps:
            answers = KeptAnswers(home, vocabulary, size)
            kept = answers
            drafters.append(StoredTextDrafter(HISTORY, lambda: kept.text))
        if learns:
            learned, damage = open_or_set_aside(
                learned_path(home, vocabulary), vocabulary, size, LEARNED, mapped=True
            )
            if damage is not None:
                notices.append(f"{damage}; `edgespec memory learn` makes it")
            if learned is not None:
                drafters.append(StoredTextDrafter(DATASTORE, lambda: learned))
        return cls(tuple(drafters), answers, tuple(notices))
