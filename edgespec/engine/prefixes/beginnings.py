"""With what the last conversations began: hashes of blocks of their tokens, by a secret, and never the tokens.

A later process finds with them that two conversations share a beginning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.files.atomic import replacing
from edgespec.files.checked import Check, Range, WrongValueError, read, read_object

# Shorter beginnings are read again in the time in which a person reads a line.
LEAST_TOKENS = 2048

# Tokens that a shared beginning is rounded down to: on the slowest machine measured, reading them takes 0.2 s.
BLOCK_TOKENS = 32

# Conversations that are remembered: those of a week of one agent's user, at 10 kB for each of 40 000 tokens.
MOST_BEGINNINGS = 64

# A template may end a prompt with tokens that the conversation's next prompt lacks, for example an empty thinking.
_ADDED_TOKENS = 4

_MOST_TOKENS = 2**24
_MOST_BYTES = 64 * 2**20
_HASH_BYTES = 8

Tokens = NDArray[np.int32]


def as_tokens(tokens: Sequence[int]) -> Tokens:
    """Token ids in the form that is hashed: little-endian int32 of shape (count,)."""
    return np.asarray(tokens, dtype="<i4")


def hash_of(key: bytes, tokens: Tokens) -> str:
    """The hash of these tokens by ``key``, in hex."""
    return hashlib.blake2b(tokens.tobytes(), key=key, digest_size=16).hexdigest()


def _is_hex(text: str) -> bool:
    return not set(text) - set("0123456789abcdef")


_Hex = Annotated[str, Check(_is_hex, "hexadecimal digits")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """One conversation's prompt. ``key``: the hash of whose it is, and for what cache.

    ``whole`` is the hash of its first ``length`` tokens, which a longer prompt of the same conversation has, too.
    ``blocks`` are the hashes of the first LEAST_TOKENS tokens, and of all tokens up to the end of each later block.
    """

    key: _Hex
    whole: _Hex
    length: Annotated[int, Range(0, _MOST_TOKENS)]
    blocks: _Hex

    @staticmethod
    def of(key: bytes, tokens: Tokens) -> Beginning:
        """The beginning that these tokens are."""
        length = max(0, len(tokens) - _ADDED_TOKENS)
        digest = hashlib.blake2b(tokens[:LEAST_TOKENS].tobytes(), key=key, digest_size=_HASH_BYTES)
        blocks, end = [], LEAST_TOKENS
        while end <= len(tokens):
            blocks.append(digest.hexdigest())
            digest.update(tokens[end : end + BLOCK_TOKENS].tobytes())
            end += BLOCK_TOKENS
        whole = hash_of(key, tokens[:length])
        return Beginning(key=hash_of(key, tokens[:0]), whole=whole, length=length, blocks="".join(blocks))

    def continues(self, other: Beginning, key: bytes, tokens: Tokens) -> bool:
        """Whether this beginning, of ``tokens``, is a later prompt of the ``other`` one's conversation."""
        return self.length >= other.length and hash_of(key, tokens[: other.length]) == other.whole

    def shared_with(self, other: Beginning) -> int:
        """Tokens that both begin with, in whole blocks; 0 if fewer than LEAST_TOKENS."""
        own, others = _hashes(self.blocks), _hashes(other.blocks)
        count = min(len(own), len(others))
        equal = int(np.count_nonzero(own[:count] == others[:count]))  # a block's hash is that of all before it, too
        return LEAST_TOKENS + (equal - 1) * BLOCK_TOKENS if equal else 0


def _hashes(blocks: str) -> NDArray[np.uint64]:
    whole = len(blocks) - len(blocks) % (2 * _HASH_BYTES)
    return np.frombuffer(bytes.fromhex(blocks[:whole]), dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Beginnings:
    """The last conversations' beginnings, the oldest first."""

    all: tuple[Beginning, ...] = ()

    def with_prompt(self, key: bytes, tokens: Tokens) -> tuple[Beginnings, int]:
        """These with one more prompt, and how many tokens it shares with another conversation.

        It takes the place of its conversation's earlier prompts.
        """
        new = Beginning.of(key, tokens)
        others = [each for each in self.all if each.key != new.key or not new.continues(each, key, tokens)]
        shared = max((new.shared_with(each) for each in others if each.key == new.key), default=0)
        return Beginnings((*others, new)[-MOST_BEGINNINGS:]), min(shared, max(0, len(tokens) - 1))


def read_beginnings(path: Path) -> Beginnings:
    """The beginnings in a file; none if it is missing or damaged, for they only save time."""
    try:
        return read(Beginnings, read_object(path, _MOST_BYTES))
    except (ModelFileError, WrongValueError):
        return Beginnings()


def write_beginnings(path: Path, beginnings: Beginnings) -> None:
    """Replace the file, readable by its owner alone. Raises DiskSpaceError, OSError."""
    content = json.dumps(asdict(beginnings)).encode("ascii")
    with replacing(path, expected_bytes=len(content), durable=False, private=True) as file:
        file.write(content)
