"""Folders that could not be deleted because a program uses a file in them; they are deleted later.

Windows refuses to delete a file that is open or mapped. Other systems remove the name and keep the content until the
last program has closed the file. A folder with such a file stays, marked as removed, and no longer counts as a model.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from edgespec.errors import StoreLockedError
from edgespec.files.locks import locked

MARK = "removed"

# Windows' error codes for a file that is open elsewhere, locked in part, or mapped. A file that is mapped and no
# longer open gives 5, as a read-only file does.
_IN_USE, _IN_USE_OR_READ_ONLY = {32, 33, 1224}, 5


def delete(folder: Path) -> tuple[int, list[Path]]:
    """Delete a folder. Returns the bytes that were freed, and the files that were kept because they are in use.

    The folder is marked first: ``sweep`` deletes later what was kept, and what a killed process did not delete.
    Raises OSError for any other failure; a model of which nothing was deleted stays then.
    """
    mark, freed, left = folder / MARK, 0, list[Path]()
    was_marked = mark.exists()
    with contextlib.suppress(OSError):  # a full disk takes no new file, and is what models are removed for
        mark.touch()
    for path in sorted(folder.rglob("*"), reverse=True):  # contents come before their folder
        if path == mark or (path.is_dir() and not path.is_symlink()):
            continue
        size = path.lstat().st_size
        try:
            path.unlink()
        except OSError as error:
            code = getattr(error, "winerror", None)
            if code not in _IN_USE and not (code == _IN_USE_OR_READ_ONLY and os.access(path, os.W_OK)):
                if not (freed or left or was_marked):
                    unmark(folder)
                raise
            left.append(path)
        else:
            freed += size
    if left:
        mark.touch()
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
