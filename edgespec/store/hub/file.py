"""Fetch one file of a hub repository: resolve the commit, resume the download in the hub's cache, verify the hash."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edgespec.errors import DiskSpaceError, DownloadError, HashMismatchError, reason_of
from edgespec.files.atomic import CHUNK_BYTES, rename, sha256_file, sync_folder
from edgespec.files.disk import SLACK_BYTES, disk_errors, readable_bytes, require_space
from edgespec.files.locks import locked
from edgespec.files.progress import QUIET, Job, ProgressEvent
from edgespec.store.hub.cache import COMMIT, SHA256, RepoCache
from edgespec.store.hub.http import HubHttp
from edgespec.store.references import ONLINE, HubFile, Network, is_safe
from edgespec.store.transfer import DOWNLOADING, Transfer
from edgespec.store.web import UnreachableError, hub_settings

# Often enough for a smooth progress bar and an immediate cancel; a wake-up takes microseconds.
POLL_S = 0.1

# How long a cancelled job may take to notice. A slower job is inside a system call with its own timeout; its daemon
# thread checks the stop signal before it writes anything more.
GRACE_S = 1.0

_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedHubFile:
    """A file in the hub's cache, verified as far as the hub stated a hash. ``commit``: that of the revision."""

    path: Path
    filename: str
    commit: str
    sha256: str


@dataclass(frozen=True, slots=True)
class _Resolved:
    """What the hub reports about a file before the download."""

    filename: str
    commit: str
    etag: str
    size: int | None


@dataclass(slots=True)
class _Status:
    """Written by the downloading thread and read by the caller's: plain assignments need no lock."""

    stage: str = "asking"
    done: int = 0
    total: int | None = None
    unstated: bool = False  # the hub stated no hash


def fetch_hub_file(wanted: HubFile, network: Network = ONLINE, job: Job = QUIET) -> FetchedHubFile:
    """Fetch the named file from the hub or, if the hub is unreachable, from its cache; a stated hash is checked.

    The job hears if the hub states none. Raises DownloadError (one sentence with the cause), HashMismatchError,
    DiskSpaceError, CancelledError; a partial download is kept for the next attempt.
    """
    folder = RepoCache(network.hub_cache, wanted.repo)
    status = _Status()

    def tick() -> None:
        job.tell(status.stage, wanted.label, done_bytes=status.done, total_bytes=status.total)

    def download(http: HubHttp, stopped: Callable[[], bool]) -> FetchedHubFile:
        return _Download(http, folder, wanted, _resolve(http, wanted), status, stopped).run()

    try:
        fetched = ask_hub(download, wanted, network, job, tick=tick, what="the download")
    except UnreachableError as error:
        reason = error
    else:
        if status.unstated:
            note = "the hub stated no hash of this file, so nothing confirms its content"
            job.tell(status.stage, wanted.label, note=note)
        return fetched

    def fallback(stopped: Callable[[], bool]) -> FetchedHubFile:
        return _from_cache(folder, wanted, status, stopped, reason)

    return run_watched(fallback, job, tick=tick, what="the check")


def _from_cache(
    folder: RepoCache, wanted: HubFile, status: _Status, stopped: Callable[[], bool], otherwise: DownloadError
) -> FetchedHubFile:
    """The file in the cache. Raises ``otherwise`` if the cache lacks it."""
    commit = folder.commit_of(wanted.revision)
    if commit is None:
        raise otherwise
    filename = wanted.filename or ""
    path = folder.pointer(commit, filename)
    if not path.is_file():
        raise otherwise
    actual = _hash(path, status, stopped)
    expected = folder.expected_hash(path)
    if expected is not None and actual != expected:
        raise HashMismatchError(
            path, f"its sha256 is {actual[:12]}…, the hub stated {expected[:12]}…", hint="fetch it again while online"
        )
    return FetchedHubFile(path=path, filename=filename, commit=commit, sha256=actual)


def _hash(path: Path, status: _Status, stopped: Callable[[], bool]) -> str:
    status.stage, status.done = "verifying", 0

    def report(event: ProgressEvent) -> None:
        status.done, status.total = event.done_bytes, event.total_bytes

    return sha256_file(path, Job(report, stopped))


def _resolve(http: HubHttp, wanted: HubFile) -> _Resolved:
    """Ask the hub for commit, etag and size of the file."""
    filename = wanted.filename or ""
    if not is_safe(filename):
        raise DownloadError(f"the hub sent an unusable file name ({filename!r})")
    headers = http.head(http.file_url(wanted.repo, wanted.revision, filename), wanted)
    commit = headers.get("x-repo-commit", "")
    etag = headers.get("x-linked-etag") or headers.get("etag") or ""
    size = headers.get("x-linked-size") or _plain_size(headers)
    if not COMMIT.fullmatch(commit) or not etag:
        raise DownloadError(
            f"{http.endpoint} does not answer like a model hub (no commit or etag)",
            hint="check HF_ENDPOINT and the proxy; the network's sign-in page may be answering",
        )
    stated = int(size) if size and size.isascii() and size.isdigit() else None
    return _Resolved(filename, commit, etag.removeprefix("W/").strip('"'), stated)


def _plain_size(headers: Mapping[str, str]) -> str | None:
    return None if "location" in headers else headers.get("content-length")  # not the redirect's length


class _Download:
    """What the downloading thread does for one resolved file."""

    def __init__(
        self,
        http: HubHttp,
        folder: RepoCache,
        wanted: HubFile,
        resolved: _Resolved,
        status: _Status,
        stopped: Callable[[], bool],
    ) -> None:
        self._http = http
        self._folder = folder
        self._wanted = wanted
        self._resolved = resolved
        self._status = status
        self._stopped = stopped
        self._partial = folder.partial(resolved.etag)

    def run(self) -> FetchedHubFile:
        """Download the missing bytes, verify, publish in the cache."""
        try:
            return self._already_here() or self._fetched()
        except OSError as error:
            raise DownloadError(
                f"the hub's cache {self._folder.path} cannot be used: {reason_of(error)}",
                hint="set HF_HOME to a folder you may write to",
            ) from error

    def _fetched(self) -> FetchedHubFile:
        self._folder.prepare()
        waiting = Job(lambda event: setattr(self._status, "stage", event.stage), self._stopped)
        # Another program may hold the lock during its own download.
        with locked(self._folder.lock(self._resolved.etag), f"downloading {self._wanted.label}", waiting):
            return self._already_here() or self._download()

    def _full(self, error: DiskSpaceError) -> DiskSpaceError:
        """The same error, with a hint for the next attempt."""
        arrived, size = self._partial_bytes(), self._resolved.size or 0
        return DiskSpaceError(
            f"the disk that holds {self._folder.path} is full; {readable_bytes(arrived)} of {readable_bytes(size)} "
            "have arrived and are kept",
            needed_bytes=max(0, size - arrived) + SLACK_BYTES,
            free_bytes=error.free_bytes,
            hint=error.hint,
        )

    def _partial_bytes(self) -> int:
        return self._partial.stat().st_size if self._partial.exists() else 0

    def _already_here(self) -> FetchedHubFile | None:
        resolved = self._resolved
        for path in (self._folder.blob(resolved.etag), self._folder.pointer(resolved.commit, resolved.filename)):
            # A file with another hash counts as missing: the download replaces it.
            if path.is_file() and (sha256 := self._sound(path)) is not None:
                return self._published(sha256)
        return None

    def _download(self) -> FetchedHubFile:
        resumed = self._partial.exists()
        self._transfer()
        sha256 = self._sound(self._partial)
        if sha256 is None and resumed:
            # The older piece may be the damaged part (a power cut, a changed mirror): download once more from the
            # start.
            self._partial.unlink(missing_ok=True)
            self._transfer()
            sha256 = self._sound(self._partial)
        if sha256 is None:
            self._partial.unlink(missing_ok=True)
            raise HashMismatchError(
                self._partial,
                f"{self._wanted.label} arrived with another hash than the hub stated ({self._resolved.etag[:12]}…)",
                hint="try again; if it persists, a proxy or mirror alters the file",
            )
        blob = self._folder.blob(self._resolved.etag)
        rename(self._partial, blob)
        sync_folder(blob.parent)
        return self._published(sha256)

    def _published(self, sha256: str) -> FetchedHubFile:
        resolved = self._resolved
        pointer = self._folder.pointer(resolved.commit, resolved.filename)
        try:
            pointer = self._folder.publish(resolved.etag, resolved.commit, resolved.filename, self._wanted.revision)
        except OSError:
            if not pointer.is_file():  # a read-only cache that has everything is fine
                raise
        return FetchedHubFile(path=pointer, filename=resolved.filename, commit=resolved.commit, sha256=sha256)

    def _sound(self, path: Path) -> str | None:
        """The file's sha256 if the content is what the hub stated, else None."""
        size, etag = path.stat().st_size, self._resolved.etag
        if self._resolved.size is not None and size != self._resolved.size:
            return None
        actual = _hash(path, self._status, self._stopped)
        if SHA256.fullmatch(etag):
            return actual if actual == etag else None
        if _GIT_SHA1.fullmatch(etag):  # small files have a git hash as etag
            return actual if _is_git_blob(path, size, etag) else None
        self._status.unstated = True
        return actual

    def _transfer(self) -> None:
        """Append to the partial file until it is complete. Raises UnreachableError, DiskSpaceError."""
        resolved, status = self._resolved, self._status
        missing = (resolved.size or 0) - self._partial_bytes()
        require_space(self._partial.parent, missing, f"downloading {self._wanted.label}")
        url = self._http.file_url(self._wanted.repo, resolved.commit, resolved.filename)
        status.stage, status.total = DOWNLOADING, resolved.size

        def arrived(count: int) -> None:
            status.done = count

        def stage(now: str) -> None:
            status.stage = now

        transfer = Transfer(
            web=self._http.web,
            name=resolved.filename,
            request=lambda offset: self._http.stream(url, offset, self._wanted),
            size=resolved.size,
            most=resolved.size,
            arrived=arrived,
            stage=stage,
        )
        try:
            with disk_errors(self._partial, resolved.size or 0), self._partial.open("ab") as file:
                transfer.run(file)
        except DiskSpaceError as error:
            raise self._full(error) from error


def _is_git_blob(path: Path, size: int, sha1: str) -> bool:
    digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == sha1


def ask_hub(
    work: Callable[[HubHttp, Callable[[], bool]], T],
    wanted: HubFile,
    network: Network,
    job: Job,
    *,
    tick: Callable[[], None],
    what: str,
) -> T:
    """Run ``work(http, stopped)``, which asks the hub for what is ``wanted``, as ``run_watched`` does.

    Raises UnreachableError also if the hub may not be asked, or if a request is overdue.
    """
    if network.offline or hub_settings().HF_HUB_OFFLINE:
        why = "offline was asked for" if network.offline else "HF_HUB_OFFLINE is set"
        raise UnreachableError(f"{wanted.filename or wanted.repo} is not in the hub's cache, and {why}")
    clients: list[HubHttp] = []

    def ask(stopped: Callable[[], bool]) -> T:
        clients.append(HubHttp(network.endpoint, stopped))
        try:
            return work(clients[0], stopped)
        finally:
            clients[0].close()

    def watch() -> None:
        tick()
        if (late := clients[0].web.overdue() if clients else None) is not None:
            raise late

    return run_watched(ask, job, tick=watch, what=what)


def run_watched(work: Callable[[Callable[[], bool]], T], job: Job, *, tick: Callable[[], None], what: str) -> T:
    """Run ``work(stopped)`` on a separate thread; returns its value or raises its exception.

    The caller's thread stays free for Ctrl-C, cancellation and progress.

    ``tick`` runs on the caller's thread every tenth of a second. Any exception of ``tick`` (or a KeyboardInterrupt)
    stops the work. Raises CancelledError, which says that ``what`` was cancelled.
    """
    stop, done = threading.Event(), threading.Event()
    values: list[T] = []
    failures: list[BaseException] = []

    def body() -> None:
        try:
            values.append(work(stop.is_set))
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    threading.Thread(target=body, name="edgespec-files", daemon=True).start()
    try:
        while not done.wait(POLL_S):
            tick()
            job.check(f"{what} was cancelled; what has arrived is kept")
    except BaseException:
        stop.set()
        done.wait(GRACE_S)
        raise
    if failures:
        raise failures[0]
    tick()
    return values[0]
