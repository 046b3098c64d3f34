"""Reads folders written by `edgespec export` as hostile input: the manifest, and the files in the manifest.

The readers of all kinds of artefacts share this module. Every function raises ModelFileError with reason and hint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import ModelFileError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"

_HINT = "export it again with `edgespec export`"

# A manifest has a few kB; a far larger file is not a manifest.
_LARGEST_MANIFEST_BYTES = 1 << 20

_LONGEST_SHOWN = 64  # characters of a wrong value in a message: enough for a name or a number

_SHA256 = re.compile(r"[0-9a-f]{64}")


def bad_file(path: Path, reason: str, *, offset: int | None = None) -> ModelFileError:
    """The ModelFileError about a file of an artefact, with the hint to export again."""
    return ModelFileError(path, reason, offset=offset, hint=_HINT)


def show(value: object) -> str:
    """A short text for any value of a hostile document."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)[:_LONGEST_SHOWN]
    return f"a {type(value).__name__}"


def read_manifest(path: Path) -> tuple[bytes, dict[str, Any]]:
    """The bytes of the manifest ``path``, and its JSON object, still unchecked."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # checked before opening: opening a named pipe would block
            raise bad_file(path, "it is not a regular file")
        if status.st_size > _LARGEST_MANIFEST_BYTES:
            raise bad_file(path, f"{status.st_size} bytes are too large for a manifest")
        raw = path.read_bytes()
        document = json.loads(raw)
    except FileNotFoundError as error:
        raise bad_file(path, "no such file") from error
    except OSError as error:
        raise bad_file(path, f"the file cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise bad_file(path, "it is not valid JSON") from error
    if not isinstance(document, dict):
        raise bad_file(path, "it is not a JSON object")
    return raw, document


def is_export(folder: Path, kind: str, marks: tuple[str, str]) -> bool:
    """Whether a folder is an artefact of that ``kind``, even a damaged one. Raises nothing.

    If the manifest cannot be read, the presence of the files ``marks`` decides: reading such a folder then reports
    the damage.
    """
    try:
        return read_manifest(folder / MANIFEST_NAME)[1].get("kind") == kind
    except ModelFileError:
        with contextlib.suppress(ModelFileError):
            return all(check_file(folder, name) > 0 for name in marks)
    return False


def check_manifest(
    folder: Path, kind: str, names: Sequence[str], *, links: bool = True
) -> tuple[dict[str, Any], str]:
    """The manifest of ``folder``, checked without the other files, and the sha256 of its bytes.

    The manifest must be of that ``kind`` and state size and hash of all ``names``. ``links``: see ``check_file``.
    """
    path = folder / MANIFEST_NAME
    check_file(folder, MANIFEST_NAME, links=links)
    raw, document = read_manifest(path)
    version = document.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise bad_file(path, f"its schema_version is {show(version)}, this edgespec reads {SCHEMA_VERSION}")
    if document.get("kind") != kind:
        raise bad_file(path, f"its kind is {show(document.get('kind'))}, not {kind!r}")
    files = document.get("files")
    if not isinstance(files, dict) or not all(isinstance(record, dict) for record in files.values()):
        raise bad_file(path, "files is missing or of the wrong type")
    for name in files:
        if not name or name in (".", "..") or not name.isprintable() or any(mark in name for mark in "/\\:"):
            raise bad_file(path, f"files names {show(name)}, which is not a plain name in this folder")
    for name in names:
        record = files.get(name, {})
        size, digest = record.get("bytes"), record.get("sha256")
        if type(size) is not int or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise bad_file(path, f"files does not state bytes and sha256 of {name}")
    return document, hashlib.sha256(raw).hexdigest()


def check_file(folder: Path, name: str, *, links: bool = True) -> int:
    """The size in bytes of a regular file of the folder; a link must not lead out of the folder.

    ``links=False`` refuses symbolic links and files with a second hard link: for files that native code opens by
    name.
    """
    path = folder / name
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            if not links:
                raise bad_file(path, "it is a symbolic link; only a regular file in the folder is accepted")
            if not path.resolve(strict=True).is_relative_to(folder.resolve(strict=True)):
                raise bad_file(path, "it is a symbolic link that leads out of its folder")
            status = path.stat()
    except FileNotFoundError as error:
        raise bad_file(path, "no such file") from error
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle; ValueError: a NUL
        raise bad_file(path, f"the file cannot be read: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise bad_file(path, "it is not a regular file")
    if not links and status.st_nlink > 1:
        raise bad_file(path, "it has a second hard link; only a file with one name is accepted")
    return status.st_size


def check_size(
    folder: Path, manifest: Mapping[str, Any], name: str, *, links: bool = True, most_bytes: int | None = None
) -> int:
    """The size of the file in bytes: it must equal the size in the manifest and be at most ``most_bytes``."""
    size = check_file(folder, name, links=links)
    said = manifest["files"][name]["bytes"]
    if size != said:
        raise bad_file(folder / name, f"it has {size} bytes and the manifest says {said}")
    if most_bytes is not None and size > most_bytes:
        raise bad_file(folder / name, f"{size} bytes are too large for this file")
    return size


def read_content(path: Path) -> bytes:
    """All bytes of a file; the caller has checked the size."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise bad_file(path, f"the file cannot be read: {error}") from error


def check_hash(manifest: Mapping[str, Any], path: Path, content: bytes) -> None:
    """Check that the sha256 of ``content`` is the one that the manifest states for the file ``path``."""
    if hashlib.sha256(content).hexdigest() != manifest["files"][path.name]["sha256"]:
        raise bad_file(path, "its sha256 is not the one in the manifest")


def check_said(folder: Path, manifest: Mapping[str, Any], found: Mapping[str, object]) -> None:
    """Check that the manifest states the values ``found``, which were read from the files."""
    for name, value in found.items():
        said = manifest.get(name)
        if said != value or isinstance(said, bool):
            raise bad_file(folder / MANIFEST_NAME, f"{name} is {show(said)} but the files say {value!r}")


def checked_ids(path: Path, ids: NDArray[np.signedinteger], vocabulary_size: int) -> NDArray[np.int32]:
    """``ids`` as a read-only int32 array, checked to be ascending and inside the vocabulary."""
    import numpy as np

    if not (np.diff(ids) > 0).all():
        raise bad_file(path, "its ids are not in ascending order")
    if int(ids[0]) < 0 or int(ids[-1]) >= vocabulary_size:
        raise bad_file(path, f"its ids lie outside 0..{vocabulary_size - 1}")
    kept = ids.astype(np.int32)
    kept.flags.writeable = False
    return kept
