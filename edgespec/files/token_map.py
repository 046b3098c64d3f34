"""How a drafter with another vocabulary reads and writes a target's tokens, and the file that keeps it."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import EdgespecError
from edgespec.files.atomic import write_bytes

# The first bytes of a kept map; another version has another name.
_MAGIC = b"edgespec token map 1\n"
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenMap:
    """Token by token, by the bytes of their texts.

    ``pieces[starts[t] : starts[t + 1]]`` are the drafter's tokens for the target's token t, at least one: int32,
    ``starts`` has one element more than the target has tokens. ``tokens`` are the target's tokens that the drafter
    has as one token, int64 ascending, and ``rows`` the drafter's tokens for them, int64 of the same length; no token
    occurs twice in either. ``firsts`` has, for each of the drafter's tokens, the target's first token of its text,
    int32, or -1. ``coverage`` is the share of a sample text's tokens, as the target cuts it, that are in ``tokens``.
    """

    starts: NDArray[np.int32]
    pieces: NDArray[np.int32]
    tokens: NDArray[np.int64]
    rows: NDArray[np.int64]
    firsts: NDArray[np.int32]
    coverage: float

    def spelled(self, token: int) -> list[int]:
        """The drafter's tokens for a token of the target, which must be one of its vocabulary."""
        found: list[int] = self.pieces[self.starts[token] : self.starts[token + 1]].tolist()
        return found

    @property
    def vocabulary_size(self) -> int:
        """The target's tokens."""
        return len(self.starts) - 1


# Stands for a map that is not made yet, where only its presence counts.
NO_MAP = TokenMap(
    starts=np.zeros(1, dtype=np.int32),
    pieces=np.zeros(0, dtype=np.int32),
    tokens=np.zeros(0, dtype=np.int64),
    rows=np.zeros(0, dtype=np.int64),
    firsts=np.zeros(0, dtype=np.int32),
    coverage=0.0,
)


def write_token_map(path: Path, key: bytes, own: TokenMap) -> None:
    """Keep a map under the ``key`` of both vocabularies, 32 bytes. A map that cannot be kept is made again."""
    counts = [len(own.starts), len(own.pieces), len(own.tokens), len(own.firsts)]
    parts = (own.starts, own.pieces, own.tokens.astype(np.int32), own.rows.astype(np.int32), own.firsts)
    body = key + np.array(counts, "<i4").tobytes() + np.array([own.coverage], "<f8").tobytes()
    body += b"".join(part.astype("<i4").tobytes() for part in parts)
    with contextlib.suppress(OSError, EdgespecError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, _MAGIC + hashlib.sha256(body).digest() + body)


def read_token_map(path: Path, key: bytes, target_tokens: int, drafter_tokens: int) -> TokenMap | None:
    """The kept map of two vocabularies of these sizes; None if there is none, or if it is damaged or of others."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    body = content[len(_MAGIC) + _DIGEST_BYTES :]
    if content[: len(content) - len(body)] != _MAGIC + hashlib.sha256(body).digest() or body[: len(key)] != key:
        return None
    counts = np.frombuffer(body, "<i4", 4, len(key)).tolist()
    after = len(key) + 16
    coverage = float(np.frombuffer(body, "<f8", 1, after)[0])
    numbers = np.frombuffer(body, "<i4", -1, after + 8)
    starts, pieces, tokens, firsts = counts
    ends = np.cumsum([starts, pieces, tokens, tokens, firsts])
    if starts != target_tokens + 1 or firsts != drafter_tokens or len(numbers) != ends[-1]:
        return None
    split = np.split(numbers, ends[:-1])
    return TokenMap(
        starts=split[0],
        pieces=split[1],
        tokens=split[2].astype(np.int64),
        rows=split[3].astype(np.int64),
        firsts=split[4],
        coverage=coverage,
    )
