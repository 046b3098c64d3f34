"""The serial loop: one round drafts, verifies and commits; plain decoding is the same loop at depth 0."""

from __future__ import annotations

import time
from collections.abc import Callable

from edgespec.decoding.contracts import (
    NOTHING,
    Context,
    DepthPolicy,
    DraftState,
    Outcome,
    Proposal,
    RoundRecord,
    Sequence,
)
from edgespec.decoding.proposals import valid_length
from edgespec.decoding.rounds import FinishReason, LoopLimits, Rounds, Step
from edgespec.decoding.sampling import Chooser

__all__ = ["DecodeLoop", "FinishReason", "LoopLimits", "Step"]


class DecodeLoop(Rounds):
    """Drafts, then verifies, in turns."""

    def __init__(
        self,
        target: Sequence,
        drafter: DraftState,
        policy: DepthPolicy,
        chooser: Chooser,
        history: list[int],
        limits: LoopLimits,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(target, chooser, history, limits, clock)
        self._drafter = drafter
        self._policy = policy

    def _round(self) -> Step:
        target, history, clock = self._target, self._history, self._clock
        base = len(history)
        started = clock()
        try:
            proposal, invalid = self._propose(self._depth_limit())
            drafted = clock()
            draft = [int(token) for token in proposal.tokens]
            rows = target.forward([history[-1], *draft], len(draft) + 1)
            verdict = self._verify(draft, proposal.draft_probs or (None,) * len(draft), rows)
            committed = self._until_stop([*draft[: verdict.accepted], *verdict.following])
            target.rewind(base + len(committed) - 1)
        except BaseException:
            self._roll_back()
            raise
        verified = clock()
        # An accepted end-of-sequence ends the comparison: it is a stop, not a rejection.
        accepted = min(verdict.accepted, len(committed))
        evaluated = min(verdict.evaluated, len(committed))
        record = RoundRecord(
            width=len(draft) + 1,
            context_length=base,
            proposed=len(draft),
            evaluated=evaluated,
            accepted=accepted,
            invalid=invalid,
            emitted=len(committed),
            source=proposal.drafted_by,
            draft_s=drafted - started,
            sync_s=proposal.sync_s,
            verify_s=verified - drafted,
            round_s=verified - started,
            draft_forwards=proposal.forwards,
        )
        step = self._commit(committed, record)
        self._policy.record(record)
        if draft:
            self._drafter.observe(
                Outcome(proposal=proposal, evaluated=evaluated, accepted=accepted, committed=tuple(committed))
            )
        return step

    def _propose(self, depth: int) -> tuple[Proposal, int]:
        """The usable part of the drafter's proposal, and how many tokens of it were cut off as invalid."""
        if depth == 0:
            return NOTHING, 0
        proposal = self._drafter.propose(Context(self._history), depth)
        within = proposal.cut(depth)
        usable = valid_length(within, self._limits.vocabulary_size, needs_probs=self._chooser.uses_rejection)
        invalid = len(proposal.tokens) - usable
        # Nothing can follow a stop: what was drafted after one would only widen the forward.
        chain = self._until_stop([int(token) for token in within.tokens[:usable]])
        return within.cut(len(chain)), invalid
