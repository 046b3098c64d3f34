"""From a policy's name to a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgespec.decoding.contracts import DepthPolicy
from edgespec.planning.acceptance import AcceptancePrior
from edgespec.planning.depth import ConfidenceDepth, EntropyDepth, FixedDepth, PolicyName
from edgespec.planning.depth_bandit import BanditDepth
from edgespec.planning.depth_cost import CostDepth, Costs


def make_policy(
    name: PolicyName,
    depth_cap: int,
    sources: Sequence[str],
    costs: Costs | None = None,
    priors: Mapping[str, AcceptancePrior] | None = None,
) -> DepthPolicy:
    """A policy of that name; ``costs`` and ``priors`` are for those that use them."""
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
