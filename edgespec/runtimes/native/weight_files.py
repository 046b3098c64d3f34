"""The mapped files of a model's weights: where each tensor lies; pages are released after reading."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.files.checked import cannot_map
from edgespec.files.gguf.records import FilePart, TensorInfo


class WeightFiles:
    """The mapped files of the weights, and the file with the embedding's rows if that is separate.

    Offsets are a header's: into all ``parts`` joined in order. Raises ModelFileError, MemoryLimitError.
    """

    def __init__(self, parts: Sequence[FilePart], table: FilePart | None = None) -> None:
        self._parts = [(part, _mapped(part.path, part.byte_count)) for part in parts]
        self._table = None if table is None else _mapped(table.path, table.byte_count)

    def bytes_of(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """The tensor's bytes in the file: uint8 (byte_count,)."""
        mapped, offset = self._find(tensor.offset)
        return np.frombuffer(mapped, dtype=np.uint8, count=tensor.byte_count, offset=offset)

    def embedding_address(self, tensor: TensorInfo) -> int:
        """The address of the embedding's rows."""
        if self._table is None:
            return self.bytes_of(tensor).ctypes.data
        return np.frombuffer(self._table, dtype=np.uint8).ctypes.data + tensor.offset

    def let_go(self, offset: int = 0, byte_count: int | None = None) -> None:
        """Release the memory of a range of one file, by default of all files, until it is read again."""
        if byte_count is None:
            for part, mapped in self._parts:
                _let_go(mapped, 0, part.byte_count)
        else:
            mapped, first = self._find(offset)
            _let_go(mapped, first, first + byte_count)

    def _find(self, offset: int) -> tuple[mmap.mmap, int]:
        """The file that an offset lies in, and the offset within that file."""
        part, mapped = next(each for each in reversed(self._parts) if each[0].start <= offset)
        return mapped, offset - part.start


def _mapped(path: Path, size: int) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise cannot_map(path, error, "the file cannot be read") from error
    if len(mapped) != size:
        raise ModelFileError(path, "the file changed after its header was read")
    return mapped


def _let_go(mapped: mmap.mmap, start: int, end: int) -> None:
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (end - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, first, length)
