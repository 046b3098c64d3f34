"""Bounds-checked reading of a GGUF file's primitives: numbers, names, strings and metadata entries."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import ModelFileError
from edgespec.files.gguf.records import VALUE_TYPES, GgufArray, MetadataValue, Scalar

# Limits that keep reading a hostile file under a second and 50 MB. Real files stay far below: the largest tokenizers
# hold 262144 tokens and about 515000 merges, and chat templates are under 100 KiB.
_MOST_STRINGS = 1 << 21
_INLINE_ELEMENTS = 64  # longer arrays stay in the file; per-layer lists are shorter, vocabularies longer
INLINE_BYTES = 1 << 20  # one value
_ALL_INLINE_BYTES = 4 << 20  # all values and keys; decoded text may take four times that in memory

DOWNLOAD_AGAIN = "the download may have been cut short: fetch the file again"


class Cursor:
    """A read position in the file; reading beyond the end raises ModelFileError."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.position = 0
        self.strings_left = _MOST_STRINGS
        self.inline_left = _ALL_INLINE_BYTES

    def fail(self, reason: str, offset: int | None = None, hint: str | None = None) -> ModelFileError:
        at = self.position if offset is None else offset
        return ModelFileError(self.path, reason, offset=at, hint=hint or DOWNLOAD_AGAIN)

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.position:
            left = self.size - self.position
            raise self.fail(f"truncated: {what} needs {count} bytes and {left} are left", hint=DOWNLOAD_AGAIN)

    def unpack(self, letter: str, count: int, size: int, what: str) -> tuple[Scalar, ...]:
        self.need(count * size, what)
        values = struct.unpack_from(f"<{count}{letter}", self.data, self.position)
        self.position += count * size
        return values

    def u32(self, what: str) -> int:
        return int(self.unpack("I", 1, 4, what)[0])

    def u64(self, what: str) -> int:
        return int(self.unpack("Q", 1, 8, what)[0])

    def text(self, length: int, what: str) -> str:
        self.need(length, what)
        self.inline_left -= length
        if self.inline_left < 0:
            raise self.fail(f"the metadata holds more than {_ALL_INLINE_BYTES} bytes of names and short values")
        try:
            text = self.data[self.position : self.position + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not valid UTF-8", self.position + error.start) from None
        self.position += length
        return text

    def name(self, what: str, most: int) -> str:
        start = self.position
        length = self.u64(f"a {what}'s length")
        if not 0 < length <= most:
            raise self.fail(f"a {what} of {length} bytes: 1 to {most} are allowed", start)
        text = self.text(length, f"a {what}")
        if "\0" in text:  # native code would stop reading the name there
            raise self.fail(f"a {what} contains a NUL character: {quote(text)}", start)
        return text

    def skip_strings(self, count: int, what: str) -> None:
        """Skip ``count`` strings; the loop is optimised because it reads vocabularies."""
        self.strings_left -= count
        if self.strings_left < 0:
            raise self.fail(f"{what} holds too many strings (over {_MOST_STRINGS} in the file)")
        self.need(count * 8, what)
        length_at, data, position, last = struct.Struct("<Q").unpack_from, self.data, self.position, self.size - 8
        for _ in range(count):
            if position > last:
                raise self.fail(f"truncated: {what} goes beyond the end of the file", hint=DOWNLOAD_AGAIN)
            position += 8 + length_at(data, position)[0]
        if position > self.size:
            raise self.fail(f"truncated: {what} goes beyond the end of the file", hint=DOWNLOAD_AGAIN)
        self.position = position


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value with its stored type; ``count`` is None for a scalar."""

    kind: str
    count: int | None
    offset: int
    value: MetadataValue


def read_entry(cursor: Cursor, key: str) -> Entry:
    what, start = f"the value of {quote(key)}", cursor.position
    kind, letter, size = _value_type(cursor, what)
    count: int | None = None
    if kind == "array":
        kind, letter, size = _value_type(cursor, what)
        if kind == "array":
            raise cursor.fail(f"{what} nests arrays, which llama.cpp does not support either", start)
        count = cursor.u64(what)
    elements = 1 if count is None else count
    first = cursor.position
    if kind == "string":
        cursor.skip_strings(elements, what)
    else:
        cursor.need(elements * size, what)
        cursor.position += elements * size
        if kind == "bool":
            _check_bools(cursor, first, what)
    end = cursor.position
    if elements > _INLINE_ELEMENTS or end - first > INLINE_BYTES:
        return Entry(kind, count, start, GgufArray(cursor.path, kind, elements, first, end - first))

    cursor.position = first
    values: tuple[Scalar, ...]
    if kind == "string":
        values = tuple(cursor.text(cursor.u64(what), what) for _ in range(elements))
    else:
        values = cursor.unpack(letter, elements, size, what)
    return Entry(kind, count, start, values[0] if count is None else values)


def _value_type(cursor: Cursor, what: str) -> tuple[str, str, int]:
    start = cursor.position
    number = cursor.u32(what)
    if number not in VALUE_TYPES:
        raise cursor.fail(f"{what} has the unknown value type {number}", start)
    return VALUE_TYPES[number]


def _check_bools(cursor: Cursor, first: int, what: str) -> None:
    for start in range(first, cursor.position, INLINE_BYTES):
        chunk = cursor.data[start : min(start + INLINE_BYTES, cursor.position)]
        if chunk.translate(None, b"\0\1"):
            raise cursor.fail(f"{what} is a bool that is neither 0 nor 1", start)


def quote(text: str) -> str:
    """``text`` for a message: ASCII, quoted and shortened to 80 characters."""
    return ascii(text if len(text) <= 80 else f"{text[:80]}...")
