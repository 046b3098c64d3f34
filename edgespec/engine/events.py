"""Typed, frozen events of a Session that generates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from edgespec.decoding.logprobs import TokenLogprob
from edgespec.decoding.round_base import DecodeStats
from edgespec.decoding.sampling import Sampling
from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.choice.plan import Plan
from edgespec.text.conversation.pieces import ToolCall

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer: complete characters only, never taken back. ``token_ids`` arrived with the text.

    ``guessed_by`` has an entry for each token: the drafter that guessed it (``model``, ``lookup``), or None for the
    target's own. ``lengths`` has the number of characters that came with each token. Bytes of the last token may be
    held back, so text can lag behind its tokens; the rest at the end of the answer comes without tokens. ``logprobs``
    has an entry for each token; empty unless ``generate`` was asked for them. The text of calls is left out: its
    tokens have no characters. ``reasoning`` is what the text says of the model's thinking, without the marks and
    the blanks around them; None if the text is the answer itself.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    guessed_by: tuple[str | None, ...] = ()
    lengths: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One decode round, as measured."""

    record: RoundRecord


@dataclass(frozen=True, slots=True)
class Reading:
    """The prompt is being read: ``tokens`` are read of the ``of`` that were not in the cache.

    One comes before each part of at most 256 tokens; the text begins after the last part. None comes for a prompt
    that is in the cache.
    """

    tokens: int
    of: int


@dataclass(frozen=True, slots=True)
class Notice:
    """A sentence for the user, for example that old turns were dropped or a drafter was lost."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The answer is complete: its whole text, ids (end-of-sequence included), counters, plan and sampling.

    ``speculation_off`` says why no drafter was used, None if one was; ``speculation_off_code`` is the reason's code
    (interfaces/reasons.py). ``plain_tokens_per_s`` is the measured plain speed; None if it was not timed.
    ``content`` is the text without thinking and calls. ``reasoning`` is the thinking in the text, without its marks;
    None without thinking. ``tool_calls`` are the calls in the text, which has their marks too. ``stop_text`` is the
    stop text at which the answer ends; None if it ends at none.
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
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    stop_text: str | None = None

    @property
    def same_text(self) -> bool:
        """Whether plain decoding would give this text. False when sampling by the rejection rule."""
        return self.plan.mode == "plain" or self.sampling.rule == "keyed" or self.sampling.greedy


Event: TypeAlias = Reading | Text | ToolCall | Round | Notice | Done
