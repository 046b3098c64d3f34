"""What a Session tells while it generates, and an Engine while it loads: frozen, typed events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from edgespec.decoding.round_base import DecodeStats
from edgespec.decoding.sampling import Sampling
from edgespec.files.progress import ProgressEvent
from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.choice.plan import Plan

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer: complete characters only, never taken back. ``token_ids`` arrived with it.

    ``guessed_by`` has an entry for each of them: the drafter that guessed it (``model``, ``lookup``), or None where
    it is the target's own. ``lengths`` tells how many characters of the text came with each. Bytes of the last token
    may still be held back, so the text can end before its tokens do, and what is left at the end comes with none.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    guessed_by: tuple[str | None, ...] = ()
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Round:
    """One decode round, as measured."""

    record: RoundRecord


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person should know: old turns were dropped, a drafter was lost."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The answer is complete: its whole text, ids (end-of-sequence included), counters, plan and sampling.

    ``speculation_off`` says why no drafter was used, where that is the case, and ``speculation_off_code`` is its code
    (interfaces/reasons.py); ``plain_tokens_per_s`` is the measured plain speed, None if it was not timed.
    ``reasoning`` is the thinking in the text, without its marks; None where there is none.
    """

    finish_reason: FinishReason
    text: str
    token_ids: tuple[int, ...]
    stats: DecodeStats
    plan: Plan
    sampling: Sampling
    speculation_off: str | None = None
    speculation_off_code: str | None = None
    plain_tokens_per_s: float | None = None
    reasoning: str | None = None

    @property
    def same_text(self) -> bool:
        """False under the rejection rule with sampling: the target's distribution, but not a seed's text."""
        return self.plan.mode == "plain" or self.sampling.rule == "keyed" or self.sampling.greedy


Event: TypeAlias = Text | Round | Notice | Done


@dataclass(frozen=True, slots=True)
class Loading:
    """A step of loading; ``fraction`` (0 to 1) is None where it is not known."""

    stage: str
    fraction: float | None = None


LoadProgress: TypeAlias = Callable[[Loading | ProgressEvent], None]
