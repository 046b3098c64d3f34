"""Every model file on this machine that we know a place of: those of the store and those that other programs keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.store.found import Places, find_models
from edgespec.store.store import Store

# Of more files the smallest are looked at: a drafter is small. Collections that people show have some dozens.
MOST_FILES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOnDisk:
    """``name`` is the MODEL argument for it, ``program`` who keeps it (None: we do), ``path`` free of links.

    Of a split model ``path`` and ``mtime_ns`` are the first part's, and ``bytes`` those of all.
    """

    name: str
    path: Path
    bytes: int
    mtime_ns: int
    program: str | None = None


def files_on_disk(store: Store, places: Places, most: int = MOST_FILES) -> Sequence[FileOnDisk]:
    """The files of models, the smallest first, each once and under our own name for it if we have one.

    Nothing is opened but to see that it is a GGUF file. What cannot be read is left out.
    """
    named = [(stored.name, stored.path, stored.bytes, None) for stored in store.list() if stored.kind == "model"]
    found = [(model.name, model.path, model.bytes, model.program) for model in find_models(places).models]
    files: dict[Path, FileOnDisk] = {}
    for name, path, size, program in (*named, *found):
        try:
            real, status = path.resolve(), path.stat()
        except (OSError, RuntimeError):  # it is gone, or its links lead in a circle
            continue
        file = FileOnDisk(name=name, path=real, bytes=size, mtime_ns=status.st_mtime_ns, program=program)
        files.setdefault(real, file)
    return sorted(files.values(), key=lambda file: (file.bytes, file.name))[:most]
