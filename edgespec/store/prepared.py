"""Where runtimes keep what they prepare of models that are not in the store: one folder for each content of a file.

A file is known by its header, size, times and inode, which takes no time to find out. Two files never share a folder,
and a file that was written to or replaced has another: a time of change cannot be set, unlike that of modification. A
copy, or a file that was renamed, may be prepared once more. The digest of all of it would know those again, and take
as long as preparing it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from pathlib import Path

from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel

# The folders that were used last stay, as long as they take no more than this together: those of two targets of 8
# billion parameters in four bits and their drafters. A choice.
MOST_BYTES = 12 * 2**30


def prepared_folder(home: Home, file: LocatedModel) -> Path | None:
    """The folder for this content of the file, which need not exist; None if the file cannot be looked at."""
    seen: tuple[str | int, ...] = (file.identity,)
    try:
        for part in file.header.split or [file]:
            status = part.path.stat()
            seen += (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    except OSError:
        return None
    return home.prepared / hashlib.sha256(repr(seen).encode()).hexdigest()[:32]


# A target and its drafter are used one after the other, and neither makes room for the other.
RECENT_S = 3600.0


def use_prepared(folder: Path, most_bytes: int = MOST_BYTES, recent_s: float = RECENT_S) -> None:
    """Note that ``folder`` is used now, and remove those used longest ago that are too many beside it.

    What was used in the last ``recent_s`` stays.
    """
    with contextlib.suppress(OSError):
        os.utime(folder)
    left = most_bytes
    for other in sorted(_folders(folder.parent), key=_used_at, reverse=True):
        left -= _bytes_in(other)
        if left < 0 and other != folder and _used_at(other) < time.time() - recent_s:
            shutil.rmtree(other, ignore_errors=True)


def _folders(root: Path) -> list[Path]:
    try:
        return [entry for entry in root.iterdir() if entry.is_dir()]
    except OSError:
        return []


def _used_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:  # removed meanwhile, by another process
        return 0.0


def _bytes_in(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            total += entry.stat().st_size
    return total
