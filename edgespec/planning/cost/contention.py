"""How much slower target and drafter are while both compute."""

from __future__ import annotations

from dataclasses import dataclass

# How much more work two sides may report in parallel than busy processors could do: threads also wait a few percent
# of the time (1.04 on two quiet cores, both on our kernels). With two other busy programs the ratio is 1.3 to 1.7.
_WAITING = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How many times slower each side is while both run in parallel."""

    target_factor: float = 1.0
    drafter_factor: float = 1.0

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

    def on_shared_processors(self, target_threads: int, drafter_threads: int, processors: int) -> Contention:
        """Raise the factors to at least what the shared processors imply.

        A thread alone keeps a processor busy. With both sides running, target_threads / target_factor +
        drafter_threads / drafter_factor processors' work is done, which cannot exceed ``processors``. A measurement
        above that was made while other programs slowed both sides alone: both factors are raised by the same ratio.
        """
        done = target_threads / self.target_factor + drafter_threads / self.drafter_factor
        excess = done / (_WAITING * processors)
        if excess <= 1.0:
            return self
        return Contention(target_factor=self.target_factor * excess, drafter_factor=self.drafter_factor * excess)
