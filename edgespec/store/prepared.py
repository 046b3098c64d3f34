"""Where runtimes keep prepared data of models outside the store: one folder for each content of a file.

A file is identified by its header, size, times and inode, which are quick to read. Two files never share a folder,
and a file that was written to or replaced gets another folder: unlike the modification time, the change time cannot
be set. A copied or renamed file may be prepared once more. A digest of the whole file would recognise copies, but
takes as long as preparing the file.
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

# The last used folders stay while their total is at most this: enough for two targets of 8 billion parameters in four
# bits and their drafters. A choice.
MOST_BYTES = 12 * 2**30


def prepared_folder(home: Home, file: LocatedModel) -> Path | None:
    """The folder for this content of the file, which need not exist; None if the file cannot be read."""
    seen: tuple[str | int, ...] = (file.identity,)
    try:
        for part in file.header.split or [file]:
            status = part.path.stat()
            seen += (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    except OSError:
        return None
    return home.prepared / hashlib.sha256(repr(seen).encode()).hexdigest()[:32]


# A target and its drafter are used one after the other: neither may evict the other.
RECENT_S = 3600.0


def use_prepared(folder: Path, most_bytes: int = MOST_BYTES, recent_s: float = RECENT_S) -> None:
    """Note that ``folder`` is used now, and remove the least recently used others beyond ``most_bytes``.

    Folders used in the last ``recent_s`` seconds stay.
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
    except OSError:  # another process has removed it
        return 0.0


def _bytes_in(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            total += entry.stat().st_size
    return total
