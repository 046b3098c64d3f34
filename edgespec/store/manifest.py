"""The manifest beside each model: where it came from, what it must hash to, how it was made."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.files.atomic import write_json

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 1

# A manifest is under 2 kB; anything far larger is not one, and is not worth reading.
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


class BadManifest(Exception):  # noqa: N818 - a reason to ignore a file, not an error that anybody sees
    """Why a manifest is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """``path`` is relative to the manifest's folder for our own files, absolute for files of the hub's cache.

    ``mtime_ns`` (nanoseconds) and ``bytes`` are the file's when its sha256 was last found right.
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

    def file_in(self, folder: Path) -> Path:
        """Where the model's file is, for a manifest that lies in ``folder``."""
        return folder / self.path  # an absolute right side wins


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
        raise BadManifest(f"its schema_version is {document.get('schema_version')!r}, this edgespec reads 1")
    values: dict[str, Any] = {}
    for key, types in _FIELDS.items():
        value = document.get(key)
        if not isinstance(value, types) or isinstance(value, bool) or (isinstance(value, str) and "\0" in value):
            raise BadManifest(f"{key} is missing or of the wrong type")
        values[key] = value
    relative = Path(values["path"])
    if not values["path"] or (not relative.is_absolute() and len(relative.parts) != 1) or relative.name == "..":
        raise BadManifest("its path leaves the model's folder")
    return Manifest(**values)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest in ``folder``. Raises DiskSpaceError, OSError."""
    fields = {key: getattr(manifest, key) for key in _FIELDS}
    write_json(folder / MANIFEST_NAME, {"schema_version": SCHEMA_VERSION, **fields})
