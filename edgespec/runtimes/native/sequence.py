"""The Sequence of a native cache: chains and trees of tokens, a short head, checkpoints, hidden rows, saved parts."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ClosedError, InvalidRequestError, StaleRowsError
from edgespec.interfaces.features import Features, Hidden
from edgespec.interfaces.model import Company, Model
from edgespec.interfaces.rows import IdArray, Rows
from edgespec.runtimes.native.batch import NativeBatch
from edgespec.runtimes.native.cache import NativeCache, NativeCancel, NativeRows
from edgespec.runtimes.native.rewinds import Checkpoints
from edgespec.runtimes.native.weights import HeadRows, ModelPart
from edgespec.runtimes.sequence import MAX_SCORED_ROWS, RuntimeSequence, TrimmedRows, checked_ids

T = TypeVar("T")


class NativeSequence(RuntimeSequence):
    """One native cache.

    Implements TreeSequence, BatchedSequence, MixtureSequence, MappedSequence, FrequentHeadSequence, SavableSequence
    and FeatureSequence.
    """

    def __init__(
        self,
        model: Model,
        part: ModelPart,
        batch: NativeBatch,
        context_length: int,
        keep_hidden: tuple[int, ...],
        open_another: Callable[[], NativeSequence],
    ) -> None:
        """``open_another`` opens an empty Sequence of the same kind."""
        facts = model.facts
        self._parents: list[int] = []  # of all nodes in the tree
        self._features: Features | None = None  # None: none are kept
        self._keeps_all = False  # else those of scored rows
        self._tree_features: list[Hidden] = []  # of the tree's nodes
        self._begun_at = 0  # tokens before the prompt that is being read, or before the last forward
        self._reads_on = -1  # where the same prompt continues, if the last forward read a part of it
        self._scored = 0  # rows of the last forward
        self._keep_hidden = keep_hidden
        self._open_another = open_another
        self._checkpoints: Checkpoints | None = None
        self._also: frozenset[int] = frozenset()  # tokens scored besides a short head, while that head is used
        cancel = NativeCancel()
        self._native = NativeCache(
            part,
            batch,
            context_length=context_length,
            cache_bytes=facts.cache_bytes(context_length),
            level=str(facts.settings["level"]),
            cancel=cancel,
            keep_hidden=keep_hidden,
        )
        if self._native.has_states:
            self._checkpoints = Checkpoints()
        try:
            super().__init__(model, cancel, context_length, thread="edgespec-native")
        except BaseException:  # e.g. no more threads can be started
            self._native.free()
            raise
        self._free_at_end(self._native.free)  # the cache holds the weights, and they must go last

    def run(self, job: Callable[[], T]) -> T:
        return super().run(self._native.acting(job))

    def forward(self, tokens: abc.Sequence[int], rows: int) -> Rows:
        self._parents.clear()
        if self._length != self._reads_on:
            self._begun_at = self._length
        self._native.called()
        found = self._worker.run(lambda: self._forward(tokens, rows))
        self._reads_on = -1 if rows else self._length
        return found

    def _decode(self, ids: IdArray, position: int, rows: int) -> None:
        self._native.forget(position)
        self._check_in(len(ids), position, ends=rows > 0)
        keep = 0 if self._features is None else len(ids) if self._keeps_all else rows
        kept = self._native.decode(ids, position, rows, keep=keep)
        if self._features is not None:
            self._features.put(position + len(ids) - keep, kept)
        if self._checkpoints is not None:
            self._checkpoints.fed(ids.tolist(), position)

    def keep_features(self, *, scored: bool = False) -> Features:
        if self._features is None:
            self._features = Features(self._native.width, self._length)
        self._keeps_all |= not scored
        return self._features

    def _check_in(self, count: int, position: int, *, ends: bool) -> None:
        """Keep the state where a prompt begins and ends, and sometimes in between: longer forwards drop it."""
        kept, read = self._checkpoints, position - self._begun_at
        if kept is None or not position or (count <= MAX_SCORED_ROWS and not (ends and read > MAX_SCORED_ROWS)):
            return
        if kept.wants(position, turn=ends or position == self._begun_at) and self._native.can_continue(position):
            kept.keep(position, self._native.state(position))

    def _rows(self, count: int) -> Rows:
        self._scored = count
        rows = NativeRows(self._native, count, self._currency())
        head = self._native.head
        ids = self._native.part.head_ids if head is None else head.ids
        return rows if ids is None else TrimmedRows(rows, ids, self._vocabulary_size)

    @property
    def company(self) -> Company:
        return self._native.company

    @property
    def waited_s(self) -> float:
        return self._native.waited_s

    @property
    def experts_read(self) -> int:
        return self._native.experts

    def check_file(self) -> None:
        self._native.part.weights.files.check()

    @property
    def frequent_ids(self) -> abc.Set[int] | None:
        head = self._native.part.head
        return None if head is None else head.known

    def score_all(self) -> None:
        self._check_usable()
        if self._native.head is not None:
            self._worker.run(lambda: self._use_head(None))

    def score_frequent(self, also: abc.Collection[int] = ()) -> None:
        self._check_usable()
        short, more = self._native.part.head, frozenset(also)
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
        self._native.called()
        return self._worker.run(lambda: self._forward_tree(tokens, parents))

    def _forward_tree(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> Rows:
        known, self._parents = self._parents, []  # invalid unless the forward succeeds
        del self._tree_features[len(known) :]
        self._check_usable()
        if self._checkpoints is not None:
            raise InvalidRequestError("this model's layers have a state, so that its tokens must be a chain")
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
            self._native.forget(self._length)
            kept = self._native.decode_tree(ids, self._length, every, keep=self._features is not None)
            self._tree_features += [] if kept is None else list(kept)
        self._parents = every
        return self._rows(len(tokens))

    def keep(self, path: abc.Sequence[int]) -> None:
        self._check_usable()
        above = -1
        for node in path:
            if not 0 <= node < len(self._parents) or self._parents[node] != above:
                raise InvalidRequestError("the kept nodes of a tree must be a path from its root")
            above = node
        self._worker.run(lambda: self._native.keep(path, self._length))
        if self._features is not None and len(path):
            self._features.put(self._length, np.stack([self._tree_features[node] for node in path]))
        self._generation += 1
        self._length += len(path)
        self._parents.clear()

    def hidden(self, layer: int) -> NDArray[np.float32]:
        """Hidden states behind a layer, for the scored rows of the last forward: float32 of shape (rows, embedding).

        They are the next layer's input; for -1, the head's. Raises InvalidRequestError for a layer that ``open`` does
        not keep, StaleRowsError if the forward's rows are stale.
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
        again: list[int] | None = None
        if self._checkpoints is not None:
            self._checkpoints.cut(length)
        if not self._native.can_continue(length):
            length, again = self._worker.run(lambda: self._go_back(length))
        super()._cut(length)
        if self._features is not None:
            self._features.cut(length)
        self._parents.clear()
        if again:
            self._native.called()
            self._worker.run(lambda: self._forward(again, 0))

    def _go_back(self, length: int) -> tuple[int, list[int] | None]:
        """Continue from the last position before ``length`` at which that is possible. Returns it, and the tokens up
        to ``length`` if they are to be read again here. On the thread."""
        kept = self._checkpoints
        nearest = 0 if kept is None else kept.nearest(length)
        again = None if kept is None or self._stop.raised else kept.again(nearest, length)
        if kept is not None and nearest:
            self._native.continue_from(nearest, kept.states[nearest])
        else:
            self._native.start_over()
        if kept is not None:
            kept.cut(nearest)
            if nearest < kept.known_from:
                kept.begin(nearest)
        return nearest, again

    def _overwrite(self) -> None:
        self._generation += 1
        self._scored = 0

    def fork(self) -> NativeSequence:
        """A second Sequence with a copy of the cache's content. Raises ClosedError, MemoryLimitError."""
        self._check_usable()
        self._parents.clear()
        other = self._open_another()
        try:
            # On both threads, so that neither cache is written or freed during the copy.
            self._worker.run(lambda: other._worker.run(lambda: other._copy_from(self)))
        except BaseException:
            other.close()
            raise
        return other

    def _copy_from(self, source: NativeSequence) -> None:
        self._native.copy_from(source._native, source._length)
        self._length = source._length
        if source._checkpoints is not None:
            self._checkpoints = source._checkpoints.copy()
        if source._features is not None:
            self._features, self._keeps_all = source._features.copy(), source._keeps_all
        if source._native.head is not self._native.head:
            self._use_head(source._native.head, source._also)

    @property
    def angles(self) -> str:
        return self._native.angles

    def part_sizes(self, length: int) -> tuple[int, int]:
        parts = self._native.parts(length)
        return (0, 0) if parts is None else (parts.count, parts.size)

    def holds(self, length: int) -> bool:
        return 0 < length <= self._length and self._native.holds_saved(length)

    def read_part(self, part: int, length: int) -> bytes:
        self._check_usable()
        if not self.holds(length) or not 0 <= part < self.part_sizes(length)[0]:
            raise InvalidRequestError(f"there is no part {part} of {length} tokens: the cache holds {self._length}")
        return self._worker.run(lambda: self._native.read_part(part, length))

    def restore(self, parts: abc.Iterable[bytes], length: int) -> None:
        self._check_usable()
        if self._length or self._parents:
            raise InvalidRequestError("a saved cache is read into an empty one")
        self._worker.run(lambda: self._restore(parts, length))

    def _restore(self, parts: abc.Iterable[bytes], length: int) -> None:
        count, size = self.part_sizes(length)
        done = 0
        try:
            for done, part in enumerate(parts, 1):
                self._check_cancelled()
                if done > count or len(part) != size:
                    break
                self._native.write_part(done - 1, length, part)
            else:
                if count and done == count:
                    self._overwrite()
                    self._length = length
                    if self._features is not None:  # a file holds none
                        self._features.put(length, np.empty((0, self._native.width), np.float32))
                    if self._checkpoints is not None:
                        self._checkpoints.begin(length)
                    return
        finally:
            if not self._length:
                self._native.start_over()
        raise InvalidRequestError(f"a cache of {length} tokens has {count} parts of {size} bytes")

    def _check_usable(self) -> None:
        # Not by the finalizer, which counts as done once it begins: the answer in flight must end as cancelled.
        if not self._native.is_open:
            raise ClosedError("this sequence is closed")
