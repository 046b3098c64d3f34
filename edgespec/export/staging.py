"""Atomic creation of export folders: written under a temporary name next to the final name, then renamed."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgespec.errors import EdgespecError, InvalidRequestError, ModelFileError, reason_of
from edgespec.files.atomic import remove_stale_temporaries, rename, sync_folder, temporary_name
from edgespec.files.disk import disk_errors, require_space
from edgespec.files.export_folder import MANIFEST_NAME, read_manifest
from edgespec.files.onnx.folder import ONNX_KIND
from edgespec.files.trimmed_drafter import TRIMMED_KIND

KINDS = (TRIMMED_KIND, "gguf", ONNX_KIND)  # the kinds of folders that export writes

_LARGER_DISK = "free some space, or export to a folder on a larger disk"


@contextmanager
def staged_folder(folder: Path, *, needed_bytes: int) -> Iterator[Path]:
    """Yield an empty temporary folder, and rename it to ``folder`` when the block ends without an exception.

    An existing ``folder`` must be empty or an earlier export; it stays unchanged until the new folder is complete on
    disk. On any exception the temporary is removed; the next export in the same parent folder removes temporaries of
    killed processes. Raises InvalidRequestError, DiskSpaceError, and EdgespecError if ``folder`` cannot be written.
    """
    final = Path(os.path.realpath(folder))  # a link to a folder stays a link
    check_replaceable(final)
    with _told(final, needed_bytes):
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_temporaries(final.parent)
        require_space(final.parent, needed_bytes, f"exporting to {folder}", hint=_LARGER_DISK)
        stage = final.parent / temporary_name(final.name)
        stage.mkdir()
    try:
        with _told(final, needed_bytes):
            yield stage
            sync_folder(stage)
            check_replaceable(final)  # files may have been added during the export
            _put_in_place(stage, final)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def _put_in_place(stage: Path, final: Path) -> None:
    if not final.exists():
        rename(stage, final)
        sync_folder(final.parent)
        return
    # No portable call exchanges two folders. A process killed between the two renames leaves nothing at the final
    # name, and never an incomplete export.
    old = final.parent / temporary_name(final.name)
    rename(final, old)
    try:
        rename(stage, final)
    except BaseException:
        rename(old, final)
        raise
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def check_replaceable(folder: Path) -> None:
    """Raise InvalidRequestError if ``folder`` holds anything but an earlier export."""
    hint = "give a folder that does not exist yet, or is empty"
    try:
        entries = sorted(folder.iterdir())
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise InvalidRequestError(f"{folder} is not a folder", hint=hint) from None
    except OSError as error:
        raise InvalidRequestError(f"{folder} cannot be read: {reason_of(error)}", hint=hint) from error
    if not entries:
        return
    known = _files_of(folder / MANIFEST_NAME)
    if known is None:
        raise InvalidRequestError(f"{folder} exists and is not an exported model; the folder is unchanged", hint=hint)
    for entry in entries:
        if entry.name not in known or not stat.S_ISREG(entry.lstat().st_mode):
            raise InvalidRequestError(
                f"{folder} holds {entry.name}, which is not part of the exported model; the folder is unchanged",
                hint=f"move {entry.name} elsewhere, or {hint}",
            )


def _files_of(manifest: Path) -> frozenset[str] | None:
    """The file names in ``manifest``; None if it is not the manifest of an export."""
    try:
        _, document = read_manifest(manifest)
    except ModelFileError:
        return None
    files = document.get("files")
    return frozenset({MANIFEST_NAME, *files}) if document.get("kind") in KINDS and isinstance(files, dict) else None


@contextmanager
def _told(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn OSError inside the block into DiskSpaceError or EdgespecError."""
    try:
        with disk_errors(folder, needed_bytes, hint=_LARGER_DISK):
            yield
    except OSError as error:
        raise EdgespecError(
            f"{folder} cannot be written: {reason_of(error)}", hint="give another folder with -o"
        ) from error
