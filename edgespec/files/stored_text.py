"""Texts as token ids in a file, with an index that finds where the end of another text occurs in them.

The index is a suffix array (Manber and Myers, 1993) of the texts read backwards, so one binary search finds the
longest match of a text's end. Files are hostile input: sizes are checked on opening, and each number on use.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import struct
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, reason_of
from edgespec.files.atomic import replacing

# Matches are at most this long: as in the index of a conversation, longer ones say nothing more about what follows.
LONGEST_MATCH_TOKENS = 32

# After one matching token alone what followed is right in a quarter of positions (docs/results/drafting.md), and a
# store of millions of tokens has nearly every token: such guesses would cost rows in every round.
LEAST_MATCH_TOKENS = 2

# Positions taken on each side of the longest match, so that a search ends in microseconds if a phrase occurs
# thousands of times. A choice: of all that follows these positions, two tokens at most are guessed.
_NEIGHBOURS = 4

_MAGIC, _VERSION = b"EDGETEXT", 1
_HEADER = struct.Struct("<8sI32sQQQI")  # magic, version, vocabulary, bytes of names, texts, tokens, checksum
_BORDER = 2**32 - 1  # ends each text, and is the id of no token
_TOKEN_BYTES = 4
_WINDOW = LONGEST_MATCH_TOKENS * _TOKEN_BYTES

# A path takes up to 4 kB on Linux; a hundred bytes are usual, so this is room for 600 000 files.
_LARGEST_NAMES_BYTES = 64 << 20


class DamagedTextError(EdgespecError):
    """A file of texts that is truncated, malformed, or of another vocabulary or version."""


@dataclass(frozen=True, slots=True)
class Text:
    """One text: its token ids, and the name it is replaced by (for example its path; "" if it has none)."""

    tokens: npt.NDArray[np.uint32]
    name: str = ""


class StoredText:
    """Texts of one vocabulary and their index. Immutable; any thread may search.

    ``backwards`` are the token ids as big-endian uint32, the last token of the latest text first, each text followed
    by a border: so bytes sort as tokens do. ``order`` are the positions of ``backwards``, sorted by the 32 tokens
    from each position on.
    """

    def __init__(
        self,
        vocabulary: bytes,
        vocabulary_size: int,
        backwards: bytes | mmap.mmap,
        order: npt.NDArray[np.uint32],
        texts: int,
        names: bytes = b"",
    ) -> None:
        self.vocabulary = vocabulary
        self.texts = texts
        self._vocabulary_size = vocabulary_size
        self._order = order
        self._names = names
        self._backwards = backwards
        self._start = 0  # bytes before the tokens, if ``backwards`` is a whole file
        self._size = len(order)

    @property
    def tokens(self) -> int:
        """Number of stored tokens."""
        return max(0, self._size - self.texts)

    # ------------------------------------------------------------------------------------------ making

    @classmethod
    def of(cls, vocabulary: bytes, vocabulary_size: int, texts: Sequence[Text]) -> StoredText:
        """Index ``texts``, oldest first. ``vocabulary`` are the 32 bytes of ``vocabulary_digest``.

        Takes half a second and 80 MB for each million tokens.
        """
        border = np.array([_BORDER], dtype=np.uint32)
        parts = [part for text in reversed(texts) for part in (text.tokens[::-1], border)]
        ids = np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint32)
        if len(ids) >= _BORDER:
            raise ValueError(f"{len(ids)} tokens are more than an index of 32-bit positions holds")
        named = [text.name for text in texts]
        names = json.dumps(named).encode("ascii") if any(named) else b""
        return cls(
            vocabulary, vocabulary_size, ids.astype(">u4").tobytes(), _sorted_positions(ids), len(texts), names
        )

    def all_texts(self) -> list[Text]:
        """Every text, oldest first. Raises DamagedTextError if borders and names contradict the header."""
        ids = np.frombuffer(self._backwards, dtype=">u4", count=self._size, offset=self._start).astype(np.uint32)
        borders = np.flatnonzero(ids == _BORDER)
        named = self._named()
        if len(borders) != self.texts or (self._size and borders[-1] != self._size - 1):
            raise DamagedTextError("its texts are not separated as its header says")
        if named and len(named) != self.texts:
            raise DamagedTextError("it does not name each of its texts")
        if np.any(np.delete(ids, borders) >= self._vocabulary_size):
            raise DamagedTextError("it holds an id that the vocabulary lacks")
        starts = [0, *(borders[:-1] + 1)] if len(borders) else []
        found = [ids[start:end][::-1] for start, end in zip(starts, borders, strict=True)]
        names = named or [""] * len(found)
        return [Text(tokens, name) for tokens, name in zip(reversed(found), names, strict=True)]

    def _named(self) -> list[str]:
        if not self._names:
            return []
        try:
            listed: Any = json.loads(self._names)
        except (ValueError, RecursionError) as error:
            raise DamagedTextError("the names of its texts are not readable") from error
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise DamagedTextError("the names of its texts are not readable")
        return listed

    # ------------------------------------------------------------------------------------------- files

    def save(self, path: Path) -> None:
        """Replace the file at ``path``, readable by its user only. Raises DiskSpaceError, OSError."""
        names = self._names + b" " * (-(len(self._names) + _HEADER.size) % 8)
        head = _HEADER.pack(_MAGIC, _VERSION, self.vocabulary, len(names), self.texts, self._size, 0)
        head = head[:-4] + struct.pack("<I", zlib.crc32(head[:-4] + names))
        end = self._start + _TOKEN_BYTES * self._size
        parts = (head, names, self._backwards[self._start : end], self._order.astype("<u4").tobytes())
        with replacing(path, expected_bytes=sum(map(len, parts)), private=True) as file:
            for part in parts:
                file.write(part)

    @classmethod
    def open(
        cls,
        path: Path,
        vocabulary: bytes,
        vocabulary_size: int,
        *,
        most_tokens: int = _BORDER - 1,
        mapped: bool = False,
    ) -> StoredText:
        """Read the file at ``path``; with ``mapped`` it is mapped, so that only the pages used are read.

        A file of more than ``most_tokens``, borders included, is not read: each takes 8 bytes of memory. Windows
        refuses to replace a mapped file. Raises DamagedTextError, OSError.
        """
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEADER.size)
            if len(head) < _HEADER.size or head[:8] != _MAGIC:
                raise DamagedTextError("its first bytes are of another format")
            _, version, own, names_bytes, texts, tokens, checksum = _HEADER.unpack(head)
            if version != _VERSION:
                raise DamagedTextError(f"its version is {version}, and this edgespec reads {_VERSION}")
            start = _HEADER.size + names_bytes
            whole = start + 2 * _TOKEN_BYTES * tokens
            if names_bytes > _LARGEST_NAMES_BYTES or tokens >= _BORDER or texts > tokens or size != whole:
                raise DamagedTextError(f"it has {size} bytes, and its header says {whole}")
            if tokens > most_tokens:
                raise DamagedTextError(f"it holds {tokens} tokens, and at most {most_tokens} are stored")
            names = file.read(names_bytes)
            if zlib.crc32(head[:-4] + names) != checksum:
                raise DamagedTextError("the checksum of its header is wrong")
            if own != vocabulary:
                raise DamagedTextError("it is of another vocabulary")
            data: bytes | mmap.mmap
            if mapped:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                if hasattr(mmap, "MADV_WILLNEED"):  # the first searches would wait for the disk
                    data.madvise(mmap.MADV_WILLNEED)
            else:
                data = head + names + file.read()
                if len(data) != whole:
                    raise DamagedTextError("it changed while it was read")
        order = np.frombuffer(data, dtype="<u4", count=tokens, offset=start + _TOKEN_BYTES * tokens)
        stored = cls(vocabulary, vocabulary_size, data, order, texts, names.rstrip(b" "))
        stored._start = start
        return stored

    # ---------------------------------------------------------------------------------------- searching

    def continuations(self, tail: Sequence[int], count: int) -> tuple[int, list[list[int]]]:
        """The length of the longest match of the text's end ``tail``, and what follows it: the likeliest token first.

        Each continuation has ``count`` tokens at most, and ends with its text. Without a match of LEAST_MATCH_TOKENS
        that something follows, there are none.
        """
        wanted = tail[-LONGEST_MATCH_TOKENS:]
        try:
            needle = struct.pack(f">{len(wanted)}I", *reversed(wanted))
        except struct.error:  # an id that no vocabulary has
            return 0, []
        order, size = self._order, self._size
        found = bisect_left(order, needle, key=self._window)
        ends = [position for position in (found - 1, found) if 0 <= position < size]
        longest = max((self._shared(needle, position) for position in ends), default=0)
        if longest < LEAST_MATCH_TOKENS:
            return 0, []
        begins = self._begins(needle[: longest * _TOKEN_BYTES])
        below = itertools.takewhile(begins, range(found - 1, max(-1, found - 1 - _NEIGHBOURS), -1))
        above = itertools.takewhile(begins, range(found, min(size, found + _NEIGHBOURS)))
        following = [self._following(int(order[position]), count) for position in (*below, *above)]
        following = [tokens for tokens in following if tokens]
        if len(following) > 2:
            times = Counter(tokens[0] for tokens in following)
            following.sort(key=lambda tokens: -times[tokens[0]])
        return longest if following else 0, following

    def _following(self, at: int, count: int) -> list[int]:
        """At most ``count`` tokens after the one at ``at`` of ``backwards``, up to the end of its text."""
        at = min(at, self._size)
        first, end = self._start + _TOKEN_BYTES * max(0, at - count), self._start + _TOKEN_BYTES * at
        tokens = list(struct.unpack(f">{(end - first) // _TOKEN_BYTES}I", self._backwards[first:end]))
        tokens.reverse()
        for position, token in enumerate(tokens):
            if token >= self._vocabulary_size:  # a border, or damage
                return tokens[:position]
        return tokens

    def _window(self, at: Any) -> bytes:
        """The 32 tokens from a position of ``backwards`` on; fewer at the end, none beyond it."""
        start = self._start + _TOKEN_BYTES * int(at)
        return self._backwards[start : min(start + _WINDOW, self._start + _TOKEN_BYTES * self._size)]

    def _shared(self, needle: bytes, position: int) -> int:
        """Leading tokens that ``needle`` shares with the sorted position."""
        window = self._window(self._order[position])
        size = min(len(needle), len(window))
        different = int.from_bytes(needle[:size], "big") ^ int.from_bytes(window[:size], "big")
        return (8 * size - different.bit_length()) // (8 * _TOKEN_BYTES)

    def _begins(self, needle: bytes) -> Any:
        return lambda position: self._window(self._order[position]).startswith(needle)


def _sorted_positions(ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The positions of ``ids``, sorted by the 32 ids from each on: prefix doubling (Manber and Myers, 1993)."""
    rank = np.minimum(ids, 2**31 - 1).astype(np.int64)  # two ranks fit in 64 bits; borders stay last
    order = np.zeros(0, dtype=np.int64)
    known = 1
    while known < LONGEST_MATCH_TOKENS or not len(order):
        key = rank << 32
        key[: max(0, len(key) - known)] |= rank[known:] + 1  # beyond the end sorts first
        order = np.argsort(key)
        in_order = key[order]
        rank[order] = np.concatenate(([0], np.cumsum(in_order[1:] != in_order[:-1])))[: len(order)]
        known *= 2
        if not len(ids) or rank[order[-1]] == len(ids) - 1:
            break
    return order.astype(np.uint32)


def set_aside_words(path: Path, what: str, damage: DamagedTextError) -> str:
    """Rename a damaged file, so that a new one can begin and nothing is lost; returns the sentence about it.

    An earlier damaged file of the new name is replaced.
    """
    aside = path.with_name(f"{path.name}.damaged")
    with contextlib.suppress(OSError):
        path.replace(aside)
    return f"{what} is damaged ({damage.message}): it was set aside as {aside}, and a new one begins"


def open_or_set_aside(
    path: Path,
    vocabulary: bytes,
    vocabulary_size: int,
    what: str,
    *,
    most_tokens: int = _BORDER - 1,
    mapped: bool = False,
) -> tuple[StoredText | None, str | None]:
    """The file's texts, None if there is no file; and a sentence about ``what`` if it cannot be used.

    A damaged file, or one of more than ``most_tokens`` with their borders, is set aside; one that cannot be read, or
    that does not fit in memory, stays. Raises none of these errors.
    """
    try:
        opened = StoredText.open(path, vocabulary, vocabulary_size, most_tokens=most_tokens, mapped=mapped)
    except FileNotFoundError:
        return None, None
    except DamagedTextError as error:
        return None, set_aside_words(path, what, error)
    except MemoryError:
        return None, f"{what} cannot be read: it does not fit in memory"
    except (OSError, ValueError) as error:
        return None, f"{what} cannot be read: {reason_of(error)}"
    return opened, None


def count_tokens(texts: Iterable[Text]) -> int:
    """The tokens of ``texts`` with their borders: what counts against a limit."""
    return sum(len(text.tokens) + 1 for text in texts)
