"""What may run where, what was ranked and what was turned away: the records of a ranking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from edgespec.interfaces.reasons import Reason
from edgespec.planning.choice.plan import Exactness, Mode
from edgespec.planning.cost.curve import Curve, DraftCost


def placed_name(model: str, device: str, layers: tuple[int, int] | None) -> str:
    """A model where it runs: "m on Vulkan0", or "m, 12 of 25 layers on Vulkan0"."""
    some = "" if layers is None else f", {layers[0]} of {layers[1]} layers"
    return f"{model}{some} on {device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOption:
    """The target in one configuration. All options of a ranking are the same model, so that they can be compared.

    ``depth_cap_stable`` is the deepest depth whose widths are bit-equal to plain decoding in this configuration;
    None means that nobody looked. ``memory`` names the device whose memory holds it, where that is not ``device``; of
    its bytes ``host_bytes`` are in the machine's own memory all the same. ``layers`` is (on the device, of all) where
    only some are there. ``eligible`` is off for a place that this plan cannot use: the target stays where it is.
    ``measured`` is off where times are estimated from other machines.
    """

    model: str
    runtime: str
    device: str
    curve: Curve
    weights_bytes: int
    cache_bytes: int
    depth_cap_stable: int | None
    threads: int = 1
    settings: Mapping[str, str | int | bool] = field(default_factory=dict)
    memory: str | None = None
    host_bytes: int = 0
    layers: tuple[int, int] | None = None
    eligible: bool = True
    measured: bool = True

    @property
    def short_name(self) -> str:
        return placed_name(self.model, self.device, self.layers)

    @property
    def memory_name(self) -> str:
        """The memory it lives in."""
        return self.memory or self.device

    def needed_bytes(self, headroom_bytes: int) -> int:
        """Weights, cache and working buffers, in the memory it lives in."""
        return self.weights_bytes + self.cache_bytes - self.host_bytes + headroom_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOption:
    """A drafter in one configuration. ``model``, ``runtime`` and ``device`` are None where it needs no model.

    ``acceptance[i]`` is the probability that draft token i is accepted given that those before it were; its last
    entry goes on for deeper drafts. Empty: not known, so nothing is promised. ``copies``: copies of the text are
    proposed besides, which cost nothing and whose gain is not counted. ``bytes_per_forward`` is what one draft token
    reads. ``eligible`` is off for a place that this plan cannot use: the drafter stays where it is loaded.
    """

    kind: Literal["model", "lookup"]
    cost: DraftCost
    acceptance: tuple[float, ...] = ()
    copies: bool = False
    model: str | None = None
    runtime: str | None = None
    device: str | None = None
    threads: int = 1
    weights_bytes: int = 0
    cache_bytes: int = 0
    bytes_per_forward: int = 0
    memory: str | None = None
    eligible: bool = True

    def __post_init__(self) -> None:
        if not all(0 <= probability <= 1 for probability in self.acceptance):
            raise ValueError("the acceptance probabilities of a drafter are from 0 to 1")
        if (self.kind == "model") != (self.model is not None and self.device is not None):
            raise ValueError("a drafter of kind model has a model and a device, and no other has")

    @property
    def sources(self) -> tuple[str, ...]:
        """Kinds of drafters, the cheapest first."""
        return ("lookup", "model") if self.copies and self.kind == "model" else (self.kind,)

    @property
    def short_name(self) -> str:
        return "copies of the text" if self.model is None else f"{self.model} on {self.device}"

    @property
    def memory_name(self) -> str | None:
        """The memory it lives in; None if it takes none worth counting."""
        return self.memory or self.device

    def needed_bytes(self, headroom_bytes: int) -> int:
        """Weights, cache and working buffers; nothing for a drafter without a model."""
        return 0 if self.model is None else self.weights_bytes + self.cache_bytes + headroom_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to run that fits and that could pay. Speed-ups are against the fastest plain decoding of all options.

    ``speedup`` is what is expected: never below plain decoding in the same configuration, which a round that would
    lose falls back to. ``depth`` is how deep it drafts then, 0 where it is expected to gain nothing;
    ``possible_speedup`` is reached at ``possible_depth`` if every token is accepted. ``drafted_tokens_per_s`` is what
    drafting in every round comes to, also where that loses. ``memory_bytes`` is what it takes of each memory.
    ``memory_bound_speedup`` is MBSU: what the bytes read would allow if nothing else took time; the gap to
    ``speedup`` is compute and overhead. None for plain decoding. ``why`` begins with the verdict.
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
        """Kinds of drafters that propose; none for plain decoding."""
        return () if self.drafter is None else self.drafter.sources

    def as_json(self) -> dict[str, Any]:
        """For programs: one entry of ``candidates``; seconds that nobody measured are null."""
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
    """What was turned away and why; the numbers in the sentence are those of the fields.

    ``speedup`` is the predicted one and ``possible_speedup`` the one if every token were accepted, both against the
    fastest plain decoding; ``needed_bytes`` and ``available_bytes`` are of the memory it did not fit in.
    ``target`` is None for what nobody has measured.
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
        """For programs: one entry of ``rejected``."""
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
    """Candidates, the best first (there is at least one, plain), and what was rejected, in the order looked at."""

    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]
