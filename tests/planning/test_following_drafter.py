"""A drafter that reads what the target computes drafts between its forwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.calibration.priors import expected_draft_cost
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


def test_its_cost_is_estimated_by_the_bytes_that_it_reads_before_it_is_timed() -> None:
    settings = {"level": "avx512-vnni"}
    big = model_facts(runtime="native", settings=settings, bit_equal_by_construction=True, bytes_per_forward=1000)
    costs = [
        expected_draft_cost(
            model_facts("its layer", settings=settings, follows=True, bytes_per_forward=read), big, 0.1
        )
        for read in (50, 100)
    ]
    assert costs[0] is not None
    assert costs[1] is not None
    assert 0 < costs[0].token_s == pytest.approx(costs[1].token_s / 2)
