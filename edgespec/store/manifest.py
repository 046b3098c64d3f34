"""The manifest in each model's folder: its source, its expected hash, and how it was made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.files.atomic import write_json
from edgespec.files.gguf.names import MOST_PARTS

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 1

# A manifest has less than 2 kB; a much larger file is not read.
_LARGEST_BYTES = 1 << 20

_FIELDS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "kind": (str,),
    "source": (str,),
    "revision": (str, type(None)),
    "sha256": (str,),
    "bytes": (int,),
    "licence": (str, type(None)),
    "mtime_ns": (int,),
    "how_made": (str,),
    "path": (str,),
}


_FILE_FIELDS = ("path", "sha256", "bytes", "mtime_ns")


class BadManifest(Exception):  # noqa: N818 - a reason to ignore a file, not an error that anybody sees
    """The reason why a manifest is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file's state when its sha256 was last verified; ``mtime_ns`` in nanoseconds.

    ``path`` is relative to the manifest's folder for our own files, absolute for files of the hub's cache.
    """

    path: str
    sha256: str
    bytes: int
    mtime_ns: int

    def file_in(self, folder: Path) -> Path:
        """The file's path, for a manifest in ``folder``."""
        return folder / self.path  # an absolute path on the right replaces the left


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is known of a model: in one file, described like a ``FileRecord``, or in several ``parts``.

    For a split model ``path`` and ``mtime_ns`` are those of the first part, ``bytes`` is the sum, and ``sha256`` is
    ``sha256_of_parts`` of the parts' hashes.
    """

    name: str
    kind: str
    source: str
    revision: str | None
    sha256: str
    bytes: int
    licence: str | None
    mtime_ns: int
    how_made: str
    path: str
    parts: tuple[FileRecord, ...] = ()

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """The model's files, in order."""
        own = FileRecord(path=self.path, sha256=self.sha256, bytes=self.bytes, mtime_ns=self.mtime_ns)
        return self.parts or (own,)

    def paths_in(self, folder: Path) -> tuple[Path, ...]:
        """The paths of the model's files, for a manifest in ``folder``."""
        return tuple(file.file_in(folder) for file in self.files)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in ``folder``; None if there is none. Raises BadManifest if it cannot be used."""
    path = folder / MANIFEST_NAME
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise BadManifest("it is far too large for a manifest")
        document: Any = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadManifest(f"it cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BadManifest("it is not valid JSON") from error
    if not isinstance(document, dict):
        raise BadManifest("it is not a JSON object")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise BadManifest(f"its schema_version is {document.get('schema_version')!r}; this edgespec reads 1")
    values = _values(document, _FIELDS)
    parts = document.get("parts", [])
    if not isinstance(parts, list) or len(parts) > MOST_PARTS or not all(isinstance(part, dict) for part in parts):
        raise BadManifest("parts has the wrong type")
    records = tuple(FileRecord(**_values(part, {key: _FIELDS[key] for key in _FILE_FIELDS})) for part in parts)
    manifest = Manifest(**values, parts=records)
    for file in (manifest.path, *(record.path for record in records)):
        relative = Path(file)
        if not file or (not relative.is_absolute() and len(relative.parts) != 1) or relative.name == "..":
            raise BadManifest("its path points outside the model's folder")
    return manifest


def _values(table: dict[str, Any], fields: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """The typed fields of a table. Raises BadManifest."""
    values: dict[str, Any] = {}
    for key, types in fields.items():
        value = table.get(key)
        if not isinstance(value, types) or isinstance(value, bool) or (isinstance(value, str) and "\0" in value):
            raise BadManifest(f"{key} is missing or has the wrong type")
        values[key] = value
    return values


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest in ``folder``. Raises DiskSpaceError, OSError."""
    fields = {key: getattr(manifest, key) for key in _FIELDS}
    parts = {"parts": [asdict(part) for part in manifest.parts]} if manifest.parts else {}
    write_json(folder / MANIFEST_NAME, {"schema_version": SCHEMA_VERSION, **fields, **parts})
