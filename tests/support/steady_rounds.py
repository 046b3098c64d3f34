"""Rounds whose times are invented: what an engine decides from them does not follow this machine's speed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.interfaces.model import ALONE, Company
from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.depth import answer, pipeline_budget
from edgespec.planning.depth.answer import AnswerDepth
from edgespec.planning.depth.pipeline_budget import MeasuredBudget
from tests.support.tiny_models import DRAFT_S, FORWARD_S

PATIENT = 1e6


def steady(told: RoundRecord) -> RoundRecord:
    """The record of such a round on a machine with the invented times."""
    draft_s = DRAFT_S * told.draft_forwards
    round_s = max(FORWARD_S, draft_s) if told.overlapped else FORWARD_S + draft_s
    return replace(told, verify_s=FORWARD_S, draft_s=draft_s, sync_s=0.0, round_s=round_s)


def steady_rounds(patch: pytest.MonkeyPatch) -> None:
    """The depth policies get the times of ``invent_measurements``, and a round waits for its drafter."""
    began, record, learn = AnswerDepth.began, AnswerDepth.record, MeasuredBudget.record

    def begin(policy: AnswerDepth, _prompt_s: float, _first_s: float, company: Company = ALONE) -> None:
        began(policy, 10 * FORWARD_S, FORWARD_S, company)

    patch.setattr(AnswerDepth, "began", begin)
    patch.setattr(AnswerDepth, "record", lambda policy, told: record(policy, steady(told)))
    patch.setattr(MeasuredBudget, "record", lambda budget, told: learn(budget, steady(told)))
    patch.setattr(answer, "PATIENCE", PATIENT)
    patch.setattr(pipeline_budget, "_PATIENCE", PATIENT)
    patch.setattr(pipeline_budget, "_FIRST_PATIENCE_S", PATIENT)
