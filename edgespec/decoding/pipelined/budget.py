"""How much a pipelined round verifies, drafts, waits and tries: what is asked."""

from __future__ import annotations

from typing import Protocol

from edgespec.interfaces.policy import RoundRecord


class Budget(Protocol):
    """How much a round verifies and drafts, and how long it waits for a drafter that is late."""

    def window(self, confidences: tuple[float | None, ...]) -> int:
        """How many of the tokens put forward to verify now, given how sure the drafter was of each."""

    def drafts_during_prefill(self) -> bool:
        """Whether the drafter reads the prompt while the target does: not where it would delay the first token."""

    def draft_tokens(self, pending: int, window: int) -> int:
        """How many tokens the drafter may add to those ``pending`` while the target verifies ``window`` of them."""

    def patience_s(self) -> float:
        """Seconds to wait for the drafter once the target is done."""

    def reuses(self) -> bool:
        """Whether what was drafted behind a rejected token is put forward again where it continues the right one."""

    def reused(self, stood: bool) -> None:
        """Whether the first token that was put forward again stood."""

    def branches(self, forks: bool) -> int:
        """How many likely corrections to go on from while the target is still at work.

        ``forks``: the drafter's own chain stays in its cache meanwhile. Without, it is read again afterwards.
        """

    def branched(self, met: bool) -> None:
        """Whether a correction that came while there were branches was one of theirs."""

    def branch_stood(self, stood: bool) -> None:
        """Whether the first token of a branch that was taken stood."""

    def record(self, record: RoundRecord) -> None:
        """Learn from a round."""
