"""Several drafters in one proposal: free copies, and a drafting model where its round brings more.

A target that verifies trees gets one tree of all guesses: the model's chain, its alternatives, and copies beside and
behind them (as Goose, CaPE and RASD combine sources; the likeliest nodes are the best tree: OPT-Tree, Wang et al.,
2024). Without drafters the combination proposes nothing, which is plain decoding.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from edgespec.errors import CancelledError, EdgespecError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import (
    NOTHING,
    ChainGate,
    Drafter,
    DraftRequest,
    DraftState,
    DraftTree,
    Outcome,
    Proposal,
    TokenChooser,
    TreeGate,
    admitted,
    values_trees,
)
from edgespec.interfaces.policy import Allowance, AnswerPolicy
from edgespec.interfaces.reasons import Reason

# Proposals watched at a time. Each round adds one, which is decided within as many rounds as it has tokens.
_WATCHED = 16

# Confidence of a drafter that reports none, so that its share of right guesses is counted too.
_UNSURE = 0.5

# Where the policy does not value guesses: a copy is proposed if it is rather right than wrong.
_RATHER_RIGHT = 0.5

# Tokens before a watched proposal that must be unchanged for the proposal to be judged.
_TAIL = 4


class Combination:
    """Asks ``drafters`` one after the other, each as far as ``depth`` lets it draft now."""

    kind = "combination"

    def __init__(self, drafters: Sequence[Drafter], depth: AnswerPolicy) -> None:
        self._drafters = tuple(drafters)
        self._depth = depth

    def start(self, request: DraftRequest) -> CombinationState:
        return CombinationState([(d.kind, d.start(request)) for d in self._drafters], self._depth, request.chooser)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()


@dataclass(frozen=True, slots=True)
class _Watched:
    """A free proposal, used or not, that continues the ``length`` tokens ending in ``tail``."""

    kind: str
    length: int
    tail: tuple[int, ...]
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class _Free:
    """The free drafters' guesses for one round: ``gain`` tokens over a plain step if they are verified alone.

    ``first``: they are verified alone whatever they gain.
    """

    proposal: Proposal
    gain: float = 0.0
    first: bool = False


class CombinationState(DraftState):
    """One session's states of the combined drafters.

    A free drafter is asked in every round, even if the policy lets it draft nothing: the text that follows shows
    which guesses would have been right. A drafter that raises is off for the rest of the session, and ``failures``
    says why: losing a drafter never ends an answer. The session replaces ``depth`` between answers. Guesses that the
    form of the answer forbids, as ``chooser`` says, are left out.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, DraftState]],
        depth: AnswerPolicy,
        chooser: TokenChooser | None = None,
    ) -> None:
        self._parts = tuple(parts)
        self._chooser = chooser
        self._growing = {kind: state for kind, state in parts if state.free and state.grows_trees}
        self._watched: deque[_Watched] = deque(maxlen=_WATCHED)
        self._allowed: dict[str, Allowance] = {}  # of the free drafters, in this round
        self.depth = depth
        self.failures: dict[str, str] = {}

    @property
    def parts(self) -> Sequence[DraftState]:
        return [state for _, state in self._parts]

    @property
    def silences(self) -> dict[str, str]:
        """Why drafters that are on have nothing to propose for the latest text, by kind."""
        parts = ((kind, state.silent_because) for kind, state in self._parts)
        return {kind: reason for kind, reason in parts if reason is not None}

    def _readers(self) -> list[DraftState]:
        """The drafters that may be useful in the next answer."""
        return [
            state
            for kind, state in self._parts
            if not state.free and kind not in self.failures and _may_pay(self.depth.why_off(kind))
        ]

    @property
    def may_read_ahead(self) -> bool:
        return bool(self._readers())

    def read_ahead(self, context: Context) -> list[Future[None]]:
        """Let the drafters read the rest of the text; a failure shows again when they draft, and is reported then."""
        readings: list[Future[None]] = []
        for state in self._readers():
            with contextlib.suppress(EdgespecError):
                readings += state.read_ahead(context)
        return readings

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        self._judge_watched(context)
        self._allowed.clear()
        if depth < 1:
            return NOTHING
        free = self._free_guesses(context, depth)
        for kind, state in self._parts:
            if kind in self.failures or state.free or not self.depth.prefers(kind, free.gain) or free.first:
                continue
            proposal = self._or_nothing(kind, partial(self._ask, kind, state, context, depth, gate))
            if proposal.tokens:
                return proposal
            if proposal.drafted_by is not None:  # it took time and has no guess
                return replace(
                    free.proposal,
                    drafted_by=kind,
                    sync_s=proposal.sync_s,
                    waited_s=proposal.waited_s,
                    hindsight=proposal.hindsight,
                    forwards=proposal.forwards,
                    companions=proposal.companions,
                    chain_length=0,
                )
        return free.proposal

    def _or_nothing(self, kind: str, ask: Callable[[], Proposal]) -> Proposal:
        """What a drafter proposes; nothing if it raises, which also turns it off."""
        try:
            return ask()
        except CancelledError:
            raise
        except EdgespecError as error:
            self.failures[kind] = error.message
            return NOTHING

    def _free_guesses(self, context: Context, depth: int) -> _Free:
        """The guesses of one free drafter, or the tree that all of them grow."""
        best = _Free(NOTHING)
        surest: tuple[float, str, TreeGate] | None = None  # of those whose guesses grow a tree
        for kind, state in self._parts:
            if not state.free or kind in self.failures:
                continue
            idea = _sound(self._or_nothing(kind, partial(state.propose, context, depth)))
            if idea.tokens and self._chooser is not None and self._chooser.is_bound:
                idea = idea.cut(self._chooser.allows(context.tokens, idea.tokens))
            if not idea.tokens:
                continue
            self._watched.append(_Watched(kind, len(context), tuple(context.tokens[-_TAIL:]), idea))
            allowance = self._allow_free(kind)
            most, gate = min(depth, allowance.depth), allowance.gate
            if most < 1:
                continue
            if context.wants_tree and kind in self._growing and values_trees(gate):
                odds = gate.believes(idea.confidences[0])
                if surest is None or odds > surest[0]:
                    surest = odds, kind, gate
                continue
            own = _chain(idea, gate, most)
            if (own.first, own.gain) > (best.first, best.gain):
                best = own
        if surest is None or best.first:
            return best
        _, kind, gate = surest
        allowance = self._allow_free(kind)
        tree = _empty_tree(context, allowance, min(depth, allowance.depth))
        self._grow(tree, context, 0, first=kind)
        choice = gate.choose(tree, tree.most_nodes)
        if choice.gain <= best.gain:
            return best
        return _Free(_proposal(tree, choice.nodes, Proposal(drafted_by=kind), 0), choice.gain)

    def _ask(self, kind: str, state: DraftState, context: Context, depth: int, outer: ChainGate | None) -> Proposal:
        """What a drafter that takes time proposes, together with the guesses of the free drafters."""
        lag = state.lag(context)
        if not state.ready:
            if self.depth.buys_load(kind, lag):
                state.load()
            return NOTHING
        allowance = self.depth.allow(kind, lag, state.unread(context))
        allowed = min(depth, allowance.depth)
        if allowed < 1:
            return NOTHING
        context.window, context.patience_s = allowance.window, allowance.patience_s
        context.hindsight = allowance.hindsight
        length = allowed if allowance.chain is None else min(allowed, allowance.chain)
        chain = state.propose(context, length, both(outer, allowance.gate))
        if chain.hindsight:
            self.depth.learn_hindsight(kind, chain.hindsight)
        gate = allowance.gate
        if not context.wants_tree or chain.draft_probs is not None or not values_trees(gate):
            return chain
        return self._grown(chain, context, gate, _empty_tree(context, allowance, allowed))

    def _grown(self, chain: Proposal, context: Context, gate: TreeGate, tree: DraftTree) -> Proposal:
        """The nodes worth verifying of the tree of a drafter's chain, its alternatives and the free guesses."""
        for position, (token, odds) in enumerate(zip(chain.tokens, gate.believed, strict=False)):
            tree.add(position - 1, token, odds, chain.source_of(position))
        length = len(tree)
        for position, others in enumerate(chain.alternatives[:length]):
            for token, odds in others:
                tree.add(position - 1, token, gate.believes_alternative(odds), chain.source_of(position))
        self._grow(tree, context, length)
        return _proposal(tree, gate.choose(tree, tree.most_nodes).nodes, chain, length)

    def _grow(self, tree: DraftTree, context: Context, chain: int, *, first: str = "") -> None:
        """Let every free drafter add its guesses, the drafter ``first`` before the others."""
        for kind in sorted(self._growing, key=lambda kind: kind != first):
            if kind in self.failures:
                continue
            own = self._allow_free(kind).gate
            try:
                self._growing[kind].grow(context, tree, chain, own.believes if values_trees(own) else float)
            except EdgespecError as error:  # the guesses of the others are still good
                self.failures[kind] = error.message
        if self._chooser is not None and self._chooser.is_bound:
            _forbid(tree, context, chain, self._chooser)

    def _allow_free(self, kind: str) -> Allowance:
        """What the policy allows a free drafter in this round; asked once."""
        if kind not in self._allowed:
            self._allowed[kind] = self.depth.allow_free(kind)
        return self._allowed[kind]

    def _judge_watched(self, context: Context) -> None:
        """Report watched proposals to the policy once the text shows which tokens were right."""
        for _ in range(len(self._watched)):
            watched = self._watched.popleft()
            start, tokens, committed = watched.length, context.tokens, context.committed_length
            if start > committed or tuple(tokens[max(0, start - len(watched.tail)) : start]) != watched.tail:
                continue  # another conversation, or an answer that was removed
            hits: list[bool] = []
            for position, token in enumerate(watched.proposal.tokens):
                if start + position >= committed or (hits and not hits[-1]):
                    break
                hits.append(tokens[start + position] == token)
            if len(hits) == len(watched.proposal.tokens) or (hits and not hits[-1]):
                self.depth.learn(watched.kind, watched.proposal.confidences[: len(hits)], hits)
            else:
                self._watched.append(watched)

    def observe(self, outcome: Outcome) -> None:
        proposal = outcome.proposal
        for kind, state in self._parts:
            if kind != proposal.drafted_by or kind in self.failures:
                continue
            if not state.free:  # ``_judge_watched`` judges free drafters
                own = outcome.evaluated if proposal.chain_length is None else proposal.chain_length
                hits = [index < outcome.accepted for index in range(min(own, outcome.evaluated))]
                self.depth.learn(kind, proposal.confidences[: len(hits)], hits)
                for odds, right in seen_alternatives(outcome):
                    self.depth.learn_alternatives(kind, odds, right)
            try:
                state.observe(outcome)
            except EdgespecError as error:
                self.failures[kind] = error.message


def _chain(idea: Proposal, gate: ChainGate | None, most: int) -> _Free:
    """A free drafter's chain as far as its gate wants it."""
    sure = idea.confidences
    if not values_trees(gate):
        kept = int(sure[0] >= _RATHER_RIGHT) * len(sure) if gate is None else admitted(gate, sure[:most])
        return _Free(idea.cut(min(most, kept)), first=True) if kept else _Free(NOTHING)
    tree = DraftTree()
    for position, token in enumerate(idea.tokens[:most]):
        tree.add(position - 1, token, gate.believes(sure[position]), idea.source_of(position))
    choice = gate.choose(tree, most)
    if not choice.nodes:
        return _Free(NOTHING)
    # A chain that is rather right goes first: without a tree it cannot join the drafter's guesses.
    return _Free(idea.cut(len(choice.nodes)), choice.gain, first=tree.odds[0] >= _RATHER_RIGHT)


def _empty_tree(context: Context, allowance: Allowance, depth: int) -> DraftTree:
    """A tree whose paths may have ``depth`` nodes."""
    nodes = depth if allowance.nodes is None else min(context.most_nodes, allowance.nodes)
    return DraftTree(most_nodes=nodes, most_depth=depth)


def _forbid(tree: DraftTree, context: Context, chain: int, chooser: TokenChooser) -> None:
    """Give odds of 0 to the nodes behind the chain that the form of the answer does not allow."""
    paths: list[list[int]] = []
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        paths.append([*(paths[parent] if parent >= 0 else ()), token])
        above = parent < 0 or tree.odds[parent] > 0
        if node >= chain and not (above and chooser.allows(context.tokens, paths[node]) == len(paths[node])):
            tree.odds[node] = 0.0


def _may_pay(why: Reason | None) -> bool:
    """Whether a drafter that was off for this reason may be useful in the next answer."""
    return why is None or why.code in ("answer_too_short", "not_paying_now")


def _proposal(tree: DraftTree, nodes: Sequence[int], chain: Proposal, length: int) -> Proposal:
    """The chosen ``nodes`` as a proposal; the first ``length`` nodes of the tree are those of the ``chain``."""
    indices = {node: index for index, node in enumerate(nodes)}
    parents = tuple(indices.get(tree.parents[node], -1) for node in nodes)
    kept = sum(node < length for node in nodes)
    return replace(
        chain.cut(kept),
        tokens=tuple(tree.tokens[node] for node in nodes),
        sources=tuple(tree.sources[node] for node in nodes),
        parents=None if parents == tuple(range(-1, len(nodes) - 1)) else parents,
        sync_s=chain.sync_s,
        hindsight=chain.hindsight,
        chain_length=kept,
    )


def _sound(idea: Proposal) -> Proposal:
    """A free drafter's proposal up to the first token that is not an int, with one probability for each token."""
    length = next((index for index, token in enumerate(idea.tokens) if type(token) is not int), len(idea.tokens))
    sure = idea.confidences
    if length == len(idea.tokens) == len(sure) and all(0.0 <= own <= 1.0 for own in sure):
        return idea
    known = [own if 0.0 <= own <= 1.0 else _UNSURE for own in sure[:length]]
    return replace(idea.cut(length), confidences=(*known, *(_UNSURE,) * (length - len(known))))


def both(first: ChainGate | None, second: ChainGate | None) -> ChainGate | None:
    """A gate that admits what both gates admit; the second gate only sees what the first admits."""
    if first is None or second is None:
        return first or second
    return _Both(first, second)


class _Both:
    def __init__(self, first: ChainGate, second: ChainGate) -> None:
        self._first, self._second = first, second

    @property
    def needs_entropy(self) -> bool:
        return self._first.needs_entropy or self._second.needs_entropy

    def admits(self, confidence: float, entropy: float | None) -> bool:
        return self._first.admits(confidence, entropy) and self._second.admits(confidence, entropy)

    def goes_on(self) -> bool:
        return self._first.goes_on() and self._second.goes_on()


def seen_alternatives(outcome: Outcome) -> list[tuple[list[float], list[bool]]]:
    """For each compared position of the chain, the odds of its alternatives and which was the target's token."""
    seen = []
    compared = outcome.committed[: outcome.evaluated]
    for token, known in zip(compared, outcome.proposal.alternatives, strict=False):
        if known:
            seen.append(([odds for _, odds in known], [other == token for other, _ in known]))
    return seen
