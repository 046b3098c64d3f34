"""Reads folders written by `edgespec export` as hostile input: the manifest, and the files in the manifest.

The readers of all kinds of artefacts share this module. Every function raises ModelFileError with reason and hint.
"""

from __future__ import annotations

import contextlib
import hashlib
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from edgespec.errors import ModelFileError
from edgespec.files.checked import (
    Check,
    Sha256,
    WrongValueError,
    ascending,
    is_line,
    parse_object,
    read,
    read_regular_file,
    shown,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"

_HINT = "export it again with `edgespec export`"

# A manifest has a few kB; a far larger file is not a manifest.
_LARGEST_MANIFEST_BYTES = 1 << 20


def bad_file(path: Path, reason: str, *, offset: int | None = None) -> ModelFileError:
    """The ModelFileError about a file of an artefact, with the hint to export again."""
    return ModelFileError(path, reason, offset=offset, hint=_HINT)


def _is_plain(name: str) -> bool:
    return bool(name) and name not in (".", "..") and is_line(name) and not any(mark in name for mark in "/\\:")


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileRecord:
    bytes: int
    sha256: Sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    schema_version: Annotated[int, Check(lambda version: version == 1, "1, the version that this edgespec reads")]
    kind: str
    files: dict[Annotated[str, Check(_is_plain, "a plain name in this folder")], dict[str, Any]]


def read_manifest(path: Path) -> tuple[bytes, dict[str, Any]]:
    """The bytes of the manifest ``path``, and its JSON object, still unchecked."""
    raw = read_regular_file(path, _LARGEST_MANIFEST_BYTES, hint=_HINT)
    return raw, parse_object(path, raw, hint=_HINT)


def _check_record(name: str, record: object) -> None:
    try:
        read(_FileRecord, record, ignore_unknown=True)
    except WrongValueError as error:
        raise error.within(name).within("files") from None


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
    try:
        manifest = read(_Manifest, document, ignore_unknown=True)
        for name in names:
            if name in manifest.files:
                _check_record(name, manifest.files[name])
        for name in set(names).difference(manifest.files):
            raise WrongValueError("is missing: it must be stated with bytes and sha256", ("files", name))
    except WrongValueError as error:
        raise bad_file(path, str(error)) from error
    if manifest.kind != kind:
        raise bad_file(path, f"its kind is {shown(manifest.kind)}, not {kind!r}")
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
            raise bad_file(folder / MANIFEST_NAME, f"{name} is {shown(said)} but the files say {value!r}")


def checked_ids(path: Path, ids: NDArray[np.signedinteger], vocabulary_size: int) -> NDArray[np.int32]:
    """``ids`` as a read-only int32 array, checked to be ascending and inside the vocabulary."""
    import numpy as np

    if not ascending(ids):
        raise bad_file(path, "its ids are not in ascending order")
    if int(ids[0]) < 0 or int(ids[-1]) >= vocabulary_size:
        raise bad_file(path, f"its ids lie outside 0..{vocabulary_size - 1}")
    kept = ids.astype(np.int32)
    kept.flags.writeable = False
    return kept
