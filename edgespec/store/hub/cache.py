"""The hub's own cache folder, in its documented layout: ``blobs`` by etag, ``snapshots`` by commit, ``refs``.

Downloads are stored there under the hub's names, so that other programs on this machine find them too.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path, PurePosixPath

from edgespec.errors import DownloadError
from edgespec.files.atomic import rename, sync_folder, write_text

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_ETAG = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class RepoCache:
    """One repository in the cache. Reading creates nothing."""

    def __init__(self, cache: Path, repo: str) -> None:
        cache = cache.absolute()  # the manifest keeps this path, and a later command may run in another folder
        self._folder = cache / f"models--{repo.replace('/', '--')}"
        self._locks = cache / ".locks" / self._folder.name

    @property
    def path(self) -> Path:
        """The repository's folder, which need not exist."""
        return self._folder

    def prepare(self) -> None:
        """Create what a download needs. Raises DownloadError if the cache cannot be written."""
        try:
            for folder in (self._folder / "blobs", self._folder / "snapshots", self._locks):
                folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(self._folder / "blobs", os.W_OK)
        except OSError:
            writable = False
        if not writable:
            raise DownloadError(
                f"the hub's cache {self._folder} cannot be written to",
                hint="set HF_HOME to a folder you may write to",
            )

    def blob(self, etag: str) -> Path:
        """Path of the content with this etag. Raises DownloadError if the etag cannot be a file name."""
        if not _ETAG.fullmatch(etag):
            raise DownloadError(f"the hub sent an unusable etag ({etag[:40]!r})")
        return self._folder / "blobs" / etag

    def partial(self, etag: str) -> Path:
        """The partial download of this content; its name differs from those of huggingface_hub's partial files."""
        blob = self.blob(etag)
        return blob.with_name(f"{blob.name}.edgespec.incomplete")

    def lock(self, etag: str) -> Path:
        """The lock that huggingface_hub takes for the same content."""
        return self._locks / f"{self.blob(etag).name}.lock"

    def pointer(self, commit: str, filename: str) -> Path:
        """The path of a file, under its own name, at a commit."""
        return self._folder / "snapshots" / commit / PurePosixPath(filename)

    def commit_of(self, revision: str) -> str | None:
        """The commit that a branch or tag had when the hub was last asked, or None."""
        if COMMIT.fullmatch(revision):
            return revision
        with contextlib.suppress(OSError, UnicodeDecodeError, ValueError):
            commit = (self._folder / "refs" / PurePosixPath(revision)).read_text(encoding="utf-8").strip()
            return commit if COMMIT.fullmatch(commit) else None
        return None

    def files(self, commit: str) -> list[str]:
        """Names of the files that are cached at a commit."""
        root = self._folder / "snapshots" / commit
        return sorted(entry.relative_to(root).as_posix() for entry in root.rglob("*") if entry.is_file())

    def expected_hash(self, pointer: Path) -> str | None:
        """The sha256 that a cached file's blob is named after, or None if the blob has another name.

        The blob may itself be a link into a store that repositories share: names there are hashes of another kind.
        """
        with contextlib.suppress(OSError):
            blob = pointer.parent / pointer.readlink()
            if blob.parent.samefile(self._folder / "blobs") and SHA256.fullmatch(blob.name):
                return blob.name
        return None

    def publish(self, etag: str, commit: str, filename: str, revision: str) -> Path:
        """Make a finished blob visible at ``commit`` (and at ``revision``) and return its path there."""
        pointer, blob = self.pointer(commit, filename), self.blob(etag)
        pointer.parent.mkdir(parents=True, exist_ok=True)
        if pointer.is_symlink() or not pointer.exists():
            with contextlib.suppress(FileNotFoundError):
                pointer.unlink()
            try:
                pointer.symlink_to(os.path.relpath(blob, pointer.parent))
            except OSError:  # Windows without the right to create links: move the file, as huggingface_hub does
                rename(blob, pointer)
            sync_folder(pointer.parent)
        elif blob.exists() and not pointer.samefile(blob):
            rename(blob, pointer)
        if revision != commit:
            write_text(self._folder / "refs" / PurePosixPath(revision), commit)
        return pointer
