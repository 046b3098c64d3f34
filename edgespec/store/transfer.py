"""Download into a growing file and resume broken connections."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO

from edgespec.errors import DownloadError
from edgespec.files.disk import readable_bytes
from edgespec.store.web import LostError, Response, UnreachableError, Web

# A broken connection is resumed; only breaks that brought no new bytes are counted. Pauses double.
BREAKS_WITHOUT_PROGRESS = 3
PAUSE_AFTER_BREAK_S = 0.25
LONGEST_PAUSE_S = 8.0
# Once bytes arrived, a lost network may return: after a sleep or a change of networks it takes some seconds.
# Connections are tried for this time. The last one may take as long: a host may have many addresses, and each that is
# silent takes a time-out.
LONGEST_RECONNECTION_S = 85.0

DOWNLOADING = "downloading"
WAITING = "waiting for the network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """``request`` asks for the file's bytes from an offset; ``size`` is the expected total, None if unknown.

    More than ``most`` bytes are refused. ``arrived`` receives the number of bytes so far, ``stage`` what is done now.
    """

    web: Web
    name: str
    request: Callable[[int], AbstractContextManager[Response]]
    size: int | None
    most: int | None
    arrived: Callable[[int], None]
    stage: Callable[[str], None]

    def run(self, file: BinaryIO) -> None:
        """Append the missing bytes. Raises UnreachableError after too many breaks, DownloadError, CancelledError."""
        breaks = Counter[bool]()  # those that lost the network, and others
        until: float | None = None  # until when a lost network is waited for, once bytes arrived
        while True:
            before = file.tell()
            if self.size is not None and before > self.size:
                before = 0  # it is received from its beginning
            try:
                if self._receive(file):
                    break
                failure: UnreachableError = LostError(
                    f"{self.web.host} sent {readable_bytes(file.tell())} and stopped too early", hint="try again"
                )
            except UnreachableError as error:
                failure = error
            arrived = file.tell()
            # The network of a server that started over is there: such an attempt counts, however long it took.
            lost = isinstance(failure, LostError) and arrived >= before
            if arrived > before:
                breaks.clear()
            else:
                breaks[lost] += 1
            if arrived != before:
                until = time.monotonic() + LONGEST_RECONNECTION_S  # from the break on: a sleep may precede it
                self.web.longest_wait_s = max(self.web.longest_wait_s, LONGEST_RECONNECTION_S)
            over = breaks[lost] >= BREAKS_WITHOUT_PROGRESS
            if lost and until is not None:
                over = time.monotonic() >= until
            if over:
                raise self._broken_off(failure, arrived)
            if lost and breaks[lost]:
                self.stage(WAITING)
            self.web.pause(min(PAUSE_AFTER_BREAK_S * 2 ** breaks[lost], LONGEST_PAUSE_S))
        file.flush()
        os.fsync(file.fileno())

    def _broken_off(self, failure: DownloadError, arrived: int) -> UnreachableError:
        """The failure, with the bytes that are kept for the next attempt."""
        of_all = "" if self.size is None else f" of {readable_bytes(self.size)}"
        kept = f"; {readable_bytes(arrived)}{of_all} have arrived and are kept" if arrived else ""
        return UnreachableError(f"{failure.message}{kept}", hint=failure.hint)

    def _receive(self, file: BinaryIO) -> bool:
        """Append the bytes of one connection; returns whether the file is complete."""
        offset, size = file.tell(), self.size
        if size is not None and offset == size:
            return True
        if size is not None and offset > size:
            offset = _empty(file)
        with self.request(offset) as response:
            if not self.name.lower().endswith((".html", ".htm")):
                self.web.refuse_page(response)  # before a page could replace the bytes that have arrived
            sent = response.headers.get("content-range", "")
            if offset and (response.status_code != 206 or not sent.startswith(f"bytes {offset}-")):
                offset = _empty(file)  # the server starts over (200) or reports another length (416)
                if response.status_code != 200:
                    return False
            done = offset
            self.arrived(done)
            try:
                for chunk in self.web.body(response):
                    done += file.write(chunk)
                    self.stage(DOWNLOADING)
                    self.arrived(done)
                    if self.most is not None and done > self.most:
                        raise DownloadError(f"{self.web.host} sends more than {self.most} bytes of {self.name}")
            finally:
                with contextlib.suppress(OSError):
                    file.flush()  # after a break or a cancel, the next attempt resumes here
        return size is None or done == size


def _empty(file: BinaryIO) -> int:
    """Empty a partial file; returns the new length, 0."""
    file.truncate(0)
    return file.seek(0)  # ``truncate`` alone does not move ``tell``
