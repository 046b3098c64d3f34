"""Reads .safetensors headers as hostile input; the weights stay in the file and are mapped on request.

Every length and offset is checked against the file's size with Python integers. As the format demands, the tensors
must fill the data section without gaps or overlaps.
"""

from __future__ import annotations

import math
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from edgespec.errors import ModelFileError
from edgespec.files.atomic import CHUNK_BYTES
from edgespec.files.checked import DOWNLOAD_AGAIN, Fields, cannot_map, is_line, parse_object, read_regular_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_LENGTH_BYTES = 8  # the header's length, before the header
_METADATA = "__metadata__"  # an object of strings, the only member that does not describe a tensor

# The format allows headers of 100 MB. 65536 tensors, the limit of every reader here, need about 160 bytes each.
_MOST_TENSORS = 65536
_MOST_HEADER_BYTES = 16 << 20
_MOST_INDEX_BYTES = 16 << 20
_MOST_SHARDS = 4096  # an order of magnitude above the largest models (DeepSeek-V3: 163)
_MOST_DIMENSIONS = 8  # weights have up to 5
_MOST_ELEMENTS = 2**63 - 1
_MOST_NAME = 1024  # characters

_ELEMENT_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
# numpy has no BF16 type: BF16 tensors are mapped as uint16 bit patterns.
_VIEWED_AS: Mapping[str, str] = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}

_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeTensor:
    """A tensor: ``shape`` slowest dimension first, ``offset`` absolute in the file ``path``, sizes in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    byte_count: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def view(self) -> npt.NDArray[Any]:
        """The elements, read-only and mapped from the file: float16, float32, or uint16 bit patterns of BF16.

        Raises ModelFileError for other types, and if the file can no longer be read, and MemoryLimitError.
        """
        kind = _VIEWED_AS.get(self.dtype)
        if kind is None:
            raise ModelFileError(self.path, f"tensor {self.name} is {self.dtype}: only F32, F16 and BF16 are read")
        if not self.byte_count:  # an empty range cannot be mapped
            return np.empty(self.shape, dtype=kind)
        try:
            return np.memmap(self.path, dtype=kind, mode="r", offset=self.offset, shape=self.shape)
        except (OSError, ValueError) as error:  # ValueError: the file became shorter
            raise cannot_map(self.path, error) from error

    def is_copy_of(self, other: SafeTensor) -> bool:
        """Whether both have the same type, shape and bytes. Raises ModelFileError if a file can no longer be read."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        try:
            with self.path.open("rb") as one, other.path.open("rb") as another:
                one.seek(self.offset)
                another.seek(other.offset)
                for done in range(0, self.byte_count, CHUNK_BYTES):
                    count = min(CHUNK_BYTES, self.byte_count - done)
                    if one.read(count) != another.read(count):
                        return False
        except OSError as error:
            raise ModelFileError(self.path, f"the file cannot be read: {error}") from error
        return True

    def float32(self) -> npt.NDArray[np.float32]:
        """The elements converted to float32 without rounding. Raises ModelFileError as ``view`` does."""
        return to_float32(self.view())


def to_float32(elements: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Convert the result of ``SafeTensor.view``, or a part of it, to float32; uint16 elements are BF16."""
    if elements.dtype == np.uint16:
        return (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return elements.astype(np.float32)


# ------------------------------------------------------------------------------------------------ one file


def read_safetensors(path: Path) -> Mapping[str, SafeTensor]:
    """The tensors of the file ``path`` by name, in the order of their data.

    Raises ModelFileError with the reason and the byte offset if the file is missing, is not safetensors, or
    contradicts itself or its size.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # checked before opening: opening a named pipe would block
            raise ModelFileError(path, "it is not a regular file", hint="give a folder with .safetensors files")
        with path.open("rb") as file:
            return _read(path, file, status.st_size)
    except FileNotFoundError as error:
        raise ModelFileError(path, "no such file", hint=DOWNLOAD_AGAIN) from error
    except (OSError, ValueError) as error:
        raise ModelFileError(path, f"the file cannot be read: {error}") from error


def _read(path: Path, file: BinaryIO, size: int) -> Mapping[str, SafeTensor]:
    start = file.read(len(_LFS_POINTER))
    if start == _LFS_POINTER:
        hint = "run `git lfs pull` in its folder"
        raise ModelFileError(path, "it is a git-LFS pointer, not the file itself", offset=0, hint=hint)
    if len(start) < _LENGTH_BYTES:
        raise _bad(path, f"too short: {size} bytes hold no safetensors header", 0)
    length = struct.unpack_from("<Q", start)[0]
    if length > _MOST_HEADER_BYTES:
        raise _bad(path, f"a header of {length} bytes is implausible", 0)
    if length > size - _LENGTH_BYTES:
        raise _bad(path, f"truncated: the header needs {length} bytes and {size - _LENGTH_BYTES} are left", 0)
    file.seek(_LENGTH_BYTES)
    raw = file.read(length)
    if len(raw) < length:
        raise _bad(path, "the file became shorter while it was read", 0)
    if not raw.startswith(b"{"):
        raise _bad(path, "it is not a safetensors file: its header is not a JSON object", _LENGTH_BYTES)
    members = parse_object(path, raw, offset=_LENGTH_BYTES)
    _check_metadata(path, members.pop(_METADATA, None))
    if len(members) > _MOST_TENSORS:
        raise _bad(path, f"a count of {len(members)} tensors is implausible", _LENGTH_BYTES)
    base = _LENGTH_BYTES + length
    found = [_tensor(path, name, value, base) for name, value in members.items()]
    found.sort(key=lambda tensor: (tensor.offset, tensor.byte_count))
    _check_layout(path, found, base, size)
    return {tensor.name: tensor for tensor in found}


def _check_metadata(path: Path, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise _bad(path, f"{_METADATA} is not an object of strings", _LENGTH_BYTES)


def _tensor(path: Path, name: str, value: Any, base: int) -> SafeTensor:
    shown = ascii(name[:80])
    if not name or len(name) > _MOST_NAME or not is_line(name):
        raise _bad(path, f"{shown} is not a valid tensor name", _LENGTH_BYTES)
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"tensor {shown} must state exactly dtype, shape and data_offsets", _LENGTH_BYTES)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    element_bytes = _ELEMENT_BYTES.get(dtype) if isinstance(dtype, str) else None
    if element_bytes is None:
        raise _bad(path, f"tensor {shown} has the unknown type {ascii(dtype)[:40]}", _LENGTH_BYTES)
    if not _are_counts(shape) or len(shape) > _MOST_DIMENSIONS:
        raise _bad(path, f"tensor {shown} has an implausible shape", _LENGTH_BYTES)
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(path, f"tensor {shown} has implausible data_offsets", _LENGTH_BYTES)
    begin, end = offsets
    needed = math.prod(shape) * element_bytes
    if needed != end - begin:
        reason = f"tensor {shown} needs {needed} bytes for its shape and its data_offsets hold {end - begin}"
        raise _bad(path, reason, _LENGTH_BYTES)
    return SafeTensor(
        name=name, dtype=dtype, shape=tuple(shape), path=path, offset=base + begin, byte_count=end - begin
    )


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each <= _MOST_ELEMENTS for each in value)


def _check_layout(path: Path, tensors: list[SafeTensor], base: int, size: int) -> None:
    """Check that the tensors are contiguous and end at the end of the file."""
    expected = base
    for tensor in tensors:
        end = tensor.offset + tensor.byte_count
        if end > size:
            reason = f"truncated: the data of tensor {tensor.name!a} ends at byte {end} and the file at {size}"
            raise _bad(path, reason, tensor.offset)
        if tensor.offset != expected:
            fault = "overlaps the previous tensor" if tensor.offset < expected else "leaves a gap"
            reason = f"the data of tensor {tensor.name!a} {fault}: it should start at byte {expected}"
            raise _bad(path, reason, tensor.offset)
        expected = end
    if expected != size:
        raise _bad(path, f"{size - expected} bytes after the last tensor belong to no tensor", expected)


def _bad(path: Path, reason: str, offset: int) -> ModelFileError:
    return ModelFileError(path, reason, offset=offset, hint=DOWNLOAD_AGAIN)


# ----------------------------------------------------------------------------------------------- a folder


def read_safetensors_folder(folder: Path) -> Mapping[str, SafeTensor]:
    """All tensors of the model in ``folder`` by name: from ``model.safetensors``, or from the shards in its index.

    Shards are plain file names in the folder; files may be links, as in the hub's cache. Raises ModelFileError.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() or not index.exists():
        tensors = read_safetensors(single) if single.exists() else {}
        if not tensors:
            what = "holds no tensors" if single.exists() else f"holds neither {SINGLE} nor {INDEX}"
            hint = "give a folder with config.json, tokenizer.json and weights as .safetensors"
            raise ModelFileError(folder, f"it {what}", hint=hint)
        return tensors
    by_shard = read_shards(index)
    tensors = {}
    for shard, names in by_shard.items():
        found = read_safetensors(folder / shard)
        if wrong := names ^ set(found):
            name = min(wrong)
            said = "is missing, though the index names it" if name in names else "is not in the index for this file"
            raise ModelFileError(folder / shard, f"tensor {name[:80]!a} {said}", hint=DOWNLOAD_AGAIN)
        tensors.update(found)
    return tensors


def read_shards(index: Path) -> dict[str, set[str]]:
    """The names of the tensors in each shard, as the file ``index`` states them. Raises ModelFileError."""
    fields = Fields(index, parse_object(index, read_regular_file(index, _MOST_INDEX_BYTES)))
    shards = fields.raw("weight_map")
    if not isinstance(shards, dict) or not 0 < len(shards) <= _MOST_TENSORS:
        raise fields.wrong("weight_map", f"an object of 1 to {_MOST_TENSORS} names")
    found: dict[str, set[str]] = {}
    for name, shard in shards.items():
        if not isinstance(shard, str) or not _is_plain(shard):
            reason = f"weight_map names {ascii(shard)[:80]}, which is not a plain .safetensors name in this folder"
            raise ModelFileError(index, reason, hint=DOWNLOAD_AGAIN)
        found.setdefault(shard, set()).add(name)
    if len(found) > _MOST_SHARDS:
        raise ModelFileError(index, f"a count of {len(found)} shards is implausible", hint=DOWNLOAD_AGAIN)
    return found


def _is_plain(name: str) -> bool:
    return (
        name.endswith(".safetensors")
        and len(name) <= 255  # the longest name that common file systems allow
        and is_line(name)
        and not name.startswith(".")
        and not any(mark in name for mark in "/\\:")
    )
