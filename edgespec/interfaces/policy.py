"""What a depth policy implements: for each answer, how far each source may draft; learned from every round."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass
from typing import Protocol

from edgespec.interfaces.drafting import ChainGate
from edgespec.interfaces.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One decode round, as measured. Times in seconds; ``source`` spent the drafting time (None: nobody did).

    ``sibling_count`` of the ``proposed`` tokens lie off the longest path of a tree, whose length is ``depth``.
    ``accepted`` are those of the path that stood; ``evaluated`` these, and one more if there were others to follow.
    ``draft_forwards``: how often the drafter's weights were read. ``verify_s`` is the target's forward and the
    comparison, so the target stood still for ``round_s - verify_s``. ``overlapped``: a drafter was at work beside the
    target's forward; ``draft_s`` is then what it took for the proposal that this round took in.
    """

    width: int
    context_length: int
    proposed: int
    evaluated: int
    accepted: int
    invalid: int
    emitted: int
    source: str | None
    draft_s: float
    sync_s: float
    verify_s: float
    round_s: float
    draft_forwards: int = 0
    overlapped: bool = False
    sibling_count: int = 0

    @property
    def depth(self) -> int:
        """Tokens put forward one after another."""
        return self.proposed - self.sibling_count

    @property
    def target_idle_s(self) -> float:
        """Seconds of the round in which the target computed nothing."""
        return max(0.0, self.round_s - self.verify_s)


@dataclass(frozen=True, slots=True)
class Allowance:
    """How far a source may draft for the next round: ``depth`` tokens (0 turns it off), fewer if ``gate`` ends it.

    It reads the last ``window`` tokens of the text (None: goes on where it left off), which may take ``patience_s``:
    reading that takes longer is left off, and gone on with in the next round. Of the last ``hindsight`` tokens of the
    text it says which it would have guessed.
    """

    depth: int
    gate: ChainGate | None = None
    window: int | None = None
    patience_s: float = math.inf
    hindsight: int = 0


class AnswerPolicy(Protocol):
    """How far each source may draft in one answer, round by round."""

    def began(self, prompt_s: float, first_s: float) -> None:
        """The prompt was read in ``prompt_s`` seconds, and a plain forward of ``first_s`` gave the first token."""

    def allow(self, source: str, lag: int = 0, unread: int = 0) -> Allowance:
        """What ``source`` may do for the next round: it is ``lag`` tokens behind the text, and skipped ``unread``."""

    def buys_load(self, source: str, lag: int = 0) -> bool:
        """Whether loading ``source``, which is then ``lag`` tokens behind, is worth beginning now."""

    def learn(self, source: str, confidences: abc.Sequence[float], hits: abc.Sequence[bool]) -> None:
        """What became of the tokens of one proposal, in order up to the first wrong one.

        ``confidences`` is empty, or as long as ``hits``. Also told of proposals that were only watched.
        """

    def learn_hindsight(self, source: str, hits: abc.Sequence[bool]) -> None:
        """Which of the text's last tokens ``source`` would have guessed, had it been asked."""

    def learn_siblings(self, source: str, odds: abc.Sequence[float], hits: abc.Sequence[bool]) -> None:
        """Which of the alternatives at one place of a chain was the target's token; put forward or not."""

    def record(self, record: RoundRecord) -> None:
        """Learn from the times of one round."""

    def end(self) -> None:
        """The answer is complete, or was given up."""

    def why_off(self, source: str) -> Reason | None:
        """Why ``source`` is off at present; None while it drafts, or may."""


class DepthPolicy(Protocol):
    """What the answers of one engine share; ``answer`` begins one. Thread-safe."""

    def answer(self, *, prompt_tokens: int, most: int | None = None, sampled: bool = False) -> AnswerPolicy:
        """For an answer of at most ``most`` tokens (None: as many as come), drawn at random where ``sampled``."""

    @property
    def plain_tokens_per_s(self) -> float | None:
        """Plain decoding's speed as measured over recent plain rounds; None before there were enough."""
