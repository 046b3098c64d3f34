"""A model of another vocabulary in the target's tokens, so that it can draft for it.

Every token of the target is fed as the drafter's tokens for it, and rows score the target's tokens that the drafter
has as one token: ascending ids, as a trimmed head's. So drafters, caches, guesses and policies see the target's ids
only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import abc
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

import numpy as np

from edgespec.errors import InvalidRequestError, NoneAllowedError
from edgespec.files.token_map import TokenMap
from edgespec.interfaces.drawing import MOST_DRAWN, Drawn, DrawRequest
from edgespec.interfaces.model import (
    ALONE,
    BatchedSequence,
    Company,
    FrequentHeadSequence,
    LoadsInBackground,
    Model,
    ModelFacts,
    Sequence,
)
from edgespec.interfaces.rows import IdArray, LogitsArray, Rows
from edgespec.runtimes.native.draws import DrawnRows
from edgespec.runtimes.sequence import MAX_SCORED_ROWS, TrimmedRows

T = TypeVar("T")


class TranslatedModel:
    """``model`` with the target's vocabulary. Implements Model and LoadsInBackground; the caller closes ``model``."""

    def __init__(self, model: Model, tokens: TokenMap) -> None:
        self._model = model
        self._tokens = tokens

    @cached_property
    def facts(self) -> ModelFacts:
        return replace(
            self._model.facts, vocabulary_size=self._tokens.vocabulary_size, can_fork=False, can_branch=False
        )

    @property
    def waits_because(self) -> str | None:
        return self._model.waits_because if isinstance(self._model, LoadsInBackground) else None

    def load(self) -> None:
        if isinstance(self._model, LoadsInBackground):
            self._model.load()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._model.wait(timeout_s) if isinstance(self._model, LoadsInBackground) else True

    def open(self, context_length: int) -> TranslatedSequence:
        """A Sequence for at most ``context_length`` of the drafter's tokens, so often for fewer of the target's."""
        return TranslatedSequence(self._model.open(context_length), self._tokens)

    def close(self) -> None:
        self._model.close()


class TranslatedSequence:
    """Implements FrequentHeadSequence around one of another vocabulary. ``length`` counts the target's tokens.

    ``context_length`` is the drafter's: a text that takes more of its tokens raises ContextFullError earlier.
    """

    def __init__(self, sequence: Sequence, tokens: TokenMap) -> None:
        self._sequence = sequence
        self._batched = sequence if isinstance(sequence, BatchedSequence) else None
        self._tokens = tokens
        self._ends: list[int] = []  # how many of the drafter's tokens end with each token
        self._columns = _Columns(tokens)

    @property
    def length(self) -> int:
        return len(self._ends)

    @property
    def context_length(self) -> int:
        return self._sequence.context_length

    @property
    def company(self) -> Company:
        return ALONE if self._batched is None else self._batched.company

    @property
    def waited_s(self) -> float:
        return 0.0 if self._batched is None else self._batched.waited_s

    def forward(self, tokens: abc.Sequence[int], rows: int) -> Rows:
        if not 0 <= rows <= len(tokens):
            raise InvalidRequestError(f"cannot score {rows} rows of {len(tokens)} tokens")
        self._check_ids(tokens)
        start = self.length
        try:
            return TranslatedRows(self._scored(tokens, rows), self._columns)
        except BaseException:
            self._drop_lost()
            if self.length > start:
                self.rewind(start)
            raise

    def _check_ids(self, tokens: abc.Collection[int]) -> None:
        size = self._tokens.vocabulary_size
        if any(not 0 <= token < size for token in tokens):
            raise InvalidRequestError(f"token ids must be in 0..{size - 1}")

    @property
    def frequent_ids(self) -> abc.Set[int] | None:
        ids = self._sequence.frequent_ids if isinstance(self._sequence, FrequentHeadSequence) else None
        return None if ids is None else _Spelled(self._tokens, ids)

    def score_all(self) -> None:
        if isinstance(self._sequence, FrequentHeadSequence):
            self._sequence.score_all()

    def score_frequent(self, also: abc.Collection[int] = ()) -> None:
        self._check_ids(also)
        if isinstance(self._sequence, FrequentHeadSequence):
            self._sequence.score_frequent({piece for token in also for piece in self._tokens.spelled(token)})

    def _scored(self, tokens: abc.Sequence[int], rows: int) -> list[tuple[Rows, int]]:
        """Feed ``tokens``; where each of the last ``rows`` is scored: the rows of a forward, and the index."""
        pieces = [self._tokens.spelled(token) for token in tokens]
        ends = list(accumulate(map(len, pieces)))
        # A token is scored behind the last of its pieces; the pieces between two scored tokens are scored too.
        first = ends[len(ends) - rows] - 1 if rows else 0
        count = ends[-1] - first if rows else 0
        if count > MAX_SCORED_ROWS:
            later = rows // 2
            before = self._scored(tokens[: len(tokens) - later], rows - later)
            kept = {id(own): own.copy() for own, _ in before}  # the next forward overwrites them
            return [*((kept[id(own)], index) for own, index in before), *self._scored(tokens[-later:], later)]
        found = self._sequence.forward([piece for one in pieces for piece in one], count)
        reached = self._ends[-1] if self._ends else 0
        self._ends += [reached + end for end in ends]
        return [(found, end - 1 - first) for end in ends[len(ends) - rows :]]

    def rewind(self, length: int) -> None:
        if 0 < length <= len(self._ends):
            self._sequence.rewind(self._ends[length - 1])
        else:  # 0, or a length that the Sequence refuses
            self._sequence.rewind(length and self._sequence.length + 1)
        del self._ends[length:]
        self._drop_lost()

    def _drop_lost(self) -> None:
        """Drop the tokens that the Sequence has dropped."""
        if (kept := bisect_right(self._ends, self._sequence.length)) < len(self._ends):
            self.rewind(kept)

    def fork(self) -> Sequence:
        other = TranslatedSequence(self._sequence.fork(), self._tokens)
        other._ends = list(self._ends)
        return other

    def run(self, job: Callable[[], T]) -> T:
        return self._sequence.run(job)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        return self._sequence.submit(job)

    def cancel(self) -> None:
        self._sequence.cancel()

    def reset_cancel(self) -> None:
        self._sequence.reset_cancel()

    def close(self) -> None:
        self._sequence.close()


class _Spelled(abc.Set[int]):
    """The target's tokens that are spelled with the drafter's tokens ``ids`` alone."""

    def __init__(self, tokens: TokenMap, ids: abc.Set[int]) -> None:
        self._tokens, self._ids = tokens, ids

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and all(piece in self._ids for piece in self._tokens.spelled(token))

    def __iter__(self) -> abc.Iterator[int]:
        return (token for token in range(self._tokens.vocabulary_size) if token in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Columns:
    """Where the scores of a map's tokens are in the rows of a forward."""

    def __init__(self, tokens: TokenMap) -> None:
        self.map = tokens
        self._ids: IdArray | None = None  # the ids for which the columns were found, for a short head
        self._found: tuple[IdArray, IdArray] | None = None

    def gathered(self, ids: IdArray | None, scores: LogitsArray) -> LogitsArray:
        """The scores of the map's tokens, float32 of the same length; ``ids`` as ``Rows.scored`` gives them."""
        rows = self.map.rows
        if ids is None:
            found: LogitsArray = scores.take(rows, mode="clip")  # three quarters of the time of indexing
            return found
        if self._found is None or self._ids is not ids:
            columns = np.minimum(np.searchsorted(ids, rows), len(ids) - 1)
            self._ids, self._found = ids, (columns, np.flatnonzero(ids[columns] != rows))
        columns, lacking = self._found
        gathered: LogitsArray = scores[columns]
        gathered[lacking] = -np.inf
        return gathered


class TranslatedRows(TrimmedRows):
    """Rows of a drafter's forward, of the target's tokens that the drafter has as one token.

    A greedy draw is the drafter's own: in place of a token that the target lacks it has the target's first token of
    the text (after string-level matching: Timor et al., 2025). Its odds count all of the drafter's tokens.
    """

    def __init__(self, rows: abc.Sequence[tuple[Rows, int]], columns: _Columns) -> None:
        def gathered(index: int) -> LogitsArray:
            own, row = rows[index]
            return columns.gathered(*own.scored(row))

        super().__init__(DrawnRows(len(rows), gathered), columns.map.tokens, columns.map.vocabulary_size)
        self._rows_of = rows
        self._map = columns.map

    def argmax_row(self, index: int) -> int:
        return self.draw(index, DrawRequest()).tokens[0]

    def draw(self, index: int, request: DrawRequest, ids: IdArray | None = None) -> Drawn:
        if request.key is not None or request.seen or request.bias or request.mask is not None:
            return super().draw(index, request, ids)
        own, row = self._rows_of[index]
        wanted = MOST_DRAWN if request.wanted > 1 else 1
        drawn = own.draw(row, replace(request, wanted=wanted))
        odds: dict[int, float] = {}
        for piece, chance in zip(drawn.tokens, drawn.odds, strict=True):
            token = int(self._map.firsts[piece])
            if token >= 0:
                odds[token] = odds.get(token, 0.0) + chance
            elif piece == drawn.tokens[0]:
                raise NoneAllowedError("the drafter's next token has no counterpart among the target's")
        return Drawn(tuple(odds)[: request.wanted], tuple(odds.values())[: request.wanted], drawn.entropy)
