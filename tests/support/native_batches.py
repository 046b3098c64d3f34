"""Sequences of a native model driven through the kernels' interface, alone and in shared forwards."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.runtimes.native.library import LEVELS, OK, EntryStruct, Matrix, Threads
from edgespec.runtimes.native.model import NativeModel
from edgespec.runtimes.native.weights import ModelPart

Floats = NDArray[np.float32]


def part_of(model: NativeModel) -> ModelPart:
    """The model in the kernels' structs: nothing else gives a forward several sequences."""
    part = model._weights
    assert part is not None
    return part


@dataclass
class Cache:
    """One es_sequence, and what its last forward scored."""

    api: Any
    pointer: int
    batch: int
    columns: int
    flag: Any
    kept_alive: list[Any] = field(default_factory=list)

    def use_heads(self, heads: Sequence[Matrix]) -> None:
        assert self.api.es_use_heads(self.pointer, (Matrix * len(heads))(*heads), len(heads)) == OK
        self.columns = sum(int(head.rows) for head in heads)

    def scores(self, rows: int) -> Floats:
        address = ctypes.addressof(self.api.es_scores(self.pointer).contents)
        view = (ctypes.c_float * (rows * self.columns)).from_address(address)
        return np.array(view, dtype=np.float32).reshape(rows, self.columns)

    def hidden(self, layer: int, rows: int, embedding: int) -> Floats:
        view = (ctypes.c_float * (rows * embedding)).from_address(self.api.es_hidden(self.pointer, layer))
        return np.array(view, dtype=np.float32).reshape(rows, embedding)


class Batch:
    """An es_batch and its sequences."""

    def __init__(self, part: ModelPart, pointer: int) -> None:
        self.part, self.pointer, self.api = part, pointer, part.library.api
        self.caches: list[Cache] = []

    def open(self, context_length: int, *, keep_hidden: Sequence[int] = ()) -> Cache:
        flag = ctypes.c_int32(0)
        pointer = self.api.es_open(self.pointer, context_length, ctypes.addressof(flag))
        assert pointer
        cache = Cache(self.api, pointer, self.pointer, int(self.part.struct.head.rows), flag)
        if keep_hidden:
            layers = np.array(keep_hidden, dtype=np.int64)
            assert self.api.es_keep_hidden(pointer, layers.ctypes.data, len(layers)) == OK
        self.caches.append(cache)
        return cache

    def close(self, cache: Cache) -> None:
        self.caches.remove(cache)
        self.api.es_close(cache.pointer)

    def forward(self, work: Sequence[Work]) -> list[int]:
        """One shared forward. Returns each entry's status; a request that is refused as a whole raises ValueError."""
        entries = (EntryStruct * len(work))(*(each.entry() for each in work))
        code = self.api.es_batch_forward(self.pointer, entries, len(work))
        if code:
            raise ValueError(code)
        return [int(entry.status) for entry in entries]


@dataclass
class Work:
    """One sequence's share of a forward. ``parents`` covers all nodes of its tree; None: a chain. ``pairs`` are its
    tokens' hidden rows, and ``kept`` takes what follows the head's norm."""

    cache: Cache
    tokens: Sequence[int]
    start: int
    scored: int
    parents: Sequence[int] | None = None
    pairs: Floats | None = None
    kept: Floats | None = None

    def entry(self) -> EntryStruct:
        tokens = np.array(self.tokens, dtype=np.int32)
        parents = None if self.parents is None else np.array(self.parents, dtype=np.int32)
        self.cache.kept_alive[:] = [tokens, parents]
        return EntryStruct(
            sequence=self.cache.pointer,
            tokens=tokens.ctypes.data,
            parents=None if parents is None else parents.ctypes.data,
            pairs=None if self.pairs is None else self.pairs.ctypes.data,
            kept=None if self.kept is None else self.kept.ctypes.data,
            start=self.start,
            count=len(tokens),
            scored=self.scored,
            first=0 if parents is None else len(parents) - len(tokens),
            keeps_all=True,
        )


@contextmanager
def batch_of(model: NativeModel, threads: int, level: str) -> Iterator[Batch]:
    part = part_of(model)
    pointer = part.library.api.es_batch_open(
        ctypes.byref(part.struct), ctypes.byref(Threads(count=threads, most_busy=0)), LEVELS[level]
    )
    assert pointer
    batch = Batch(part, pointer)
    try:
        yield batch
    finally:
        for cache in list(batch.caches):
            batch.close(cache)
        part.library.api.es_batch_close(pointer)
