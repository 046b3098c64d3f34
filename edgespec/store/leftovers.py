"""Folders that could not be deleted because a program uses a file in them; they are deleted later.

Windows refuses to delete a file that is open or mapped. Other systems remove the name and keep the content until the
last program has closed the file. A folder with such a file stays, marked as removed, and no longer counts as a model.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from edgespec.errors import StoreLockedError
from edgespec.files.locks import locked

MARK = "removed"

# Windows' error codes for a file that is open elsewhere, locked in part, or mapped.
_IN_USE = {32, 33, 1224}


def delete(folder: Path) -> tuple[int, list[Path]]:
    """Delete a folder. Returns the bytes that were freed, and the files that were kept because they are in use.

    If files were kept, the folder is marked, so that ``sweep`` deletes it later. Raises OSError for any other
    failure.
    """
    freed, left = 0, list[Path]()
    for path in sorted(folder.rglob("*"), reverse=True):  # contents come before their folder
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
    """Whether the folder belongs to a removed model."""
    return (folder / MARK).exists()


def unmark(folder: Path) -> None:
    """Remove the mark: the model is being fetched again."""
    (folder / MARK).unlink(missing_ok=True)


def sweep(parent: Path, lock_of: Callable[[Path], Path]) -> None:
    """Delete the marked folders in ``parent`` that are no longer in use. Raises nothing.

    ``lock_of`` returns a folder's lock; a folder whose lock another process holds is skipped.
    """
    with contextlib.suppress(OSError):
        marked = [entry for entry in parent.iterdir() if is_marked(entry)]
        for folder in marked:
            with contextlib.suppress(OSError, StoreLockedError), locked(lock_of(folder), "using it", timeout_s=0):
                if is_marked(folder):
                    delete(folder)
