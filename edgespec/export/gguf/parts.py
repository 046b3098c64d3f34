"""Composes GGUF files from parts: new bytes, and byte ranges of a source GGUF.

gguf.GGUFWriter is not used because it needs every value decoded and every tensor as an array, while a trimmed model
differs from its source only in two keys, some offsets and the removed rows. Copying raw bytes keeps metadata
unchanged (strings that are not UTF-8, number types) and holds only one chunk in memory.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from edgespec.architectures.shape import EMBEDDING, HEAD
from edgespec.errors import InvalidRequestError, ModelFileError, reason_of
from edgespec.files.checked import ascending
from edgespec.files.gguf.cursor import Cursor, read_entry
from edgespec.files.gguf.records import GGML_TYPES, VALUE_TYPES, FilePart, GgufHeader, TensorInfo

_TRIMMED = (EMBEDDING, HEAD, "output.bias")  # tables with a row (or an element) for each token

_PER_LAYER = "per_layer_token_embd.weight"  # its vocabulary may be smaller than the tokenizer's

# Bytes per read: 4 MiB is enough for full disk speed and small enough for prompt cancellation.
CHUNK_BYTES = 4 << 20

_FIRST_ENTRY = 24  # magic, version, two counts
_MOST_KEY_BYTES = 65535  # the format's own limit
_TYPE_NUMBERS = {name: number for number, (name, _, _) in GGML_TYPES.items()}
_VALUE_NUMBERS = {name: number for number, (name, _, _) in VALUE_TYPES.items()}

Ids: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Literal:
    """New bytes, not copied from the source."""

    data: bytes

    @property
    def byte_count(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Span:
    """``byte_count`` bytes of the source from absolute ``offset`` on."""

    offset: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows ``ids`` (ascending) of a table in the source that starts at absolute ``offset``."""

    offset: int
    row_bytes: int
    ids: Ids

    @property
    def byte_count(self) -> int:
        return self.row_bytes * len(self.ids)


Part: TypeAlias = Literal | Span | Rows


# --------------------------------------------------------------------------------------------- reading


def open_source(header: GgufHeader) -> BinaryIO:
    """Open the file of ``header``; the parts of a split model appear as one file. Raises ModelFileError."""
    try:
        return io.BufferedReader(_JoinedParts(header.split)) if header.split else header.path.open("rb")
    except OSError as error:
        raise ModelFileError(header.path, f"the file cannot be read: {reason_of(error)}") from error


class _JoinedParts(io.RawIOBase):
    """The parts of a split model as one file. Raises OSError."""

    def __init__(self, parts: Sequence[FilePart]) -> None:
        with contextlib.ExitStack() as opened:
            self._parts = [(part, opened.enter_context(part.path.open("rb"))) for part in parts]
            self._opened = opened.pop_all()
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence in (os.SEEK_SET, os.SEEK_CUR)
        self._at = offset if whence == os.SEEK_SET else self._at + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read at most to the end of the current part."""
        view = memoryview(buffer)
        for part, file in self._parts:
            start = self._at - part.start
            if 0 <= start < part.byte_count:
                file.seek(start)
                count = file.readinto(view[: part.byte_count - start])
                self._at += count
                return count
        return 0

    def close(self) -> None:
        self._opened.close()
        super().close()


def read_part(part: Part, source: BinaryIO, path: Path) -> Iterator[bytes]:
    """The bytes of ``part`` in pieces of a few MiB; ``source`` is the open file ``path``.

    Raises ModelFileError if the file cannot be read or has become shorter.
    """
    if isinstance(part, Literal):
        yield part.data
    elif isinstance(part, Span):
        end = part.offset + part.byte_count
        for start in range(part.offset, end, CHUNK_BYTES):
            yield _read(source, path, start, min(CHUNK_BYTES, end - start))
    else:
        yield from _read_rows(part, source, path)


def _read_rows(part: Rows, source: BinaryIO, path: Path) -> Iterator[bytes]:
    """The kept rows, read in windows from the first to the last kept row: slower would be a seek per row."""
    in_window = max(1, CHUNK_BYTES // part.row_bytes)
    at = 0
    while at < len(part.ids):
        first = int(part.ids[at])
        behind = int(np.searchsorted(part.ids, first + in_window))
        wanted = part.ids[at:behind]
        count = int(wanted[-1]) - first + 1
        data = _read(source, path, part.offset + first * part.row_bytes, count * part.row_bytes)
        yield np.frombuffer(data, dtype=np.uint8).reshape(count, part.row_bytes)[wanted - first].tobytes()
        at = behind


def _read(source: BinaryIO, path: Path, offset: int, count: int) -> bytes:
    try:
        source.seek(offset)
        data = source.read(count)
    except OSError as error:
        raise ModelFileError(path, f"the file cannot be read: {reason_of(error)}", offset=offset) from error
    if len(data) != count:
        raise ModelFileError(path, "the file became shorter after its header was read", offset=offset)
    return data


# --------------------------------------------------------------------------------------------- writing


def whole_parts(header: GgufHeader) -> list[Part]:
    """The unchanged source; a split model becomes one file."""
    if not header.split:
        return [Span(0, header.file_bytes)]
    entries = [span for _, span in _raw_entries(header)]
    tensors = [(tensor, tensor.shape, Span(tensor.offset, tensor.byte_count)) for tensor in header.tensors]
    return _model_parts(header, entries, tensors)


def tokenizer_parts(header: GgufHeader) -> list[Part]:
    """A GGUF with all of the source's metadata and no tensors."""
    entries = [span for _, span in _raw_entries(header)]
    return [_start(header, 0, len(entries)), *entries]


def drafter_parts(header: GgufHeader, kept: Ids) -> list[Part]:
    """The source with only the ``kept`` rows of its head, and without a tokenizer.

    llama.cpp takes the vocabulary's size from ``<architecture>.vocab_size`` if the tokenizer's model is "no_vocab".
    """
    size_key = f"{header.architecture}.vocab_size"
    entries: list[Part] = [
        span for key, span in _raw_entries(header) if key != size_key and not key.startswith("tokenizer.")
    ]
    # Key, value type and value of each entry.
    no_vocabulary = struct.pack("<I", _VALUE_NUMBERS["string"]) + _string("no_vocab")
    entries.append(Literal(_string("tokenizer.ggml.model") + no_vocabulary))
    entries.append(Literal(_string(size_key) + struct.pack("<II", _VALUE_NUMBERS["uint32"], len(kept))))
    tensors = []
    for tensor in header.tensors:
        part, shape = _trimmed(tensor, header, kept)
        tensors.append((tensor, shape, part))
    return _model_parts(header, entries, tensors)


def _model_parts(
    header: GgufHeader, entries: Sequence[Part], tensors: Sequence[tuple[TensorInfo, tuple[int, ...], Part]]
) -> list[Part]:
    """A GGUF of these entries and tensors; each tensor has a new shape and a part with its data."""
    records, data, offset = bytearray(), list[Part](), 0
    for tensor, shape, part in tensors:
        records += _tensor_record(tensor, shape, offset)
        padding = -part.byte_count % header.alignment
        data += [part, Literal(bytes(padding))] if padding else [part]
        offset += part.byte_count + padding
    parts: list[Part] = [_start(header, len(tensors), len(entries)), *entries, Literal(bytes(records))]
    written = sum(part.byte_count for part in parts)
    return [*parts, Literal(bytes(-written % header.alignment)), *data]


def trimmed_tensors(header: GgufHeader) -> tuple[TensorInfo, ...]:
    """The tensors of which a trimmed model keeps only some rows.

    Raises ModelFileError if the model has other tables over the vocabulary, which cannot be trimmed.
    """
    vocabulary_size = header.vocabulary_size
    for tensor in header.tensors:
        if tensor.name == _PER_LAYER or (tensor.name not in _TRIMMED and vocabulary_size in tensor.shape):
            reason = f"tensor {tensor.name} is a table over the vocabulary that the architecture looks up by token"
            raise ModelFileError(
                header.path, f"{reason}, so its vocabulary cannot be trimmed", hint="export it without trimming"
            )
    return tuple(tensor for tensor in header.tensors if tensor.name in _TRIMMED)


def embedding_table(header: GgufHeader) -> TensorInfo:
    """The tensor with a row for each token. Raises ModelFileError if it is missing or has another number of rows."""
    table = next((tensor for tensor in header.tensors if tensor.name == EMBEDDING), None)
    if table is None:
        raise ModelFileError(header.path, f"it has no {EMBEDDING}: it is not a language model")
    for tensor in trimmed_tensors(header):
        rows = tensor.shape[-1]
        dimensions = 1 if tensor.name.endswith(".bias") else 2
        if len(tensor.shape) != dimensions or rows != header.vocabulary_size or tensor.byte_count % rows:
            reason = f"tensor {tensor.name} of shape {tensor.shape} lacks rows for {header.vocabulary_size} tokens"
            raise ModelFileError(header.path, reason)
    return table


def check_kept(kept: npt.NDArray[np.integer], vocabulary_size: int) -> Ids:
    """``kept`` as int32. Raises InvalidRequestError unless it holds at least one id, ascending, in the vocabulary."""
    if kept.ndim != 1 or kept.dtype.kind not in "iu" or len(kept) == 0:
        raise InvalidRequestError("the tokens to keep must be a list of at least one token id")
    if not 0 <= int(kept.min()) <= int(kept.max()) < vocabulary_size:
        raise InvalidRequestError(f"a token to keep lies outside the vocabulary of {vocabulary_size} tokens")
    ids = kept.astype(np.int32)
    if not ascending(ids):
        raise InvalidRequestError("the tokens to keep must be in ascending order without duplicates")
    return ids


def _trimmed(tensor: TensorInfo, header: GgufHeader, kept: Ids) -> tuple[Part, tuple[int, ...]]:
    if tensor.name not in _TRIMMED:
        return Span(tensor.offset, tensor.byte_count), tensor.shape
    return Rows(tensor.offset, tensor.byte_count // header.vocabulary_size, kept), (*tensor.shape[:-1], len(kept))


def check_own_names(header: GgufHeader) -> None:
    """Raise ModelFileError for a file that Ollama converted: what is written has the keys and names of its source."""
    if header.completed:
        raise ModelFileError(
            header.path,
            "it was converted by Ollama, with keys or names that llama.cpp does not read",
            hint="export the same model from the hub",
        )


def _raw_entries(header: GgufHeader) -> Sequence[tuple[str, Span]]:
    """Every key with its byte range, including key and type; keys of split models are left out."""
    check_own_names(header)
    found = []
    with header.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = Cursor(header.path, data, len(data))
        cursor.position = _FIRST_ENTRY
        for _ in range(len(header.metadata)):
            start = cursor.position
            key = cursor.name("key", _MOST_KEY_BYTES)
            read_entry(cursor, key)
            if not key.startswith("split."):
                found.append((key, Span(start, cursor.position - start)))
    return found


def _start(header: GgufHeader, tensors: int, keys: int) -> Literal:
    return Literal(b"GGUF" + struct.pack("<IQQ", header.version, tensors, keys))


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _tensor_record(tensor: TensorInfo, shape: tuple[int, ...], offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _string(tensor.name) + sizes + struct.pack("<IQ", _TYPE_NUMBERS[tensor.type_name], offset)
