"""A drafter with a trimmed head that steps aside while the text is not what its head was cut for.

A head trimmed to the frequent tokens (VocabTrim, Goel et al., 2025; FR-Spec, Zhao et al., 2025) cannot say the rest.
That costs a few percent of the drafts on text like the one it was counted on, and most of them on other text: another
language, another alphabet. How much it costs can be seen in the text itself, without asking anybody: it is the share
of recent tokens that the head could have said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edgespec.decoding.contracts import (
    NOTHING,
    ChainGate,
    Context,
    Drafter,
    DraftRequest,
    DraftsBranches,
    DraftState,
    ExplainsSilence,
    Outcome,
    Proposal,
)
from edgespec.drafters.model import KIND
from edgespec.errors import CancelledError, ClosedError, EdgespecError

__all__ = ["ESCAPE_MISSED", "RETURN_MISSED", "WINDOW_TOKENS", "EscapeDrafter", "EscapeState"]

# Tokens looked back on: some five lines of text. Eleven tokens of a text that the head lacks altogether are enough to
# be noticed, and chance moves the share by 3.2 % only (one deviation at a coverage of 93 %).
WINDOW_TOKENS = 64

# Sizes of a head may lose 6.9 % of the tokens they are judged by, where the whole head says 72 % of those (as with
# the default pair: vocabtrim.lost_allowed). The margin is three deviations of chance at that loss, 9.5 %:
# 3 * sqrt(0.069 * 0.931 / 64). So the head is left where it says less than 1 - 0.069 - 0.095 = 83.6 % of the window:
# 11 missing tokens or more. Text that this head was made for gets there by chance once in 230 windows (binomial),
# text of 98 % coverage never (once in 17 million).
ESCAPE_MISSED = 11

# And back where at most 6.9 % are missing: the loss that was allowed from the start. Between the two nothing changes,
# so that a text at the border does not make both drafters read it in turns.
RETURN_MISSED = 4


_NOT_ITS_TEXT = "the drafter's trimmed head lacks too many words of this text"


class EscapeDrafter:
    """Drafts with ``trimmed``, and with ``whole`` (None: with nobody) while the trimmed head lacks what is written.

    ``kept`` are the ids that the trimmed head can say. Both drafters load what they need at their first proposal, so
    a whole drafter that is never needed is never loaded. To the outside they are one source, of one kind.
    """

    kind = KIND

    def __init__(self, trimmed: Drafter, whole: Drafter | None, kept: Iterable[int]) -> None:
        self._trimmed = trimmed
        self._whole = whole
        self._kept = frozenset(int(token) for token in kept)

    def start(self, request: DraftRequest) -> EscapeState:
        whole = self._whole
        return EscapeState(
            self._trimmed.start(request), None if whole is None else lambda: whole.start(request), self._kept
        )

    def close(self) -> None:
        self._trimmed.close()
        if self._whole is not None:
            self._whole.close()


class EscapeState:
    """One session's drafters. ``escaped`` tells which of them speaks, ``failure`` why the whole one cannot.

    A whole drafter that fails (no memory, a file that is gone) is given up for the session; the trimmed one goes on
    once it can say the text again.
    """

    def __init__(
        self, trimmed: DraftState, start_whole: Callable[[], DraftState] | None, kept: frozenset[int]
    ) -> None:
        self._trimmed = trimmed
        self._start_whole = start_whole
        self._whole: DraftState | None = None
        self._kept = kept
        self._latest: DraftState = trimmed  # the one that made the latest proposal
        self._cancelled = False
        self._closed = False
        self.escaped = False
        self.failure: str | None = None

    @property
    def free(self) -> bool:
        return self._trimmed.free

    @property
    def silent_because(self) -> str | None:
        """Why nobody drafts the latest text; None while somebody can."""
        if self.escaped and self.failure is not None:
            return f"{_NOT_ITS_TEXT}, and the untrimmed drafter failed: {self.failure}"
        if self.escaped and self._start_whole is None:
            return f"{_NOT_ITS_TEXT}, and the untrimmed drafter is not in the store"
        speaking = self._whole if self.escaped else self._trimmed
        return speaking.silent_because if isinstance(speaking, ExplainsSilence) else None

    def lag(self, context: Context) -> int:
        speaking = self._speaking(context)
        return 0 if speaking is None else speaking.lag(context)

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        if self._closed:
            raise ClosedError("this drafter's state is closed")
        speaking = self._speaking(context)
        if speaking is None:
            return NOTHING
        self._latest = speaking
        if speaking is self._trimmed:
            return speaking.propose(context, depth, gate)
        try:
            return speaking.propose(context, depth, gate)
        except CancelledError:
            raise
        except EdgespecError as error:
            self._give_up(error)
            return NOTHING

    @property
    def forks(self) -> bool:
        latest = self._latest
        return isinstance(latest, DraftsBranches) and latest.forks

    def branch(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        """From whichever drafter made the latest proposal: another one would have to read the text first."""
        if self._closed:
            raise ClosedError("this drafter's state is closed")
        latest = self._latest
        if not isinstance(latest, DraftsBranches):
            return NOTHING
        try:
            return latest.branch(context, depth, gate)
        except CancelledError:
            raise
        except EdgespecError as error:
            if latest is self._trimmed:
                raise
            self._give_up(error)
            return NOTHING

    def _speaking(self, context: Context) -> DraftState | None:
        """Who may propose now: the trimmed drafter, the whole one, or nobody."""
        self._look(context)
        if not self.escaped:
            return self._trimmed
        if self._whole is None and self._start_whole is not None and self.failure is None:
            try:
                self._whole = self._start_whole()
            except EdgespecError as error:
                self._give_up(error)
                return None
            if self._cancelled:
                self._whole.cancel()
        return self._whole

    def _look(self, context: Context) -> None:
        """Decide by the last committed tokens; assumed ones may be wrong, and fewer than a window say too little."""
        end = context.committed_length
        if end < WINDOW_TOKENS:
            return
        kept = self._kept
        missed = sum(token not in kept for token in context.tokens[end - WINDOW_TOKENS : end])
        if missed >= ESCAPE_MISSED:
            self.escaped = True
        elif missed <= RETURN_MISSED:
            self.escaped = False

    def _give_up(self, error: EdgespecError) -> None:
        self.failure = error.message
        lost, self._whole, self._latest = self._whole, None, self._trimmed
        if lost is not None:
            lost.close()

    def observe(self, outcome: Outcome) -> None:
        self._latest.observe(outcome)

    def cancel(self) -> None:
        self._cancelled = True
        for state in self._started():
            state.cancel()

    def reset_cancel(self) -> None:
        self._cancelled = False
        for state in self._started():
            state.reset_cancel()

    def close(self) -> None:
        self._closed = True
        for state in self._started():
            state.close()

    def _started(self) -> list[DraftState]:
        return [self._trimmed] if self._whole is None else [self._trimmed, self._whole]
