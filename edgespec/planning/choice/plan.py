"""The decision what runs where, as frozen data with a reason for each choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from edgespec.interfaces.model import NumericClass

Mode = Literal["plain", "serial", "pipelined"]
Exactness = Literal["W", "N", "D"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model and where it runs."""

    model: str
    runtime: str
    device: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDrafter:
    """Who proposes. ``model``, ``runtime`` and ``device`` are None for a drafter that needs no model."""

    kind: str
    model: str | None = None
    runtime: str | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the engine will do. ``drafter_off`` says why there is no model drafter, where one was wanted."""

    mode: Mode
    exactness: Exactness
    numeric_class: NumericClass
    target: PlannedModel
    drafter: PlannedDrafter | None
    depth_cap: int
    context_length: int
    predicted_tokens_per_s: float | None
    reasons: tuple[str, ...]
    drafter_off: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The shape of CLI.md's ``plan`` object."""
        drafter = self.drafter
        return {
            "mode": self.mode,
            "exactness": self.exactness,
            "numeric_class": self.numeric_class.as_json(),
            "target": {
                "model": self.target.model,
                "runtime": self.target.runtime,
                "device": self.target.device,
                "threads": self.target.threads,
            },
            "drafter": None
            if drafter is None
            else {
                "kind": drafter.kind,
                "model": drafter.model,
                "runtime": drafter.runtime,
                "device": drafter.device,
            },
            "depth_cap": self.depth_cap,
            "context_length": self.context_length,
            "predicted_tokens_per_s": self.predicted_tokens_per_s,
            "reasons": list(self.reasons),
        }


def plain_version(plan: Plan) -> Plan:
    """The plan of an answer that was asked for plainly, in the same numeric class."""
    if plan.mode == "plain":
        return plan
    reasons = (*plan.reasons, "plain: depth 0 was asked for")
    return replace(plan, mode="plain", exactness="W", drafter=None, depth_cap=0, reasons=reasons)
