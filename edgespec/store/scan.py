"""Walks folders of other programs: the files below a folder, the model in files. Names and contents are untrusted."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from edgespec.errors import reason_of
from edgespec.files.checked import is_line, is_text
from edgespec.files.disk import read_bounded

_DEEPEST = 8  # levels of folders; the programs make at most four
# Most files and folders that are examined below one folder, so that scanning an unrelated folder takes only a
# fraction of a second. A collection of a hundred models has a few hundred.
_MOST_ENTRIES = 20_000
# Most bytes of a small file (a manifest, a template, settings). Real ones have a few kilobytes.
_MOST_SMALL_BYTES = 1 << 20

Ignored: TypeAlias = dict[Path, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A file that ``program`` keeps. ``name`` is its MODEL argument: a path, or ``ollama:NAME:TAG``.

    ``others`` are the further parts of a split model; ``bytes`` is the size of all parts. ``settings``: the file in
    which the program states how the model is used. ``refused``: why edgespec cannot run the model as the program
    does. ``vision``: the program keeps a projector for images with it.
    """

    name: str
    path: Path
    bytes: int
    program: str
    others: tuple[Path, ...] = ()
    settings: Path | None = None
    refused: str | None = None
    vision: bool = False


def found_model(name: str, paths: Sequence[Path], program: str, ignored: Ignored) -> FoundModel | None:
    """The model in these files, or None if one of the files cannot be used."""
    size = 0
    for path in paths:
        try:
            status = path.stat()
            regular = stat.S_ISREG(status.st_mode)  # opening a named pipe would block forever
            start = b""
            if regular:
                with path.open("rb") as file:
                    start = file.read(4)
        except OSError as error:
            ignored[path] = f"it cannot be read: {reason_of(error)}"
            return None
        if start != b"GGUF":
            ignored[path] = "it is not a GGUF file"
            return None
        size += status.st_size
    if not is_line(name):
        told = "contains control characters" if is_text(name) else "is not UTF-8: give its path as MODEL"
        ignored[paths[0]] = f"its name {told}"
        return None
    return FoundModel(name=name, path=paths[0], bytes=size, program=program, others=tuple(paths[1:]))


def small_file(path: Path) -> bytes:
    """The content of a small file. Raises what ``read_bounded`` raises."""
    return read_bounded(path, _MOST_SMALL_BYTES)


def files_below(
    folder: Path, ignored: Ignored, wanted: Callable[[Path], bool] = lambda _path: True
) -> Iterator[Path]:
    """Files below a folder, to a limited depth. A link to a folder is followed; each folder is entered once."""
    folders, left, entered = [(folder, 0)], _MOST_ENTRIES, set[tuple[int, int]]()
    while folders:
        current, depth = folders.pop()
        try:
            own = current.stat()
        except OSError:
            continue
        # Some file systems of Windows number no files.
        if own.st_ino and (own.st_dev, own.st_ino) in entered:
            continue
        entered.add((own.st_dev, own.st_ino))
        below = []
        for entry in entries(current, ignored):
            left -= 1
            if left < 0:
                ignored[folder] = f"it holds more than {_MOST_ENTRIES} entries; the rest was not examined"
                return
            try:
                mode = entry.stat().st_mode
            except OSError as error:
                if wanted(entry):  # other broken links are left out
                    ignored[entry] = f"it cannot be read: {reason_of(error)}"
                continue
            if stat.S_ISREG(mode) and wanted(entry):
                yield entry
            elif stat.S_ISDIR(mode) and depth < _DEEPEST:
                below.append((entry, depth + 1))
        folders += reversed(below)


def entries(folder: Path, ignored: Ignored, wanted: Callable[[Path], bool] = lambda _entry: True) -> list[Path]:
    """The entries of a folder, sorted; none if it does not exist."""
    try:
        return sorted(entry for entry in islice(folder.iterdir(), _MOST_ENTRIES + 1) if wanted(entry))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        ignored[folder] = f"it cannot be read: {reason_of(error)}"
        return []
