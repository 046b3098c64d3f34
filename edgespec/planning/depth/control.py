"""The default depth policy, for the answers of one engine."""

from __future__ import annotations

from edgespec.interfaces.policy import AnswerPolicy, DepthPolicy
from edgespec.planning.cost.costs import Costs
from edgespec.planning.depth.answer import AnswerDepth
from edgespec.planning.depth.base import NOT_CALIBRATED, ConfidenceGate, EntropyGate, FixedDepth, PolicyName
from edgespec.planning.depth.experience import History
from edgespec.planning.depth.state import DepthState, Priors


class DepthControl(DepthState):
    """Decides with what is known. ``AnswerDepth`` decides for one answer, round by round."""

    def answer(
        self, *, prompt_tokens: int, most: int | None = None, sampled: bool = False, hindsight: bool = True
    ) -> AnswerPolicy:
        with self.lock:
            if self.times is None:
                return FixedDepth(0, NOT_CALIBRATED, self.plain)
            if self.depth_cap < 1:
                return FixedDepth(0, None, self.plain)
            for source in {*self.costs.drafts, *self.modes[sampled].sources}:
                self.known(source, sampled=sampled)
            return AnswerDepth(self, self.times, prompt_tokens, most, sampled=sampled, hindsight=hindsight)


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
    if name == "cost":
        return DepthControl(costs or Costs(), depth_cap, priors, history, pipelined=pipelined)
    gate = {"fixed": None, "entropy": EntropyGate, "confidence": ConfidenceGate}[name]
    return FixedDepth(depth_cap + (pipelined and depth_cap > 0), gate=gate)
