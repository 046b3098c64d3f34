"""A drafter that reads what the target computes drafts between its forwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.planning.choice.planner import decide, make_plan
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE
from edgespec.planning.cost.widths import WidthProbe
from tests.planning.test_plan_made import FACTS
from tests.planning.test_ranking import APART, ROOMY, drafter, target
from tests.support.planning import SMALL, model_facts, request


@pytest.mark.parametrize("follows", [False, True])
def test_it_is_planned_serially_with_a_reason(follows: bool) -> None:
    facts = model_facts("its layer", device="GPU0", follows=follows)
    wanted = request("model", drafters=(replace(SMALL, facts=facts),))
    ranking = decide(wanted, [target()], [replace(drafter("GPU0"), facts=facts)], ROOMY, APART)
    assert ranking is not None
    modes = {candidate.mode for candidate in ranking.candidates}
    assert modes == ({"plain", "serial"} if follows else {"plain", "serial", "pipelined"})
    refused = [one.verdict.code for one in ranking.rejected if one.mode == "pipelined"]
    assert refused == ["drafter_layer"] * follows
    costs = Costs(plain_s=0.1, drafts={"model": FREE}, contention=Contention())
    plan = make_plan(wanted, FACTS, WidthProbe(widths=tuple(range(1, 9)), complete=True), (), costs, ranking)
    assert ("its layer drafts: it reads what the model computes for each token" in plan.reasons) == follows
