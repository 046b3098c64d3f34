"""What a drafter takes and returns: proposals, their outcomes, and the gates of a depth policy.

Everything here works on token ids. docs/glossary.md defines the words (round, width, depth, committed, ...).
"""

from __future__ import annotations

from collections import abc
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from edgespec.interfaces.counted_text import MOST_NODES, Context
from edgespec.interfaces.model import Sequence
from edgespec.interfaces.rows import Distribution, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Tokens proposed for the next round: a chain, or a tree if ``parents`` is given.

    ``draft_probs[i]`` is the distribution token i was drawn from; None means that it was not drawn at random
    (a copy, an argmax), which verification treats as probability one. ``sources[i]`` names who proposed it;
    ``drafted_by`` names the drafter that spent the time, also for an empty proposal (None: no drafter ran).
    ``sync_s`` is the part of that time spent reading tokens the drafter had not seen. In ``waited_s`` of it the
    forwards waited for those of other answers, which ``sync_s`` leaves out. ``forwards`` is the number of times the
    drafter's weights were read, ``companions`` how many other answers shared each of them, on average.
    ``confidences[i]`` is the drafter's confidence in token i, from 0 to 1 (empty: unknown). The policy learns how
    often tokens of each confidence are accepted.

    ``alternatives[i]`` are the tokens most likely to be the target's instead of token i of a chain, best first, each
    with the drafter's odds from the same scores (empty: not asked for, or drawn under the rejection rule). They may
    become nodes of a tree.

    ``chain_length`` of the tokens, the first ones, are the chain of ``drafted_by`` (None: all); the others are
    alternatives and guesses of other drafters.

    ``hindsight`` says which of the text's last tokens the drafter would have guessed, as computed while it read them
    (empty: not asked for, or the drafter had read them before).
    """

    tokens: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    draft_probs: tuple[Distribution | None, ...] | None = None
    parents: tuple[int, ...] | None = None
    drafted_by: str | None = None
    sync_s: float = 0.0
    waited_s: float = 0.0
    forwards: int = 0
    companions: float = 0.0
    confidences: tuple[float, ...] = ()
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()
    hindsight: tuple[bool, ...] = ()
    chain_length: int | None = None

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
            waited_s=self.waited_s,
            forwards=self.forwards,
            companions=self.companions,
            confidences=self.confidences[:length],
            alternatives=self.alternatives[:length],
            chain_length=None if self.chain_length is None else min(length, self.chain_length),
        )

    def source_of(self, position: int) -> str:
        """Who proposed the token at ``position``; ``drafted_by``, or ``unknown``, if ``sources`` is shorter."""
        return self.sources[position] if position < len(self.sources) else self.drafted_by or "unknown"


NOTHING = Proposal()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a proposal: ``evaluated`` tokens were compared and ``accepted`` of them committed.

    ``committed`` is the text at the positions of the proposal's tokens, as far as it goes.
    """

    proposal: Proposal
    evaluated: int
    accepted: int
    committed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """One drafted token and, under the rejection rule, the distribution it was drawn from.

    ``confidence`` is the drafter's estimate of how likely the target chooses this token: the highest probability, or
    ``Drawn.odds`` if the target shares the noise; None if not asked for. ``alternatives`` are as in Proposal.
    """

    token: int
    distribution: Distribution | None = None
    confidence: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


class TokenChooser(Protocol):
    """How this session turns scores into a token; the target and its drafters share it."""

    @property
    def reuses_noise(self) -> bool:
        """Whether acceptance depends on noise that earlier answers may have been drawn with.

        If so, a guess that depends on earlier answers would change the distribution of the text.
        """

    @property
    def is_bound(self) -> bool:
        """Whether the answer has a form, which forbids some tokens."""

    def allows(self, context: abc.Sequence[int], tokens: abc.Sequence[int]) -> int:
        """How many of the ``tokens`` may follow ``context``, in their order."""

    def forced(self, context: abc.Sequence[int]) -> abc.Sequence[int]:
        """The tokens of the only text that may follow ``context``, as far as there is one. Likely, not certain."""

    def draft(
        self,
        rows: Rows,
        index: int,
        context: abc.Sequence[int],
        gate: ChainGate | None,
        *,
        alternatives: int = 0,
        committed: int = 0,
    ) -> Draft | None:
        """The token a drafter with these scores proposes to follow ``context``; None if ``gate`` ends the chain.

        The draft names at most ``alternatives`` other tokens. ``committed`` is the committed text's length, which
        chooses the noise of a draft that does not share the target's.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """What a drafter receives when a session starts. A chain ends after a token of ``stop_ids``.

    ``target`` is the session's Sequence, for drafters that read what it computes (features.py).
    """

    chooser: TokenChooser
    vocabulary_size: int
    context_length: int
    stop_ids: frozenset[int] = frozenset()
    target: Sequence | None = None


class DraftState:
    """One session's drafter. It reads what it lacks of each context it receives.

    A subclass overrides what it can do. The base class can do nothing: it proposes nothing and is always ready.
    """

    @property
    def parts(self) -> abc.Sequence[DraftState]:
        """The states that this one consists of: they are cancelled and closed with it."""
        return ()

    @property
    def free(self) -> bool:
        """Whether proposing takes negligible time; the caller may then ask only to see whether guesses are right."""
        return False

    @property
    def grows_trees(self) -> bool:
        """Whether ``grow`` adds guesses; asked of free states only."""
        return False

    @property
    def ready(self) -> bool:
        """Whether loading has ended. Until then proposals are empty; ``propose`` raises a failed load's error."""
        return True

    @property
    def silent_because(self) -> str | None:
        """Why the latest proposal was empty; None if the state may draft."""
        return None

    def load(self) -> None:
        """Begin to load the model on a separate thread, and return immediately. Idempotent."""

    def lag(self, context: Context) -> int:
        """Tokens of ``context`` that must be read before proposing, except the last one."""
        return 0

    def unread(self, context: Context) -> int:
        """Tokens skipped at the beginning of ``context``. Reading them means reading the whole context again."""
        return 0

    def read_ahead(self, context: Context) -> list[Future[None]]:
        """Begin to read the rest of ``context``, and return immediately; empty if there is nothing to read.

        The next call of any other method stops the reading, and waits for one short forward at most.
        """
        return []

    def stop_reading(self) -> None:
        """Make the reading stop soon. Any thread may call it."""
        for part in self.parts:
            part.stop_reading()

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        """Tokens to follow ``context``: a chain of at most ``depth``, or a tree of no longer paths.

        Fewer, or none, are always allowed.
        """
        return NOTHING

    def grow(self, context: Context, tree: DraftTree, chain: int, believes: abc.Callable[[float], float]) -> None:
        """Add guesses after the text and after each node of the tree's first ``chain`` nodes, which are a chain.

        ``believes`` turns the state's confidence into a probability.
        """

    def observe(self, outcome: Outcome) -> None:
        """Learn from a verified proposal. Changes nothing about the tokens the state has synced."""

    def cancel(self) -> None:
        """Make a ``propose`` in flight raise CancelledError; callable from any thread."""
        for part in self.parts:
            part.cancel()

    def reset_cancel(self) -> None:
        """Forget an earlier ``cancel``."""
        for part in self.parts:
            part.reset_cancel()

    def close(self) -> None:
        """Free the drafter's resources. Idempotent."""
        for part in self.parts:
            part.close()


# Names of drafters: copies of the text, tokens that a form forces, and a model. Statistics and stored measurements
# use them, so an engine's only drafting model has this name; a second one needs another.
COPIES, FORCED, MODEL = "lookup", "forced", "model"


class Drafter(Protocol):
    """A source of proposals, shared by sessions. Loads its model when a state first needs it."""

    @property
    def kind(self) -> str:
        """The drafter's name in proposals, costs and statistics: no other drafter of the engine has it."""

    def start(self, request: DraftRequest) -> DraftState: ...

    def close(self) -> None: ...


class ChainGate(Protocol):
    """Decides where a chain ends early. The drafter asks it for each token of a proposal, in order.

    Under the rejection rule the gate is always asked before the token is drawn, from the drafter's distribution:
    whether a token is proposed must not depend on the token, or the text would not follow the target's distribution.
    """

    @property
    def needs_entropy(self) -> bool:
        """Whether ``admits`` needs the entropy, which takes another pass over the scores."""

    def admits(self, confidence: float, entropy: float | None) -> bool:
        """Whether to propose the next token. ``confidence`` is as in Draft; ``entropy`` in nats."""

    def goes_on(self) -> bool:
        """Whether one more forward of the drafter is worth its time; asked before the forward."""


def admitted(gate: ChainGate, confidences: abc.Sequence[float]) -> int:
    """Number of leading tokens that ``gate`` admits; the gate is not asked past the first one it stops.

    ``confidences`` are those of the drafted tokens, from 0 to 1. The entropy is always None.
    """
    return next((index for index, own in enumerate(confidences) if not gate.admits(own, None)), len(confidences))


class TreeGate(ChainGate, Protocol):
    """A gate that also says how likely guesses are, and which nodes of a tree are worth verifying."""

    @property
    def believed(self) -> abc.Sequence[float]:
        """For each admitted token of the chain, the probability that it is the target's if all before it are."""

    def believes(self, confidence: float) -> float:
        """The probability that a guess of this confidence is the target's token."""

    def believes_alternative(self, odds: float) -> float:
        """The same for an alternative with the drafter's ``odds``."""

    def choose(self, tree: DraftTree, most: int) -> Choice:
        """At most ``most`` nodes that are worth verifying. The nodes above a chosen node are chosen too."""


def values_trees(gate: ChainGate | None) -> TypeGuard[TreeGate]:
    """Whether a gate is a TreeGate. Checking the whole protocol at run time takes ten times as long."""
    return hasattr(gate, "choose")


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen nodes of a tree, ascending, and the tokens they gain over a plain step, after what their rows cost."""

    nodes: tuple[int, ...]
    gain: float


class DraftTree:
    """Guesses about what follows a text. Node i follows node ``parents[i]`` < i, or the text's end if that is -1.

    ``odds[i]`` is the probability that token i is the target's if all tokens above it are. ``sources[i]`` names who
    guessed the token first. The children of a node are different tokens. A round uses at most ``most_nodes`` of the
    nodes, none of them below the level ``most_depth``.
    """

    __slots__ = ("_below", "_levels", "most_depth", "most_nodes", "odds", "parents", "sources", "tokens")

    def __init__(self, *, most_nodes: int = MOST_NODES, most_depth: int = MOST_NODES) -> None:
        self.most_nodes, self.most_depth = most_nodes, most_depth
        self._levels: list[int] = []  # 1: follows the text
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.odds: list[float] = []
        self.sources: list[str] = []
        self._below: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, odds: float, source: str) -> int:
        """The node of ``token`` below ``parent``. If the node is there already, the higher odds count.

        Odds outside of 0 to 1 count as the nearer one of the two, and NaN as 0. Raises ValueError for a parent that
        is not there.
        """
        if not -1 <= parent < len(self.tokens):
            raise ValueError(f"node {parent} is not in this tree of {len(self.tokens)}")
        odds = odds if 0.0 <= odds <= 1.0 else float(odds > 1.0)
        below = self._below.setdefault(parent, {})
        node = below.get(token)
        if node is None:
            node = below[token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self._levels.append(1 if parent < 0 else self._levels[parent] + 1)
            self.odds.append(odds)
            self.sources.append(source)
        else:
            self.odds[node] = max(self.odds[node], odds)
        return node

    def left_over(self, parent: int) -> float:
        """The probability that the target's token is none of the guesses below ``parent``."""
        return max(0.0, 1.0 - sum(self.odds[node] for node in self._below.get(parent, {}).values()))

    def reach(self) -> list[float]:
        """For each node, the probability that it and all nodes above it are the target's; 0 if it is too deep."""
        reached: list[float] = []
        for parent, odds, level in zip(self.parents, self.odds, self._levels, strict=True):
            above = 1.0 if parent < 0 else reached[parent]
            reached.append(odds * above if level <= self.most_depth else 0.0)
        return reached
