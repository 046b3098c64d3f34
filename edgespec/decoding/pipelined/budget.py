"""How much a pipelined round verifies, drafts, waits and tries: what is asked."""

from __future__ import annotations

from typing import Literal, Protocol

from edgespec.interfaces.policy import RoundRecord


class Budget(Protocol):
    """How much a round verifies and drafts, and how long it waits for a drafter that is late."""

    @property
    def overlaps_prefill(self) -> bool:
        """Whether the drafter reads the prompt while the target does: not where it would delay the first token."""

    def window(self, pending: int) -> int:
        """How many of the ``pending`` tokens put forward to verify now."""

    def draft_tokens(self, window: int) -> int:
        """How many tokens the drafter may add while the target verifies ``window``."""

    def patience_s(self) -> float:
        """Seconds to wait for the drafter once the target is done."""

    def reuses(self) -> bool:
        """Whether what was drafted behind a rejected token is put forward again where it continues the right one."""

    def branches(self, forks: bool) -> int:
        """How many likely corrections to go on from while the target is still at work.

        ``forks``: the drafter's own chain stays in its cache meanwhile. Without, it is read again afterwards.
        """

    def learn(self, what: Literal["again", "branch", "correction"], well: bool) -> None:
        """Whether the first token that was put forward again, or of a branch that was taken, stood; or whether a
        correction that came while there were branches was one of theirs.
        """

    def record(self, record: RoundRecord) -> None:
        """Learn from a round: what stood of what was compared, and how long a forward of either side takes."""
