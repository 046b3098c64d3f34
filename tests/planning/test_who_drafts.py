"""Which drafter is planned, and whether serially or pipelined, by the measured times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgespec.interfaces.model import ModelFacts
from edgespec.planning.choice.options import Candidate
from edgespec.planning.choice.plan import Mode, PlannedDrafter
from edgespec.planning.choice.planner import DraftingModel, PlanRequest
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, ContextCurves, Curve, DraftCost, choose_depth
from edgespec.planning.cost.margins import TREES_GAIN
from edgespec.planning.cost.round_simulation import SimulatedPair, expected_pipelined
from edgespec.planning.cost.widths import WidthProbe
from edgespec.planning.depth.control import DepthControl
from tests.support.planning import SMALL, a_round, model_facts, plan_pair, rank_pair, request

FLAT = Curve(widths=(1, 16), forward_s=(0.1, 0.1))
APART = Contention()
CROWDED = Contention(target_factor=1.9, drafter_factor=2.1)
SLOW_DRAFTER = DraftCost(token_s=0.05)
FACTS = model_facts(runtime="native")
ELSEWHERE = DraftingModel(facts=model_facts("small", device="Vulkan0"))


def costs(curve: Curve = FLAT, **known: Any) -> Costs:
    return Costs(
        **{
            "curves": ContextCurves(contexts=(0,), curves=(curve,)),
            "drafts": {"model": SLOW_DRAFTER, "lookup": FREE},
            "acceptance": {"model": (0.8,)},
            **known,
        }
    )


def probe(cap: int) -> WidthProbe:
    return WidthProbe(widths=tuple(range(1, cap + 2)))


def wanted(*sources: str, **wish: Any) -> PlanRequest:
    """A request whose drafting model, if any, is on another device than the target."""
    own = {"drafters": (ELSEWHERE,)} if "model" in (sources or ("model",)) else {}
    return request(*(sources or ("model",)), **{**own, **wish})


def best(
    known: Costs,
    cap: int = 4,
    *sources: str,
    target: ModelFacts = FACTS,
    agreed: Mode | None = None,
    **wish: Any,
) -> Candidate:
    ranking = rank_pair(wanted(*sources, **wish), target, probe(cap), known, agreed)
    assert ranking is not None
    return ranking.best


def said(known: Costs, cap: int = 4, *sources: str, agreed: Mode | None = None, **wish: Any) -> dict[str, str]:
    """The reasons of the plan, by their codes."""
    made = plan_pair(wanted(*sources, **wish), FACTS, probe(cap), (), known, agreed)
    return {reason.code: reason.text for reason in made.why}


def test_independent_devices_are_planned_pipelined() -> None:
    found = best(costs(contention=APART))
    at_once = expected_pipelined(SimulatedPair(curve=FLAT, draft=SLOW_DRAFTER, acceptance=(0.8,)), 4)
    assert (found.mode, found.sources) == ("pipelined", ("model",))
    assert found.tokens_per_s == pytest.approx(at_once.tokens_per_s)
    assert at_once.tokens_per_s > choose_depth(FLAT, SLOW_DRAFTER, (0.8,), 4).tokens_per_s
    assert said(costs(contention=APART))["contention"] == "in parallel neither side slows the other down"


def test_two_models_in_one_memory_are_planned_serially_because_of_contention() -> None:
    found, reasons = best(costs(contention=CROWDED)), said(costs(contention=CROWDED))
    assert found.mode == "serial"
    in_turns = choose_depth(FLAT, SLOW_DRAFTER, (0.8,), 4)
    assert found.tokens_per_s == pytest.approx(in_turns.tokens_per_s)
    assert reasons["contention"] == "in parallel the target takes 1.90x and the drafter 2.10x as long as alone"
    assert reasons["in_turns"].endswith(f"x, serial {in_turns.speedup:.2f}x: serial")


def test_without_measured_contention_the_plan_is_serial() -> None:
    assert best(costs()).mode == "serial"
    reason = said(costs())["contention_not_measured"]
    assert reason == "serial: how much target and drafter slow each other down is not known"


def test_two_models_on_one_device_run_in_parallel_only_after_answers_that_gained_by_it() -> None:
    """A forecast of it never came true on one processor."""
    known, one_device = costs(contention=APART), {"drafters": (SMALL,)}
    assert best(known, **one_device).mode == "serial"
    assert said(known, **one_device)["in_turns"].endswith(
        "on one device only answers show a gain of running in parallel: serial"
    )
    assert best(known, **one_device, agreed="pipelined").mode == "pipelined"
    assert best(replace(known, contention=CROWDED), **one_device, agreed="pipelined").mode == "serial"


def test_answers_that_lost_in_parallel_overrule_the_forecast() -> None:
    known = costs(contention=APART)
    assert best(known, agreed="serial").mode == "serial"
    words = said(known, agreed="serial")["in_turns"]
    assert words.endswith("expected, but the last answers in parallel were slower than serial ones: serial")
    assert best(known, agreed="serial", mode="pipelined").mode == "pipelined", "it was asked for"


def test_the_trees_of_serial_drafting_count_against_pipelined_drafting() -> None:
    drafting = DraftCost(token_s=0.02)
    chains = choose_depth(FLAT, drafting, (0.8,), 4).tokens_per_s
    crowded = Contention(target_factor=1.15, drafter_factor=1.15)
    known = costs(drafts={"model": drafting, "lookup": FREE}, contention=crowded)
    at_once = expected_pipelined(SimulatedPair(curve=FLAT, draft=drafting, acceptance=(0.8,), contention=crowded), 4)
    assert 1.02 < at_once.tokens_per_s / chains < 1.02 * TREES_GAIN
    for branching, mode in ((False, "pipelined"), (True, "serial")):
        target = replace(FACTS, can_branch=branching)
        assert best(known, 4, "lookup", "model", target=target).mode == mode
        assert best(known, 4, "model", target=target).mode == "pipelined", "there is nothing to copy"


@pytest.mark.parametrize(("mode", "words"), [("serial", "serial: asked for"), ("pipelined", "pipelined: asked for")])
def test_a_requested_mode_is_kept(mode: Any, words: str) -> None:
    for contention in (None, APART, CROWDED):
        known = costs(contention=contention, drafts={"model": DraftCost(token_s=0.01)})
        assert best(known, mode=mode).mode == mode
        assert said(known, mode=mode)["mode_asked"] == words
    copies = best(costs(), 4, "lookup", mode=mode)
    assert (copies.mode, copies.sources) == (mode, ("lookup",))


def test_a_drafter_that_gains_only_if_pipelined_is_planned_pipelined() -> None:
    steep = Curve(widths=(1, 16), forward_s=(0.1, 0.85))
    dear = costs(steep, drafts={"model": DraftCost(token_s=0.06)}, contention=APART, acceptance={"model": (0.99,)})
    assert best(dear).mode == "pipelined"
    assert best(replace(dear, contention=None)).sources == ()
    assert best(dear, drafters=(SMALL,)).sources == (), "they share one device"


def test_a_drafter_that_gains_in_neither_mode_is_rejected_with_both_figures() -> None:
    known = costs(drafts={"model": DraftCost(token_s=0.3)}, contention=CROWDED)
    ranking = rank_pair(request("model"), FACTS, probe(4), known)
    assert ranking is not None
    assert (ranking.best.mode, ranking.best.sources) == ("plain", ())
    assert ranking.best.tokens_per_s == pytest.approx(10)
    off = {each.mode: each for each in ranking.rejected}
    assert {each.verdict.code for each in off.values()} == {"cannot_pay"}
    assert off["serial"].verdict.text == "cannot speed this up here (0.50x at best): off"
    assert off["pipelined"].possible_speedup is not None
    assert off["pipelined"].possible_speedup < 1
    assert said(known)["no_drafter_pays"] == "plain: no drafter can be faster here"


def test_pipelined_has_to_beat_serial_by_more_than_the_noise() -> None:
    fast = DraftCost(token_s=0.0001)  # either mode: copies take no time
    steep = Curve(widths=(1, 2, 3), forward_s=(0.1, 0.11, 0.12))
    assert best(costs(steep, drafts={"model": fast}, contention=APART), 2).mode == "serial"


def test_copies_of_the_text_do_not_decide_the_mode() -> None:
    known = costs(contention=APART)
    found = best(known, 4, "lookup")
    assert (found.mode, found.sources) == ("serial", ("lookup",))
    assert found.tokens_per_s == pytest.approx(10)
    together = best(known, 4, "lookup", "model")
    assert (together.mode, together.sources) == ("pipelined", ("lookup", "model"))


def test_without_times_no_mode_is_chosen() -> None:
    made = plan_pair(request("model"), FACTS, probe(4), (), Costs())
    assert made.why[-1] == request("model").not_calibrated
    reasons = said(costs(drafts={}))
    assert reasons["no_model_drafter"] == "no model drafter: it has not been timed"


def test_a_drafter_without_known_acceptance_promises_no_gain() -> None:
    found = best(costs(acceptance={}, contention=APART))
    assert (found.mode, found.verdict.code) == ("pipelined", "gain_not_known")
    assert found.tokens_per_s == pytest.approx(10)
    assert found.possible_speedup > 1.02


def test_a_drafter_that_was_seldom_right_is_planned_if_it_could_pay() -> None:
    """Planning a drafter is free: each round drafts only if that is expected to pay."""
    found = best(costs(acceptance={"model": (0.05,)}))
    assert (found.mode, found.sources, found.verdict.code) == ("serial", ("model",), "possible_gain")
    assert (found.tokens_per_s, found.depth) == (pytest.approx(10), 0)
    assert found.drafted_tokens_per_s < 10


def test_priors_of_other_machines_predict_no_speed_of_this_one() -> None:
    assert plan_pair(request("model"), FACTS, probe(4), (), costs()).predicted_tokens_per_s is not None
    guessed = plan_pair(request("model"), FACTS, probe(4), (), costs(measured=False))
    assert (guessed.mode, guessed.predicted_tokens_per_s) == ("serial", None)


def test_of_several_drafting_models_the_ranking_plans_the_one_that_gains_most() -> None:
    tiny = DraftingModel(facts=model_facts("tiny"), source="model:tiny")
    fast = DraftCost(token_s=0.001)
    known = costs(
        drafts={"model": SLOW_DRAFTER, "model:tiny": fast}, acceptance={"model": (0.8,), "model:tiny": (0.8,)}
    )
    both = request("lookup", drafters=(SMALL, tiny))
    assert both.sources == ("lookup", "model", "model:tiny")
    ranking = rank_pair(both, FACTS, probe(4), known)
    assert ranking is not None
    assert ranking.best.sources == ("lookup", "model:tiny")
    assert {candidate.sources for candidate in ranking.candidates if candidate.drafter is not None} == {
        ("lookup", "model"),
        ("lookup", "model:tiny"),
    }
    plan = plan_pair(both, FACTS, probe(4), (), known)
    assert plan.drafter == PlannedDrafter(kind="lookup+model:tiny", facts=tiny.facts)
    assert "no model:tiny drafter: it has not been timed" in said(costs(), 4, drafters=(tiny,)).values()


def test_two_drafters_cannot_have_one_source() -> None:
    with pytest.raises(ValueError, match="another source"):
        request(drafters=(SMALL, SMALL))


def test_the_depth_policy_prices_the_drafting_model_whatever_its_name() -> None:
    def depths(source: str) -> list[int]:
        known = costs(drafts={"lookup": FREE, source: DraftCost(token_s=0.001)}, acceptance={source: (0.8,)})
        assert known.model == source
        control = DepthControl(known, 4)
        answer = control.answer(prompt_tokens=64)
        answer.began(0.1, 0.1)
        found = []
        for _ in range(30):
            allowed = answer.allow(source).depth
            found.append(allowed)
            answer.learn(source, (0.9,) * allowed, (True,) * allowed)
            own = source if allowed else None
            draft_s = 0.001 * allowed
            answer.record(
                a_round(allowed, allowed, context=128, forwards=allowed, source=own, draft_s=draft_s, verify_s=0.1)
            )
        assert control.speedup(1.0) > 1
        return found

    assert depths("model") == depths("model:tiny")
    assert max(depths("model:tiny")) > 1
    assert costs(drafts={"lookup": FREE}).model is None
