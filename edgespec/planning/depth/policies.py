"""Depth policies by name."""

from __future__ import annotations

from edgespec.interfaces.policy import DepthPolicy
from edgespec.planning.cost.costs import Costs
from edgespec.planning.depth.base import ConfidenceGate, EntropyGate, FixedDepth, PolicyName
from edgespec.planning.depth.control import DepthControl
from edgespec.planning.depth.experience import History
from edgespec.planning.depth.state import Priors


def make_policy(
    name: PolicyName,
    depth_cap: int,
    costs: Costs | None = None,
    priors: Priors | None = None,
    history: History | None = None,
    *,
    pipelined: bool = False,
) -> DepthPolicy:
    """Make the policy ``name``; only the ``cost`` policy uses ``costs``, ``priors`` and ``history``."""
    if name in ("cost", "bandit"):
        return DepthControl(costs or Costs(), depth_cap, priors, history, pipelined=pipelined)
    gate = {"fixed": None, "entropy": EntropyGate, "confidence": ConfidenceGate}[name]
    return FixedDepth(depth_cap + (pipelined and depth_cap > 0), gate=gate)
