"""What a depth policy implements: how far each source may draft in an answer, learned from every round."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass
from typing import Protocol

from edgespec.interfaces.drafting import ChainGate
from edgespec.interfaces.model import ALONE, Company
from edgespec.interfaces.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One decode round, as measured. Times in seconds; ``source`` spent the drafting time (None: no source did).

    ``alternative_count`` of the ``proposed`` tokens are not on a tree's longest path, whose length is ``depth``.
    ``accepted`` counts the path's accepted tokens; ``evaluated`` adds the first rejected one, if any.
    ``draft_forwards``: how often the drafter's weights were read, with ``draft_companions`` other answers on average.
    ``verify_s`` is the target's forward and the comparison, so the target was idle for ``round_s - verify_s``.
    ``waited_s``: how long the round's forwards waited for those of other answers, which no other time but ``round_s``
    has. ``overlapped``: a drafter ran in parallel with the target's forward; ``draft_s`` is then the drafting
    time of the proposal that arrived in this round. ``company``: the other answers whose rows the target's forward
    computed as well. ``experts``: how many the forward read, of all layers together; 0 for a model without, or where
    they are not counted.
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
    waited_s: float = 0.0
    draft_forwards: int = 0
    draft_companions: float = 0.0
    overlapped: bool = False
    alternative_count: int = 0
    company: Company = ALONE
    experts: int = 0

    @property
    def depth(self) -> int:
        """Length of the proposed chain."""
        return self.proposed - self.alternative_count

    @property
    def forwards_after_reading(self) -> int:
        """Drafter forwards that ``sync_s`` leaves out: reading includes the first one."""
        return self.draft_forwards - (self.sync_s > 0)

    @property
    def own_s(self) -> float:
        """Seconds of the round in which it did not wait for other answers."""
        return self.round_s - self.waited_s

    @property
    def target_idle_s(self) -> float:
        """Seconds of the round in which the target computed nothing."""
        return max(0.0, self.round_s - self.verify_s)


@dataclass(frozen=True, slots=True)
class Allowance:
    """How far a source may draft in the next round: ``depth`` tokens (0 turns it off), fewer if ``gate`` stops.

    A tree may have paths of that length, and ``nodes`` nodes (None: as many as its longest path may have).

    The source reads the last ``window`` tokens of the text (None: continues where it stopped reading), for at most
    ``patience_s`` seconds a round; the next round reads the rest. For each of the text's last ``hindsight`` tokens
    the source reports whether it would have guessed the token. ``chain``: how many tokens a source drafts that has to
    say before its one forward (None: until ``gate`` stops).
    """

    depth: int
    gate: ChainGate | None = None
    window: int | None = None
    patience_s: float = math.inf
    hindsight: int = 0
    nodes: int | None = None
    chain: int | None = None


class AnswerPolicy(Protocol):
    """How far each source may draft in one answer, round by round."""

    def began(self, prompt_s: float, first_s: float, company: Company = ALONE) -> None:
        """The prompt was read in ``prompt_s`` seconds, and a plain forward of ``first_s`` gave the first token.

        ``company``: the other answers in that forward.
        """

    def allow(self, source: str, lag: int = 0, unread: int = 0) -> Allowance:
        """What ``source`` may do in the next round; it lacks the last ``lag`` tokens and skipped ``unread``."""

    def allow_free(self, source: str) -> Allowance:
        """The same for a source whose proposals take negligible time. Any source may be named, known or not."""

    def prefers(self, source: str, free_gain: float) -> bool:
        """Whether a round with ``source`` gains more than free guesses alone; asked in every round.

        ``free_gain``: the tokens over a plain step that this round's free guesses gain, after what their rows cost.
        """

    def buys_load(self, source: str, lag: int = 0) -> bool:
        """Whether to begin loading ``source`` now, given that it will lack ``lag`` tokens of the text."""

    def learn(self, source: str, confidences: abc.Sequence[float], hits: abc.Sequence[bool]) -> None:
        """Learn which tokens of one proposal were right, in order up to the first wrong one.

        ``confidences`` is empty, or as long as ``hits``. Proposals that were only watched are reported here as well.
        """

    def learn_hindsight(self, source: str, hits: abc.Sequence[bool]) -> None:
        """Learn which of the text's last tokens ``source`` would have guessed."""

    def learn_alternatives(self, source: str, odds: abc.Sequence[float], hits: abc.Sequence[bool]) -> None:
        """Learn which alternative at one position of a chain was the target's token, whether proposed or not."""

    def record(self, record: RoundRecord) -> None:
        """Learn from the times of one round."""

    def end(self) -> None:
        """Note that the answer is complete or was given up."""

    def why_off(self, source: str) -> Reason | None:
        """Why ``source`` is off now; None if it may draft."""

    @property
    def plain_tokens_per_s(self) -> float | None:
        """Plain decoding's speed in this answer, from recent plain rounds; None before there were enough.

        Where times by context are known, those of other contexts count as if they were of this answer's.
        """


class DepthPolicy(Protocol):
    """What the answers of one engine share; ``answer`` returns the policy of a new answer. Thread-safe."""

    def answer(
        self, *, prompt_tokens: int, most: int | None = None, sampled: bool = False, hindsight: bool = True
    ) -> AnswerPolicy:
        """For an answer of at most ``most`` tokens (None: no limit); ``sampled``: its tokens are drawn at random.

        ``hindsight``: which tokens of the text a source would have guessed tells how often it is accepted.
        """
