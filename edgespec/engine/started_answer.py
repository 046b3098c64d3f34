"""An answer as it begins, as a plain record."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.decoding.sampling import Sampling
from edgespec.drafters.combination import CombinationState
from edgespec.engine.answer import AnswerTask
from edgespec.engine.conversation import Turn
from edgespec.interfaces.policy import AnswerPolicy
from edgespec.planning.choice.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedAnswer:
    """One answer as it begins: its turn, how it is decoded, and the task that decodes it.

    ``history`` are the turn's tokens; the loop adds the answer's tokens.
    """

    turn: Turn
    sampling: Sampling
    seed_is_fresh: bool
    depth: AnswerPolicy
    plan: Plan
    drafts: CombinationState
    history: list[int]
    task: AnswerTask
