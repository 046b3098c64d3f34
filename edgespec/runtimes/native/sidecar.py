"""A model's matrices as the kernels want them, in a file beside the model: the next load maps it and is done.

Mapped read-only, so that processes share it and the system may drop its pages. It is checked as a whole at every
load: a checksum of a gigabyte takes a tenth of a second, and its pages have to be brought in anyway. Sizes and
addresses come from the model's header and never from this file, so that nothing beyond it is read whatever it holds:
it can be wrong, as a damaged model could be, but not unsafe.
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

# The number is this file's own format. How tiles are laid out needs none: whoever maps them lays some out to compare.
_MAGIC = b"edgespec tiles 1"
_DIGEST_BYTES = 32
HEADER_BYTES = 4096  # tiles stay on cache lines, and on pages

_CHUNK_BYTES = 16 << 20  # checked and written at a time: a cancel waits for one; the seal depends on it

# Tiles below this stay mapped whatever their pages are: the translations that a processor keeps at hand cover about
# as much in small pages (12 MiB on Zen 4), and large ones gain nothing. Between that and any model to be decoded.
_LARGE_PAGES_MATTER_BYTES = 32 << 20

# What only saves time must not fill a disk: it takes at most this part of what is free. A choice.
_PART_OF_FREE_SPACE = 4

# The first load waits for the file to be written, usually into memory at 400 MB/s and more. A disk that is so slow
# that even this has to wait for it is left alone after the time these two allow.
_PATIENCE_S = 2.0
_SLOWEST_BYTES_PER_S = 100e6


_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPPINGS = Path("/proc/self/smaps")
_SIZES = ("Size", "FilePmdMapped", "ShmemPmdMapped")


@dataclass(frozen=True, slots=True)
class MappedTiles:
    """Tiles in a mapped sidecar, readable from ``address`` on as long as this object lives.

    ``as_fast_as_memory``: not in small pages where memory of this process's own would be in large ones.
    """

    address: int
    mapped: mmap.mmap
    as_fast_as_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """The file at ``path``, which need not exist. ``key`` is a digest of the model and of what lies where in it.

    ``cancelled`` is asked between chunks; both methods raise CancelledError if it says so.
    """

    path: Path
    key: bytes
    tile_bytes: int
    library: NativeLibrary
    threads: int
    cancelled: Callable[[], bool]

    def is_there(self) -> bool:
        """Whether the file says that it is of this model, and has its size. ``read`` tells whether it is whole."""
        head = _MAGIC + self.key
        try:
            with self.path.open("rb") as file:
                return file.read(len(head)) == head and os.fstat(file.fileno()).st_size == self._size
        except OSError:
            return False

    @property
    def _size(self) -> int:
        return HEADER_BYTES + self.tile_bytes

    def read(self) -> MappedTiles | None:
        """The tiles, if the file is there, of this model, and whole."""
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
            # Measured on ext4 and Linux 6.18: pages read in on demand are then large ones, and decoding is as fast as
            # from memory of our own, where small ones cost 7 %. Reading ahead of demand (MADV_WILLNEED) brings small
            # ones in. Older kernels have no large ones for most file systems.
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
        """Copy the tiles to ``address``, and let their pages go one by one. Raises CancelledError."""

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
        """Write the tiles at ``address``, all or nothing; whether that succeeded.

        A full or a read-only disk is no error, nor one that is too slow: the next load takes a little longer.
        """
        end = time.monotonic() + _PATIENCE_S + self._size / _SLOWEST_BYTES_PER_S
        try:
            if not self.path.parent.is_dir():  # the model was removed meanwhile
                return False
            require_space(self.path, _PART_OF_FREE_SPACE * self._size, "a sidecar")
            head = _MAGIC + self.key + self._seal(address)
            with replacing(self.path, expected_bytes=self._size, durable=False) as file:
                file.write(head.ljust(HEADER_BYTES, b"\0"))
                for start, length in self._chunks():
                    self._check_cancelled()
                    if time.monotonic() > end:
                        raise TimeoutError("this disk is too slow")
                    file.write((ctypes.c_char * length).from_address(address + start))
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


def has_room(path: Path, size: int) -> bool:
    """Whether a sidecar of ``size`` bytes may be written to ``path``, as far as can be told beforehand."""
    folder = next(parent for parent in path.parents if parent.exists())
    try:
        require_space(path, _PART_OF_FREE_SPACE * size, "a sidecar")
    except (OSError, DiskSpaceError):
        return False
    return folder.is_dir() and os.access(folder, os.W_OK)


def _would_gain_large_pages(address: int) -> bool:
    """Whether the file mapped around ``address`` is in small pages here, and other memory would be in large ones."""
    try:
        if "[never]" in _LARGE_PAGES.read_text(encoding="utf-8"):
            return False
        lines = _MAPPINGS.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return False  # no Linux: there is no choice
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
