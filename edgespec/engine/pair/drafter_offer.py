"""A fitting drafter that is not on this machine: an application may offer its user to fetch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from edgespec.interfaces.model import ALL_KEPT, ModelFacts
from edgespec.store.catalogue import catalogue
from edgespec.store.families import Family

# The drafter in the catalogue for a target without a smaller model of its family: its tokens are translated. What it
# reads per draft token, layers and head in four bits, and what a token takes in its cache: 30 layers of 3 heads.
UNIVERSAL = "smollm2-135m"
_UNIVERSAL_NAME, _UNIVERSAL_READS, _UNIVERSAL_CACHE = "SmolLM2 135M", 82_000_000, 23_040


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOffer:
    """A known drafter for ``target`` (the target's hash, else its name). Nothing of the drafter was fetched.

    ``model`` is the MODEL argument that fetches the drafter, ``bytes`` the download's size. ``expected_speedup`` is
    over plain decoding, by what is known of this machine. ``translated``: it has another vocabulary.
    """

    name: str
    model: str
    bytes: int
    licence: str
    expected_speedup: float
    target: str
    translated: bool = False

    def as_json(self) -> dict[str, Any]:
        """For programs: every field but ``target``."""
        return {
            "name": self.name,
            "model": self.model,
            "bytes": self.bytes,
            "licence": self.licence,
            "expected_speedup": self.expected_speedup,
            "translated": self.translated,
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
        speedup = expected_speedup(
            _drafting(target, drafter.name, drafter.bytes, drafter.draft_bytes, drafter.cache_bytes)
        )
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


def universal_offer(
    target: ModelFacts, expected_speedup: Callable[[ModelFacts], float | None]
) -> DrafterOffer | None:
    """The catalogue's drafter for any target, if it gains; ``expected_speedup`` as in ``best_offer``."""
    spec = catalogue()[UNIVERSAL]
    if spec.bytes is None or spec.licence is None:
        return None
    speedup = expected_speedup(_drafting(target, _UNIVERSAL_NAME, spec.bytes, _UNIVERSAL_READS, _UNIVERSAL_CACHE))
    if speedup is None:
        return None
    return DrafterOffer(
        name=_UNIVERSAL_NAME,
        model=UNIVERSAL,
        bytes=spec.bytes,
        licence=spec.licence,
        expected_speedup=speedup,
        target=target.sha256 or target.name,
        translated=True,
    )


def _drafting(target: ModelFacts, name: str, weight_bytes: int, reads: int, cache: int) -> ModelFacts:
    """A drafter that is not here, in the target's setting; the bytes of its file, a forward, a cached token."""
    return replace(
        target,
        name=name,
        sha256=None,
        weight_bytes=weight_bytes,
        bytes_per_forward=reads,
        kv_bytes_per_token=cache,
        windowed=ALL_KEPT,
    )
