"""How much slower target and drafter are while both compute."""

from __future__ import annotations

from dataclasses import dataclass

# How much more two sides may get done at once than busy processors could: threads also wait for one another, a few
# percent of their time (1.04 on two quiet cores, both sides on our kernels). Beside two programs that keep such cores
# busy it comes out as 1.3 to 1.7.
_WAITING = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How many times slower each side is while both run at once."""

    target_factor: float = 1.0
    drafter_factor: float = 1.0

    def __post_init__(self) -> None:
        # A measurement may say 0.99 where two devices do not touch each other: that is noise, and it is 1.
        if not (0.9 <= self.target_factor < float("inf") and 0.9 <= self.drafter_factor < float("inf")):
            raise ValueError("running at once makes nothing faster")

    def worse(self, other: Contention | None) -> Contention:
        """Of two measurements of one pair of devices the larger factors; this one where there is no other."""
        if other is None:
            return self
        return Contention(
            target_factor=max(self.target_factor, other.target_factor),
            drafter_factor=max(self.drafter_factor, other.drafter_factor),
        )

    def on_shared_processors(self, target_threads: int, drafter_threads: int, processors: int) -> Contention:
        """No less than two sides with so many threads can cost each other on so many processors.

        A thread alone keeps a processor busy; with both at work target_threads / target_factor +
        drafter_threads / drafter_factor of such work is done, and there are no more processors than that. A
        measurement that says so was made beside other programs, which had made both slow alone already: both factors
        are raised alike.
        """
        done = target_threads / self.target_factor + drafter_threads / self.drafter_factor
        excess = done / (_WAITING * processors)
        if excess <= 1.0:
            return self
        return Contention(target_factor=self.target_factor * excess, drafter_factor=self.drafter_factor * excess)
