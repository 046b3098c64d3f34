"""Typed, frozen events of a Session that generates."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, TypeAlias

from edgespec.decoding.logprobs import TokenLogprob
from edgespec.decoding.round_base import DecodeStats
from edgespec.decoding.sampling import Sampling
from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.choice.plan import Plan
from edgespec.text.conversation.pieces import ToolCall

FinishReason = Literal["stop", "length", "cancelled"]


def warn_old(old: str, new: str) -> None:
    """Warn the caller's caller that ``old`` goes in the next version. ``new`` is what to use in its place."""
    warnings.warn(f"{old} goes in the next version of edgespec: use {new}", DeprecationWarning, stacklevel=3)


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer. ``text`` has the characters that came with it; ``id`` is its number in the vocabulary.

    The characters of a call, and those whose bytes are incomplete, are not there: the text is then empty or shorter.
    ``guessed_by`` is the drafter that guessed the token (``model``, ``lookup``); None for the target's own.
    ``logprob`` is the natural logarithm of the probability that the target gave it, None unless ``generate`` was
    asked for ``logprobs``. The probability is from the softmax over the target's raw scores: before bias, penalties,
    temperature and truncation. In an answer that has a form the softmax is over the tokens that the form allows, and
    behind a healed prompt that of the first token is over those that agree with the prompt's end.
    ``top`` has as many tokens as ``logprobs`` asked for, the likeliest at this position: each with its whole text,
    its id and its ``logprob``, the likeliest first, ties by lowest id. Half of a character is U+FFFD in their texts.
    The first ``held`` bytes of the token are the end of the prompt, which was healed, and in no text.
    """

    text: str
    id: int
    guessed_by: str | None = None
    logprob: float | None = None
    top: tuple[Token, ...] = ()
    held: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer: complete characters only, never taken back. ``tokens`` are those that arrived with it.

    Where an answer is cut within a character, the text ends before it.

    Bytes of the last token may be held back, so text can lag behind its tokens; the rest at the end of the answer
    comes without tokens. Where thinking ends between the tokens of one round, the tokens are all in the first text.
    The text of calls is left out. ``reasoning`` is what the text says of the model's thinking, without the marks and
    the blanks around them; None if the text is the answer itself.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    reasoning: str | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Goes in the next version: ``id`` of each of ``tokens``."""
        warn_old("Text.token_ids", "Text.tokens")
        return tuple(each.id for each in self.tokens)

    @property
    def guessed_by(self) -> tuple[str | None, ...]:
        """Goes in the next version: ``guessed_by`` of each of ``tokens``."""
        warn_old("Text.guessed_by", "Text.tokens")
        return tuple(each.guessed_by for each in self.tokens)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Goes in the next version: characters in ``text`` of each of ``tokens``."""
        warn_old("Text.lengths", "Text.tokens")
        return tuple(len(each.text) for each in self.tokens)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Goes in the next version: ``logprob`` and ``top`` of each of ``tokens``; empty if not asked for."""
        warn_old("Text.logprobs", "Text.tokens")
        return tuple(
            TokenLogprob(each.id, each.logprob, tuple((own.id, own.logprob or 0.0) for own in each.top))
            for each in self.tokens
            if each.logprob is not None
        )


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

    text: str

    @property
    def message(self) -> str:
        """Goes in the next version: ``text``."""
        warn_old("Notice.message", "Notice.text")
        return self.text


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model reads of a call that ``Session.run_tools`` made. ``text`` is the function's result, or an error.

    ``failed``: the arguments did not fit the function's schema, or the function raised.
    """

    call: ToolCall
    text: str
    failed: bool


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
