"""From a policy's name to a policy."""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.interfaces.policy import DepthPolicy
from edgespec.planning.cost.acceptance import AcceptancePrior
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.margins import SLOWER_ALLOWED
from edgespec.planning.depth.base import ConfidenceDepth, EntropyDepth, FixedDepth, PolicyName
from edgespec.planning.depth.control import DepthControl
from edgespec.planning.depth.experience import History
from edgespec.planning.depth.pipeline_budget import MeasuredBudget


def make_policy(
    name: PolicyName,
    depth_cap: int,
    costs: Costs | None = None,
    priors: Mapping[str, AcceptancePrior] | None = None,
    history: History | None = None,
    *,
    pipelined: bool = False,
) -> DepthPolicy:
    """A policy of that name; ``costs``, ``priors`` and ``history`` are for the one that uses them.

    Where drafting and verifying go on at once (``pipelined``) a chain has one token more than ``depth_cap``: a
    window's forward scores the first token of the next one as well.
    """
    if name in ("cost", "bandit"):
        return DepthControl(costs or Costs(), depth_cap, priors, history, pipelined=pipelined)
    depth = depth_cap + (pipelined and depth_cap > 0)
    if name == "fixed":
        return FixedDepth(depth)
    return EntropyDepth(depth) if name == "entropy" else ConfidenceDepth(depth)


def make_budget(depth_cap: int, costs: Costs) -> MeasuredBudget:
    """How much a pipelined round verifies, by the target's times with the drafter at work beside it."""
    factor = None if costs.contention is None else max(1.0, costs.contention.target_factor)
    curve = None if costs.curves is None else costs.curves.curves[0].scaled(factor or 1.0)
    return MeasuredBudget(depth_cap, curve, overlaps_prefill=factor is not None and factor <= SLOWER_ALLOWED)
