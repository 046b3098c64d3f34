"""Gates of chains: two as one, and asking one about a draft that was made in one go."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.interfaces.drafting import ChainGate


def admitted(gate: ChainGate, confidences: Sequence[float]) -> int:
    """How many leading tokens ``gate`` lets through; past the first one it stops it is not asked.

    ``confidences`` are those of the drafted tokens, from 0 to 1. There is no distribution, so never an entropy.
    """
    return next((index for index, own in enumerate(confidences) if not gate.admits(own, None)), len(confidences))


def both(first: ChainGate | None, second: ChainGate | None) -> ChainGate | None:
    """A gate that lets through what both do; the second is asked about what the first lets through."""
    if first is None or second is None:
        return first or second
    return _Both(first, second)


class _Both:
    def __init__(self, first: ChainGate, second: ChainGate) -> None:
        self._first, self._second = first, second

    @property
    def needs_entropy(self) -> bool:
        return self._first.needs_entropy or self._second.needs_entropy

    def admits(self, confidence: float, entropy: float | None) -> bool:
        return self._first.admits(confidence, entropy) and self._second.admits(confidence, entropy)

    def goes_on(self) -> bool:
        return self._first.goes_on() and self._second.goes_on()
