"""A runtime without weights: scores are a pure function of the token prefix, and faults occur on request.

It keeps the Model and Sequence contracts exactly, and is a little stricter than a real runtime: rows live in one
buffer that the next forward overwrites, and every rewind makes them stale.
"""

from __future__ import annotations

import hashlib
from collections import abc
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from edgespec.errors import (
    CancelledError,
    ClosedError,
    ContextFullError,
    EdgespecError,
    ForwardError,
    InvalidRequestError,
    RewindError,
    RuntimeUnavailableError,
)
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.rows import LogitsArray, Rows
from edgespec.runtimes.sequence import MAX_SCORED_ROWS

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Faults:
    """Which fault occurs, and at which call of a Sequence (counted from 1; None: never)."""

    raise_at: int | None = None
    error: Callable[[], BaseException] = lambda: ForwardError("the fake forward failed", code=-3)
    nan_at: int | None = None
    cancel_at: int | None = None
    refuse_rewind_at: int | None = None


@dataclass(slots=True)
class CallLog:
    """Every call of one Sequence: ``widths`` and ``rows`` of its forwards, and the lengths of its rewinds.

    ``parents``: those of its trees, whose forwards are counted like any other.
    """

    widths: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    fed: list[tuple[int, ...]] = field(default_factory=list)
    parents: list[tuple[int, ...]] = field(default_factory=list)
    rewinds: list[int] = field(default_factory=list)


def noise_words(*parts: object, count: int) -> np.ndarray:
    """``count`` numbers in [0, 1), a pure function of ``parts``: float64."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little"))).random(count)


class FakeModel:
    """A Model whose ``scores(prefix)`` cover ``vocabulary_size`` ids.

    ``spread`` is the distance between the lowest and the highest possible score: small spreads act like a high
    temperature. With ``order`` only that many last tokens matter, so that the text soon repeats itself.
    ``width_noise`` shifts every score by plus or minus that much, depending on the number of scored rows. ``table``
    replaces the hash: scores by prefix, for tests with known scores.
    """

    def __init__(
        self,
        vocabulary_size: int = 12,
        *,
        seed: int = 0,
        spread: float = 6.0,
        order: int | None = None,
        width_noise: float = 0.0,
        can_fork: bool = False,
        can_branch: bool = False,
        bit_equal_by_construction: bool = False,
        mask_id: int | None = None,
        faults: Faults | None = None,
        table: Callable[[tuple[int, ...]], abc.Sequence[float]] | None = None,
    ) -> None:
        self.vocabulary_size = vocabulary_size
        self.faults = faults or Faults()
        self.sequences: list[FakeSequence] = []
        self.closed = False
        self.width_noise = width_noise
        self._seed = seed
        self._spread = spread
        self._order = order
        self._can_fork = can_fork
        self._can_branch = can_branch
        self._bit_equal = bit_equal_by_construction
        self._mask_id = mask_id
        self._table = table
        self._memo: dict[tuple[int, ...], LogitsArray] = {}

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(
            name="fake",
            sha256=None,
            architecture="fake",
            runtime="fake",
            build="1",
            device="cpu",
            threads=1,
            vocabulary_size=self.vocabulary_size,
            trained_context_length=4096,
            weight_bytes=1,
            bytes_per_forward=1,
            kv_bytes_per_token=1,
            kv_type="f32",
            can_rewind=self.faults.refuse_rewind_at is None,
            can_fork=self._can_fork,
            can_branch=self._can_branch,
            bit_equal_by_construction=self._bit_equal,
            mask_id=self._mask_id,
        )

    def scores(self, prefix: abc.Sequence[int]) -> LogitsArray:
        """The scores of the token that follows ``prefix``: float32 of shape (vocabulary_size,)."""
        seen = tuple(prefix if self._order is None else prefix[-self._order :])
        if seen not in self._memo:
            if self._table is not None:
                row = np.asarray(self._table(seen), dtype=np.float32)
            else:
                row = (noise_words(self._seed, seen, count=self.vocabulary_size) * self._spread).astype(np.float32)
            assert row.shape == (self.vocabulary_size,)
            self._memo[seen] = row
        return self._memo[seen]

    def scores_at_width(self, prefix: abc.Sequence[int], rows: int) -> LogitsArray:
        """``scores`` as computed by a forward with ``rows`` scored rows."""
        exact = self.scores(prefix)
        if not self.width_noise:
            return exact
        signs = np.where(noise_words("width", rows, tuple(prefix), count=len(exact)) < 0.5, -1, 1)
        return (exact + self.width_noise * signs).astype(np.float32)

    def open(self, context_length: int) -> FakeSequence:
        if self.closed:
            raise ClosedError("the fake model is closed")
        sequence = FakeSequence(self, context_length)
        self.sequences.append(sequence)
        return sequence

    @property
    def can_fork(self) -> bool:
        return self._can_fork

    @property
    def can_branch(self) -> bool:
        return self._can_branch

    def close(self) -> None:
        for sequence in self.sequences:
            sequence.close()
        self.closed = True


class FakeSequence:
    """``tokens`` is the cache; ``log`` records the calls."""

    def __init__(self, model: FakeModel, context_length: int) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.log = CallLog()
        self.cancelled = False
        self.closed = False
        self.jobs = 0
        self.tree: list[tuple[int, int]] = []  # (token, parent)
        self._context_length = context_length
        self._generation = 0
        self._buffer = np.zeros((0, model.vocabulary_size), dtype=np.float32)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def context_length(self) -> int:
        return self._context_length

    def forward(self, tokens: abc.Sequence[int], rows: int) -> Rows:
        self.tree.clear()
        if self.closed:
            raise ClosedError("the fake sequence is closed")
        if not 0 <= rows <= len(tokens):
            raise InvalidRequestError(f"cannot score {rows} rows of {len(tokens)} tokens")
        self._begin(tokens, rows)
        self.tokens.extend(tokens)
        first = self.length - rows + 1
        return self._scored([self.tokens[: first + index] for index in range(rows)])

    def _begin(self, tokens: abc.Sequence[int], rows: int) -> None:
        """Count the call and raise the fault due at it."""
        if any(not 0 <= token < self.model.vocabulary_size for token in tokens):
            raise InvalidRequestError("a token is outside the vocabulary")
        if not 0 <= rows <= min(len(tokens), MAX_SCORED_ROWS) or rows + len(self.tree) > MAX_SCORED_ROWS:
            raise InvalidRequestError(f"{rows} rows of {len(tokens)} tokens are too many")
        self.log.widths.append(len(tokens))
        self.log.rows.append(rows)
        self.log.fed.append(tuple(tokens))
        self._generation += 1
        faults, call = self.model.faults, len(self.log.widths)
        if call == faults.cancel_at:
            self.cancel()
        if self.cancelled:
            raise CancelledError("the fake forward was cancelled")
        if call == faults.raise_at:
            raise faults.error()
        if self.length + len(self.tree) + len(tokens) > self._context_length:
            raise ContextFullError("the fake cache is full")

    def _scored(self, prefixes: abc.Sequence[abc.Sequence[int]]) -> Rows:
        """The rows after these prefixes, in the buffer that all forwards share."""
        rows = len(prefixes)
        if len(self._buffer) < rows:
            self._buffer = np.zeros((rows, self.model.vocabulary_size), dtype=np.float32)
        self._buffer[:] = -1.0  # so that a test reading stale rows fails
        for index, prefix in enumerate(prefixes):
            self._buffer[index] = self.model.scores_at_width(prefix, rows)
        if len(self.log.widths) == self.model.faults.nan_at:
            self._buffer[:, -1] = np.nan
        generation, buffer = self._generation, self._buffer
        return Rows(rows, lambda index: buffer[index], lambda: self._generation == generation)

    def forward_tree(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> Rows:
        try:
            return self._forward_tree(tokens, parents)
        except BaseException:
            self.tree.clear()
            raise

    def _forward_tree(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> Rows:
        if self.closed:
            raise ClosedError("the fake sequence is closed")
        if not self.model.can_branch:
            raise RuntimeUnavailableError("the fake runtime was told not to branch")
        known = len(self.tree)
        if len(parents) != len(tokens) or any(not -1 <= own < known + index for index, own in enumerate(parents)):
            raise InvalidRequestError("a token of a tree follows an earlier one")
        self._begin(tokens, len(tokens))
        self.log.parents.append(tuple(parents))
        self.tree += zip(tokens, parents, strict=True)
        return self._scored([[*self.tokens, *self._path(known + index)] for index in range(len(tokens))])

    def _path(self, index: int) -> list[int]:
        token, parent = self.tree[index]
        return [*([] if parent < 0 else self._path(parent)), token]

    def keep(self, path: abc.Sequence[int]) -> None:
        if self.closed:
            raise ClosedError("the fake sequence is closed")
        above = -1
        for index in path:
            if not 0 <= index < len(self.tree) or self.tree[index][1] != above:
                raise InvalidRequestError("what is kept of a tree is a path from its root")
            above = index
        self._generation += 1
        self.tokens += [self.tree[index][0] for index in path]
        self.tree.clear()

    def rewind(self, length: int) -> None:
        self.log.rewinds.append(length)
        if len(self.log.rewinds) == self.model.faults.refuse_rewind_at:
            raise RewindError("the fake cache cannot drop its tail")
        if not 0 <= length <= self.length:
            raise RewindError(f"cannot rewind to {length}: the cache holds {self.length} tokens")
        self._generation += 1
        self.tree.clear()
        del self.tokens[length:]

    def fork(self) -> FakeSequence:
        if not self.model.can_fork:
            raise RuntimeUnavailableError("the fake runtime was told not to fork")
        if self.closed:
            raise ClosedError("the fake sequence is closed")
        self.tree.clear()
        other = self.model.open(self._context_length)
        other.tokens = list(self.tokens)
        return other

    def run(self, job: Callable[[], T]) -> T:
        if self.closed:
            raise ClosedError("the fake sequence is closed")
        self.jobs += 1
        return job()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(self.run(job))
        except EdgespecError as error:
            future.set_exception(error)
        return future

    def cancel(self) -> None:
        self.cancelled = True

    def reset_cancel(self) -> None:
        self.cancelled = False

    def close(self) -> None:
        self._generation += 1
        self.closed = True
