"""One wheel from the user's package indexes, downloaded on a separate thread that the caller can poll and stop."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from edgespec.errors import DiskSpaceError, DownloadError, EdgespecError, HashMismatchError
from edgespec.files.atomic import sha256_file
from edgespec.files.disk import disk_errors
from edgespec.files.progress import Job
from edgespec.store.mirrors.index import PackageIndex, WheelLink
from edgespec.store.mirrors.settings import IndexSettings
from edgespec.store.mirrors.wheels import largest_wheel
from edgespec.store.references import PackagePart
from edgespec.store.transfer import DOWNLOADING, Transfer

# How long ``stop`` waits for the thread. A slower thread is inside a system call with its own timeout.
_GRACE_S = 1.0


class WheelDownload:
    """The wheel of ``part``, downloaded to ``path``; an earlier partial download there is resumed."""

    def __init__(self, part: PackagePart, path: Path, settings: IndexSettings) -> None:
        self.part = part
        self.path = path
        self._settings = settings
        self._stop = threading.Event()
        self._arrived = 0
        self._stage = DOWNLOADING
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="edgespec-wheel", daemon=True)
        self._thread.start()

    def finished(self) -> bool:
        """Whether the download has ended, with or without an error."""
        return not self._thread.is_alive()

    def progress(self) -> int:
        """Bytes of the wheel that have arrived."""
        return self._arrived

    def stage(self) -> str:
        """What is done now: the download, or waiting for the network."""
        return self._stage

    def check(self) -> None:
        """Raise the download's error, if any, after ``finished``: for example DownloadError or DiskSpaceError."""
        failure = self._failure
        if failure is None:
            return
        if isinstance(failure, DiskSpaceError | HashMismatchError) or not isinstance(
            failure, EdgespecError | OSError
        ):
            raise failure
        said = failure.message if isinstance(failure, EdgespecError) else str(failure)
        raise DownloadError(
            f"{self.part.requirement} could not be fetched: {said}", hint=getattr(failure, "hint", None)
        ) from failure

    def stop(self) -> None:
        """End the download if it still runs. Idempotent."""
        self._stop.set()
        self._thread.join(_GRACE_S)

    def _run(self) -> None:
        try:
            index = PackageIndex(self._settings, self._stop.is_set)
            try:
                self._fetch(index, index.find(self.part))
            finally:
                index.close()
        except BaseException as error:
            self._failure = error

    def _fetch(self, index: PackageIndex, link: WheelLink) -> None:
        here = link.path
        if here is not None:
            size, most = here.stat().st_size, largest_wheel(self.part)
            if size > most or not here.is_file():
                raise DownloadError(f"{here} is not a file of at most {most} bytes")
            with disk_errors(self.path, size):
                shutil.copyfile(here, self.path)
            self._arrived = self.path.stat().st_size
        elif link.sha256 is None:  # without a hash an earlier piece may be of another file
            self.path.unlink(missing_ok=True)
            self._transfer(index, link)
        elif not self._is_whole(link):
            resumed = self.path.exists()
            self._transfer(index, link)
            if resumed and not self._is_whole(link):  # the earlier piece may be the damaged part
                self.path.unlink()
                self._transfer(index, link)
        if link.sha256 is not None and not self._is_whole(link):
            self.path.unlink()
            raise HashMismatchError(
                self.path,
                f"{link.filename} arrived with another sha256 than the index states",
                hint="try again; if it persists, a proxy or mirror alters the file",
            )

    def _is_whole(self, link: WheelLink) -> bool:
        return self.path.is_file() and sha256_file(self.path, Job(cancelled=self._stop.is_set)) == link.sha256

    def _transfer(self, index: PackageIndex, link: WheelLink) -> None:
        with disk_errors(self.path, self.part.bytes or 0), self.path.open("ab") as file:
            Transfer(
                web=index.web(link.url),
                name=link.filename,
                request=lambda offset: index.stream(link, offset),
                size=None,
                most=largest_wheel(self.part),
                arrived=self._tell,
                stage=self._enter,
            ).run(file)

    def _tell(self, count: int) -> None:
        self._arrived = count

    def _enter(self, stage: str) -> None:
        self._stage = stage
