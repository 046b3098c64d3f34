"""A drafter with a trimmed head, and the untrimmed drafter for text that its head does not cover."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from edgespec.drafters.head_coverage import HeadCoverage
from edgespec.errors import CancelledError, ClosedError, EdgespecError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, ChainGate, Drafter, DraftRequest, DraftState, Outcome, Proposal

_Answer = TypeVar("_Answer")


class TrimmedHeadDrafter:
    """Drafts with ``trimmed``, and with ``whole`` (None: not at all) while the trimmed head lacks the text's tokens.

    ``kept`` are the ids that the trimmed head scores. Each drafter is loaded when first needed. Both have one name
    in proposals and statistics.
    """

    def __init__(self, trimmed: Drafter, whole: Drafter | None, kept: Iterable[int]) -> None:
        self._trimmed = trimmed
        self.kind = trimmed.kind
        self._whole = whole
        self._kept = frozenset(int(token) for token in kept)

    def start(self, request: DraftRequest) -> TrimmedHeadState:
        whole = self._whole
        start = partial(_Missing, "is not in the store") if whole is None else partial(whole.start, request)
        return TrimmedHeadState(self._trimmed.start(request), start, self._kept)

    def close(self) -> None:
        self._trimmed.close()
        if self._whole is not None:
            self._whole.close()


class _Missing(DraftState):
    """A whole drafter that cannot draft."""

    def __init__(self, why: str) -> None:
        self._why = why

    @property
    def silent_because(self) -> str:
        return f"the drafter's trimmed head lacks too many words of this text, and the untrimmed drafter {self._why}"


# A whole drafter that has not been needed.
_NOT_STARTED = DraftState()


class TrimmedHeadState(DraftState):
    """One session's drafters. ``escaped``: the whole drafter drafts.

    A whole drafter that fails (no memory, a missing file) is given up for the session; the trimmed drafter continues
    once its head covers the text again.
    """

    def __init__(self, trimmed: DraftState, start_whole: Callable[[], DraftState], kept: frozenset[int]) -> None:
        self._trimmed, self._whole, self._start_whole = trimmed, _NOT_STARTED, start_whole
        self._latest = trimmed  # was asked for the latest proposal
        self._watch = HeadCoverage(kept)
        self._cancelled = self._closed = False

    @property
    def parts(self) -> Sequence[DraftState]:
        return self._trimmed, self._whole

    @property
    def escaped(self) -> bool:
        return self._watch.escaped

    @property
    def _current(self) -> DraftState:
        return self._whole if self.escaped else self._trimmed

    @property
    def silent_because(self) -> str | None:
        return self._current.silent_because

    @property
    def ready(self) -> bool:
        return self._current.ready

    def load(self) -> None:
        self._current.load()

    def lag(self, context: Context) -> int:
        return self._follow(context).lag(context)

    def unread(self, context: Context) -> int:
        return self._follow(context).unread(context)

    def read_ahead(self, context: Context) -> list[Future[None]]:
        return self._follow(context).read_ahead(context)

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        own = self._latest = self._follow(context)
        return self._or_give_up(own, lambda: own.propose(context, depth, gate)) or NOTHING

    def observe(self, outcome: Outcome) -> None:
        self._latest.observe(outcome)

    def _follow(self, context: Context) -> DraftState:
        """The drafter for this text. The whole one is started when it is first needed."""
        if self._watch.look(context) and self._whole is _NOT_STARTED:
            self._whole = self._or_give_up(self._whole, self._start_whole) or self._whole
            if self._cancelled:
                self._whole.cancel()
        return self._current

    def _or_give_up(self, state: DraftState, ask: Callable[[], _Answer]) -> _Answer | None:
        """What a drafter answers; None if it was the whole one and has failed."""
        if self._closed:
            raise ClosedError("this drafter's state is closed")
        try:
            return ask()
        except EdgespecError as error:
            if state is self._trimmed or isinstance(error, CancelledError):
                raise
            state.close()
            self._whole = self._latest = _Missing(f"failed: {error.message}")
            return None

    def cancel(self) -> None:
        self._cancelled = True
        super().cancel()

    def reset_cancel(self) -> None:
        self._cancelled = False
        super().reset_cancel()

    def close(self) -> None:
        self._closed = True
        super().close()
