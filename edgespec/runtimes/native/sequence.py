"""One native cache and the thread that computes with it."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ClosedError, InvalidRequestError, StaleRowsError
from edgespec.interfaces.model import Model
from edgespec.interfaces.rows import IdArray, Rows
from edgespec.runtimes.native.cache import NativeCache, NativeCancel, NativeRows
from edgespec.runtimes.native.parts import HeadRows, ModelPart
from edgespec.runtimes.sequence import MAX_SCORED_ROWS, RuntimeSequence, TrimmedRows, checked_ids


class NativeSequence(RuntimeSequence):
    """One native cache. Implements the contracts TreeSequence and FrequentHeadSequence."""

    def __init__(
        self,
        model: Model,
        part: ModelPart,
        context_length: int,
        keep_hidden: tuple[int, ...],
        open_another: Callable[[], NativeSequence],
    ) -> None:
        """``open_another`` opens an empty one of the same kind."""
        facts = model.facts
        self._parents: list[int] = []  # of the tree's nodes
        self._scored = 0  # rows of the last forward
        self._keep_hidden = keep_hidden
        self._open_another = open_another
        self._part = part
        self._also: frozenset[int] = frozenset()  # what is scored beside a short head, while that is in use
        self._native = NativeCache(
            part,
            context_length=context_length,
            cache_bytes=facts.kv_bytes_per_token * context_length,
            threads=facts.threads,
            level=str(facts.settings["level"]),
            keep_hidden=tuple(layer for layer in keep_hidden if layer >= 0),  # -1 is there anyway
        )
        try:
            super().__init__(model, NativeCancel(self._native), context_length, thread="edgespec-native")
        except BaseException:  # there are limits on threads
            self._native.free()
            raise
        self._free_at_end(self._native.free)  # the cache holds the weights, which must go after it

    def forward(self, tokens: abc.Sequence[int], rows: int) -> Rows:
        self._parents.clear()
        return self._worker.run(lambda: self._forward(tokens, rows))

    def _decode(self, ids: IdArray, position: int, rows: int) -> None:
        self._native.decode(ids, position, rows)

    def _rows(self, count: int) -> Rows:
        self._scored = count
        rows = NativeRows(self._native, count, self._currency())
        head = self._native.head
        ids = self._part.head_ids if head is None else head.ids
        return rows if ids is None else TrimmedRows(rows, ids, self._vocabulary_size)

    @property
    def frequent_ids(self) -> abc.Set[int] | None:
        return None if self._part.head is None else self._part.head.known

    def score_all(self) -> None:
        self._check_usable()
        if self._native.head is not None:
            self._worker.run(lambda: self._use_head(None))

    def score_frequent(self, also: abc.Collection[int] = ()) -> None:
        self._check_usable()
        short, more = self._part.head, frozenset(also)
        if short is None or (self._native.head is not None and more == self._also):
            return
        head = short.and_also(more)
        self._worker.run(lambda: self._use_head(head, more))

    def _use_head(self, head: HeadRows | None, also: frozenset[int] = frozenset()) -> None:
        self._native.use_head(head)
        self._also = also
        self._overwrite()

    def forward_tree(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> Rows:
        """See the contract. A tree has at most MAX_SCORED_ROWS tokens: more raise InvalidRequestError."""
        return self._worker.run(lambda: self._forward_tree(tokens, parents))

    def _forward_tree(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> Rows:
        known, self._parents = self._parents, []  # gone, unless all goes well
        self._check_usable()
        if len(parents) != len(tokens) or any(not -1 <= own < len(known) + i for i, own in enumerate(parents)):
            raise InvalidRequestError("a token of a tree follows an earlier one")
        if len(known) + len(tokens) > MAX_SCORED_ROWS:
            raise InvalidRequestError(
                f"a tree of {len(known) + len(tokens)} tokens is too large (at most {MAX_SCORED_ROWS})"
            )
        ids = checked_ids(
            tokens,
            len(tokens),
            length=self._length + len(known),
            context_length=self._context_length,
            vocabulary_size=self._vocabulary_size,
        )
        self._overwrite()
        self._check_cancelled()
        every = [*known, *parents]
        if len(tokens):
            self._native.decode_tree(ids, self._length, every)
        self._parents = every
        return self._rows(len(tokens))

    def keep(self, path: abc.Sequence[int]) -> None:
        self._check_usable()
        above = -1
        for node in path:
            if not 0 <= node < len(self._parents) or self._parents[node] != above:
                raise InvalidRequestError("what is kept of a tree is a path from its root")
            above = node
        self._worker.run(lambda: self._native.keep(path, self._length))
        self._generation += 1
        self._length += len(path)
        self._parents.clear()

    def hidden(self, layer: int) -> NDArray[np.float32]:
        """The hidden states of the last forward's scored rows behind a layer: float32 of shape (rows, embedding).

        They are what enters the next layer; of -1, what the head reads. Raises InvalidRequestError for a layer that
        ``open`` was not told to keep, StaleRowsError where the forward's rows are stale.
        """
        self._check_usable()
        if layer not in self._keep_hidden:
            raise InvalidRequestError(
                f"the hidden states behind layer {layer} are not kept", hint="name it in open(keep_hidden=...)"
            )
        if self._scored == 0:
            raise StaleRowsError("there is no forward whose rows have hidden states")
        return self._native.hidden(layer, self._scored)

    def rewind(self, length: int) -> None:
        super().rewind(length)
        if self._parents:
            self._cut(length)

    def _cut(self, length: int) -> None:
        super()._cut(length)
        self._parents.clear()

    def _overwrite(self) -> None:
        self._generation += 1
        self._scored = 0

    def fork(self) -> NativeSequence:
        """A second Sequence with a copy of the cache's content. Raises ClosedError, MemoryLimitError."""
        self._check_usable()
        self._parents.clear()
        other = self._open_another()
        try:
            # On both threads, so that neither cache is written or freed meanwhile.
            self._worker.run(lambda: other._worker.run(lambda: other._copy_from(self)))
        except BaseException:
            other.close()
            raise
        return other

    def _copy_from(self, source: NativeSequence) -> None:
        self._native.copy_from(source._native, source._length)
        self._length = source._length
        if source._native.head is not self._native.head:
            self._use_head(source._native.head, source._also)

    def _check_usable(self) -> None:
        # Not by the finalizer, which is over as soon as it begins: the answer in flight is to end as a cancelled one.
        if not self._native.is_open:
            raise ClosedError("this sequence is closed")
