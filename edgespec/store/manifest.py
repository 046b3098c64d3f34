"""The manifest in each model's folder: its source, its expected hash, and how it was made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

from edgespec.errors import ModelFileError, reason_of
from edgespec.files.atomic import write_json
from edgespec.files.checked import Check, Length, parse_object, read, to_json
from edgespec.files.disk import read_bounded
from edgespec.files.gguf.names import MOST_PARTS

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 1

# A manifest has less than 2 kB; a much larger file is not read.
_LARGEST_BYTES = 1 << 20

_Text: TypeAlias = Annotated[str, Check(lambda text: "\0" not in text, "a string without NUL")]


class BadManifest(Exception):  # noqa: N818 - a reason to ignore a file, not an error that anybody sees
    """The reason why a manifest is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file's state when its sha256 was last verified; ``mtime_ns`` in nanoseconds.

    ``path`` is relative to the manifest's folder for our own files, absolute for files of the hub's cache.
    """

    path: _Text
    sha256: _Text
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

    name: _Text
    kind: _Text
    source: _Text
    revision: _Text | None = None
    sha256: _Text
    bytes: int
    licence: _Text | None = None
    mtime_ns: int
    how_made: _Text
    path: _Text
    parts: Annotated[tuple[FileRecord, ...], Length(0, MOST_PARTS)] = ()

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
        document = parse_object(path, read_bounded(path, _LARGEST_BYTES))
        if document.get("schema_version") != SCHEMA_VERSION:
            raise BadManifest(f"its schema_version is {document.get('schema_version')!r}; this edgespec reads 1")
        manifest = read(Manifest, document, ignore_unknown=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadManifest(f"it cannot be read: {reason_of(error)}") from error
    except ModelFileError as error:
        raise BadManifest(error.reason) from error
    except ValueError as error:
        raise BadManifest(str(error)) from error
    for file in (manifest.path, *(record.path for record in manifest.parts)):
        relative = Path(file)
        if not file or (not relative.is_absolute() and len(relative.parts) != 1) or relative.name == "..":
            raise BadManifest("its path points outside the model's folder")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest in ``folder``. Raises DiskSpaceError, OSError."""
    stored = to_json(manifest)
    if not manifest.parts:
        del stored["parts"]
    write_json(folder / MANIFEST_NAME, {"schema_version": SCHEMA_VERSION, **stored})
