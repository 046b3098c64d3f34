"""Protocols and records shared by the loop, the drafters, the planner and the runtimes.

Everything here speaks token ids. Shapes: ``rows`` is the number of scored positions of a forward, ``vocabulary``
the width of the target's output head. Words (round, width, depth, committed, ...) are those of the glossary in
the README.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import NonFiniteLogitsError, StaleRowsError

FloatArray = NDArray[np.float64]
LogitsArray = NDArray[np.float32]
IdArray = NDArray[np.int64]

T = TypeVar("T")


# --------------------------------------------------------------------------------------------- rows


class Rows:
    """The scores of the last ``count`` positions of one forward.

    ``read_row(i)`` returns row i as float32 of shape (vocabulary,); it may be a view of native memory that the
    Sequence's next forward overwrites, so every access first asks ``is_current``. A runtime with native
    reductions overrides ``argmax`` and ``top_k``; everything else inherits these.
    """

    def __init__(
        self, count: int, read_row: Callable[[int], LogitsArray], is_current: Callable[[], bool] = lambda: True
    ) -> None:
        self.count = count
        self._read_row = read_row
        self._is_current = is_current

    def _check(self, index: int) -> None:
        if not self._is_current():
            raise StaleRowsError("these rows were overwritten by a later forward, rewind or close")
        if not 0 <= index < self.count:
            raise IndexError(f"row {index} of {self.count}")

    def _row(self, index: int) -> LogitsArray:
        self._check(index)
        return self._read_row(index)

    def argmax_row(self, index: int) -> int:
        """The id with the highest score of row ``index``; ties go to the lowest id.

        Raises NonFiniteLogitsError if the row holds a NaN or +infinity.
        """
        row = self._row(index)
        best = int(np.argmax(row))  # numpy counts NaN as the maximum, so one look at the winner finds both
        if not np.isfinite(row[best]):
            raise NonFiniteLogitsError(f"the target's logits hold {row[best]} at token id {best}")
        return best

    def argmax(self) -> IdArray:
        """``argmax_row`` of every row: int64 of shape (count,)."""
        return np.array([self.argmax_row(i) for i in range(self.count)], dtype=np.int64)

    def top_k(self, k: int) -> tuple[IdArray, LogitsArray]:
        """The k best (ids, scores) of every row, best first, ties by lowest id; both of shape (count, k)."""
        ids = np.empty((self.count, k), dtype=np.int64)
        scores = np.empty((self.count, k), dtype=np.float32)
        for i in range(self.count):
            row = self._row(i)
            # Everything at or above the k-th score, so that a tie at the border is decided by id, not by chance.
            border = np.partition(row, len(row) - k)[len(row) - k]
            candidates = np.flatnonzero(row >= border)
            order = candidates[np.argsort(-row[candidates], kind="stable")][:k]
            ids[i], scores[i] = order, row[order]
        return ids, scores

    def logits(self, index: int) -> LogitsArray:
        """Row ``index``: float32 of shape (vocabulary,), the caller's to keep.

        Raises StaleRowsError after the Sequence's next forward, rewind or close.
        """
        return np.array(self._row(index), dtype=np.float32)

    def copy(self) -> Rows:
        """The same rows, detached from the Sequence: valid for ever."""
        kept = [self.logits(i) for i in range(self.count)]
        return Rows(self.count, kept.__getitem__)


# ------------------------------------------------------------------------------- models and sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known about loaded weights. ``settings`` are the runtime's own, as they enter the numeric class."""

    name: str
    sha256: str | None
    architecture: str
    runtime: str
    build: str
    device: str
    threads: int
    vocabulary_size: int
    trained_context_length: int
    weight_bytes: int
    bytes_per_forward: int
    kv_bytes_per_token: int
    kv_type: str
    can_rewind: bool = True
    can_fork: bool = False
    settings: Mapping[str, str | int | bool] = field(default_factory=dict)


@runtime_checkable
class Sequence(Protocol):
    """One KV cache. Owned by one Session; only ``cancel`` may be called from any thread."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""

    @property
    def context_length(self) -> int:
        """Tokens the cache can hold."""

    def forward(self, tokens: abc.Sequence[int], rows: int) -> Rows:
        """Append ``tokens`` and score the last ``rows`` of them (0 <= rows <= len(tokens)).

        On any exception the cache is back at its former length. Raises ContextFullError, CancelledError,
        ForwardError, ClosedError.
        """

    def rewind(self, length: int) -> None:
        """Drop everything from ``length`` on. Raises RewindError if the cache cannot."""

    def fork(self) -> Sequence:
        """A second Sequence with the same content. Raises RuntimeUnavailableError where unsupported."""

    def run(self, job: Callable[[], T]) -> T:
        """Run ``job`` on this Sequence's worker thread and wait: forwards inside it cost no thread switch."""

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Hand ``job`` to the worker thread without waiting for it."""

    def cancel(self) -> None:
        """Make the forward in flight, and every later one until ``reset_cancel``, raise CancelledError."""

    def reset_cancel(self) -> None:
        """Forget an earlier ``cancel``."""

    def close(self) -> None:
        """Free the cache and the thread. Idempotent."""


@runtime_checkable
class Model(Protocol):
    """Weights on one device. Owned by the Engine; opens any number of Sequences."""

    @property
    def facts(self) -> ModelFacts: ...

    def open(self, context_length: int) -> Sequence:
        """A fresh, empty Sequence. Raises MemoryLimitError, ForwardError, ClosedError."""

    def close(self) -> None:
        """Free the weights, after closing every Sequence still open. Idempotent."""


# ------------------------------------------------------------------------------------------- drafting


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Probabilities over a support: ``ids`` int64 ascending, ``probs`` float64 > 0 summing to 1, same shape."""

    ids: IdArray
    probs: FloatArray

    def dense(self, vocabulary_size: int) -> FloatArray:
        """Float64 of shape (vocabulary_size,), zero off the support."""
        full = np.zeros(vocabulary_size, dtype=np.float64)
        full[self.ids] = self.probs
        return full

    def normalised(self) -> Distribution:
        """The same distribution, summing to one to the last bit that float64 allows."""
        return Distribution(self.ids, self.probs / self.probs.sum())

    @property
    def peak(self) -> float:
        """The highest probability."""
        return float(self.probs.max())

    @property
    def entropy(self) -> float:
        """In nats."""
        return float(-np.dot(self.probs, np.log(self.probs)))


class Context:
    """What a drafter sees: ``committed_length`` tokens that stand, then possibly assumed ones.

    A view: it does not copy, and the tokens behind it only ever grow between two calls or change after
    ``committed_length``; a drafter finds out how far it agrees by ``common_prefix``.
    """

    __slots__ = ("committed_length", "tokens")

    def __init__(self, tokens: list[int], committed_length: int | None = None) -> None:
        self.tokens = tokens
        self.committed_length = len(tokens) if committed_length is None else committed_length

    def __len__(self) -> int:
        return len(self.tokens)

    def common_prefix(self, known: list[int]) -> int:
        """Number of leading tokens that ``known`` shares with this context."""
        return common_prefix(known, self.tokens)


def common_prefix(left: list[int], right: list[int]) -> int:
    """Number of leading tokens two lists share; whole-list comparisons first, since they usually decide."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    low, high = 0, shorter  # left[:low] agrees, left[:high] does not
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Tokens put forward for the next round: a chain, or a tree when ``parents`` is given.

    ``draft_probs[i]`` is the distribution token i was drawn from; None means that it was not drawn at random
    (a copy, an argmax), which verification treats as probability one. ``sources[i]`` names who proposed it;
    ``drafted_by`` names who spent the time, also when nothing came of it (None: nobody did). ``sync_s`` is the
    part of that time spent catching up with tokens the drafter had not seen, ``forwards`` how often the drafter's
    weights were read. ``confidences[i]`` is how sure it was of token i before choosing it, from 0 to 1 (empty: it
    cannot tell); what that is worth as a probability of acceptance is found out by whoever uses it.
    """

    tokens: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    draft_probs: tuple[Distribution | None, ...] | None = None
    parents: tuple[int, ...] | None = None
    drafted_by: str | None = None
    sync_s: float = 0.0
    forwards: int = 0
    confidences: tuple[float, ...] = ()

    def cut(self, length: int) -> Proposal:
        """The first ``length`` tokens."""
        if length >= len(self.tokens):
            return self
        return Proposal(
            tokens=self.tokens[:length],
            sources=self.sources[:length],
            draft_probs=None if self.draft_probs is None else self.draft_probs[:length],
            parents=None if self.parents is None else self.parents[:length],
            drafted_by=self.drafted_by,
            sync_s=self.sync_s,
            forwards=self.forwards,
            confidences=self.confidences[:length],
        )


NOTHING = Proposal()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a proposal: ``evaluated`` tokens were compared, ``accepted`` of them stand."""

    proposal: Proposal
    evaluated: int
    accepted: int
    committed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """One drafted token and, under the rejection rule, the distribution it was drawn from.

    ``confidence`` is the highest probability there was, None if nobody asked for it.
    """

    token: int
    distribution: Distribution | None = None
    confidence: float | None = None


class ChainGate(Protocol):
    """Where a chain ends early: asked for each token of one proposal in turn, by whoever drafts it.

    Always before the token is chosen, from what the drafter's distribution looks like: whether a token is put forward
    must never depend on the token itself, or the text would no longer be the target's.
    """

    @property
    def needs_entropy(self) -> bool:
        """Whether ``admits`` wants to know the entropy, which takes another pass over the scores."""

    def admits(self, confidence: float, entropy: float | None) -> bool:
        """Whether the next token is put forward. ``confidence``: highest probability; ``entropy`` in nats."""

    def goes_on(self) -> bool:
        """Whether one more forward of the drafter is worth its time, before it is spent."""


class TokenChooser(Protocol):
    """How this session turns scores into a token; the target and its drafters share it."""

    def draft(self, rows: Rows, index: int, context: abc.Sequence[int], gate: ChainGate | None) -> Draft | None:
        """The token a drafter with these scores proposes to follow ``context``; None if ``gate`` ends the chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """What a drafter is told when a session starts. A chain ends after a token of ``stop_ids``."""

    chooser: TokenChooser
    vocabulary_size: int
    context_length: int
    stop_ids: frozenset[int] = frozenset()


class DraftState(Protocol):
    """One session's drafter. Syncs itself with the context it is given."""

    @property
    def free(self) -> bool:
        """Whether proposing costs nothing worth counting: then it may be asked just to see whether it is right."""

    def lag(self, context: Context) -> int:
        """Tokens of ``context`` this would have to read before it could propose, the last one not counted."""

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        """At most ``depth`` tokens to follow ``context``; fewer, or none, are always allowed."""

    def observe(self, outcome: Outcome) -> None:
        """Learn from a verified proposal. Changes nothing about the tokens the state has synced."""

    def cancel(self) -> None:
        """Make a ``propose`` in flight raise CancelledError; callable from any thread."""

    def reset_cancel(self) -> None:
        """Forget an earlier ``cancel``."""

    def close(self) -> None:
        """Idempotent."""


@runtime_checkable
class ExplainsSilence(Protocol):
    """A DraftState that may have a reason of its own to propose nothing for a while."""

    @property
    def silent_because(self) -> str | None:
        """Why it proposed nothing when last asked; None if it may."""


class Drafter(Protocol):
    """Something that proposes tokens; shared by sessions. Loads what it needs at its first proposal."""

    @property
    def kind(self) -> str:
        """A short name: ``model``, ``lookup``, ..."""

    def start(self, request: DraftRequest) -> DraftState: ...

    def close(self) -> None: ...


# ----------------------------------------------------------------------------------- rounds and policy


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One decode round, as measured. Times in seconds; ``source`` spent the drafting time (None: nobody did).

    ``draft_forwards``: how often the drafter's weights were read.
    """

    width: int
    context_length: int
    proposed: int
    evaluated: int
    accepted: int
    invalid: int
    emitted: int
    source: str | None
    draft_s: float
    sync_s: float
    verify_s: float
    round_s: float
    draft_forwards: int = 0


@dataclass(frozen=True, slots=True)
class Allowance:
    """How far a source may draft for the next round: ``depth`` tokens (0 turns it off), fewer if ``gate`` ends it."""

    depth: int
    gate: ChainGate | None = None


class DepthPolicy(Protocol):
    """How far each source may draft now, learned from the rounds so far. Sessions of one engine share it."""

    def allow(self, source: str, lag: int = 0) -> Allowance:
        """What ``source`` may do for the next round, if it is ``lag`` tokens behind the text."""

    def learn(self, source: str, confidences: abc.Sequence[float], hits: abc.Sequence[bool]) -> None:
        """What became of the tokens of one proposal, in order up to the first wrong one.

        ``confidences`` is empty, or as long as ``hits``. Also told of proposals that were only watched.
        """

    def record(self, record: RoundRecord) -> None:
        """Learn from the times of one round."""

    def why_off(self, source: str) -> str | None:
        """One sentence if ``source`` is off at present, else None."""

    @property
    def plain_tokens_per_s(self) -> float | None:
        """Plain decoding's speed as measured over recent plain rounds; None before there were enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericClass:
    """The setting within which rows are bit-equal: two runs in one class emit the same text.

    ``widths`` are the forward widths whose rows were probed to be bit-equal; empty means not probed.
    """

    runtime: str
    build: str
    device: str
    threads: int
    kv_type: str
    settings: Mapping[str, str | int | bool]
    widths: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "runtime": self.runtime,
            "build": self.build,
            "device": self.device,
            "threads": self.threads,
            "kv_type": self.kv_type,
            "settings": dict(self.settings),
            "widths": list(self.widths),
        }
