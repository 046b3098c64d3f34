"""The jobs of the drafter's thread, and the tokens that result."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Event
from typing import Protocol, TypeVar

from edgespec.interfaces.drafting import Proposal
from edgespec.interfaces.rows import Distribution

T = TypeVar("T")


class Submit(Protocol):
    """Queues a job on the drafter's thread, which runs jobs sequentially."""

    def __call__(self, job: Callable[[], T], /) -> Future[T]: ...


@dataclass(frozen=True, slots=True)
class Drafted:
    """The valid part of a drafter's proposal, the number of malformed tokens, and the drafting time in seconds."""

    proposal: Proposal
    invalid: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Flight:
    """A proposal being drafted to follow ``tokens``; ``target_done`` tells its drafter to stop."""

    tokens: list[int]
    future: Future[Drafted]
    target_done: Event


class UntilDone:
    """The gate of a flight: admits every token until the target is done."""

    needs_entropy = False

    def __init__(self, done: Event) -> None:
        self._done = done

    def admits(self, confidence: float, entropy: float | None) -> bool:
        return True

    def goes_on(self) -> bool:
        return not self._done.is_set()


@dataclass(slots=True)
class Piece:
    """One proposal, and how many of its tokens were verified. ``again``: they were drafted for another position."""

    proposal: Proposal
    evaluated: int = 0
    accepted: int = 0
    again: bool = False


@dataclass(frozen=True, slots=True)
class PutForward:
    """A proposed token: its proposal and its position in it."""

    token: int
    piece: Piece
    position: int

    @property
    def source(self) -> str:
        """The drafter that proposed the token."""
        return self.piece.proposal.source_of(self.position)

    @property
    def probs(self) -> Distribution | None:
        own = self.piece.proposal.draft_probs
        return own[self.position] if own is not None and self.position < len(own) else None


def put_forward(proposal: Proposal, *, after: int = 0, again: bool = False) -> list[PutForward]:
    """The tokens of ``proposal`` from position ``after`` on."""
    piece = Piece(proposal, again=again)
    return [
        PutForward(int(token), piece, position) for position, token in enumerate(proposal.tokens) if position >= after
    ]
