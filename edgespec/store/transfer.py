"""A file that grows until it is complete: connections that break are picked up where they broke."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO

from edgespec.errors import DownloadError
from edgespec.files.disk import readable_bytes
from edgespec.store.web import Response, UnreachableError, Web

# A connection that breaks is picked up where it broke; only breaks that brought nothing new are counted.
BREAKS_WITHOUT_PROGRESS = 3
PAUSE_AFTER_BREAK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """``request`` asks for the file's bytes from an offset on; ``size`` is what is expected in all, None if unknown.

    More than ``most`` bytes are refused. ``arrived`` is told how many there are.
    """

    web: Web
    name: str
    request: Callable[[int], AbstractContextManager[Response]]
    size: int | None
    most: int | None
    arrived: Callable[[int], None]

    def run(self, file: BinaryIO) -> None:
        """Append what is missing. Raises UnreachableError after too many breaks, DownloadError, CancelledError."""
        breaks = 0
        while True:
            before = file.tell()
            try:
                if self._receive(file):
                    break
                failure: DownloadError = UnreachableError(
                    f"{self.web.host} sent {readable_bytes(file.tell())} and ended too early", hint="try again"
                )
            except UnreachableError as error:
                failure = error
            breaks = 0 if file.tell() > before else breaks + 1
            if breaks >= BREAKS_WITHOUT_PROGRESS:
                raise self._broken_off(failure, file.tell())
            self.web.pause(PAUSE_AFTER_BREAK_S)
        file.flush()
        os.fsync(file.fileno())

    def _broken_off(self, failure: DownloadError, arrived: int) -> UnreachableError:
        """The failure, with what is left for the next attempt."""
        of_all = "" if self.size is None else f" of {readable_bytes(self.size)}"
        kept = f"; {readable_bytes(arrived)}{of_all} have arrived and are kept" if arrived else ""
        return UnreachableError(f"{failure.message}{kept}", hint=failure.hint)

    def _receive(self, file: BinaryIO) -> bool:
        """One connection's worth of bytes, appended; whether the file is complete now."""
        offset, size = file.tell(), self.size
        if size is not None and offset == size:
            return True
        if size is not None and offset > size:
            offset = _empty(file)
        with self.request(offset) as response:
            if not self.name.lower().endswith((".html", ".htm")):
                self.web.refuse_page(response)  # before what has arrived is thrown away for it
            sent = response.headers.get("content-range", "")
            if offset and (response.status_code != 206 or not sent.startswith(f"bytes {offset}-")):
                offset = _empty(file)  # the server starts over (200), or disagrees about the length (416)
                if response.status_code != 200:
                    return False
            done = offset
            self.arrived(done)
            try:
                for chunk in self.web.body(response):
                    done += file.write(chunk)
                    self.arrived(done)
                    if self.most is not None and done > self.most:
                        raise DownloadError(f"{self.web.host} sends more than {self.most} bytes of {self.name}")
            finally:
                with contextlib.suppress(OSError):
                    file.flush()  # a break, a cancel: what has arrived counts next time
        return size is None or done == size


def _empty(file: BinaryIO) -> int:
    """Drop what a partial file holds; returns the new length."""
    file.truncate(0)
    return file.seek(0)  # truncating alone leaves ``tell`` where it was
