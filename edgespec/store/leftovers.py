"""What could not be deleted because a program uses it, and is deleted later.

Windows keeps a file that is open or mapped, and says so; other systems take the name away and keep the content until
the last program has closed it. A folder with such a file stays, marked, and is no model any more.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import filelock

MARK = "removed"

# Windows' numbers for a file that is open elsewhere, locked in part, or mapped.
_IN_USE = {32, 33, 1224}


def delete(folder: Path) -> tuple[int, list[Path]]:
    """Delete a folder. Returns the bytes that were freed, and the files that are in use and so were left.

    Where any are, the folder is marked, so that ``sweep`` deletes it later. Raises OSError for any other reason.
    """
    freed, left = 0, list[Path]()
    for path in sorted(folder.rglob("*"), reverse=True):  # what is inside comes before its folder
        if path.is_dir() and not path.is_symlink():
            continue
        size = path.lstat().st_size
        try:
            path.unlink()
        except OSError as error:
            if getattr(error, "winerror", None) not in _IN_USE:
                raise
            left.append(path)
        else:
            freed += size
    if left:
        (folder / MARK).touch()
    else:
        shutil.rmtree(folder)
    return freed, left


def is_marked(folder: Path) -> bool:
    """Whether the folder is of a model that was removed."""
    return (folder / MARK).exists()


def unmark(folder: Path) -> None:
    """The model is wanted again."""
    (folder / MARK).unlink(missing_ok=True)


def sweep(place: Path, lock_of: Callable[[Path], Path]) -> None:
    """Delete the marked folders in ``place`` that nobody uses any more. Raises nothing.

    ``lock_of`` names a folder's lock; one that another process holds is left alone.
    """
    with contextlib.suppress(OSError):
        marked = [entry for entry in place.iterdir() if is_marked(entry)]
        for folder in marked:
            with contextlib.suppress(OSError, filelock.Timeout), filelock.FileLock(lock_of(folder), timeout=0):
                if is_marked(folder):
                    delete(folder)
