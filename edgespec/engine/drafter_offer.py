"""A drafter that is not on this machine and would fit: what an application may offer its user to fetch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from edgespec.interfaces.model import ModelFacts
from edgespec.store.families import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOffer:
    """A known drafter for ``target`` (what the target's content is known by). Nothing of it was fetched.

    ``model`` is the MODEL argument that fetches it, ``bytes`` the size of that download, ``expected_speedup`` how
    many times as fast as plain decoding the target is expected to be with it, by what is known of this machine.
    """

    name: str
    model: str
    bytes: int
    licence: str
    expected_speedup: float
    target: str

    def as_json(self) -> dict[str, Any]:
        """For programs: every field but what the target is known by."""
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
    """The drafter of the target's family that is expected to gain most; None if none is. Pure.

    ``expected_speedup`` is asked about each as it would run, and says None for one that does not pay or has no room.
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
