"""The pipelined loop: the drafter writes on while the target verifies what it wrote before.

A round feeds the target the last committed token and a window of the tokens put forward, and lets the drafter
continue all of them meanwhile, assuming that they stand (PEARL's post-verify: Liu et al., 2024). A forward over w
draft tokens scores w + 1 places, so the first of the new tokens is compared as well: nothing is gained by a bonus
token that the drafter has already said. With nothing put forward, or a window of none, the target scores one place
while the first tokens are being drafted, so that a drafter that was just wrong costs no time (pre-verify).

How far the drafter gets is not planned in advance: it is told to end when the target is done, so that a chunk
takes the time of a forward (DuoDecoding: Lv et al., 2025), whatever the machine does. It is told before it chooses a
token, never because of one, so that drawn tokens keep their law. If it is late all the same, because it had a prompt
to read, the round goes on without it, and what it brings is used where the text has taken the same way meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from threading import Event
from typing import Protocol

from edgespec.decoding.contracts import (
    Context,
    DepthPolicy,
    Distribution,
    DraftState,
    Outcome,
    Proposal,
    RoundRecord,
    Rows,
    Sequence,
)
from edgespec.decoding.proposals import valid_length
from edgespec.decoding.rounds import LoopLimits, Rounds, Step
from edgespec.decoding.sampling import Chooser
from edgespec.decoding.verify import Verdict
from edgespec.errors import CancelledError, EdgespecError

__all__ = ["Budget", "FixedBudget", "PipelinedLoop", "Submit"]

# How far behind a rejected token the right one is looked for. Past two or three the match is chance: with function
# words every tenth place or so has any given one.
_WORDS_TOO_MANY = 2

# Hands a job to the drafter's thread, which runs one after another.
Submit = Callable[[Callable[[], "Drafted"]], "Future[Drafted]"]


class Budget(Protocol):
    """How much a round verifies and drafts, and how long it waits for a drafter that is late."""

    def window(self, confidences: tuple[float | None, ...]) -> int:
        """How many of the tokens put forward to verify now, given how sure the drafter was of each."""

    def draft_tokens(self, pending: int) -> int:
        """How many tokens the drafter may add to those ``pending`` while the target verifies."""

    def patience_s(self) -> float:
        """Seconds to wait for the drafter once the target is done."""

    def reuses(self) -> bool:
        """Whether what was drafted behind a rejected token is put forward again where it continues the right one."""

    def reused(self, stood: bool) -> None:
        """Whether the first token that was put forward again stood."""

    def record(self, record: RoundRecord) -> None:
        """Learn from a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedBudget:
    """Always the same: verify up to ``most`` tokens, draft up to ``ahead``, wait ``patience`` s, reuse or not."""

    most: int
    ahead: int
    patience: float = 1e9
    reuse: bool = False

    def window(self, confidences: tuple[float | None, ...]) -> int:
        return self.most

    def draft_tokens(self, pending: int) -> int:
        return self.ahead

    def patience_s(self) -> float:
        return self.patience

    def reuses(self) -> bool:
        return self.reuse

    def reused(self, stood: bool) -> None:
        """Nothing to learn."""

    def record(self, record: RoundRecord) -> None:
        """Nothing to learn."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """What the drafter's thread made of one request, and the seconds it took."""

    proposal: Proposal
    seconds: float


@dataclass(slots=True)
class _Piece:
    """One proposal and how far its tokens were verified."""

    proposal: Proposal
    evaluated: int = 0
    accepted: int = 0
    again: bool = False  # put forward before, at another place


@dataclass(frozen=True, slots=True)
class _Token:
    """A token put forward: where it is in which proposal."""

    token: int
    piece: _Piece
    place: int

    @property
    def probs(self) -> Distribution | None:
        own = self.piece.proposal.draft_probs
        return own[self.place] if own is not None and self.place < len(own) else None

    @property
    def confidence(self) -> float | None:
        own = self.piece.proposal.confidences
        return own[self.place] if self.place < len(own) else None


@dataclass(frozen=True, slots=True)
class _Flight:
    """A proposal being made to follow ``tokens``; ``done`` tells its drafter that enough is drafted."""

    tokens: list[int]
    future: Future[Drafted]
    target_done: Event


class _UntilDone:
    """The gate of a flight: lets everything pass until the target is done."""

    needs_entropy = False

    def __init__(self, done: Event) -> None:
        self._done = done

    def admits(self, confidence: float, entropy: float | None) -> bool:
        return True

    def goes_on(self) -> bool:
        return not self._done.is_set()


class PipelinedLoop(Rounds):
    """Drafts and verifies at once. ``submit`` hands a job to the thread on which the drafter works."""

    def __init__(
        self,
        target: Sequence,
        drafter: DraftState,
        policy: DepthPolicy,
        chooser: Chooser,
        history: list[int],
        limits: LoopLimits,
        *,
        submit: Submit,
        budget: Budget,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(target, chooser, history, limits, clock)
        self._drafter = drafter
        self._policy = policy
        self._submit = submit
        self._budget = budget
        self._pending: list[_Token] = []
        self._flight: _Flight | None = None
        self._untold: list[Outcome] = []

    def steps(self) -> Generator[Step, None, None]:
        """As of every loop; leaving the iteration ends the drafting in flight first."""
        try:
            yield from super().steps()
        finally:
            self._abandon()

    # ------------------------------------------------------------------------------------------- a round

    def _round(self) -> Step:
        target, history, clock = self._target, self._history, self._clock
        base = len(history)
        started = clock()
        try:
            window = self._window()
            self._take_off(window)
            chunk = [each.token for each in self._pending[:window]]
            rows = target.forward([history[-1], *chunk], window + 1)
            drafted_s, drafted, invalid = self._land()
            chain = self._pending[: window + 1]
            verdict = self._compare(chain, rows, bonus=len(chain) == window)
            stands = [each.token for each in chain[: verdict.accepted]]
            committed = self._until_stop([*stands, *verdict.following])
            target.rewind(base + len(committed) - 1)
        except BaseException:
            self._abandon()
            self._roll_back()
            raise
        verified = clock()
        # An accepted end-of-sequence ends the comparison: it is a stop, not a rejection.
        accepted = min(verdict.accepted, len(committed))
        evaluated = min(verdict.evaluated, len(committed))
        record = RoundRecord(
            width=window + 1,
            context_length=base,
            proposed=len(chain),
            evaluated=evaluated,
            accepted=accepted,
            invalid=invalid,
            emitted=len(committed),
            source=chain[0].piece.proposal.drafted_by if chain else None,
            draft_s=drafted_s,
            sync_s=0.0 if drafted is None else drafted.sync_s,
            verify_s=verified - started,
            round_s=verified - started,
            draft_forwards=0 if drafted is None else drafted.forwards,
        )
        rest = self._pending[window + 1 :] if verdict.kind == "open" else []
        if verdict.kind == "correction" and self._budget.reuses():
            rest = self._continuing(committed[-1], self._pending[verdict.accepted + 1 :])
        step = self._commit(committed, record)
        self._policy.record(record)
        self._budget.record(record)
        self._settle(chain[:evaluated], accepted, rest, tuple(committed))
        if step.finish is not None:
            self._abandon()
        return step

    def _window(self) -> int:
        """How many of the tokens put forward are verified now."""
        pending = self._pending
        most = min(len(pending), self._depth_limit())
        if not most:
            return 0
        return max(0, min(most, self._budget.window(tuple(each.confidence for each in pending))))

    def _compare(self, chain: list[_Token], rows: Rows, *, bonus: bool) -> Verdict:
        return self._verify([each.token for each in chain], [each.probs for each in chain], rows, bonus=bonus)

    # ----------------------------------------------------------------------------------------- drafting

    def _take_off(self, window: int) -> None:
        """Let the drafter continue everything put forward, unless it is at work or there is no place for more."""
        if self._flight is not None:
            return
        self._tell()
        pending = [each.token for each in self._pending]
        if pending and pending[-1] in self._limits.stop_ids:
            return  # nothing can follow a stop
        # One more than the tokens beside which another fits: the last one may be the answer's last.
        room = self._depth_room() + 1 - len(pending)
        # What this round compares, and beyond that what the next one can verify.
        useful = window + 1 + self._limits.depth_cap - len(pending)
        wanted = min(room, useful, self._budget.draft_tokens(len(pending))) if self._limits.depth_cap else 0
        if wanted < 1:
            return
        tokens, done = [*self._history, *pending], Event()
        context, gate = Context(tokens, len(self._history)), _UntilDone(done)

        def draft() -> Drafted:
            started = self._clock()
            proposal = self._drafter.propose(context, wanted, gate)
            return Drafted(proposal.cut(wanted), self._clock() - started)

        self._flight = _Flight(tokens, self._submit(draft), done)

    def _land(self) -> tuple[float, Proposal | None, int]:
        """Take in what the drafter has; returns its seconds, its proposal and how much of it was malformed.

        Raises CancelledError and what else the drafter raised.
        """
        flight = self._flight
        if flight is None:
            return 0.0, None, 0
        flight.target_done.set()
        if not flight.future.done():
            wait([flight.future], self._budget.patience_s())
            if not flight.future.done():
                return 0.0, None, 0  # late: it goes on, and so do we
        self._flight = None
        drafted = flight.future.result()
        proposal = drafted.proposal
        usable = valid_length(proposal, self._limits.vocabulary_size, needs_probs=self._chooser.uses_rejection)
        chain = self._until_stop([int(token) for token in proposal.tokens[:usable]])
        invalid = len(proposal.tokens) - usable
        known = [*self._history, *(each.token for each in self._pending)]
        start = len(flight.tokens)
        said = known[start:]
        if known[:start] == flight.tokens and chain[: len(said)] == said:
            piece = _Piece(proposal.cut(len(chain)))
            self._pending += [_Token(token, piece, place) for place, token in enumerate(chain) if place >= len(said)]
        return drafted.seconds, proposal, invalid

    def _settle(self, compared: list[_Token], accepted: int, rest: list[_Token], committed: tuple[int, ...]) -> None:
        """Keep ``rest``, and note the outcome of each proposal that will not be compared any further."""
        for index, each in enumerate(compared):
            if each.piece.again and not each.piece.evaluated:
                self._budget.reused(index < accepted)
            each.piece.evaluated += 1
            each.piece.accepted += index < accepted
        going_on = {id(each.piece) for each in rest}
        self._pending = rest
        told: set[int] = set()
        for each in compared:
            piece = each.piece
            if id(piece) in going_on or id(piece) in told:
                continue
            told.add(id(piece))
            self._untold.append(
                Outcome(
                    proposal=piece.proposal,
                    evaluated=piece.evaluated,
                    accepted=piece.accepted,
                    committed=committed,
                )
            )
        if self._flight is None:
            self._tell()

    def _continuing(self, correction: int, behind: list[_Token]) -> list[_Token]:
        """What was drafted to follow ``correction``, if it is among the next tokens ``behind`` a rejected one.

        So it is where the drafter said a word too many. Another place has other odds, so these tokens no longer
        count as drawn at random.
        """
        for index, each in enumerate(behind[:_WORDS_TOO_MANY]):
            if each.token == correction:
                tokens = tuple(own.token for own in behind[index + 1 :])
                piece = _Piece(Proposal(tokens=tokens, drafted_by=each.piece.proposal.drafted_by), again=True)
                return [_Token(token, piece, place) for place, token in enumerate(tokens)]
        return []

    def _tell(self) -> None:
        """Let the drafter learn; never while it is at work."""
        untold, self._untold = self._untold, []
        for outcome in untold:
            self._drafter.observe(outcome)

    def _abandon(self) -> None:
        """End the drafting in flight and forget what was put forward."""
        flight, self._flight, self._pending = self._flight, None, []
        if flight is None:
            return
        flight.target_done.set()
        if flight.future.cancel():
            return
        if not flight.future.done():
            self._drafter.cancel()
            wait([flight.future])
            self._drafter.reset_cancel()
        with contextlib.suppress(EdgespecError, CancelledError):
            flight.future.result()
