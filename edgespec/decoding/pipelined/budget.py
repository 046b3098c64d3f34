"""How much a pipelined round verifies and drafts, and how long it waits: the protocol of the rules."""

from __future__ import annotations

from typing import Protocol

from edgespec.interfaces.policy import RoundRecord


class Budget(Protocol):
    """How much a round verifies and drafts, and how long it waits for a late drafter."""

    @property
    def overlaps_prefill(self) -> bool:
        """Whether the drafter reads the prompt while the target does: not if that delays the first token."""

    def window(self, pending: int) -> int:
        """How many of the ``pending`` proposed tokens to verify now."""

    def draft_tokens(self, window: int) -> int:
        """How many tokens the drafter may add while the target verifies ``window``."""

    def patience_s(self) -> float:
        """Seconds to wait for the drafter once the target is done."""

    def reuses(self) -> bool:
        """Whether tokens drafted behind a rejected token are proposed again where they continue the correction."""

    def learn_reuse(self, well: bool) -> None:
        """Learn whether the first token that was proposed again was accepted."""

    def record(self, record: RoundRecord) -> None:
        """Learn from a round: how many compared tokens were accepted, and how long each side's forward took."""
