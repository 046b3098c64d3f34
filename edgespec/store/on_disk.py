"""Every model file on this machine whose path is known: those of the store and those that other programs keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.store.found import ModelFolders, find_models
from edgespec.store.store import Store

# Of more files only the smallest are examined, since a drafter is small. Published collections have a few dozen.
MOST_FILES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOnDisk:
    """A model file on this machine.

    ``name``: the MODEL argument. ``program``: the program that keeps the file (None: edgespec). ``path``: without
    links. For a split model ``path`` and ``mtime_ns`` are those of the first part, and ``bytes`` is the size of all
    parts.
    """

    name: str
    path: Path
    bytes: int
    mtime_ns: int
    program: str | None = None


def files_on_disk(store: Store, folders: ModelFolders, most: int = MOST_FILES) -> Sequence[FileOnDisk]:
    """The model files, the smallest first, each listed once, under edgespec's own name if it has one.

    A file is opened only to check that it is GGUF. Unreadable files are left out.
    """
    named = [(stored.name, stored.path, stored.bytes, None) for stored in store.list() if stored.kind == "model"]
    runnable = [model for model in find_models(folders).models if model.refused is None]
    found = [(model.name, model.path, model.bytes, model.program) for model in runnable]
    files: dict[Path, FileOnDisk] = {}
    for name, path, size, program in (*named, *found):
        try:
            real, status = path.resolve(), path.stat()
        except (OSError, RuntimeError):  # the file is gone, or its links form a cycle
            continue
        file = FileOnDisk(name=name, path=real, bytes=size, mtime_ns=status.st_mtime_ns, program=program)
        files.setdefault(real, file)
    return sorted(files.values(), key=lambda file: (file.bytes, file.name))[:most]
