"""Notes about model files, kept in edgespec's home so that a start need not read the files' headers again.

A note is valid while the file keeps its size and modification time. What a note says of a drafter is checked again
before the drafter is used: a wrong note loses a drafter, but never changes an answer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.files.atomic import write_json
from edgespec.files.home import Home
from edgespec.store.on_disk import FileOnDisk

# Version 1 refused drafters for another eos token or token type, version 2 for another vocabulary.
SCHEMA_VERSION = 3

# A note has about a kilobyte, and a home has at most a few hundred notes.
_LARGEST_BYTES = 8 << 20

# Most vocabularies compared with a file, and settings it was described in, that its note keeps: the last used ones.
_MOST_KEPT = 16


@dataclass(slots=True)
class FileNote:
    """What is known of one model file.

    ``refused``: why the file cannot be used at all. ``vocabularies``, by the target's identity: why the file cannot
    draft for the target, or None. ``translated``, by the same: the share of a sample text's tokens that the file has
    too, if its vocabulary is another one. ``described``: the file's facts as a drafter, by all that they depend on.
    ``drafter``: the file's last drafter when the file was a target.
    """

    refused: str | None = None
    drafter: str | None = None
    vocabularies: dict[str, str | None] = field(default_factory=dict)
    translated: dict[str, float] = field(default_factory=dict)
    described: dict[str, Mapping[str, Any]] = field(default_factory=dict)


class FileNotes:
    """The notes of one home, read at construction and written by ``save``. An unreadable notes file is replaced."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._stored = _read(home.file_notes)
        self._notes: dict[str, tuple[FileOnDisk, FileNote]] = {}

    def of(self, file: FileOnDisk) -> FileNote:
        """The valid note about a file, or an empty one. Changes to the returned note are saved."""
        key = str(file.path)
        if key not in self._notes:
            stored = self._stored.get(key)
            known = isinstance(stored, dict) and stored.get("seen") == [file.bytes, file.mtime_ns]
            self._notes[key] = (file, _note(stored) if known and stored else FileNote())
        return self._notes[key][1]

    def drafters(self) -> Mapping[Path, str]:
        """The last drafter of each target whose file is unchanged, by the target's path."""
        found = {}
        for key, stored in self._stored.items():
            path, drafter = Path(key), stored.get("drafter") if isinstance(stored, dict) else None
            if isinstance(drafter, str):
                with contextlib.suppress(OSError, ValueError):
                    seen = stored.get("seen")
                    if isinstance(seen, list) and path.stat().st_mtime_ns in seen[1:]:
                        found[path] = drafter
        return found

    def save(self, files: Iterable[FileOnDisk], *, all_files: bool = True) -> None:
        """Write the changed notes about ``files``. An error while writing is ignored.

        ``all_files``: there are no others, so notes about others are dropped.
        """
        there = {str(file.path) for file in files} | (set() if all_files else set(self._stored))
        document = {key: stored for key, stored in self._stored.items() if key in there}
        document |= {
            key: {
                "seen": [file.bytes, file.mtime_ns],
                "refused": note.refused,
                "drafter": note.drafter,
                "vocabularies": _last(note.vocabularies),
                "translated": _last(note.translated),
                "described": _last(note.described),
            }
            for key, (file, note) in self._notes.items()
            if key in there
        }
        if document == self._stored:
            return
        with contextlib.suppress(OSError, ValueError, EdgespecError):
            self._home.create(self._home.root)
            write_json(self._home.file_notes, {"schema_version": SCHEMA_VERSION, "files": document})
            self._stored = document


def _last(kept: Mapping[str, Any]) -> dict[str, Any]:
    return dict(list(kept.items())[-_MOST_KEPT:])


def _note(stored: Mapping[str, Any]) -> FileNote:
    """A note from its stored form; values of the wrong type are left out."""
    refused, drafter = stored.get("refused"), stored.get("drafter")
    return FileNote(
        refused=refused if isinstance(refused, str) else None,
        drafter=drafter if isinstance(drafter, str) else None,
        vocabularies={
            key: reason for key, reason in _items(stored, "vocabularies") if reason is None or isinstance(reason, str)
        },
        translated={key: share for key, share in _items(stored, "translated") if isinstance(share, float)},
        described={key: facts for key, facts in _items(stored, "described") if isinstance(facts, dict)},
    )


def _items(stored: Mapping[str, Any], key: str) -> Iterable[tuple[str, Any]]:
    value = stored.get(key)
    return value.items() if isinstance(value, dict) else ()


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            return {}
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
        return {}
    files = document.get("files")
    return files if isinstance(files, dict) else {}
