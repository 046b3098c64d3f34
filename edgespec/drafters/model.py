"""A smaller model as drafter: it writes a chain token by token with the session's own way of choosing."""

from __future__ import annotations

import time
from collections.abc import Callable

from edgespec.decoding.contracts import (
    NOTHING,
    ChainGate,
    Context,
    Distribution,
    DraftRequest,
    Model,
    Outcome,
    Proposal,
    Rows,
    Sequence,
)
from edgespec.errors import ClosedError

KIND = "model"

# Tokens of lag that an ordinary round leaves: the last draft token and the token that followed it. Feeding more
# than this is catching up, which is timed apart so that it does not count as the price of a round.
_ORDINARY_LAG_TOKENS = 2


class ModelDrafter:
    """Drafts with ``model``, opened by ``open_model`` at the first proposal. One Sequence for each session."""

    kind = KIND

    def __init__(self, open_model: Callable[[], Model]) -> None:
        self._open_model = open_model

    def start(self, request: DraftRequest) -> ModelDraftState:
        return ModelDraftState(self._open_model, request)

    def close(self) -> None:
        """The model belongs to whoever ``open_model`` got it from."""


class ModelDraftState:
    """One session's cache of the drafter."""

    free = False

    def __init__(self, open_model: Callable[[], Model], request: DraftRequest) -> None:
        self._open_model = open_model
        self._request = request
        self._sequence: Sequence | None = None
        self._known: list[int] = []  # the tokens in the cache, one for one
        self._cancelled = False
        self._closed = False

    def lag(self, context: Context) -> int:
        return max(0, len(context) - 1 - context.common_prefix(self._known))

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        if self._closed:
            raise ClosedError("this drafter's state is closed")
        if depth < 1 or not len(context):
            return NOTHING
        if self._sequence is None:
            model = self._open_model()
            # A drafter with a shorter context is of use for as long as the text fits it.
            self._sequence = model.open(min(self._request.context_length, model.facts.trained_context_length))
            if self._cancelled:
                self._sequence.cancel()
        sequence = self._sequence
        # The whole chain is one job on the drafter's thread: one hand-over instead of one for each token.
        return sequence.run(lambda: self._chain(sequence, context, depth, gate))

    def _chain(self, sequence: Sequence, context: Context, depth: int, gate: ChainGate | None) -> Proposal:
        depth = min(depth, sequence.context_length - len(context) + 1)
        if depth < 1:
            return NOTHING
        try:
            rows, sync_s = self._sync(sequence, context)
            return self._draft(sequence, context, rows, depth, sync_s, gate)
        finally:
            del self._known[sequence.length :]

    def _sync(self, sequence: Sequence, context: Context) -> tuple[Rows, float]:
        """Make the cache hold exactly the context; the last token is fed (again) for its scores."""
        shared = min(context.common_prefix(self._known), len(context) - 1)
        sequence.rewind(shared)
        del self._known[shared:]
        lag = context.tokens[shared:]
        started = time.perf_counter()
        rows = self._known_ids(sequence.forward(lag, 1))
        sync_s = time.perf_counter() - started if len(lag) > _ORDINARY_LAG_TOKENS else 0.0
        self._known.extend(lag)
        return rows, sync_s

    def _draft(
        self, sequence: Sequence, context: Context, rows: Rows, depth: int, sync_s: float, gate: ChainGate | None
    ) -> Proposal:
        tokens: list[int] = []
        probs: list[Distribution | None] = []
        confidences: list[float] = []
        so_far = list(context.tokens)
        forwards = 1
        while True:
            draft = self._request.chooser.draft(rows, 0, so_far, gate)
            if draft is None:
                break
            tokens.append(draft.token)
            probs.append(draft.distribution)
            if draft.confidence is not None:
                confidences.append(draft.confidence)
            so_far.append(draft.token)
            if len(tokens) == depth or draft.token in self._request.stop_ids:
                break
            if gate is not None and not gate.goes_on():
                break
            rows = self._known_ids(sequence.forward([draft.token], 1))
            self._known.append(draft.token)
            forwards += 1
        drawn = any(own is not None for own in probs)
        return Proposal(
            tokens=tuple(tokens),
            sources=(KIND,) * len(tokens),
            draft_probs=tuple(probs) if drawn else None,
            drafted_by=KIND,
            sync_s=sync_s,
            forwards=forwards,
            confidences=tuple(confidences),
        )

    def _known_ids(self, rows: Rows) -> Rows:
        """Scores of the target's ids only: a drafter's vocabulary may be padded at its end."""
        size = self._request.vocabulary_size
        if rows.count and len(rows.logits(0)) <= size:
            return rows
        return Rows(rows.count, lambda index: rows.logits(index)[:size])

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn: the cache follows the context at the next proposal."""

    def cancel(self) -> None:
        self._cancelled = True
        if self._sequence is not None:
            self._sequence.cancel()

    def reset_cancel(self) -> None:
        self._cancelled = False
        if self._sequence is not None:
            self._sequence.reset_cancel()

    def close(self) -> None:
        self._closed = True
        if self._sequence is not None:
            self._sequence.close()
