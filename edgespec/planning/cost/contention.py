"""How much slower target and drafter are while both compute."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How many times slower each side is while both run in parallel.

    ``busy`` is the share of the processors that other programs used during the measurement, if too large.
    """

    target_factor: float = 1.0
    drafter_factor: float = 1.0
    busy: float = 0.0

    def __post_init__(self) -> None:
        # A measurement on two independent devices may give 0.99: that is noise around 1.
        if not (0.9 <= self.target_factor < float("inf") and 0.9 <= self.drafter_factor < float("inf")):
            raise ValueError("running in parallel makes neither side faster")

    def worse(self, other: Contention | None) -> Contention:
        """The larger factors of two measurements of one pair of devices; this one if ``other`` is None."""
        if other is None:
            return self
        return Contention(
            target_factor=max(self.target_factor, other.target_factor),
            drafter_factor=max(self.drafter_factor, other.drafter_factor),
        )
