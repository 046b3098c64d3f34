"""A drafter with a trimmed head, and the untrimmed drafter for text that its head does not cover."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future

from edgespec.drafters.head_coverage import HeadCoverage
from edgespec.drafters.model import KIND
from edgespec.errors import CancelledError, ClosedError, EdgespecError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import (
    NOTHING,
    ChainGate,
    Drafter,
    DraftRequest,
    DraftsBranches,
    DraftState,
    ExplainsSilence,
    LoadsAtLeisure,
    Outcome,
    Proposal,
    ReadsAhead,
    SkipsText,
)

_NOT_ITS_TEXT = "the drafter's trimmed head lacks too many words of this text"


class TrimmedHeadDrafter:
    """Drafts with ``trimmed``, and with ``whole`` (None: not at all) while the trimmed head lacks the text's tokens.

    ``kept`` are the ids that the trimmed head scores. Each drafter is loaded when first needed. Both proposals and
    statistics count as one source, of one kind.
    """

    kind = KIND

    def __init__(self, trimmed: Drafter, whole: Drafter | None, kept: Iterable[int]) -> None:
        self._trimmed = trimmed
        self._whole = whole
        self._kept = frozenset(int(token) for token in kept)

    def start(self, request: DraftRequest) -> TrimmedHeadState:
        whole = self._whole
        return TrimmedHeadState(
            self._trimmed.start(request), None if whole is None else lambda: whole.start(request), self._kept
        )

    def close(self) -> None:
        self._trimmed.close()
        if self._whole is not None:
            self._whole.close()


class TrimmedHeadState:
    """One session's drafters. ``escaped``: the whole drafter drafts; ``failure``: why it cannot.

    A whole drafter that fails (no memory, a missing file) is given up for the session; the trimmed drafter continues
    once its head covers the text again.
    """

    def __init__(
        self, trimmed: DraftState, start_whole: Callable[[], DraftState] | None, kept: frozenset[int]
    ) -> None:
        self._trimmed = trimmed
        self._start_whole = start_whole
        self._whole: DraftState | None = None
        self._watch = HeadCoverage(kept)
        self._latest: DraftState = trimmed  # made the latest proposal
        self._cancelled = False
        self._closed = False
        self.failure: str | None = None

    @property
    def escaped(self) -> bool:
        return self._watch.escaped

    @property
    def free(self) -> bool:
        return self._trimmed.free

    @property
    def silent_because(self) -> str | None:
        """Why no drafter can draft the latest text; None if one may."""
        if self.escaped and self.failure is not None:
            return f"{_NOT_ITS_TEXT}, and the untrimmed drafter failed: {self.failure}"
        if self.escaped and self._start_whole is None:
            return f"{_NOT_ITS_TEXT}, and the untrimmed drafter is not in the store"
        speaking = self._whole if self.escaped else self._trimmed
        return speaking.silent_because if isinstance(speaking, ExplainsSilence) else None

    @property
    def ready(self) -> bool:
        """Whether there is no loading to wait for: true if the current drafter is ready or there is none."""
        speaking = self._whole if self.escaped else self._trimmed
        try:
            return not isinstance(speaking, LoadsAtLeisure) or speaking.ready
        except EdgespecError as error:
            if speaking is self._trimmed:
                raise
            self._give_up(error)
            return True

    def load(self) -> None:
        """Begin to load the current drafter."""
        speaking = self._whole if self.escaped else self._trimmed
        if isinstance(speaking, LoadsAtLeisure):
            speaking.load()

    def lag(self, context: Context) -> int:
        speaking = self._speaking(context)
        return 0 if speaking is None else speaking.lag(context)

    def unread(self, context: Context) -> int:
        speaking = self._speaking(context)
        return speaking.unread(context) if isinstance(speaking, SkipsText) else 0

    def read_ahead(self, context: Context) -> Future[None] | None:
        speaking = self._speaking(context)
        return speaking.read_ahead(context) if isinstance(speaking, ReadsAhead) else None

    def stop_reading(self) -> None:
        for state in (self._trimmed, self._whole):
            if isinstance(state, ReadsAhead):
                state.stop_reading()

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
        """From the drafter of the latest proposal: the other one would have to read the text first."""
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
        """The drafter that may propose now: the trimmed or the whole one, or None."""
        if not self._watch.look(context):
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
