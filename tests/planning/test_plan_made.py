"""The planner's second half: what is decided from measurements, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.reasons import Reason
from edgespec.planning.choice.plan import Plan
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, ContextCurves, Curve, DraftCost
from edgespec.planning.cost.margins import DRAFT_MARGIN
from edgespec.planning.cost.widths import WIDEST, ContextProbe, WidthProbe
from tests.support.planning import SMALL, model_facts, plan_pair, request

FACTS = model_facts(build="0.3.36+abc", device="gpu0", kv_type="q8_0", settings={"repack": True})


def stable_to(width: int) -> WidthProbe:
    others = dict.fromkeys(range(width + 1, WIDEST + 1), 0.5)
    return WidthProbe(
        widths=tuple(range(1, width + 1)),
        contexts=(ContextProbe(start=96, positions=12, max_abs_diff=others),),
        complete=True,
    )


# A forward costs the same at every width, and a draft token a tenth of it.
FLAT = ContextCurves(contexts=(96,), curves=(Curve(widths=(1, 16), forward_s=(0.1, 0.1)),))
CHEAP = DraftCost(token_s=0.01, lag_token_s=0.001)
KNOWN = Costs(curves=FLAT, drafts={"lookup": FREE, "model": CHEAP})


def plan(
    probe: WidthProbe | None,
    *,
    facts: ModelFacts = FACTS,
    reasons: Sequence[Reason] = (),
    costs: Costs | None = KNOWN,
    sources: Sequence[str] = ("lookup",),
    **wish: Any,
) -> Plan:
    return plan_pair(request(*sources, **wish), facts, probe, reasons, costs or Costs())


def test_a_plan_drafts_within_the_bit_equal_widths() -> None:
    made = plan(stable_to(4))
    assert (made.mode, made.exactness, made.depth_cap) == ("serial", "W", 3)
    assert made.numeric_class.widths == (1, 2, 3, 4)
    assert made.drafter is not None
    assert (made.drafter.kind, made.drafter.model, made.drafter.runtime, made.drafter.device) == ("lookup",) + (
        None,
    ) * 3
    assert "up to 3 guesses at a time keep the text identical" in made.reasons
    assert "each round guesses as far as that is expected to pay" in made.reasons


def test_beyond_the_compared_contexts_decoding_is_plain_with_a_reason() -> None:
    said = "beyond 108 tokens of context decoding is plain"
    assert any(said in reason for reason in plan(stable_to(4)).reasons)
    assert any(said in reason for reason in plan(stable_to(4), depth=2).reasons)
    by_construction = replace(FACTS, bit_equal_by_construction=True)
    for quiet in (
        plan(stable_to(4), facts=by_construction),
        plan(stable_to(4), context_length=108),
        plan(stable_to(4), exactness="near"),
        plan(stable_to(1)),
    ):
        assert not any("tokens of context decoding is plain" in reason for reason in quiet.reasons)


BRANCHING = replace(FACTS, can_branch=True)
MODEL: dict[str, Any] = {"sources": ("model",)}
SHORT, BESIDE = "the drafter reads 49152 of the 151936 rows", "second choices are verified as well"


def notes(made: Plan) -> tuple[bool, bool]:
    """Whether the plan mentions a trimmed head, and alternatives."""
    said = " ".join(made.reasons)
    return SHORT in said, BESIDE in said


def test_a_plan_reports_a_trimmed_head_and_alternatives() -> None:
    short = replace(SMALL, head=(49152, 151936))
    wishes: dict[str, Any] = {**MODEL, "drafters": (short,), "weighs_alternatives": True}
    assert notes(plan(stable_to(4), facts=BRANCHING, **wishes)) == (True, True)
    assert notes(plan(stable_to(4), **wishes)) == (True, False), "the target cannot score alternatives"
    assert notes(plan(stable_to(4), facts=BRANCHING, **{**wishes, "depth": 2})) == (True, False)
    assert notes(plan(stable_to(4), facts=BRANCHING, **MODEL)) == (False, False)
    assert notes(plan(stable_to(4), facts=BRANCHING, **{**wishes, "drafters": (), "sources": ("lookup",)})) == (
        False,
        False,
    )
    assert notes(plan(stable_to(4), facts=BRANCHING, **{**wishes, "depth": 0})) == (False, False)


def test_a_plan_reports_how_far_its_drafter_is_requantised() -> None:
    said = "the drafter's weights are kept in four bits: 278 MB instead of the file's 392 MB"
    small = replace(SMALL, facts=model_facts("small", weight_bytes=278_000_000), filed_bytes=391_600_000)
    wishes: dict[str, Any] = {**MODEL, "drafters": (small,)}
    assert said in plan(stable_to(4), **wishes).reasons
    assert said not in plan(stable_to(4), **{**wishes, "depth": 0}).reasons
    assert "four bits" not in " ".join(plan(stable_to(4), **MODEL).reasons)


def test_the_depth_cap_counts_only_consecutive_widths() -> None:
    made = plan(WidthProbe(widths=(1, 2, 3, 7, 8)))
    assert made.depth_cap == 2
    assert made.numeric_class.widths == (1, 2, 3, 7, 8)


@pytest.mark.parametrize(("asked", "cap"), [(1, 1), (2, 2), (3, 3), (4, 3), (99, 3)])
def test_a_requested_depth_stays_within_the_bit_equal_widths(asked: int, cap: int) -> None:
    made = plan(stable_to(4), depth=asked)
    assert (made.mode, made.exactness, made.depth_cap) == ("serial", "W", cap)
    assert any(f"depth {asked} was asked for" in reason for reason in made.reasons) is (asked > 3)
    assert not any("calibrated" in reason for reason in made.reasons)  # a requested depth is not evaluated
    assert made.predicted_tokens_per_s is None  # and its speed is not predicted
    # so no times are needed
    assert plan(stable_to(4), depth=asked, costs=None) == made


@pytest.mark.parametrize("exactness", ["stable", "near"])
@pytest.mark.parametrize("probe", [None, stable_to(4)], ids=["unprobed", "probed"])
def test_depth_zero_gives_a_plain_plan(probe: WidthProbe | None, exactness: str) -> None:
    made = plan(probe, depth=0, exactness=exactness)
    assert (made.mode, made.exactness, made.depth_cap, made.drafter) == ("plain", "W", 0, None)
    assert made.reasons == ("plain: depth 0 was asked for",)


@pytest.mark.parametrize("exactness", ["stable", "near"])
@pytest.mark.parametrize("depth", ["auto", 3])
def test_without_a_width_probe_the_plan_is_plain(exactness: str, depth: int | str) -> None:
    made = plan(None, exactness=exactness, depth=depth)
    assert (made.mode, made.exactness, made.depth_cap, made.drafter) == ("plain", "W", 0, None)
    assert made.numeric_class.widths == (1,)
    unprobed = "plain: which widths are bit-equal here has not been measured"
    assert made.reasons == (request().not_calibrated.text if depth == "auto" else unprobed,)


@pytest.mark.parametrize("depth", ["auto", 3])
def test_without_a_bit_equal_width_the_plan_is_plain(depth: int | str) -> None:
    made = plan(stable_to(1), depth=depth)
    assert (made.mode, made.exactness, made.depth_cap, made.drafter) == ("plain", "W", 0, None)
    assert any(reason.startswith("plain: no width beyond 1") for reason in made.reasons)


@pytest.mark.parametrize("probe", [None, stable_to(1), stable_to(4)], ids=["unprobed", "unstable", "stable"])
@pytest.mark.parametrize("exactness", ["stable", "near"])
def test_without_a_drafter_the_plan_is_plain(probe: WidthProbe | None, exactness: str) -> None:
    made = plan(probe, sources=(), exactness=exactness)
    assert (made.mode, made.exactness, made.depth_cap, made.drafter) == ("plain", "W", 0, None)
    assert "plain: there is no drafter" in made.reasons


def test_a_cache_that_cannot_rewind_makes_the_plan_plain() -> None:
    for exactness in ("stable", "near"):
        made = plan(stable_to(8), facts=replace(FACTS, can_rewind=False), exactness=exactness)
        assert (made.mode, made.exactness, made.depth_cap, made.drafter) == ("plain", "W", 0, None)
        assert any("does not work with this kind of model yet" in reason for reason in made.reasons)
        assert made.plain_because == made.why[-1]


@pytest.mark.parametrize(
    ("asked", "stable", "cap", "level"),
    [
        ("auto", 1, WIDEST - 1, "N"),
        ("auto", 4, WIDEST - 1, "N"),
        ("auto", WIDEST, WIDEST - 1, "W"),
        (2, 4, 2, "W"),
        (3, 4, 3, "W"),
        (4, 4, 4, "N"),
        (99, 4, WIDEST - 1, "N"),
        (5, 1, 5, "N"),
    ],
)
def test_near_exactness_exceeds_the_bit_equal_widths_with_a_reason(
    asked: int | str, stable: int, cap: int, level: str
) -> None:
    made = plan(stable_to(stable), exactness="near", depth=asked)
    assert (made.mode, made.exactness, made.depth_cap) == ("serial", level, cap)
    says = [reason for reason in made.reasons if "near exactness was asked for" in reason]
    assert len(says) == (level == "N")
    if says:
        assert f"depth up to {cap}" in says[0]
        assert f"depths to {stable - 1} are bit-equal" in says[0]


@pytest.mark.parametrize(
    ("depth", "said"), [(1, "1 guess at a time, as asked for"), (2, "2 guesses at a time, as asked for")]
)
def test_a_requested_depth_is_among_the_reasons(depth: int, said: str) -> None:
    made = plan(stable_to(4), depth=depth)
    assert Reason("depth_asked", said) in made.why
    assert "depth_asked" not in {reason.code for reason in plan(stable_to(4), depth=9).why}, (
        "deeper than the bit-equal widths allow"
    )
    assert "depth_asked" not in {reason.code for reason in plan(stable_to(4)).why}


def test_near_exactness_is_never_chosen_without_a_request() -> None:
    for stable in range(1, WIDEST + 1):
        for depth in ("auto", *range(WIDEST + 2)):
            assert plan(stable_to(stable), depth=depth).exactness == "W"
            assert plan(stable_to(stable), depth=depth).depth_cap <= stable - 1


def test_a_plan_names_its_drafting_model() -> None:
    small = replace(SMALL, facts=model_facts("small", runtime="onnx", device="gpu1"))
    made = plan(stable_to(4), sources=("lookup", "model"), drafters=(small,))
    assert made.drafter is not None
    drafter = made.drafter
    assert (drafter.kind, drafter.model, drafter.runtime, drafter.device) == (
        "lookup+model",
        "small",
        "onnx",
        "gpu1",
    )


def test_every_mode_reports_why_there_is_no_drafting_model() -> None:
    for probe in (None, stable_to(1), stable_to(4)):
        made = plan(probe, no_model="another vocabulary")
        assert made.drafter_off == "another vocabulary"
        assert "no model drafter: another vocabulary" in made.reasons


def test_a_plan_contains_its_inputs_and_is_repeatable() -> None:
    given = [Reason("target_place", "big on gpu0, 4 threads")]
    made = plan(stable_to(3), reasons=given, context_length=777)
    assert made.why[0] == given[0]
    assert given == [Reason("target_place", "big on gpu0, 4 threads")]  # pure
    assert made == plan(stable_to(3), reasons=given, context_length=777)
    assert made.predicted_tokens_per_s == pytest.approx(10)  # copies of the text promise no gain
    assert made.context_length == 777
    assert (made.target.model, made.target.runtime, made.target.device, made.target.threads) == (
        "big",
        "llama",
        "gpu0",
        4,
    )
    kind = made.numeric_class
    assert (kind.runtime, kind.build, kind.device, kind.threads, kind.kv_type) == (
        "llama",
        "0.3.36+abc",
        "gpu0",
        4,
        "q8_0",
    )
    assert kind.settings == {"repack": True}
    assert plan(stable_to(3), costs=None).predicted_tokens_per_s is None  # not measured
    with pytest.raises(FrozenInstanceError):
        made.depth_cap = 9  # type: ignore[misc]


def test_a_plan_as_json() -> None:
    given = [Reason("target_place", "why")]
    made = plan(stable_to(3), sources=("model",), reasons=given).as_json()
    assert made["drafter"] == {"kind": "model", "model": "small", "runtime": "llama", "device": "cpu"}
    assert made["target"] == {"model": "big", "runtime": "llama", "device": "gpu0", "threads": 4}
    assert made["numeric_class"]["widths"] == [1, 2, 3]
    assert (made["mode"], made["exactness"], made["depth_cap"]) == ("serial", "W", 2)
    assert made["predicted_tokens_per_s"] == pytest.approx(10)
    assert made["reasons"][0] == "why"
    assert made["reason_codes"][0] == "target_place"
    assert len(made["reason_codes"]) == len(made["reasons"])
    assert plan(None).as_json()["drafter"] is None


# ------------------------------------------------------------------------------------- drafters and times


def both(**wish: Any) -> Plan:
    return plan(stable_to(4), **{"sources": ("lookup", "model"), **wish})


def test_without_calibration_no_drafter_is_planned_by_default() -> None:
    for costs in (None, Costs(), Costs(drafts=KNOWN.drafts)):
        made = both(costs=costs)
        assert (made.mode, made.exactness, made.depth_cap, made.drafter) == ("plain", "W", 0, None)
        assert made.why[-1] == made.plain_because == request().not_calibrated
        assert made.predicted_tokens_per_s is None


def test_a_plan_reports_the_best_possible_speedup_of_each_drafter() -> None:
    made = both()
    step = "a plain step takes 100.0 ms; one that verifies guesses takes longer"
    assert f"{step}: 1.00x with 1, 1.00x with 2, 1.00x with 3" in made.reasons
    assert made.drafter is not None
    assert made.drafter.kind == "lookup+model"
    (said,) = [reason.text for reason in made.why if reason.code == "gain_not_known"]
    most = "up to 3.08x with 3 right guesses at a time"  # 4 / 1.3
    assert said.endswith(f"depends on the text: {most}")
    copies = plan(stable_to(4), sources=("lookup",)).reasons
    assert any("up to 4.00x with 3 right guesses at a time" in reason for reason in copies)


def test_a_hopeless_drafter_is_rejected_with_its_best_possible_speedup() -> None:
    dear = replace(KNOWN, drafts={"lookup": FREE, "model": DraftCost(token_s=0.2)})
    made = both(costs=dear)
    assert made.drafter is not None
    assert (made.drafter.kind, made.drafter.runtime, made.drafter.device) == ("lookup", None, None)
    # 2 tokens in 0.3 s, 3 in 0.5 s, 4 in 0.7 s: the first is the best, and plain decoding does 10 a second.
    off = "small on cpu drafting for big on gpu0, serial: cannot speed this up here (0.67x at best): off"
    assert off in made.reasons
    alone = both(costs=dear, sources=("model",))
    assert (alone.mode, alone.drafter, alone.depth_cap) == ("plain", None, 0)
    assert alone.plain_because == Reason("no_drafter_pays", "plain: no drafter can be faster here")
    assert off in alone.reasons
    assert alone.predicted_tokens_per_s == pytest.approx(10)


def test_a_curve_too_steep_for_any_drafter_gives_a_plain_plan() -> None:
    steep = ContextCurves(contexts=(96,), curves=(Curve(widths=(1, 16), forward_s=(0.1, 1.6)),))
    made = both(costs=replace(KNOWN, curves=steep))
    assert made.mode == "plain"
    assert any(
        "copies of the text" in r and "cannot speed this up here (1.00x at best): off" in r for r in made.reasons
    )


@pytest.mark.parametrize(("gain", "kept"), [(DRAFT_MARGIN + 0.005, True), (DRAFT_MARGIN - 0.005, False)])
def test_a_gain_within_the_error_of_measurement_gives_a_plain_plan(gain: float, kept: bool) -> None:
    curve = Curve(widths=(1, 2), forward_s=(0.1, 0.2 / gain))
    costs = Costs(curves=ContextCurves(contexts=(0,), curves=(curve,)), drafts={"lookup": FREE})
    assert (plan(stable_to(2), costs=costs).mode == "serial") is kept


def test_an_unmeasured_drafter_is_left_out_with_a_reason() -> None:
    made = both(costs=replace(KNOWN, drafts={"lookup": FREE}))
    assert made.drafter is not None
    assert made.drafter.kind == "lookup"
    assert "no model drafter: it has not been timed" in made.reasons


def test_the_predicted_speed_includes_the_expected_acceptance() -> None:
    assert both().predicted_tokens_per_s == pytest.approx(10)  # unknown acceptance: at least plain decoding
    seen = replace(KNOWN, acceptance={"model": (0.5,)})
    # Depths 1 to 3 commit 1.5, 1.75 and 1.875 tokens in 0.11, 0.12 and 0.13 s.
    assert both(costs=seen).predicted_tokens_per_s == pytest.approx(1.75 / 0.12)
    # Times of similar machines choose, and promise nothing.
    assert both(costs=replace(seen, measured=False)).predicted_tokens_per_s is None
    never = replace(KNOWN, acceptance={"model": (0.0,), "lookup": (1.0,)})
    assert both(costs=never).predicted_tokens_per_s == pytest.approx(10)
    assert both(costs=seen, depth=0).predicted_tokens_per_s == pytest.approx(10)
    assert plan(None, costs=seen).predicted_tokens_per_s == pytest.approx(10)


def test_a_requested_depth_is_planned_even_if_it_loses() -> None:
    dear = replace(KNOWN, drafts={"model": DraftCost(token_s=9.0)})
    made = both(depth=2, costs=dear)
    assert (made.mode, made.depth_cap, made.predicted_tokens_per_s) == ("serial", 2, None)
    assert made.drafter is not None
    assert made.drafter.kind == "lookup+model"


def test_near_exactness_evaluates_depths_beyond_the_bit_equal_widths() -> None:
    made = plan(stable_to(1), exactness="near", sources=("model",))
    assert (made.exactness, made.depth_cap, made.mode) == ("N", WIDEST - 1, "serial")
    assert any("with 11 right guesses at a time" in reason for reason in made.reasons)
    assert plan(stable_to(1), exactness="near", costs=None).mode == "plain"


def test_the_predicted_speed_uses_the_shortest_measured_context() -> None:
    longer = Curve(widths=(1, 16), forward_s=(0.5, 5.0))
    curves = ContextCurves(contexts=(96, 1018), curves=(FLAT.curves[0], longer))
    assert both(costs=replace(KNOWN, curves=curves)).predicted_tokens_per_s == pytest.approx(10)
