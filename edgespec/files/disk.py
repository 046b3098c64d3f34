"""Checks of free disk space before writing, errors for a full disk, and amounts as words."""

from __future__ import annotations

import codecs
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgespec.errors import DiskSpaceError

# A completely full file system breaks other programs, and manifests and logs need space too. 64 MiB is a choice, not
# a measurement: far more than edgespec writes next to a model, and little on a disk that holds models.
SLACK_BYTES = 64 * 2**20

# What a file is read in.
_PIECE_BYTES = 1 << 20

_LARGER_STORE = "free some space, or set EDGESPEC_HOME (for files of the hub: HF_HOME) to a larger disk"

# What a full disk or an exhausted quota gives.
FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


def expanded(path: Path | str) -> Path:
    """The path with its ``~`` or ``~name`` replaced; unchanged where no user has such a home folder."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def is_there(path: Path | str) -> bool:
    """Whether there is a file or a folder. A Path raises OSError for a name that is too long, this says False."""
    return os.path.exists(path)  # noqa: PTH110


def is_folder(path: Path | str) -> bool:
    """Whether there is a folder, in the manner of ``is_there``."""
    return os.path.isdir(path)  # noqa: PTH112


def is_file(path: Path | str) -> bool:
    """Whether there is a file. A Path raises OSError also for one in a folder that may not be read."""
    return os.path.isfile(path)  # noqa: PTH113


def read_bounded(path: Path | str, most_bytes: int) -> bytes:
    """The bytes of a regular file.

    Raises OSError, also for a file of another kind (opening a named pipe would block), and ValueError for one of more
    than ``most_bytes`` or a name that no file can have.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    data = bytearray()
    with open(path, "rb") as file:  # noqa: PTH123
        while piece := file.read(_PIECE_BYTES):
            data += piece
            if len(data) > most_bytes:
                raise ValueError(f"it is too large: more than {readable_bytes(most_bytes)}")
    return bytes(data)


def in_utf_8(data: bytes) -> bytes:
    """The bytes of a text without a byte order mark: UTF-16 with one, which PowerShell 5.1 writes, in UTF-8."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        with suppress(UnicodeDecodeError):
            return data.decode("utf-16").encode()
    return data.removeprefix(codecs.BOM_UTF8)


def readable_bytes(count: int) -> str:
    """``count`` bytes for a message, in decimal units (kB, MB, GB)."""
    value = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def gib(count: int) -> str:
    """Bytes of memory for a message, in GiB. An estimate of free memory may be negative: shown as 0."""
    return f"{max(0, count) / 2**30:.2f} GiB"


def megabytes(count: float) -> str:
    """Bytes for a message, in whole megabytes (10^6 bytes)."""
    return f"{count / 1e6:.0f} MB"


def counted(number: int, one: str, several: str | None = None) -> str:
    """The number and its noun: "1 thread", "2 threads". ``several`` is the plural, if it is not ``one`` with an s."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write on the file system of ``path``; ``path`` need not exist."""
    folder = path.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_space(path: Path, needed_bytes: int, what: str, *, hint: str = _LARGER_STORE) -> None:
    """Raise DiskSpaceError, with ``hint``, unless ``needed_bytes`` plus SLACK_BYTES are free at ``path``."""
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
    """Turn a full disk or an exhausted quota inside the block into DiskSpaceError; other errors pass unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DiskSpaceError(
            f"the disk that holds {path} is full; existing files are unchanged",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes(path.parent),
            hint=hint,
        ) from error
