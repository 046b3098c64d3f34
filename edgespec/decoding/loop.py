"""The serial loop: one round drafts, verifies and commits; plain decoding is the same loop at depth 0.

On token ids only. A round is a transaction: whatever happens inside it, the target's cache and the history are
back at the last committed token when the exception leaves.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal

from edgespec.decoding.contracts import (
    NOTHING,
    Context,
    DepthPolicy,
    DraftState,
    Outcome,
    Proposal,
    RoundRecord,
    Rows,
    Sequence,
)
from edgespec.decoding.proposals import valid_length
from edgespec.decoding.sampling import Chooser
from edgespec.decoding.verify import Verdict, verify_matching, verify_rejection
from edgespec.errors import EdgespecError, PromptTooLongError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one forward brought: ``tokens`` to emit, and ``record`` unless it was the prefill.

    ``finish`` is ``stop`` if the last token is one of the stop ids, ``length`` if the budget or the context is
    used up, else None.
    """

    tokens: tuple[int, ...]
    record: RoundRecord | None
    finish: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """``max_tokens`` to emit at most (None: until the context is full), ``depth_cap`` tokens a round may propose."""

    max_tokens: int | None
    depth_cap: int
    vocabulary_size: int
    stop_ids: frozenset[int] = frozenset()


class DecodeLoop:
    """Decodes after ``history``, which it extends with committed tokens only.

    On entry the target's cache must hold a prefix of ``history``. Iterate ``steps()``; leaving the iteration at
    any point leaves everything consistent.
    """

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
        self._target = target
        self._drafter = drafter
        self._policy = policy
        self._chooser = chooser
        self._history = history
        self._limits = limits
        self._clock = clock
        self._emitted = 0

    def steps(self) -> Generator[Step, None, None]:
        """The prefill's token, then one Step a round, until something finishes the answer."""
        yield (step := self._prefill())
        while step.finish is None:
            yield (step := self._round())

    # ------------------------------------------------------------------------------------------ prefill

    def _prefill(self) -> Step:
        history, target = self._history, self._target
        if len(history) >= target.context_length:
            raise PromptTooLongError(
                f"the prompt has {len(history)} tokens and the context holds {target.context_length}, "
                "with room for at least one answer token",
                hint="shorten the prompt or use a larger --context",
            )
        # The last token goes in alone, at width 1, whether or not the cache already held it: so a prompt that is
        # asked again, and therefore wholly cached, begins its answer as it did the first time.
        target.rewind(min(target.length, len(history) - 1))
        if target.length < len(history) - 1:
            target.forward(history[target.length : -1], 0)
        rows = target.forward(history[-1:], 1)
        token = self._chooser.target_token(rows, 0, history)
        return self._commit([token], None)

    # ------------------------------------------------------------------------------------------- rounds

    def _round(self) -> Step:
        target, history, clock = self._target, self._history, self._clock
        base = len(history)
        started = clock()
        try:
            proposal, invalid = self._propose(self._depth_limit())
            drafted = clock()
            draft = [int(token) for token in proposal.tokens]
            rows = target.forward([history[-1], *draft], len(draft) + 1)
            verdict = self._verify(draft, proposal, rows)
            committed = self._until_stop([*draft[: verdict.accepted], verdict.next_token])
            target.rewind(base + len(committed) - 1)
        except BaseException:
            # If the cache is beyond repair the error that made it so is already on its way.
            with contextlib.suppress(EdgespecError):
                target.rewind(min(target.length, base - 1))
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

    def _depth_limit(self) -> int:
        """Never more than the class allows, nor past the budget or the context with the token that follows."""
        return max(0, min(self._limits.depth_cap, self._depth_room()))

    def _depth_room(self) -> int:
        """Draft tokens that fit beside the token that follows them; negative when not even that one fits."""
        room = self._target.context_length - len(self._history) - 1
        if self._limits.max_tokens is None:
            return room
        return min(room, self._limits.max_tokens - self._emitted - 1)

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

    def _verify(self, draft: list[int], proposal: Proposal, rows: Rows) -> Verdict:
        chooser, history, base = self._chooser, self._history, len(self._history)
        if not chooser.uses_rejection:
            return verify_matching(draft, lambda i: chooser.target_token(rows, i, [*history, *draft[:i]]))
        vocabulary_size = self._limits.vocabulary_size
        own = proposal.draft_probs or (None,) * len(draft)
        return verify_rejection(
            draft,
            [None if probs is None else probs.normalised().dense(vocabulary_size) for probs in own],
            lambda i: chooser.distribution(rows, i, [*history, *draft[:i]]).dense(vocabulary_size),
            [chooser.accept_uniform(base + i) for i in range(len(draft))],
            lambda probs, i: chooser.draw_dense(probs, base + i),
        )

    def _until_stop(self, tokens: list[int]) -> list[int]:
        for index, token in enumerate(tokens):
            if token in self._limits.stop_ids:
                return tokens[: index + 1]
        return tokens

    def _commit(self, tokens: list[int], record: RoundRecord | None) -> Step:
        self._history.extend(tokens)
        self._emitted += len(tokens)
        finish: FinishReason | None = None
        if tokens[-1] in self._limits.stop_ids:
            finish = "stop"
        elif self._depth_room() < 0:
            finish = "length"
        return Step(tokens=tuple(tokens), record=record, finish=finish)
