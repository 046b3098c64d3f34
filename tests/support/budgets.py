"""A budget of a pipelined round with constant answers."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.interfaces.policy import RoundRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedBudget:
    """Always the same budget: verify up to ``most`` tokens, draft up to ``ahead``, wait ``patience`` s, reuse or not.

    ``overlaps_prefill``: the drafter reads the prompt while the target does.
    """

    most: int
    ahead: int
    patience: float = 1e9
    reuse: bool = False
    overlaps_prefill: bool = False

    def window(self, pending: int) -> int:
        return self.most

    def draft_tokens(self, window: int) -> int:
        return self.ahead

    def patience_s(self) -> float:
        return self.patience

    def reuses(self) -> bool:
        return self.reuse

    def learn_reuse(self, well: bool) -> None:
        """Learn nothing."""

    def record(self, record: RoundRecord) -> None:
        """Learn nothing."""
