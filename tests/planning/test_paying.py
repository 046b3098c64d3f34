"""Who drafts and whether in turns with the target or at once, by the times that were measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgespec.planning.choice.paying import NOT_CALIBRATED, Paying, weigh_sources
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, ContextCurves, Curve, DraftCost, choose_depth
from edgespec.planning.cost.round_simulation import SimulatedPair, expected_pipelined

FLAT = Curve(widths=(1, 16), forward_s=(0.1, 0.1))
APART = Contention()
CROWDED = Contention(target_factor=1.9, drafter_factor=2.1)
SLOW_DRAFTER = DraftCost(token_s=0.05)


def costs(curve: Curve = FLAT, **known: Any) -> Costs:
    return Costs(
        **{
            "curves": ContextCurves(contexts=(0,), curves=(curve,)),
            "drafts": {"model": SLOW_DRAFTER, "lookup": FREE},
            "acceptance": {"model": (0.8,)},
            **known,
        }
    )


def weigh(known: Costs, cap: int = 4, **wish: Any) -> Paying:
    return weigh_sources(("model",), known, cap, **wish)


def test_two_that_do_not_touch_work_at_once() -> None:
    found = weigh(costs(contention=APART))
    at_once = expected_pipelined(SimulatedPair(curve=FLAT, draft=SLOW_DRAFTER, acceptance=(0.8,)), 4)
    assert (found.mode, found.sources) == ("pipelined", ("model",))
    assert found.tokens_per_s == pytest.approx(at_once.tokens_per_s)
    assert at_once.tokens_per_s > choose_depth(FLAT, SLOW_DRAFTER, (0.8,), 4).tokens_per_s
    assert any(reason.startswith("pipelined the target takes 1.00 times") for reason in found.reasons)
    assert any("where it is always right" in reason for reason in found.reasons)


def test_two_that_share_the_memory_take_turns_and_the_contention_is_the_reason() -> None:
    found = weigh(costs(contention=CROWDED))
    assert found.mode == "serial"
    assert found.tokens_per_s == pytest.approx(choose_depth(FLAT, SLOW_DRAFTER, (0.8,), 4).tokens_per_s)
    (reason,) = [each for each in found.reasons if each.startswith("serial")]
    assert "the target takes 1.90 times and the drafter 2.10 times as long as alone" in reason


def test_where_contention_was_not_measured_they_take_turns() -> None:
    found = weigh(costs())
    assert found.mode == "serial"
    assert "serial: what target and drafter cost each other has not been measured" in found.reasons


@pytest.mark.parametrize(("mode", "said"), [("serial", "serial: asked for"), ("pipelined", "pipelined: asked for")])
def test_a_mode_that_was_asked_for_is_kept(mode: Any, said: str) -> None:
    for contention in (None, APART, CROWDED):
        found = weigh(costs(contention=contention, drafts={"model": DraftCost(token_s=0.01)}), mode=mode)
        assert found.mode == mode
        assert said in found.reasons


def test_a_drafter_that_pays_only_at_once_is_kept_for_that() -> None:
    steep = Curve(widths=(1, 16), forward_s=(0.1, 0.85))
    dear = costs(steep, drafts={"model": DraftCost(token_s=0.06)}, contention=APART, acceptance={"model": (0.99,)})
    assert weigh(dear).mode == "pipelined"
    assert weigh(replace(dear, contention=None)).sources == ()


def test_a_drafter_that_pays_neither_way_is_dropped_with_both_figures() -> None:
    found = weigh(costs(drafts={"model": DraftCost(token_s=0.3)}, contention=CROWDED))
    assert (found.mode, found.sources) == ("plain", ())
    assert found.tokens_per_s == pytest.approx(10)
    (reason,) = [each for each in found.reasons if each.startswith("no model drafter")]
    assert "even if it were always right it would reach 0.50x plain, and 0." in reason
    assert "pipelined with the target, as the target takes 1.90 times" in reason
    assert found.reasons[-1] == "plain: no drafter can be faster here"


def test_at_once_has_to_beat_turns_by_more_than_the_noise() -> None:
    fast = DraftCost(token_s=0.0001)  # in turns or at once: it takes no time
    steep = Curve(widths=(1, 2, 3), forward_s=(0.1, 0.11, 0.12))
    found = weigh(costs(steep, drafts={"model": fast}, contention=APART), cap=2)
    assert found.mode == "serial"


def test_copies_of_the_text_say_nothing_about_the_mode() -> None:
    known = costs(contention=APART)
    found = weigh_sources(("lookup",), known, 4)
    assert (found.mode, found.sources) == ("serial", ("lookup",))
    assert found.tokens_per_s == pytest.approx(10)
    assert weigh_sources(("lookup", "model"), known, 4).mode == "pipelined"


def test_without_times_nothing_is_decided() -> None:
    assert weigh_sources(("model",), Costs(), 4).reasons == (NOT_CALIBRATED,)
    assert weigh_sources((), Costs(), 4) == Paying()
    assert weigh(costs(drafts={})).reasons[1] == "no model drafter: what it costs has not been measured"


def test_a_drafter_nobody_has_heard_promises_nothing() -> None:
    found = weigh(costs(acceptance={}, contention=APART))
    assert (found.mode, found.tokens_per_s) == ("pipelined", pytest.approx(10))
