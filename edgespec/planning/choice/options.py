"""The records of a ranking: what may run where, candidates, and rejections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.interfaces.drafting import COPIES
from edgespec.interfaces.model import HOST, ModelFacts
from edgespec.interfaces.reasons import Reason
from edgespec.planning.choice.plan import Exactness, Mode
from edgespec.planning.cost.curve import Curve, DraftCost

# For each model, in addition to weights and cache: memory.py's estimate for the largest vocabulary in use (262 144
# entries): 64 MiB of context and 8 bytes for each of 64 rows of scores.
HEADROOM_BYTES = 192 * 2**20


def placed_name(model: str, device: str, layers: tuple[int, int] | None) -> str:
    """A model with its device: "m on Vulkan0", or "m, 12 of 25 layers on Vulkan0"."""
    some = "" if layers is None else f", {layers[0]} of {layers[1]} layers"
    return f"{model}{some} on {device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The bytes of a model's weights and cache, and in whose memory they are.

    ``device_bytes`` are in ``memory``, named by the device that owns it; ``host_bytes`` stay in the machine's own.
    ``layers`` is (on the device, total) if only some are on the device.
    """

    memory: str
    device_bytes: int
    host_bytes: int = 0
    layers: tuple[int, int] | None = None

    @staticmethod
    def whole(facts: ModelFacts, context_length: int) -> Footprint:
        """A model that is completely on its device, in a memory of the device's own name."""
        return Footprint(memory=facts.device, device_bytes=facts.weight_bytes + facts.cache_bytes(context_length))

    def taken(self) -> dict[str, int]:
        """Bytes taken of each memory; working buffers are with the device."""
        taken = {self.memory: self.device_bytes + HEADROOM_BYTES}
        if self.host_bytes:
            taken[HOST] = taken.get(HOST, 0) + self.host_bytes
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOption:
    """The target in one setting. All options of a ranking are the same model.

    ``depth_cap_stable`` is the deepest depth whose widths are bit-equal to plain decoding in this setting; None if
    not measured. ``eligible`` is False for a setting that this plan cannot use. ``measured`` is False for times
    estimated from other machines.
    """

    facts: ModelFacts
    footprint: Footprint
    curve: Curve
    depth_cap_stable: int | None
    eligible: bool = True
    measured: bool = True

    @property
    def short_name(self) -> str:
        return placed_name(self.facts.name, self.facts.device, self.footprint.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOption:
    """A drafter in one setting. ``facts`` and ``footprint`` are None for a drafter without a model.

    ``source`` is the drafter's name in costs, acceptance and rounds. ``acceptance[i]`` is the probability that draft
    token i is accepted if those before it were; the last entry is repeated for deeper drafts. Empty: not known, so no
    gain is predicted. ``copies``: copies of the text are proposed as well, free and not counted in the gain.
    ``eligible`` is False for a setting that this plan cannot use, since the drafter is loaded elsewhere.
    """

    source: str
    cost: DraftCost
    acceptance: tuple[float, ...] = ()
    copies: bool = False
    facts: ModelFacts | None = None
    footprint: Footprint | None = None
    eligible: bool = True

    def __post_init__(self) -> None:
        if not all(0 <= probability <= 1 for probability in self.acceptance):
            raise ValueError("the acceptance probabilities of a drafter are between 0 and 1")
        if (self.facts is None) != (self.footprint is None):
            raise ValueError("a drafter with a model has facts and a footprint")

    @property
    def sources(self) -> tuple[str, ...]:
        """What proposes, the cheapest first."""
        return (COPIES, self.source) if self.copies and self.facts is not None else (self.source,)

    @property
    def device(self) -> str | None:
        return None if self.facts is None else self.facts.device

    @property
    def short_name(self) -> str:
        return "copies of the text" if self.facts is None else f"{self.facts.name} on {self.facts.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to run that fits and could pay. Speed-ups are against the fastest plain decoding of all options.

    ``speedup`` is the expected one, never below plain decoding in the same configuration, to which a losing round
    falls back. ``depth`` is the expected depth, 0 if no gain is expected. ``possible_speedup`` is reached at
    ``possible_depth`` if every token is accepted. ``drafted_tokens_per_s`` is the rate of drafting in every round,
    even if that loses. ``memory_bytes`` are the bytes taken of each memory. ``memory_bound_speedup`` is MBSU: the
    speed-up if only reading bytes took time; its gap to ``speedup`` is compute and overhead. None for plain decoding.
    ``why`` begins with the verdict.
    """

    what: str
    target: TargetOption
    drafter: DrafterOption | None
    mode: Mode
    depth: int
    exactness: Exactness
    tokens_per_round: float
    round_s: float
    tokens_per_s: float
    speedup: float
    possible_speedup: float
    possible_depth: int
    drafted_tokens_per_s: float
    memory_bytes: Mapping[str, int]
    memory_bound_speedup: float | None
    why: tuple[Reason, ...]

    @property
    def verdict(self) -> Reason:
        return self.why[0]

    @property
    def sources(self) -> tuple[str, ...]:
        """What proposes; empty for plain decoding."""
        return () if self.drafter is None else self.drafter.sources

    def as_json(self) -> dict[str, Any]:
        """One entry of ``candidates`` in the JSON; seconds that were not measured are null."""
        measured = self.target.measured
        return {
            "what": self.what,
            **self.verdict.as_json(),
            "mode": self.mode,
            "exactness": self.exactness,
            "depth": self.depth,
            "tokens_per_round": self.tokens_per_round,
            "round_s": self.round_s if measured else None,
            "predicted_tokens_per_s": self.tokens_per_s if measured else None,
            "speedup": self.speedup,
            "possible_speedup": self.possible_speedup,
            "memory_bound_speedup": self.memory_bound_speedup,
            "memory_bytes": dict(self.memory_bytes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A rejected way to run and the reason; the numbers in the sentence are those of the fields.

    ``speedup`` is the prediction and ``possible_speedup`` the one if every token were accepted, both against the
    fastest plain decoding. ``needed_bytes`` and ``available_bytes`` are those of the memory that was too small.
    ``target`` is None for a target that was not measured.
    """

    what: str
    verdict: Reason
    target: TargetOption | None
    drafter: DrafterOption | None = None
    mode: Mode | None = None
    speedup: float | None = None
    possible_speedup: float | None = None
    needed_bytes: int | None = None
    available_bytes: int | None = None

    @property
    def sentence(self) -> str:
        return f"{self.what}: {self.verdict.text}"

    def as_json(self) -> dict[str, Any]:
        """One entry of ``rejected`` in the JSON."""
        return {
            "what": self.what,
            **self.verdict.as_json(),
            "mode": self.mode,
            "speedup": self.speedup,
            "possible_speedup": self.possible_speedup,
            "needed_bytes": self.needed_bytes,
            "available_bytes": self.available_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Candidates, the best first (at least one, plain), and rejections in the order of evaluation."""

    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]
