"""Notes about model files, kept in edgespec's home so that a start need not read the files' headers again.

A note is valid while the file keeps its size and modification time. What a note says of a drafter is checked again
before the drafter is used: a wrong note loses a drafter, but never changes an answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError, ModelFileError
from edgespec.files.atomic import write_json
from edgespec.files.checked import WrongValueError, read, read_object, to_json
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
    """What is known of one model file with the size and the modification time (in nanoseconds) ``seen``.

    ``refused``: why the file cannot be used at all. ``vocabularies``, by the target's identity: why the file cannot
    draft for the target, or None. ``translated``, by the same: the share of a sample text's tokens that the file has
    too, if its vocabulary is another one. ``described``: the file's facts as a drafter, by all that they depend on.
    ``drafter``: the file's last drafter when the file was a target.
    """

    seen: tuple[int, int]
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
        self._notes: dict[str, FileNote] = {}

    def of(self, file: FileOnDisk) -> FileNote:
        """The valid note about a file, or an empty one. Changes to the returned note are saved."""
        key, seen = str(file.path), (file.bytes, file.mtime_ns)
        if key not in self._notes:
            note = _note(self._stored.get(key))
            self._notes[key] = FileNote(seen) if note is None or note.seen != seen else note
        return self._notes[key]

    def drafters(self) -> Mapping[Path, str]:
        """The last drafter of each target whose file is unchanged, by the target's path."""
        found = {}
        for key, stored in self._stored.items():
            path, note = Path(key), _note(stored)
            if note is not None and note.drafter is not None:
                with contextlib.suppress(OSError, ValueError):
                    if path.stat().st_mtime_ns == note.seen[1]:
                        found[path] = note.drafter
        return found

    def save(self, files: Iterable[FileOnDisk], *, all_files: bool = True) -> None:
        """Write the changed notes about ``files``. An error while writing is ignored.

        ``all_files``: there are no others, so notes about others are dropped.
        """
        there = {str(file.path) for file in files} | (set() if all_files else set(self._stored))
        document = {key: stored for key, stored in self._stored.items() if key in there}
        document |= {key: _kept(note) for key, note in self._notes.items() if key in there}
        if document == self._stored:
            return
        with contextlib.suppress(OSError, ValueError, EdgespecError):
            self._home.create(self._home.root)
            write_json(self._home.file_notes, {"schema_version": SCHEMA_VERSION, "files": document})
            self._stored = document


def _kept(note: FileNote) -> dict[str, Any]:
    """A note as it is stored, with the last entries of its tables."""
    return {
        name: dict(list(value.items())[-_MOST_KEPT:]) if isinstance(value, dict) else value
        for name, value in to_json(note).items()
    }


def _note(stored: object) -> FileNote | None:
    """A note from its stored form; None for a damaged one."""
    with contextlib.suppress(WrongValueError):
        return read(FileNote, stored, ignore_unknown=True)
    return None


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(ModelFileError, WrongValueError):
        document = read_object(path, _LARGEST_BYTES)
        if document.get("schema_version") == SCHEMA_VERSION:
            return read(dict[str, Any], document.get("files"))
    return {}
