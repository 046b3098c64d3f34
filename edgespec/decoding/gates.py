"""What a policy tells whoever drafts for it, token by token: whether to go on, and what to put forward beside.

Imported from ``contracts`` by all but that module.
"""

from __future__ import annotations

from collections import abc
from typing import Protocol, runtime_checkable

__all__ = ["ChainGate", "SiblingGate"]


class ChainGate(Protocol):
    """Where a chain ends early: asked for each token of one proposal in turn, by whoever drafts it.

    Always before the token is chosen, from what the drafter's distribution looks like: whether a token is put forward
    must never depend on the token itself, or the text would no longer be the target's.
    """

    @property
    def needs_entropy(self) -> bool:
        """Whether ``admits`` wants to know the entropy, which takes another pass over the scores."""

    def admits(self, confidence: float, entropy: float | None) -> bool:
        """Whether the next token is put forward. ``confidence``: highest probability; ``entropy`` in nats."""

    def goes_on(self) -> bool:
        """Whether one more forward of the drafter is worth its time, before it is spent."""


@runtime_checkable
class SiblingGate(ChainGate, Protocol):
    """A gate that also knows whether tokens put forward beside those of the chain it let through are worth it."""

    def siblings(self, odds: abc.Sequence[abc.Sequence[float]], most: int) -> abc.Sequence[tuple[int, int]]:
        """At most ``most`` pairs (i, j), ascending: the j-th alternative of the chain's token i is worth verifying.

        ``odds[i][j]`` is what the drafter thinks of it, best first; there is an entry for each token let through.
        """
