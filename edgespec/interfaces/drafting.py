"""What a drafter takes and gives: the context, proposals, what became of them, and the gates of a depth policy.

Everything here speaks token ids. The words (round, width, depth, committed, ...) are those of docs/glossary.md.
"""

from __future__ import annotations

import math
from collections import abc
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from edgespec.interfaces.drawing import Seen
from edgespec.interfaces.rows import Distribution, Rows


class Context:
    """What a drafter sees: ``committed_length`` tokens that stand, then possibly assumed ones.

    A view: it does not copy, and the tokens behind it only ever grow between two calls or change after
    ``committed_length``; a drafter finds out how far it agrees by ``common_prefix``. ``wants_runners_up``: whoever
    asks has a use for ``Proposal.runners_up``. With ``wants_siblings`` a chain with other tokens beside
    its own is welcome. ``window`` and ``patience_s`` are those of an Allowance (interfaces/policy.py): how much a
    drafter needs to have read, and how long that may take.
    """

    __slots__ = (
        "committed_length",
        "hindsight",
        "patience_s",
        "tokens",
        "wants_runners_up",
        "wants_siblings",
        "window",
    )

    def __init__(
        self,
        tokens: list[int],
        committed_length: int | None = None,
        *,
        wants_runners_up: bool = False,
        wants_siblings: bool = False,
    ) -> None:
        self.tokens = tokens
        self.committed_length = len(tokens) if committed_length is None else committed_length
        self.wants_runners_up = wants_runners_up
        self.wants_siblings = wants_siblings
        self.window: int | None = None
        self.patience_s = math.inf
        self.hindsight = 0

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


class CountedText(abc.Sequence[int]):
    """A text that grows and shrinks at its end, and how often each of its tokens stands in it.

    Nothing is counted before somebody asks. From then on a token takes as long in a long text as in a short one.
    """

    def __init__(self, tokens: abc.Iterable[int] = ()) -> None:
        self.tokens = list(tokens)
        self._places: dict[int, int] | None = None  # where in the arrays each token stands; None: nobody has asked
        self._arrays = np.zeros((2, 0), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Any) -> Any:
        return self.tokens[index]

    def extend(self, tokens: abc.Iterable[int]) -> None:
        before = len(self.tokens)
        self.tokens.extend(tokens)
        if self._places is not None:
            for token in self.tokens[before:]:
                self._count(self._places, token)

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        if self._places is not None:
            for token in self.tokens[length:]:
                self._forget(self._places, token)
        del self.tokens[length:]

    def follow(self, tokens: list[int]) -> None:
        """Become ``tokens``: what the two do not share is cut and counted anew."""
        self.cut(common_prefix(self.tokens, tokens))
        self.extend(tokens[len(self.tokens) :])

    @property
    def seen(self) -> Seen:
        """A view: it holds until the text changes."""
        if self._places is None:
            self._places = {}
            for token in self.tokens:
                self._count(self._places, token)
        tokens, occurrences = self._arrays[:, : len(self._places)]
        return Seen(tokens, occurrences)

    def _count(self, places: dict[int, int], token: int) -> None:
        place = places.setdefault(token, len(places))
        if place == self._arrays.shape[1]:
            self._arrays = np.pad(self._arrays, ((0, 0), (0, place + 1)))  # twice as many
        self._arrays[0, place] = token
        self._arrays[1, place] += 1

    def _forget(self, places: dict[int, int], token: int) -> None:
        place = places[token]
        self._arrays[1, place] -= 1
        if not self._arrays[1, place]:  # the last one takes its place
            del places[token]
            last = len(places)
            self._arrays[:, place] = self._arrays[:, last]
            self._arrays[1, last] = 0
            if place < last:
                places[int(self._arrays[0, place])] = place


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Tokens put forward for the next round: a chain, or a tree when ``parents`` is given.

    ``draft_probs[i]`` is the distribution token i was drawn from; None means that it was not drawn at random
    (a copy, an argmax), which verification treats as probability one. ``sources[i]`` names who proposed it;
    ``drafted_by`` names who spent the time, also when nothing came of it (None: nobody did). ``sync_s`` is the
    part of that time spent catching up with tokens the drafter had not seen, ``forwards`` how often the drafter's
    weights were read. ``confidences[i]`` is how sure it was of token i, from 0 to 1 (empty: it cannot tell); what
    that is worth as a probability of acceptance is found out by whoever uses it.

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

    ``hindsight`` says which of the text's last tokens the drafter would have guessed, had it been asked: it found out
    while it read them (empty: nobody asked, or it had read them before).
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
    hindsight: tuple[bool, ...] = ()

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

    def source_of(self, place: int) -> str:
        """Who proposed the token at ``place``; ``drafted_by``, or ``unknown``, where ``sources`` does not reach."""
        return self.sources[place] if place < len(self.sources) else self.drafted_by or "unknown"


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

    ``confidence`` is how likely it is to be the target's token, as far as the drafter can tell: the highest
    probability, or where the target shares its noise the odds of that (``Drawn.odds``); None if nobody asked for it.
    ``runner_up`` is what would have been the token if this one did not exist, None if nobody asked or there is no
    other. ``alternatives`` are as in Proposal.
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
class LoadsAtLeisure(Protocol):
    """A DraftState whose model is loaded beside the answer, on a thread of its own. Others are always ready."""

    @property
    def ready(self) -> bool:
        """Whether there is nothing to wait for; until then nothing is proposed. ``propose`` raises what failed."""

    def load(self) -> None:
        """Begin to load it, and return at once. Idempotent."""


@runtime_checkable
class SkipsText(Protocol):
    """A DraftState that can begin in the middle of the text."""

    def unread(self, context: Context) -> int:
        """Tokens at the beginning of ``context`` that it skipped. To read them it reads everything again."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A DraftState that may read a text while nobody waits for it."""

    def read_ahead(self, context: Context) -> Future[None] | None:
        """Begin to read what it lacks of ``context``, and return at once; None if there is nothing to read.

        Whatever it is asked next ends that, and waits for no more than one short forward.
        """

    def stop_reading(self) -> None:
        """Make it end soon. Any thread may call it."""


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
    """Something that proposes tokens; shared by sessions. Loads what it needs when a state is asked to."""

    @property
    def kind(self) -> str:
        """A short name: ``model``, ``lookup``, ..."""

    def start(self, request: DraftRequest) -> DraftState: ...

    def close(self) -> None: ...


class ChainGate(Protocol):
    """Where a chain ends early: asked for each token of one proposal in turn, by whoever drafts it.

    Under the rejection rule always before the token is chosen, from what the drafter's distribution looks like:
    whether a token is put forward must not depend on the token there, or the text would no longer be the target's.
    """

    @property
    def needs_entropy(self) -> bool:
        """Whether ``admits`` wants to know the entropy, which takes another pass over the scores."""

    def admits(self, confidence: float, entropy: float | None) -> bool:
        """Whether the next token is put forward. ``confidence`` is as in Draft; ``entropy`` in nats."""

    def goes_on(self) -> bool:
        """Whether one more forward of the drafter is worth its time, before it is spent."""


def admitted(gate: ChainGate, confidences: abc.Sequence[float]) -> int:
    """How many leading tokens ``gate`` lets through; past the first one it stops it is not asked.

    ``confidences`` are those of the drafted tokens, from 0 to 1. There is no distribution, so never an entropy.
    """
    return next((index for index, own in enumerate(confidences) if not gate.admits(own, None)), len(confidences))


@runtime_checkable
class SiblingGate(ChainGate, Protocol):
    """A gate that also knows whether tokens put forward beside those of the chain it let through are worth it."""

    def siblings(self, odds: abc.Sequence[abc.Sequence[float]], most: int) -> abc.Sequence[tuple[int, int]]:
        """At most ``most`` pairs (i, j), ascending: the j-th alternative of the chain's token i is worth verifying.

        ``odds[i][j]`` is what the drafter thinks of it, best first; there is an entry for each token let through.
        """
