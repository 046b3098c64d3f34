"""A fitting drafter that is not on this machine: an application may offer its user to fetch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from edgespec.interfaces.model import ALL_KEPT, ModelFacts
from edgespec.store.families import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOffer:
    """A known drafter for ``target`` (the target's hash, else its name). Nothing of the drafter was fetched.

    ``model`` is the MODEL argument that fetches the drafter, ``bytes`` the download's size. ``expected_speedup`` is
    over plain decoding, by what is known of this machine.
    """

    name: str
    model: str
    bytes: int
    licence: str
    expected_speedup: float
    target: str

    def as_json(self) -> dict[str, Any]:
        """For programs: every field but ``target``."""
        return {
            "name": self.name,
            "model": self.model,
            "bytes": self.bytes,
            "licence": self.licence,
            "expected_speedup": self.expected_speedup,
        }


def best_offer(
    family: Family | None, target: ModelFacts, expected_speedup: Callable[[ModelFacts], float | None]
) -> DrafterOffer | None:
    """The drafter of the target's family with the largest expected gain; None without one. Pure.

    ``expected_speedup`` is called with each drafter's facts; None means no gain, or no room.
    """
    offers = []
    for drafter in () if family is None else family.drafters:
        if drafter.bytes is None:
            continue
        facts = replace(
            target,
            name=drafter.name,
            sha256=None,
            weight_bytes=drafter.bytes,
            bytes_per_forward=drafter.draft_bytes,
            kv_bytes_per_token=drafter.cache_bytes,
            windowed=ALL_KEPT,
        )
        speedup = expected_speedup(facts)
        if speedup is not None:
            offers.append(
                DrafterOffer(
                    name=drafter.name,
                    model=drafter.model,
                    bytes=drafter.bytes,
                    licence=drafter.licence,
                    expected_speedup=speedup,
                    target=target.sha256 or target.name,
                )
            )
    return max(offers, key=lambda offer: (offer.expected_speedup, -offer.bytes), default=None)
