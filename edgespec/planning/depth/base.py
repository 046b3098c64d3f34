"""Depth policies that use no measured times, named as in the literature.

``fixed`` drafts the same depth always. ``entropy`` stops a chain when the drafter is unsure (SVIP, Zhang et al.,
2024). ``confidence`` stops a chain when some token is likely to be rejected (the rule of SpecDec++, Huang et al.,
2024). The default, ``cost``, is planning/depth/control.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

from edgespec.interfaces.drafting import ChainGate
from edgespec.interfaces.model import ALONE
from edgespec.interfaces.policy import Allowance, AnswerPolicy, RoundRecord
from edgespec.interfaces.reasons import Reason
from edgespec.planning.cost.live_times import PlainTimes

PolicyName = Literal["fixed", "entropy", "confidence", "cost"]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)

OFF = Allowance(0)

NOT_CALIBRATED = Reason("not_calibrated", "this machine is not calibrated yet")
DEPTH_0 = Reason("depth_zero", "depth 0 was asked for")

# SVIP stops where the root of the drafter's entropy exceeds a threshold, which stands for a bound on the acceptance
# probability. We do not know the paper's constant. At a root of 1.0 (1 nat, as of 2.7 equally likely tokens) a draft
# token is about as likely to be rejected as accepted.
ENTROPY_ROOT_LIMIT = 1.0

# SpecDec++ stops when some token of the chain is rejected with more than this probability; the paper tunes it for its
# models. Above even odds a further token is more likely wasted than not.
REJECTION_LIMIT = 0.5


class FixedDepth:
    """Drafts the same depth in every round, as its own answer policy.

    ``why`` is the reason reported at depth 0. ``gate`` makes the gate that may end a chain early. ``plain`` learns
    how fast plain decoding is.
    """

    def __init__(
        self,
        depth: int,
        why: Reason | None = DEPTH_0,
        plain: PlainTimes | None = None,
        gate: Callable[[], ChainGate] | None = None,
    ) -> None:
        self.depth = depth
        self._why, self._plain, self._gate = why, plain or PlainTimes(), gate

    def answer(
        self, *, prompt_tokens: int, most: int | None = None, sampled: bool = False, hindsight: bool = True
    ) -> AnswerPolicy:
        return self

    def allow(self, source: str, lag: int = 0, unread: int = 0) -> Allowance:
        return Allowance(self.depth, self._gate and self._gate())

    def allow_free(self, source: str) -> Allowance:
        return self.allow(source)

    def prefers(self, source: str, free_gain: float) -> bool:
        return not free_gain

    def buys_load(self, source: str, lag: int = 0) -> bool:
        return self.allow(source, lag).depth > 0

    def record(self, record: RoundRecord) -> None:
        # A drafter or other requests make the target slower, which says nothing about plain decoding.
        if record.width == 1 and not record.overlapped and record.company == ALONE:
            self._plain.record(record.verify_s, record.context_length)

    def _learns_nothing(self, *_told: object, **_by_name: object) -> None:
        """Do nothing: this policy learns from neither prompts nor tokens, and keeps no state after an answer."""

    began = learn = learn_hindsight = learn_alternatives = end = _learns_nothing

    def why_off(self, source: str) -> Reason | None:
        return None if self.depth else self._why

    @property
    def plain_tokens_per_s(self) -> float | None:
        return self._plain.tokens_per_s(lambda context: 1.0)


class EntropyGate:
    """SVIP's stopping rule: the entropy of the drafter's distribution, before the token is chosen."""

    needs_entropy = True

    def __init__(self, limit: float = ENTROPY_ROOT_LIMIT) -> None:
        self._limit = limit

    def admits(self, confidence: float, entropy: float | None) -> bool:
        if entropy is None:  # a drafter without a distribution (copies): use its confidence
            return confidence >= math.exp(-self._limit)
        return math.sqrt(max(0.0, entropy)) <= self._limit

    def goes_on(self) -> bool:
        return True


class ConfidenceGate:
    """The rule of SpecDec++: stop once P(at least one token of the chain is rejected) exceeds a limit."""

    needs_entropy = False

    def __init__(self, limit: float = REJECTION_LIMIT) -> None:
        self._limit = limit
        self._survives = 1.0

    def admits(self, confidence: float, entropy: float | None) -> bool:
        self._survives *= confidence
        return 1.0 - self._survives <= self._limit

    def goes_on(self) -> bool:
        return True
