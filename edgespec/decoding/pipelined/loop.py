"""The pipelined loop: the drafter continues its guesses while the target verifies them.

A round feeds the target the last committed token and a window of the proposed tokens, and lets the drafter continue
all proposed tokens in parallel, assuming acceptance (PEARL's post-verify: Liu et al., 2024). A forward over w draft
tokens scores w + 1 positions, so the first newly drafted token is compared as well; it replaces a bonus token.
Without proposed tokens, or with an empty window, the target scores one position while the drafter drafts the first
tokens, so a drafter that was just wrong costs no time (pre-verify).

The length of a draft is not planned. The drafter stops when the target is done, so that drafting takes the time of a
forward on any machine (DuoDecoding: Lv et al., 2025). The stop takes effect before a token is drawn and never depends
on a token, so drawn tokens keep their distribution. If the drafter is late, because it had a prompt to read, the
round continues without it; its late proposal is used if the text has taken the same course.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from concurrent.futures import wait
from threading import Event

from edgespec.decoding.pipelined.budget import Budget
from edgespec.decoding.pipelined.in_flight import Drafted, Flight, PutForward, Submit, UntilDone, put_forward
from edgespec.decoding.round_base import LoopLimits, OnReading, Rounds, Step, unheard, valid_length
from edgespec.decoding.sampling import Chooser
from edgespec.decoding.verify import Verdict
from edgespec.errors import CancelledError, EdgespecError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import DraftState, Outcome, Proposal
from edgespec.interfaces.model import Sequence
from edgespec.interfaces.policy import AnswerPolicy, RoundRecord

# How many tokens behind a rejected one are searched for the correction. After two or three a match is chance: about
# every tenth position has any given function word.
_WORDS_TOO_MANY = 2


class PipelinedLoop(Rounds):
    """Drafts and verifies in parallel. ``submit`` queues a job on the drafter's thread."""

    def __init__(
        self,
        target: Sequence,
        drafter: DraftState,
        depth: AnswerPolicy,
        chooser: Chooser,
        history: list[int],
        limits: LoopLimits,
        *,
        submit: Submit,
        budget: Budget,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(target, depth, chooser, history, limits, clock)
        self._drafter = drafter
        self._submit = submit
        self._budget = budget
        self._pending: list[PutForward] = []
        self._flight: Flight | None = None
        self._untold: list[Outcome] = []

    def steps(self, reading: OnReading = unheard) -> Generator[Step, None, None]:
        """As ``Rounds.steps``; leaving the iteration first ends the drafting in flight."""
        try:
            yield from super().steps(reading)
        finally:
            self._abandon()

    def _prefill(self, reading: OnReading = unheard) -> Step:
        """As ``Rounds._prefill``, without waiting for the drafter. The first round after the drafter has read the
        prompt takes its proposal. An answer that ends before such a round does not let it read.
        """
        if self._budget.overlaps_prefill and self._depth_room() > 0:
            self._take_off(0)
        return super()._prefill(reading)

    # ------------------------------------------------------------------------------------------- a round

    def _round(self) -> Step:
        target, history, clock = self._target, self._history, self._clock
        base = len(history)
        started = clock()
        try:
            window = self._window()
            self._take_off(window)
            chunk = [each.token for each in self._pending[:window]]
            overlapped = self._flight is not None
            rows = target.forward([history[-1], *chunk], window + 1)
            scored = clock()
            drafted_s, drafted, invalid = self._land()
            waited_s = clock() - scored
            chain = self._pending[: window + 1]
            tokens, probs = [each.token for each in chain], [each.probs for each in chain]
            verdict = self._verify(tokens, probs, rows, bonus=len(chain) == window)
            committed = self._until_stop([*tokens[: verdict.accepted], *verdict.following])
            logprobs = self._logprobs(rows, range(len(committed)), committed)
            target.rewind(base + len(committed) - 1)
            rest = self._going_on(verdict, committed[-1])
        except BaseException:
            self._abandon()
            self._roll_back()
            raise
        verified = clock()
        # An accepted end-of-sequence ends the comparison: it is a stop, not a rejection.
        accepted = min(verdict.accepted, len(committed))
        evaluated = min(verdict.evaluated, len(committed))
        if drafted is not None and drafted.forwards == 0:
            overlapped = False  # no drafter ran: the target was alone
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
            verify_s=verified - started - waited_s,
            round_s=verified - started,
            draft_forwards=0 if drafted is None else drafted.forwards,
            overlapped=overlapped,
            experts=self._experts(),
        )
        step = self._commit(committed, record, [each.source for each in chain[:accepted]], logprobs)
        self._depth.record(record)
        self._budget.record(record)
        self._settle(base, chain[:evaluated], accepted, rest)
        if step.finish is not None:
            self._abandon()
            self._tell()
        return step

    def _window(self) -> int:
        """How many of the proposed tokens are verified now."""
        pending = self._pending
        most = min(len(pending), self._depth_limit())
        if not most:
            return 0
        return max(0, min(most, self._budget.window(len(pending))))

    # ----------------------------------------------------------------------------------------- drafting

    def _take_off(self, window: int) -> None:
        """Unless the drafter is busy, let it continue the proposed tokens."""
        if self._flight is not None:
            return
        self._tell()
        limits = self._limits
        if not limits.depth_cap or (limits.exact_length is not None and len(self._history) >= limits.exact_length):
            return
        pending = [each.token for each in self._pending]
        # ``_depth_room`` leaves a position for the token that follows; a draft may fill that position too.
        room = self._depth_room() + 1
        # Tokens that this round compares, plus those that the next one can verify.
        useful = window + 1 + limits.depth_cap - len(pending)
        wanted = min(room - len(pending), useful, self._budget.draft_tokens(window))
        if pending and pending[-1] in limits.stop_ids:
            wanted = 0  # nothing can follow a stop
        if wanted > 0:
            self._flight = self._continue(pending, wanted)

    def _continue(self, pending: list[int], wanted: int) -> Flight:
        tokens, done = [*self._history, *pending], Event()
        context = Context(tokens, len(self._history))

        def draft() -> Drafted:
            started = self._clock()
            proposal = self._drafter.propose(context, wanted, UntilDone(done)).cut(wanted)
            usable = valid_length(proposal, self._limits.vocabulary_size, needs_probs=self._chooser.uses_rejection)
            chain = self._until_stop([int(token) for token in proposal.tokens[:usable]])
            return Drafted(proposal.cut(len(chain)), len(proposal.tokens) - usable, self._clock() - started)

        return Flight(tokens, self._submit(draft), done)

    def _land(self) -> tuple[float, Proposal | None, int]:
        """Take the drafter's proposal; returns its seconds, the proposal and its number of malformed tokens.

        Raises CancelledError and what else the drafter raised.
        """
        flight = self._flight
        if flight is None:
            return 0.0, None, 0
        flight.target_done.set()
        if not flight.future.done():
            wait([flight.future], self._budget.patience_s())
        if not flight.future.done():
            return 0.0, None, 0  # a late drafter continues; so does the round
        self._flight = None
        drafted = flight.future.result()
        proposal = drafted.proposal
        chain = list(proposal.tokens)
        known = [*self._history, *(each.token for each in self._pending)]
        start = len(flight.tokens)
        said = known[start:]
        if known[:start] == flight.tokens and chain[: len(said)] == said:
            self._pending += put_forward(proposal, after=len(said))
        return drafted.seconds, proposal, drafted.invalid

    def _going_on(self, verdict: Verdict, last: int) -> list[PutForward]:
        """The tokens to propose next, after the committed token ``last``."""
        pending = self._pending
        if verdict.kind == "correction" and last not in self._limits.stop_ids and self._budget.reuses():
            return self._continuing(last, pending[verdict.accepted + 1 :])
        return pending[verdict.accepted :] if verdict.kind == "open" else []

    def _settle(self, base: int, compared: list[PutForward], accepted: int, rest: list[PutForward]) -> None:
        """Keep ``rest``, and note the outcome of each proposal that no later round will compare.

        The ``compared`` tokens followed the first ``base`` tokens of the history.
        """
        for index, each in enumerate(compared):
            piece = each.piece
            if piece.again and not piece.evaluated:
                self._budget.learn_reuse(index < accepted)
            piece.evaluated += 1
            piece.accepted += index < accepted
        going_on = {id(each.piece) for each in rest}
        self._pending = rest
        told: set[int] = set()
        for index, each in enumerate(compared):
            piece = each.piece
            if id(piece) in going_on or id(piece) in told:
                continue
            told.add(id(piece))
            said = tuple(self._history[base + index - each.position :])
            outcome = Outcome(
                proposal=piece.proposal, evaluated=piece.evaluated, accepted=piece.accepted, committed=said
            )
            self._untold.append(outcome)
        if self._flight is None:
            self._tell()

    def _continuing(self, correction: int, behind: list[PutForward]) -> list[PutForward]:
        """The tokens drafted after ``correction``, if it is among the next tokens ``behind`` a rejected one.

        This covers a drafter that wrote a superfluous token. The tokens move to another position with other
        probabilities, so they no longer count as drawn at random.
        """
        for index, each in enumerate(behind[:_WORDS_TOO_MANY]):
            if each.token == correction:
                rest = behind[index + 1 :]
                again = Proposal(
                    tokens=tuple(own.token for own in rest),
                    sources=tuple(own.source for own in rest),
                    drafted_by=each.piece.proposal.drafted_by,
                )
                return put_forward(again, again=True)
        return []

    def _tell(self) -> None:
        """Report outcomes to the drafter; never called while it is drafting."""
        untold, self._untold = self._untold, []
        for outcome in untold:
            self._drafter.observe(outcome)

    def _abandon(self) -> None:
        """End the drafting in flight and forget the proposed tokens."""
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
