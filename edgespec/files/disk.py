"""Free space, asked before writing, and a full disk, told as one sentence."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgespec.errors import DiskSpaceError

# A file system that runs completely full breaks other programs, and manifests and logs need room too. 64 MiB is a
# choice, not a measurement: far more than we ever write beside a model, and little on any disk that holds one.
SLACK_BYTES = 64 * 2**20

_LARGER_STORE = "free some space, or set EDGESPEC_HOME (for files of the hub: HF_HOME) to a larger disk"

_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


def readable_bytes(count: int) -> str:
    """``count`` bytes for a sentence, in decimal units as disks and downloads are sold."""
    value = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def gib(count: int) -> str:
    """Bytes of memory for a person. What is left may be negative only on paper: it is nothing."""
    return f"{max(0, count) / 2**30:.2f} GiB"


def megabytes(count: float) -> str:
    """Bytes of a file or of what a forward reads, in whole megabytes."""
    return f"{count / 1e6:.0f} MB"


def free_bytes(path: Path) -> int:
    """Bytes this user may still write on the file system that holds ``path``, which need not exist yet."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def require_space(path: Path, needed_bytes: int, what: str, *, hint: str = _LARGER_STORE) -> None:
    """Raise DiskSpaceError, with the ``hint``, unless ``needed_bytes`` and some slack fit beside ``path``."""
    if needed_bytes <= 0:
        return
    free = free_bytes(path)
    if free < needed_bytes + SLACK_BYTES:
        raise DiskSpaceError(
            f"{what} needs {readable_bytes(needed_bytes + SLACK_BYTES)} of free disk space at {path}, "
            f"where {readable_bytes(free)} are free",
            needed_bytes=needed_bytes + SLACK_BYTES,
            free_bytes=free,
            hint=hint,
        )


@contextmanager
def disk_errors(path: Path, needed_bytes: int, *, hint: str = _LARGER_STORE) -> Iterator[None]:
    """Turn a full disk (or an exhausted quota) inside the block into DiskSpaceError with ``hint``; others pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskSpaceError(
            f"the disk that holds {path} is full; nothing that was there before has changed",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes(path.parent),
            hint=hint,
        ) from error
