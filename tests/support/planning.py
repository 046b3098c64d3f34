"""Planning for a pair as if it were loaded, from facts and costs alone."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.reasons import Reason
from edgespec.planning.choice.options import DrafterOption, Ranking
from edgespec.planning.choice.plan import Plan
from edgespec.planning.choice.planner import (
    PlanRequest,
    contention_of,
    decide,
    depth_cap,
    drafter_options,
    make_plan,
    target_option,
)
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.widths import WidthProbe

NO_LIMIT = 2**63


def plan_pair(
    request: PlanRequest, target: ModelFacts, probe: WidthProbe | None, notes: Sequence[Reason], costs: Costs
) -> Plan:
    """The plan of an engine with this pair."""
    return make_plan(request, target, probe, notes, costs, rank_pair(request, target, probe, costs))


def rank_pair(request: PlanRequest, target: ModelFacts, probe: WidthProbe | None, costs: Costs) -> Ranking | None:
    """The ranking of an engine with this pair, without measurements of other placements or a memory limit."""
    if costs.curves is None:
        return None
    cap = depth_cap(target, probe)
    place = target_option(target, costs.curves.curves[0], request.context_length, cap)
    cost, model = costs.drafts.get("model"), None
    if cost is not None:
        model = DrafterOption(
            kind="model",
            cost=cost,
            acceptance=tuple(costs.acceptance.get("model", ())),
            model=request.drafter_model or "the drafter",
            runtime=request.drafter_runtime,
            device=request.drafter_device,
        )
    drafters = [one for one in drafter_options(request, model) if one.kind in costs.drafts]
    both = contention_of(request, costs)
    pairs = {} if both is None else {(target.device, request.drafter_device): both}
    memory = dict.fromkeys((target.device, request.drafter_device), NO_LIMIT)
    return decide(request, [place], drafters, memory, pairs)
