"""Facts of invented models, the ways to run them, and planning for a pair as if it were loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.policy import RoundRecord
from edgespec.interfaces.reasons import Reason
from edgespec.planning.choice.options import DrafterOption, Footprint, Ranking, TargetOption
from edgespec.planning.choice.plan import Mode, Plan
from edgespec.planning.choice.planner import (
    DraftingModel,
    PlanRequest,
    contention_of,
    decide,
    depth_cap,
    drafter_options,
    make_plan,
)
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import Curve, DraftCost
from edgespec.planning.cost.widths import WidthProbe

NO_LIMIT = 2**63
GIB = 2**30


def model_facts(name: str = "big", **changes: Any) -> ModelFacts:
    """The facts of a tiny model, but for ``changes``."""
    values: dict[str, Any] = {
        "name": name,
        "sha256": f"sha256:{name}",
        "architecture": "llama",
        "runtime": "llama",
        "build": "1",
        "device": "cpu",
        "threads": 4,
        "vocabulary_size": 1000,
        "trained_context_length": 2048,
        "weight_bytes": 1,
        "bytes_per_forward": 1,
        "kv_bytes_per_token": 1,
        "kv_type": "f16",
    }
    return ModelFacts(**{**values, **changes})


def a_round(
    proposed: int = 0, accepted: int = 0, *, context: int = 100, forwards: int = 0, **measured: Any
) -> RoundRecord:
    """A round of a chain in 10 ms that the target spends alone, but for what was ``measured``."""
    draft_s, verify_s = measured.get("draft_s", 0.0), measured.get("verify_s", 0.010)
    values: dict[str, Any] = {
        "width": proposed + 1,
        "context_length": context,
        "proposed": proposed,
        "evaluated": proposed,
        "accepted": accepted,
        "invalid": 0,
        "emitted": accepted + 1,
        "source": None,
        "draft_s": draft_s,
        "sync_s": 0.0,
        "verify_s": verify_s,
        "round_s": draft_s + verify_s,
        "draft_forwards": forwards,
    }
    return RoundRecord(**{**values, **measured})


# The drafting model of a request that names no other.
SMALL = DraftingModel(facts=model_facts("small"))


def request(*sources: str, **wish: Any) -> PlanRequest:
    """A request with these sources: ``lookup``, and ``model`` for a model that drafts (default: ``SMALL``)."""
    models = {"drafters": (SMALL,)} if "model" in sources else {}
    return PlanRequest(
        **{
            "depth": "auto",
            "exactness": "stable",
            "context_length": 2048,
            "copies": "lookup" in sources,
            **models,
            **wish,
        }
    )


def target_option(facts: ModelFacts, curve: Curve, **values: Any) -> TargetOption:
    """A target that is completely on its device; its cache is 512 MiB."""
    footprint = Footprint(memory=facts.device, device_bytes=facts.weight_bytes + GIB // 2)
    return TargetOption(**{"facts": facts, "footprint": footprint, "curve": curve, "depth_cap_stable": 7, **values})


def drafter_option(facts: ModelFacts, cost: DraftCost, **values: Any) -> DrafterOption:
    """A drafter that is completely on its device; its cache is 256 MiB."""
    footprint = Footprint(memory=facts.device, device_bytes=facts.weight_bytes + GIB // 4)
    return DrafterOption(**{"source": "model", "cost": cost, "facts": facts, "footprint": footprint, **values})


def plan_pair(
    request: PlanRequest,
    target: ModelFacts,
    probe: WidthProbe | None,
    notes: Sequence[Reason],
    costs: Costs,
    agreed: Mode | None = None,
) -> Plan:
    """The plan of an engine with this pair."""
    return make_plan(request, target, probe, notes, costs, rank_pair(request, target, probe, costs, agreed))


def rank_pair(
    request: PlanRequest, target: ModelFacts, probe: WidthProbe | None, costs: Costs, agreed: Mode | None = None
) -> Ranking | None:
    """The ranking of an engine with this pair, without measurements of other placements or a memory limit.

    ``agreed``: the mode that answers found faster.
    """
    if costs.curves is None:
        return None
    here = target_option(target, costs.curves.curves[0], depth_cap_stable=depth_cap(target, probe))
    models = [
        drafter_option(
            model.facts, cost, source=model.source, acceptance=tuple(costs.acceptance.get(model.source, ()))
        )
        for model in request.drafters
        if (cost := costs.drafts.get(model.source)) is not None
    ]
    drafters = [one for one in drafter_options(request, models) if one.source in costs.drafts]
    devices = [model.facts.device for model in request.drafters]
    both = contention_of(request, costs)
    pairs = {} if both is None else {(target.device, device): both for device in devices}
    shown = {} if agreed is None else {(target.device, device): agreed for device in devices}
    return decide(request, [here], drafters, dict.fromkeys((target.device, *devices), NO_LIMIT), pairs, shown)
