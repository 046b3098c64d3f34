"""From a policy's name to a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgespec.interfaces.policy import DepthPolicy
from edgespec.planning.cost.acceptance import AcceptancePrior
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.margins import SLOWER_ALLOWED
from edgespec.planning.depth.bandit import BanditDepth
from edgespec.planning.depth.base import ConfidenceDepth, EntropyDepth, FixedDepth, PolicyName
from edgespec.planning.depth.cost_model import CostDepth
from edgespec.planning.depth.pipeline_budget import MeasuredBudget
from edgespec.planning.depth.pipelined import PipelinedDepth


def make_policy(
    name: PolicyName,
    depth_cap: int,
    sources: Sequence[str],
    costs: Costs | None = None,
    priors: Mapping[str, AcceptancePrior] | None = None,
    *,
    pipelined: bool = False,
) -> DepthPolicy:
    """A policy of that name; ``costs`` and ``priors`` are for those that use them.

    Where drafting and verifying go on at once (``pipelined``) a chain has one token more than ``depth_cap``: a
    window's forward scores the first token of the next one as well. The bandit has nothing to choose from there, and
    is ``cost``.
    """
    if pipelined:
        if name in ("cost", "bandit"):
            return PipelinedDepth(depth_cap, sources, costs, priors)
        depth_cap += depth_cap > 0
    if name == "fixed":
        return FixedDepth(depth_cap)
    if name == "entropy":
        return EntropyDepth(depth_cap)
    if name == "confidence":
        return ConfidenceDepth(depth_cap)
    if name == "cost":
        return CostDepth(depth_cap, sources, costs, priors)
    # "plain" comes first: it is timed before anything is compared with it.
    others: dict[str, DepthPolicy] = {
        "plain": FixedDepth(0),
        "cost": CostDepth(depth_cap, sources, costs, priors),
        "confidence": ConfidenceDepth(depth_cap),
        "entropy": EntropyDepth(depth_cap),
        "fixed": FixedDepth(depth_cap),
    }
    return BanditDepth(others)


def make_budget(depth_cap: int, costs: Costs) -> MeasuredBudget:
    """How much a pipelined round verifies, by the target's times with the drafter at work beside it."""
    curve = None if costs.curves is None else costs.curves.curves[0]
    factor = None if costs.contention is None else max(1.0, costs.contention.target_factor)
    if curve is not None and factor is not None:
        curve = curve.scaled(factor)
    return MeasuredBudget(depth_cap, curve, overlaps_prefill=factor is not None and factor <= SLOWER_ALLOWED)
