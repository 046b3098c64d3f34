"""Counters of one answer. Rates are derived, never stored beside their terms."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from edgespec.interfaces.policy import RoundRecord


@dataclass(slots=True, kw_only=True)
class DecodeStats:
    """What one answer took. The token sampled from the prefill belongs to no round.

    ``cached_tokens`` of the ``prompt_tokens`` were still in the cache. ``proposed`` counts siblings too. ``ttft_s``
    runs from the request to the first token, ``decode_s`` from there to the last; both are None until there is such
    a token.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    emitted_tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    evaluated: int = 0
    accepted: int = 0
    invalid_proposals: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    ttft_s: float | None = None
    decode_s: float | None = None
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    rounds_by_source: Counter[str] = field(default_factory=Counter)

    def add_round(self, record: RoundRecord) -> None:
        """Count one round; its emitted tokens are counted as they are emitted."""
        self.rounds += 1
        self.proposed += record.proposed
        self.evaluated += record.evaluated
        self.accepted += record.accepted
        self.invalid_proposals += record.invalid
        self.draft_s += record.draft_s
        self.verify_s += record.verify_s
        if record.proposed:
            self.accepted_lengths[record.accepted] += 1
        if record.source is not None:
            self.rounds_by_source[record.source] += 1

    @property
    def tokens_per_round(self) -> float | None:
        """Emitted tokens a round, corrections and bonuses included."""
        return (self.emitted_tokens - 1) / self.rounds if self.rounds else None

    @property
    def accepted_per_proposed(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        return (self.emitted_tokens - 1) / self.decode_s if self.decode_s and self.emitted_tokens > 1 else None

    @property
    def target_idle_s(self) -> float | None:
        """Seconds of decoding in which the target computed nothing."""
        return None if self.decode_s is None else max(0.0, self.decode_s - self.verify_s)

    @property
    def drafter_idle_s(self) -> float | None:
        """Seconds of decoding in which no drafter was at work: beside the target, or in turns with it."""
        return None if self.decode_s is None else max(0.0, self.decode_s - self.draft_s)

    def as_json(self) -> dict[str, Any]:
        """The shape of CLI.md's ``stats`` object."""
        longest = max(self.accepted_lengths, default=-1)
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "emitted_tokens": self.emitted_tokens,
            "rounds": self.rounds,
            "proposed": self.proposed,
            "evaluated": self.evaluated,
            "accepted": self.accepted,
            "invalid_proposals": self.invalid_proposals,
            "tokens_per_round": self.tokens_per_round,
            "accepted_per_proposed": self.accepted_per_proposed,
            "accepted_lengths": [self.accepted_lengths[length] for length in range(longest + 1)],
            "rounds_by_source": dict(self.rounds_by_source),
            "ttft_s": self.ttft_s,
            "decode_s": self.decode_s,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "target_idle_s": self.target_idle_s,
            "drafter_idle_s": self.drafter_idle_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
        }
