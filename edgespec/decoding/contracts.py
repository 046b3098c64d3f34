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

from edgespec.decoding.distributions import Distribution as Distribution
from edgespec.decoding.gates import ChainGate as ChainGate
from edgespec.decoding.gates import SiblingGate as SiblingGate
from edgespec.decoding.rows import FloatArray as FloatArray
from edgespec.decoding.rows import IdArray as IdArray
from edgespec.decoding.rows import LogitsArray as LogitsArray
from edgespec.decoding.rows import Rows as Rows

T = TypeVar("T")


# ------------------------------------------------------------------------------- models and sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known about loaded weights. ``settings`` are the runtime's own, as they enter the numeric class.

    ``can_branch``: its Sequences are TreeSequences, and a tree's rows are those of its paths as chains, bit for bit.
    """

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
    can_branch: bool = False
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
class TreeSequence(Sequence, Protocol):
    """A Sequence that scores several continuations at once, as a tree of tokens.

    The tree is no part of the cache: ``length`` does not count it, and ``forward``, ``rewind`` and ``fork`` drop it.
    """

    def forward_tree(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> Rows:
        """Add ``tokens`` to the tree and score every one of them.

        Token i follows the token of the tree with index ``parents[i]``, counted from the tree's first token on and
        smaller than its own, or what the cache ends with where that is -1. Its row is the one that ``forward`` gives
        at the end of its path. On any exception the tree is gone. Raises what ``forward`` raises.
        """

    def keep(self, path: abc.Sequence[int]) -> None:
        """Append the tokens with these indices, a path down from the cache's end, and drop the rest of the tree.

        Raises InvalidRequestError for what is no such path.
        """


@runtime_checkable
class ShortHeadSequence(Sequence, Protocol):
    """A Sequence that can leave most tokens unscored, to read fewer rows of its model's output head."""

    @property
    def short_ids(self) -> abc.Set[int] | None:
        """The tokens that are scored at first; None where all are, and none can be left out."""

    def score_all(self) -> None:
        """Score all tokens from the next forward on. The cache stays; earlier Rows are stale. Raises ClosedError."""

    def score_short(self, also: abc.Collection[int] = ()) -> None:
        """Score ``short_ids`` and the tokens ``also`` alone, others being at -infinity; else as ``score_all``.

        Raises InvalidRequestError for what is no token, MemoryLimitError.
        """


@runtime_checkable
class Model(Protocol):
    """Weights on one device. Owned by the Engine; opens any number of Sequences."""

    @property
    def facts(self) -> ModelFacts: ...

    def open(self, context_length: int) -> Sequence:
        """A fresh, empty Sequence. Raises MemoryLimitError, ForwardError, ClosedError."""

    def close(self) -> None:
        """Free the weights, after closing every Sequence still open. Idempotent."""


@runtime_checkable
class Restarting(Protocol):
    """A Model in a process of its own: loaded while others go on, and perhaps lost and started again."""

    @property
    def waits_because(self) -> str | None:
        """Why ``open`` would raise WorkerLostError now, though not later; None if there is nothing to wait for."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until there is nothing to wait for, for so many seconds at most; whether there is not.

        Raises what loading raised, if the model is given up.
        """


# ------------------------------------------------------------------------------------------- drafting


# (chains, length) that a proposal is best spread over, given the odds that the target's next token is the drafter's
# best id, its second best, and so on.
Spread = Callable[[abc.Sequence[float]], tuple[int, int]]


class Context:
    """What a drafter sees: ``committed_length`` tokens that stand, then possibly assumed ones.

    A view: it does not copy, and the tokens behind it only ever grow between two calls or change after
    ``committed_length``; a drafter finds out how far it agrees by ``common_prefix``. ``wants_runners_up``: whoever
    asks has a use for ``Proposal.runners_up``. With ``wants_siblings`` a chain with other tokens beside
    its own is welcome, with ``spread`` several chains.
    """

    __slots__ = ("committed_length", "spread", "tokens", "wants_runners_up", "wants_siblings")

    def __init__(
        self,
        tokens: list[int],
        committed_length: int | None = None,
        *,
        wants_runners_up: bool = False,
        wants_siblings: bool = False,
        spread: Spread | None = None,
    ) -> None:
        self.spread = spread
        self.tokens = tokens
        self.committed_length = len(tokens) if committed_length is None else committed_length
        self.wants_runners_up = wants_runners_up
        self.wants_siblings = wants_siblings

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

    ``runners_up[i]`` is what the drafter would have said in place of token i: the best id of the same scores that is
    not token i (None: there is none; empty: nobody asked). It is never put forward, so nobody asks whether it stands.
    It only names a text, prefix and runner-up, from which drafting may go on before the verdict: a branch. By the
    keyed rule the text is the target's own, whatever is put forward. By the rejection rule it keeps its law as well.
    A branch is put forward when the correction has made its text the history; that, and whether there is one at all,
    may depend on anything drawn so far, but its own tokens are a function of the text they follow and are verified as
    such, as not drawn at random. And what is drafted anew where no branch fits draws from noise that decided nothing
    before.

    ``alternatives[i]`` are the other tokens likeliest to be the target's in place of token i of a chain, each with
    the drafter's odds of that, best first (empty: nobody asked). Those worth verifying are put forward as siblings:
    behind the chain in ``tokens``, each with the parent that token i has.
    """

    tokens: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    draft_probs: tuple[Distribution | None, ...] | None = None
    parents: tuple[int, ...] | None = None
    drafted_by: str | None = None
    sync_s: float = 0.0
    forwards: int = 0
    confidences: tuple[float, ...] = ()
    runners_up: tuple[int | None, ...] = ()
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()

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
            runners_up=self.runners_up[:length],
            alternatives=self.alternatives[:length],
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

    ``confidence`` is the highest probability there was, None if nobody asked for it; ``runner_up`` what would have
    been the token if this one did not exist, None if nobody asked or there is no other. ``alternatives`` are as in
    Proposal.
    """

    token: int
    distribution: Distribution | None = None
    confidence: float | None = None
    runner_up: int | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


class TokenChooser(Protocol):
    """How this session turns scores into a token; the target and its drafters share it."""

    def draft(
        self,
        rows: Rows,
        index: int,
        context: abc.Sequence[int],
        gate: ChainGate | None,
        *,
        runner_up: bool = False,
        alternatives: int = 0,
    ) -> Draft | None:
        """The token a drafter with these scores proposes to follow ``context``; None if ``gate`` ends the chain.

        With ``runner_up`` the draft says what it would have been otherwise, and it names at most so many
        ``alternatives``: none under the rejection rule, where they have no part in the law.
        """

    def candidates(
        self, rows: Rows, index: int, context: abc.Sequence[int], count: int
    ) -> abc.Sequence[tuple[int, float]]:
        """At most ``count`` ids, the likeliest choices of a target with these scores first, and the odds of each."""


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


@runtime_checkable
class DraftsBranches(Protocol):
    """A DraftState that can draft beside its latest proposal: what follows where a token of that is another one."""

    @property
    def forks(self) -> bool:
        """Whether the latest proposal stays in its cache meanwhile, so that a branch costs its own forwards only."""

    def branch(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        """As ``propose``, but a function of the context alone: the rejection rule draws nothing at random here."""


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

    Of the ``proposed`` tokens ``beside`` lie beside the longest path of a tree, so that ``depth`` is its length.
    ``accepted`` are those of the path that stood; ``evaluated`` these, and one more if there were others to follow.
    ``draft_forwards``: how often the drafter's weights were read. ``verify_s`` is the target's forward and the
    comparison, so the target stood still for ``round_s - verify_s``. ``overlapped``: a drafter was at work beside the
    target's forward; ``draft_s`` is then what it took for the proposal that this round took in.
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
    overlapped: bool = False
    beside: int = 0

    @property
    def depth(self) -> int:
        """Tokens put forward one after another."""
        return self.proposed - self.beside

    @property
    def target_idle_s(self) -> float:
        """Seconds of the round in which the target computed nothing."""
        return max(0.0, self.round_s - self.verify_s)


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

    def learn_siblings(self, source: str, odds: abc.Sequence[float], hits: abc.Sequence[bool]) -> None:
        """Which of the alternatives at one place of a chain was the target's token; put forward or not."""

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
