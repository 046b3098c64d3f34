"""The records of a ranking: what may run where, candidates, and rejections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from edgespec.interfaces.reasons import Reason
from edgespec.planning.choice.plan import Exactness, Mode
from edgespec.planning.cost.curve import Curve, DraftCost


def placed_name(model: str, device: str, layers: tuple[int, int] | None) -> str:
    """A model with its device: "m on Vulkan0", or "m, 12 of 25 layers on Vulkan0"."""
    some = "" if layers is None else f", {layers[0]} of {layers[1]} layers"
    return f"{model}{some} on {device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOption:
    """The target in one configuration. All options of a ranking are the same model.

    ``depth_cap_stable`` is the deepest depth whose widths are bit-equal to plain decoding in this configuration; None
    if not measured. ``memory`` names the device whose memory holds the target, if not ``device``; ``host_bytes`` of
    the bytes are in the machine's own memory. ``layers`` is (on the device, total) if only some are on the device.
    ``eligible`` is False for a configuration that this plan cannot use. ``measured`` is False for times estimated
    from other machines.
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
        """The device whose memory holds the target."""
        return self.memory or self.device

    def needed_bytes(self, headroom_bytes: int) -> int:
        """Weights, cache and working buffers, in that memory."""
        return self.weights_bytes + self.cache_bytes - self.host_bytes + headroom_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOption:
    """A drafter in one configuration. ``model``, ``runtime`` and ``device`` are None for a drafter without a model.

    ``acceptance[i]`` is the probability that draft token i is accepted if those before it were; the last entry is
    repeated for deeper drafts. Empty: not known, so no gain is predicted. ``copies``: copies of the text are proposed
    as well, free and not counted in the gain. ``bytes_per_forward`` is what one draft token reads. ``eligible`` is
    False for a configuration that this plan cannot use, since the drafter is loaded elsewhere.
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
            raise ValueError("the acceptance probabilities of a drafter are between 0 and 1")
        if (self.kind == "model") != (self.model is not None and self.device is not None):
            raise ValueError("only a drafter of kind model has a model and a device")

    @property
    def sources(self) -> tuple[str, ...]:
        """Kinds of drafters, the cheapest first."""
        return ("lookup", "model") if self.copies and self.kind == "model" else (self.kind,)

    @property
    def short_name(self) -> str:
        return "copies of the text" if self.model is None else f"{self.model} on {self.device}"

    @property
    def memory_name(self) -> str | None:
        """The device whose memory holds the drafter; None for a drafter without a model."""
        return self.memory or self.device

    def needed_bytes(self, headroom_bytes: int) -> int:
        """Weights, cache and working buffers; 0 for a drafter without a model."""
        return 0 if self.model is None else self.weights_bytes + self.cache_bytes + headroom_bytes


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
        """Kinds of drafters that propose; empty for plain decoding."""
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
