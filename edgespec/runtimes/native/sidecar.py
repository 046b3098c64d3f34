"""A model's laid out matrices in a file next to the model, which the next load only maps.

The file is mapped read-only: processes share it, and the system may drop its pages. Every load checks the whole file:
a checksum of a gigabyte takes 0.1 s, and its pages must be read anyway. Sizes and addresses come from the model's
header and never from this file, so a load never reads beyond its end: a damaged file can give wrong results, like a
damaged model, but cannot be unsafe.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgespec.errors import CancelledError, DiskSpaceError
from edgespec.files.atomic import replacing
from edgespec.files.disk import require_space
from edgespec.runtimes.native.library import NativeLibrary
from edgespec.runtimes.thread import map_on_threads

# The number is the version of the format. The layout of tiles needs none: each load compares some tiles.
_MAGIC = b"edgespec tiles 1"
_DIGEST_BYTES = 32
HEADER_BYTES = 4096  # keeps tiles aligned to cache lines and pages

_CHUNK_BYTES = 16 << 20  # checked and written at a time: a cancel waits for one chunk; the seal depends on the size

# Tiles below this stay mapped with any page size: the address translations that a processor caches cover about as
# much in small pages (12 MiB on Zen 4), so large pages gain nothing. The limit is above that size and below any
# useful model's.
_LARGE_PAGES_MATTER_BYTES = 32 << 20

# A cache must not fill a disk: a sidecar takes at most this part of the free bytes. A choice.
_PART_OF_FREE_SPACE = 4

# The first load waits for the write, usually into memory at 400 MB/s and more. Writing to a slower disk is given up
# after the time these two constants allow, and not tried again for a month: each try delays a load, and its
# hundreds of megabytes are thrown away.
_PATIENCE_S = 2.0
_SLOWEST_BYTES_PER_S = 100e6
_NOT_AGAIN_S = 30 * 24 * 3600.0

_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPPINGS = Path("/proc/self/smaps")
_SIZES = ("Size", "FilePmdMapped", "ShmemPmdMapped")


@dataclass(frozen=True, slots=True)
class MappedTiles:
    """Tiles in a mapped sidecar, readable at ``address`` as long as this object lives.

    ``as_fast_as_memory``: False if the file is in small pages where memory of this process would be in large pages.
    """

    address: int
    mapped: mmap.mmap
    as_fast_as_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """The file at ``path``, which may be missing. ``key`` is a digest of the model and its layout.

    ``cancelled`` is called between chunks; if it returns True, ``read`` and ``write`` raise CancelledError.
    """

    path: Path
    key: bytes
    tile_bytes: int
    library: NativeLibrary
    threads: int
    cancelled: Callable[[], bool]

    def is_there(self) -> bool:
        """Whether the file has this model's key and size. Only ``read`` checks the content."""
        head = _MAGIC + self.key
        try:
            with self.path.open("rb") as file:
                return file.read(len(head)) == head and os.fstat(file.fileno()).st_size == self._size
        except OSError:
            return False

    def may_be_written(self) -> bool:
        """Whether a write may begin: there is room now, and the disk was not too slow before."""
        folder = next(parent for parent in self.path.parents if parent.exists())
        try:
            require_space(self.path, _PART_OF_FREE_SPACE * self._size, "a sidecar")
        except (OSError, DiskSpaceError):
            return False
        return folder.is_dir() and os.access(folder, os.W_OK) and not self._was_slow()

    @property
    def _slow_mark(self) -> Path:
        """The file that says, with this model's key, that the disk was too slow for the tiles."""
        return self.path.with_name(f"{self.path.name}.slow")

    def _was_slow(self) -> bool:
        try:
            written = self._slow_mark.stat().st_mtime
            recent = abs(time.time() - written) < _NOT_AGAIN_S  # of either sign: clocks are set
            return recent and self._slow_mark.read_bytes() == self.key
        except OSError:
            return False

    @property
    def _size(self) -> int:
        return HEADER_BYTES + self.tile_bytes

    def read(self) -> MappedTiles | None:
        """The tiles, if the file exists, belongs to this model, and is intact."""
        try:
            if not self.path.is_file():
                return None
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != self._size:
                    return None
                mapped = mmap.mmap(file.fileno(), self._size, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Measured on ext4 and Linux 6.18: pages read on demand are large, and decoding is as fast as from memory
            # of this process; small pages are 7 % slower. Reading ahead (MADV_WILLNEED) gives small pages. Older
            # kernels have no large pages for most file systems.
            with contextlib.suppress(OSError):
                mapped.madvise(mmap.MADV_HUGEPAGE)
        address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data + HEADER_BYTES
        head = _MAGIC + self.key
        if mapped[: len(head)] != head or mapped[len(head) : len(head) + _DIGEST_BYTES] != self._seal(address):
            return None
        return MappedTiles(
            address, mapped, self.tile_bytes < _LARGE_PAGES_MATTER_BYTES or not _would_gain_large_pages(address)
        )

    def copy(self, tiles: MappedTiles, address: int) -> None:
        """Copy the tiles to ``address``, and release their pages one by one. Raises CancelledError."""

        def copy(chunk: tuple[int, int]) -> None:
            self._check_cancelled()
            start, length = chunk
            ctypes.memmove(address + start, tiles.address + start, length)
            page = mmap.PAGESIZE
            first, end = -(-(HEADER_BYTES + start) // page) * page, (HEADER_BYTES + start + length) // page * page
            if first < end and hasattr(mmap, "MADV_DONTNEED"):
                tiles.mapped.madvise(mmap.MADV_DONTNEED, first, end - first)

        map_on_threads(copy, self._chunks(), self.threads, "edgespec-copy")

    def write(self, address: int) -> bool:
        """Write the tiles at ``address``, all or nothing. Returns whether that succeeded.

        A full, read-only or slow disk is not an error: the next load only takes a little longer.
        """
        end = time.monotonic() + _PATIENCE_S + self._size / _SLOWEST_BYTES_PER_S
        try:
            # Without its folder the model was removed while it loaded.
            if not self.path.parent.is_dir() or not self.may_be_written():
                return False
            head = _MAGIC + self.key + self._seal(address)
            with replacing(self.path, expected_bytes=self._size, durable=False) as file:
                file.write(head.ljust(HEADER_BYTES, b"\0"))
                for start, length in self._chunks():
                    self._check_cancelled()
                    if time.monotonic() > end:
                        raise TimeoutError("this disk is too slow")
                    file.write((ctypes.c_char * length).from_address(address + start))
        except TimeoutError:
            with contextlib.suppress(OSError, DiskSpaceError), replacing(self._slow_mark, durable=False) as file:
                file.write(self.key)
            return False
        except (OSError, DiskSpaceError):
            return False
        return True

    def _chunks(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.tile_bytes, _CHUNK_BYTES):
            yield start, min(_CHUNK_BYTES, self.tile_bytes - start)

    def _seal(self, address: int) -> bytes:
        """A digest over the checksums of all chunks."""

        def checksum(chunk: tuple[int, int]) -> bytes:
            self._check_cancelled()
            start, length = chunk
            return int(self.library.api.es_checksum(address + start, length)).to_bytes(8, "little")

        sums = map_on_threads(checksum, self._chunks(), self.threads, "edgespec-check")
        return hashlib.sha256(self.key + b"".join(sums)).digest()

    def _check_cancelled(self) -> None:
        if self.cancelled():
            raise CancelledError("loading was cancelled")


def _would_gain_large_pages(address: int) -> bool:
    """Whether the file mapped at ``address`` is in small pages, where other memory would be in large pages."""
    try:
        if "[never]" in _LARGE_PAGES.read_text(encoding="utf-8"):
            return False
        lines = _MAPPINGS.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return False  # not Linux: there is no choice
    size, large, inside = 0, 0, False
    for line in lines:
        name, _, rest = line.partition(":")
        if "-" in name.split()[0]:
            start, _, end = name.split()[0].partition("-")
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and name in _SIZES:
            size += int(rest.split()[0]) * (name == "Size")
            large += int(rest.split()[0]) * (name != "Size")
    return 2 * large < size
