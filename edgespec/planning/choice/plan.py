"""The plan: what runs where, as frozen data with a reason for each choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from edgespec.interfaces.model import ModelFacts, NumericClass
from edgespec.interfaces.reasons import PLAIN_CODES, Reason

Mode = Literal["plain", "serial", "pipelined"]
Exactness = Literal["W", "N", "D"]

DEPTH_ZERO = Reason("depth_zero", "plain: depth 0 was asked for")


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model and where it runs."""

    facts: ModelFacts

    @property
    def model(self) -> str:
        return self.facts.name

    @property
    def runtime(self) -> str:
        return self.facts.runtime

    @property
    def device(self) -> str:
        return self.facts.device

    @property
    def threads(self) -> int:
        return self.facts.threads


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDrafter:
    """The drafter. ``kind`` lists what proposes, joined by "+". ``facts`` are None for a drafter without a model."""

    kind: str
    facts: ModelFacts | None = None

    @property
    def model(self) -> str | None:
        return None if self.facts is None else self.facts.name

    @property
    def runtime(self) -> str | None:
        return None if self.facts is None else self.facts.runtime

    @property
    def device(self) -> str | None:
        return None if self.facts is None else self.facts.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the engine will do, and why. ``drafter_off``: why a requested drafting model is not used."""

    mode: Mode
    exactness: Exactness
    numeric_class: NumericClass
    target: PlannedModel
    drafter: PlannedDrafter | None
    depth_cap: int
    context_length: int
    predicted_tokens_per_s: float | None
    why: tuple[Reason, ...]
    drafter_off: str | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons as sentences."""
        return tuple(reason.text for reason in self.why)

    @property
    def plain_because(self) -> Reason | None:
        """Why decoding is plain; None if the plan drafts."""
        if self.mode != "plain":
            return None
        return next((reason for reason in reversed(self.why) if reason.code in PLAIN_CODES), None)

    def as_json(self) -> dict[str, Any]:
        """The ``plan`` object of the JSON."""
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
            "reason_codes": [reason.code for reason in self.why],
        }


def plain_version(plan: Plan) -> Plan:
    """The plan of an answer that was requested without guesses, in the same numeric class."""
    if plan.mode == "plain":
        return plan
    why = (*plan.why, DEPTH_ZERO)
    return replace(plan, mode="plain", exactness="W", drafter=None, depth_cap=0, why=why, drafter_off=None)
