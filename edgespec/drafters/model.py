"""A smaller model as drafter: it writes a chain token by token with the session's own way of choosing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from edgespec.drafters.gates import MOST_ALTERNATIVES, with_siblings
from edgespec.drafters.head_coverage import HeadCoverage, short_head_watch
from edgespec.errors import ClosedError, EdgespecError, MemoryLimitError, WorkerLostError
from edgespec.interfaces.drafting import (
    NOTHING,
    ChainGate,
    Context,
    Draft,
    DraftRequest,
    Outcome,
    Proposal,
    SiblingGate,
)
from edgespec.interfaces.model import FrequentHeadSequence, LoadsInBackground, Model, Sequence
from edgespec.interfaces.rows import Distribution, Rows

KIND = "model"

# Tokens of lag that an ordinary round leaves: the last draft token and the token that followed it. Feeding more
# than this is catching up, which is timed apart so that it does not count as the price of a round.
_ORDINARY_LAG_TOKENS = 2


class ModelDrafter:
    """Drafts with the model that ``open_model`` names, which may have to be loaded. One Sequence for each session."""

    kind = KIND

    def __init__(self, open_model: Callable[[], Model]) -> None:
        self._open_model = open_model

    def start(self, request: DraftRequest) -> ModelDraftState:
        return ModelDraftState(self._open_model, request)

    def close(self) -> None:
        """The model belongs to whoever ``open_model`` got it from."""


class ModelDraftState:
    """One session's cache of the drafter.

    Before its model is loaded, and between the loss of the model's process and its restart, it proposes nothing, and
    ``silent_because`` says why. Once the model is given up, proposing raises what loading it raised.

    Branches are drafted on forks of the cache where the model can fork; when the text takes one, its cache is gone on
    with. Elsewhere the one cache goes back and forth. ``forks`` says which, once the model is open.
    """

    free = False

    def __init__(self, open_model: Callable[[], Model], request: DraftRequest) -> None:
        self._open_model = open_model
        self._request = request
        self._sequence: Sequence | None = None
        self._known: list[int] = []  # the tokens in the cache, one for one
        self._branches: list[tuple[Sequence, list[int]]] = []  # the caches of branches, and the tokens in them
        self._padded = False  # whether the model has more ids than the target
        self._watch: HeadCoverage | None = None  # where the model has a short head
        self._cancelled = False
        self._closed = False
        self.silent_because: str | None = None
        self.forks = False

    def lag(self, context: Context) -> int:
        shared = (context.common_prefix(known) for known in (self._known, *(known for _, known in self._branches)))
        return max(0, len(context) - 1 - max(shared))

    @property
    def ready(self) -> bool:
        return self._sequence is not None or _waits_because(self._open_model()) is None

    def load(self) -> None:
        model = self._open_model()
        if isinstance(model, LoadsInBackground):
            model.load()
        self.silent_because = _waits_because(model)

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        if self._closed:
            raise ClosedError("this drafter's state is closed")
        if depth < 1 or not len(context):
            return NOTHING
        sequence = self._take_up(context) or self._open()
        return NOTHING if sequence is None else self._run(sequence, context, depth, gate, drawing=True)

    def branch(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        """As ``propose``, with the likeliest token wherever that draws one; nothing before the first chain."""
        if self._closed:
            raise ClosedError("this drafter's state is closed")
        sequence, known = self._sequence, self._known
        if depth < 1 or sequence is None:
            return NOTHING
        if not self.forks:
            return self._run(sequence, context, depth, gate, drawing=False)
        try:
            fork = sequence.fork()
        except EdgespecError:
            self.forks = False  # there is no room for another cache, say: branches have to do without
            return NOTHING
        self._sequence, self._known = fork, list(known)
        if self._cancelled:
            fork.cancel()
        proposal = NOTHING
        try:
            proposal = self._run(fork, context, depth, gate, drawing=False)
            return proposal
        finally:
            if proposal.tokens:
                self._branches.append((fork, self._known))
            else:
                fork.close()
            self._sequence, self._known = sequence, known
            if self._cancelled:
                sequence.cancel()

    def _take_up(self, context: Context) -> Sequence | None:
        """The cache that agrees longest with the text; closes those of branches that the text has not taken."""
        if self._sequence is None or not self._branches:
            return self._sequence
        caches = [(self._sequence, self._known), *self._branches]
        shared = [context.common_prefix(known) for _, known in caches]
        best = max(range(len(caches)), key=shared.__getitem__)
        self._sequence, self._known = caches[best]
        self._branches = []
        for index, (sequence, known) in enumerate(caches):
            if index != best and shared[index] >= min(len(known), context.committed_length):
                self._branches.append((sequence, known))
            elif index != best:
                sequence.close()
        return self._sequence

    def _run(
        self, sequence: Sequence, context: Context, depth: int, gate: ChainGate | None, *, drawing: bool
    ) -> Proposal:
        try:
            # The whole chain is one job on the drafter's thread: one hand-over instead of one for each token.
            return sequence.run(lambda: self._chain(sequence, context, depth, gate, drawing))
        except WorkerLostError as error:
            self._sequence, self._known = None, []
            sequence.close()
            self.silent_because = error.message
            return NOTHING

    def _open(self) -> Sequence | None:
        """An empty cache; None while there is a reason to wait for the model. Raises what opening raises."""
        model = self._open_model()
        self.silent_because = _waits_because(model)
        if self.silent_because is not None:
            return None
        try:
            # A drafter with a shorter context is of use for as long as the text fits it.
            sequence = model.open(min(self._request.context_length, model.facts.trained_context_length))
        except WorkerLostError:
            self.silent_because = _waits_because(model)
            if self.silent_because is None:
                raise
            return None
        self._padded = model.facts.vocabulary_size > self._request.vocabulary_size
        self.forks = model.facts.can_fork
        if self._watch is None and isinstance(sequence, FrequentHeadSequence) and sequence.frequent_ids is not None:
            self._watch = short_head_watch(sequence.frequent_ids)
        self._sequence = sequence
        if self._cancelled:
            sequence.cancel()
        return sequence

    def _chain(
        self, sequence: Sequence, context: Context, depth: int, gate: ChainGate | None, drawing: bool
    ) -> Proposal:
        depth = min(depth, sequence.context_length - len(context) + 1)
        if depth < 1:
            return NOTHING
        try:
            rows, sync_s = self._sync(sequence, context)
            return replace(self._draft(sequence, context, rows, depth, gate, drawing), sync_s=sync_s)
        finally:
            del self._known[sequence.length :]

    def _sync(self, sequence: Sequence, context: Context) -> tuple[Rows, float]:
        """Make the cache hold exactly the context; the last token is fed (again) for its scores."""
        shared = min(context.common_prefix(self._known), len(context) - 1)
        sequence.rewind(shared)
        del self._known[shared:]
        lag = context.tokens[shared:]
        started = time.perf_counter()
        self._choose_head(sequence, context)
        rows = self._known_ids(sequence.forward(lag, 1))
        sync_s = time.perf_counter() - started if len(lag) > _ORDINARY_LAG_TOKENS else 0.0
        self._known.extend(lag)
        return rows, sync_s

    def _choose_head(self, sequence: Sequence, context: Context) -> None:
        if self._watch is None or not isinstance(sequence, FrequentHeadSequence):
            return
        if self._watch.look(context):
            sequence.score_all()
        else:
            with contextlib.suppress(MemoryLimitError):  # the head in use says less, and serves as well
                sequence.score_frequent(self._watch.more)

    def _draft(
        self, sequence: Sequence, context: Context, rows: Rows, depth: int, gate: ChainGate | None, drawing: bool
    ) -> Proposal:
        tokens: list[int] = []
        probs: list[Distribution | None] = []
        confidences: list[float] = []
        others: list[int | None] = []
        alternatives: list[tuple[tuple[int, float], ...]] = []
        weighs = gate if context.wants_siblings and depth > 1 and isinstance(gate, SiblingGate) else None
        so_far = list(context.tokens)
        forwards = 1
        while True:
            draft = self._request.chooser.draft(
                rows,
                0,
                so_far,
                gate,
                runner_up=context.wants_runners_up,
                alternatives=MOST_ALTERNATIVES if weighs is not None else 0,
            )
            if draft is None:
                break
            if not drawing:
                draft = _undrawn(draft)
            tokens.append(draft.token)
            probs.append(draft.distribution)
            if draft.confidence is not None:
                confidences.append(draft.confidence)
            others.append(draft.runner_up)
            alternatives.append(draft.alternatives)
            so_far.append(draft.token)
            ended = len(tokens) == depth or draft.token in self._request.stop_ids
            if ended or (gate is not None and not gate.goes_on()):
                break
            rows = self._known_ids(sequence.forward([draft.token], 1))
            self._known.append(draft.token)
            forwards += 1
        drawn = any(own is not None for own in probs)
        chain = Proposal(
            tokens=tuple(tokens),
            sources=(KIND,) * len(tokens),
            draft_probs=tuple(probs) if drawn else None,
            drafted_by=KIND,
            forwards=forwards,
            confidences=tuple(confidences),
            runners_up=tuple(others) if context.wants_runners_up else (),
            alternatives=tuple(alternatives) if weighs is not None else (),
        )
        return chain if weighs is None else with_siblings(chain, weighs, depth, self._request.stop_ids)

    def _known_ids(self, rows: Rows) -> Rows:
        """Scores of the target's ids only: a drafter's vocabulary may be padded at its end."""
        return rows.first(self._request.vocabulary_size) if self._padded else rows

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn: the cache follows the context at the next proposal."""

    def cancel(self) -> None:
        self._cancelled = True
        for sequence in self._open_sequences():
            sequence.cancel()

    def reset_cancel(self) -> None:
        self._cancelled = False
        for sequence in self._open_sequences():
            sequence.reset_cancel()

    def close(self) -> None:
        self._closed = True
        for sequence in self._open_sequences():
            sequence.close()

    def _open_sequences(self) -> list[Sequence]:
        sequence = self._sequence  # looked at once: a proposal that loses its process drops it meanwhile
        return [*(() if sequence is None else (sequence,)), *(branch for branch, _ in tuple(self._branches))]


def _undrawn(draft: Draft) -> Draft:
    """The same with the likeliest token in place of one that was drawn: a function of what came before it."""
    own = draft.distribution
    if own is None:
        return draft
    best = own.likeliest
    rest = None if draft.runner_up is None else own.without(best)
    return Draft(best, None, draft.confidence, None if rest is None else rest.likeliest)


def _waits_because(model: Model) -> str | None:
    return model.waits_because if isinstance(model, LoadsInBackground) else None
