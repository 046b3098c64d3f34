"""Files with a saved conversation and its cache, read as hostile input.

Layout: eight bytes that name the format, its version and the header's length (both uint32, little-endian), the
header's sha256, the header (JSON), the tokens (int32, little-endian), the parts of the cache, the sha256 of all of
this, and its code by the home's secret (``provenance.py``). The header says how many tokens and parts there are;
together they are as long as the file. A checksum finds damage; a file that was changed on purpose can have a correct
one, so every value is checked as well. Files of version 1 have no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from edgespec.errors import ModelFileError, SessionFileError, reason_of
from edgespec.files.atomic import CHUNK_BYTES, replacing
from edgespec.files.checked import Fields, parse_object
from edgespec.files.home import Home
from edgespec.files.provenance import MAC_BYTES, NO_MAC, mac_in, made_in

_MAGIC = b"edgesess"
_VERSION = 2
_FIRST = struct.Struct("<8sII32s")
_DIGEST_BYTES = 32

# A conversation's text, twice. A million tokens of English have 5 MB.
MOST_HEADER_BYTES = 64 * 2**20

# More than any model's context.
MOST_TOKENS = 2**24

_DAMAGED = "it was cut or altered; save the session again"


def write_session_file(
    path: Path,
    home: Home,
    header: Mapping[str, Any],
    tokens: Sequence[int],
    parts: Iterable[bytes],
    sizes: tuple[int, int],
    *,
    durable: bool = True,
) -> int:
    """Replace ``path``, readable by its owner alone, as a file made in ``home``. Returns its size in bytes.

    ``sizes`` are the number of ``parts`` and the bytes of each. Only a saved session is replaced. A power cut may
    tear a file that is not ``durable``. Raises SessionFileError, DiskSpaceError, and what the iteration raises; the
    file at ``path`` is then unchanged.
    """
    count, size = sizes
    document = {**header, "token_count": len(tokens), "part_count": count, "part_bytes": size}
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except ValueError as error:  # half of a surrogate pair
        raise SessionFileError(path, f"the conversation cannot be written as text: {error}") from error
    if len(text) > MOST_HEADER_BYTES or len(tokens) > MOST_TOKENS:
        raise SessionFileError(path, "the conversation is too long to be saved", hint="remove some of its turns")
    total = _FIRST.size + len(text) + 4 * len(tokens) + count * size + _DIGEST_BYTES + MAC_BYTES
    try:
        _check_replaceable(path)
        digest, written = hashlib.sha256(), 0
        with replacing(path, expected_bytes=total, durable=durable, private=True) as file:
            first = _FIRST.pack(_MAGIC, _VERSION, len(text), hashlib.sha256(text).digest())
            for piece in (first, text, np.asarray(tokens, dtype="<i4").tobytes()):
                digest.update(piece)
                written += file.write(piece)
            for part in parts:
                digest.update(part)
                written += file.write(part)
            written += file.write(digest.digest() + mac_in(home, digest.digest()))
            if written != total:
                raise AssertionError(f"{written} bytes were written, not {total}")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise SessionFileError(path, f"the file cannot be written: {reason_of(error)}") from error
    return total


def _check_replaceable(path: Path) -> None:
    """Raise SessionFileError if ``path`` is something else than a saved session."""
    if not path.parent.is_dir():
        raise SessionFileError(path, "its folder does not exist", hint="make the folder first, or name another one")
    with contextlib.suppress(FileNotFoundError):
        is_session = stat.S_ISREG(path.stat().st_mode)
        if is_session:
            with path.open("rb") as file:
                is_session = file.read(len(_MAGIC)) == _MAGIC
        if not is_session:
            raise SessionFileError(path, "it is not a saved session and is not replaced", hint="name another file")


class SessionFile:
    """An open file with a saved session. A context manager.

    Its header is checked when it is opened. Call ``verify``, or ``read_stated``, before anything else is used.
    """

    def __init__(self, path: Path) -> None:
        """Raises SessionFileError for a file that is missing, no saved session, damaged, or of a newer version."""
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
                raise SessionFileError(path, "it is not a regular file")
            self._file: BinaryIO = path.open("rb")
        except FileNotFoundError as error:
            raise SessionFileError(path, "no such file") from error
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error
        try:
            with self._checking():
                self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        first = self._file.read(_FIRST.size)
        if first[: len(_MAGIC)] != _MAGIC:
            raise SessionFileError(self.path, "it is not a saved session")
        if len(first) < _FIRST.size:
            raise SessionFileError(self.path, _DAMAGED)
        _, version, length, wanted = _FIRST.unpack(first)
        if version > _VERSION:
            raise SessionFileError(
                self.path, "it was saved by a newer version of edgespec", hint="update edgespec to read it"
            )
        if version < 1 or length > min(MOST_HEADER_BYTES, size - _FIRST.size - _DIGEST_BYTES):
            raise SessionFileError(self.path, _DAMAGED)
        text = self._file.read(length)
        if hashlib.sha256(text).digest() != wanted:
            raise SessionFileError(self.path, _DAMAGED)
        self.header = Fields(self.path, parse_object(self.path, text))
        self.token_count = self.header.integer("token_count", 0, MOST_TOKENS)
        self.part_count = self.header.integer("part_count", 0, size)
        self.part_bytes = self.header.integer("part_bytes", 0, size)
        self._mac_bytes = MAC_BYTES if version > 1 else 0
        parts = self.part_count * self.part_bytes
        if _FIRST.size + length + 4 * self.token_count + parts + _DIGEST_BYTES + self._mac_bytes != size:
            raise SessionFileError(self.path, _DAMAGED)
        self._head, self._tokens_at = hashlib.sha256(first + text), self._file.tell()

    def read_stated(self) -> None:
        """Read the tokens, and the checksum and the code that the file states. ``parts`` checks the checksum."""
        with self._checking():
            self._file.seek(self._tokens_at)
            self._tokens = self._read(4 * self.token_count)
            self._begun = self._head.copy()
            self._begun.update(self._tokens)
            self._file.seek(self.part_count * self.part_bytes, os.SEEK_CUR)
            self._digest = self._read(_DIGEST_BYTES)
            self._mac = self._read(self._mac_bytes) or NO_MAC

    def verify(self) -> None:
        """Read everything once and raise SessionFileError unless the checksum fits."""
        self.read_stated()
        with self._checking():
            digest, left = self._begun.copy(), self.part_count * self.part_bytes
            self._file.seek(self._tokens_at + len(self._tokens))
            while left:
                chunk = self._read(min(CHUNK_BYTES, left))
                digest.update(chunk)
                left -= len(chunk)
            if digest.digest() != self._digest:
                raise SessionFileError(self.path, _DAMAGED)

    def made_in(self, home: Home) -> bool:
        """Whether the content with this checksum was written with the home's secret. Raises OSError (``made_in``)."""
        return made_in(home, self._digest, self._mac)

    def tokens(self) -> list[int]:
        """The tokens, unchecked."""
        found: list[int] = np.frombuffer(self._tokens, dtype="<i4").tolist()
        return found

    def parts(self) -> Iterator[bytes]:
        """The parts of the cache. After the last one raises SessionFileError unless the checksum fits."""
        with self._checking():
            digest = self._begun.copy()
            self._file.seek(self._tokens_at + len(self._tokens))
            for _ in range(self.part_count):
                part = self._read(self.part_bytes)
                digest.update(part)
                yield part
            if digest.digest() != self._digest:
                raise SessionFileError(self.path, _DAMAGED)

    def _read(self, count: int) -> bytes:
        found = self._file.read(count)
        if len(found) != count:
            raise SessionFileError(self.path, _DAMAGED)
        return found

    @contextlib.contextmanager
    def _checking(self) -> Iterator[None]:
        try:
            yield
        except ModelFileError as error:  # of the JSON reader
            raise SessionFileError(self.path, f"it is damaged: {error.reason}") from error
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> SessionFileError:
        return SessionFileError(self.path, f"the file cannot be read: {reason_of(error)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()
