"""The serial loop: one round drafts, verifies and commits; plain decoding is the same loop at depth 0."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from edgespec.decoding.logprobs import TokenLogprob
from edgespec.decoding.round_base import (
    UNCHOOSABLE,
    LoopLimits,
    Rounds,
    Step,
    first_chain,
    height,
    valid_length,
)
from edgespec.decoding.sampling import Chooser
from edgespec.decoding.verify import TreeVerdict, verify_tree
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, DraftState, Outcome, Proposal
from edgespec.interfaces.model import Sequence, TreeSequence
from edgespec.interfaces.policy import AnswerPolicy, RoundRecord


@dataclass(frozen=True, slots=True)
class _Compared:
    """The result of comparing a proposal with the target. ``outcome``: of the chain, or of a tree's first chain.

    ``guessed_by`` names who proposed each accepted token; ``committed`` begins with the accepted tokens.
    """

    committed: list[int]
    evaluated: int
    guessed_by: list[str]
    outcome: Outcome
    logprobs: tuple[TokenLogprob, ...]

    @property
    def accepted(self) -> int:
        return len(self.guessed_by)


class DecodeLoop(Rounds):
    """Drafts and verifies one after the other.

    With ``trees`` proposals may be trees if the target is a TreeSequence.
    """

    def __init__(
        self,
        target: Sequence,
        drafter: DraftState,
        depth: AnswerPolicy,
        chooser: Chooser,
        history: list[int],
        limits: LoopLimits,
        clock: Callable[[], float] = time.perf_counter,
        *,
        trees: bool = False,
    ) -> None:
        super().__init__(target, depth, chooser, history, limits, clock)
        self._drafter = drafter
        self._tree_target = target if trees and isinstance(target, TreeSequence) else None

    def _round(self) -> Step:
        clock, base = self._clock, len(self._history)
        started = clock()
        try:
            proposal, invalid = self._propose(self._depth_limit())
            drafted = clock()
            if proposal.parents is None or self._tree_target is None:
                compared = self._compare_chain(proposal)
            else:
                compared = self._compare_tree(proposal, proposal.parents, self._tree_target)
        except BaseException:
            self._roll_back()
            raise
        verified, waited_s = clock(), self._waited_s()
        committed, proposed = compared.committed, len(proposal.tokens)
        record = RoundRecord(
            width=proposed + 1,
            context_length=base,
            proposed=proposed,
            evaluated=compared.evaluated,
            accepted=compared.accepted,
            invalid=invalid,
            emitted=len(committed),
            source=proposal.drafted_by,
            draft_s=drafted - started - proposal.waited_s,
            sync_s=proposal.sync_s,
            verify_s=verified - drafted - waited_s,
            round_s=verified - started,
            waited_s=proposal.waited_s + waited_s,
            draft_forwards=proposal.forwards,
            draft_companions=proposal.companions,
            alternative_count=proposed - height(proposal),
            company=self._company(),
            experts=self._experts(),
        )
        step = self._commit(committed, record, compared.guessed_by, compared.logprobs)
        self._depth.record(record)
        if proposed:
            self._drafter.observe(compared.outcome)
        return step

    def _propose(self, depth: int) -> tuple[Proposal, int]:
        """The valid part of the drafter's proposal, and the number of tokens cut off as invalid."""
        if depth == 0:
            return NOTHING, 0
        trees, nodes = self._tree_target is not None, self._node_limit()
        context = Context(self._history, wants_tree=trees, most_nodes=nodes)
        proposal = self._drafter.propose(context, depth)
        within = proposal.cut(depth if proposal.parents is None else nodes)
        usable = valid_length(
            within,
            self._limits.vocabulary_size,
            needs_probs=self._chooser.uses_rejection,
            most_depth=depth if trees else 0,
        )
        invalid = len(proposal.tokens) - usable
        if within.parents is not None:
            return within.cut(usable), invalid
        # Nothing follows a stop token: tokens drafted after it would only widen the forward.
        chain = self._until_stop([int(token) for token in within.tokens[:usable]])
        return within.cut(len(chain)), invalid

    def _compare_chain(self, proposal: Proposal) -> _Compared:
        history, target = self._history, self._target
        draft = [int(token) for token in proposal.tokens]
        rows = target.forward([history[-1], *draft], len(draft) + 1)
        verdict = self._verify(draft, proposal.draft_probs or (None,) * len(draft), rows)
        committed = self._until_stop([*draft[: verdict.accepted], *verdict.following])
        logprobs = self._logprobs(rows, range(len(committed)), committed)
        target.rewind(len(history) + len(committed) - 1)
        # An accepted end-of-sequence ends the comparison: it is a stop, not a rejection.
        accepted = min(verdict.accepted, len(committed))
        evaluated = min(verdict.evaluated, len(committed))
        outcome = Outcome(proposal=proposal, evaluated=evaluated, accepted=accepted, committed=tuple(committed))
        guessed_by = [proposal.source_of(index) for index in range(accepted)]
        return _Compared(committed, evaluated, guessed_by, outcome, logprobs)

    def _compare_tree(self, proposal: Proposal, parents: tuple[int, ...], target: TreeSequence) -> _Compared:
        """Compare a tree whose root is the last committed token; each row is that of its path."""
        history = self._history
        draft = [int(token) for token in proposal.tokens]
        rows = target.forward_tree([history[-1], *draft], [-1, *(parent + 1 for parent in parents)])
        path: list[int] = []

        def target_token(at: int) -> int:
            if at >= 0:
                path.append(at)
            return self._chooser.target_token(rows, at + 1, self._assuming([draft[index] for index in path]))

        try:
            verdict = verify_tree(draft, parents, target_token)
        except UNCHOOSABLE:
            if not path:
                raise
            verdict = TreeVerdict(tuple(path), None, "open")
        following = () if verdict.next_token is None else (verdict.next_token,)
        committed = self._until_stop([*(draft[index] for index in verdict.path), *following])
        kept = [0, *(index + 1 for index in verdict.path[: len(committed) - 1])]
        logprobs = self._logprobs(rows, kept, committed)
        target.keep(kept)
        accepted = min(len(verdict.path), len(committed))
        evaluated = min(accepted + (verdict.kind == "correction"), len(committed))
        # Drafters learn acceptance from chains only.
        chain = first_chain(proposal)
        taken = verdict.path[:accepted]
        leading = next((position for position, index in enumerate(taken) if index != position), len(taken))
        seen = min(leading + (leading == accepted < evaluated or leading < accepted), len(chain.tokens))
        outcome = Outcome(proposal=chain, evaluated=seen, accepted=leading, committed=tuple(committed))
        guessed_by = [proposal.source_of(index) for index in taken]
        return _Compared(committed, evaluated, guessed_by, outcome, logprobs)
