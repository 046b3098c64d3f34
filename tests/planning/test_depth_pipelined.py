"""The default depth policy of a target and a drafter that work at the same time."""

from __future__ import annotations

import math
from dataclasses import replace

from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.cost.contention import Contention
from edgespec.planning.depth.answer import PLAIN_EVERY
from edgespec.planning.depth.control import DepthControl
from edgespec.planning.depth.experience import Lengths
from tests.planning.test_depth_control import begun, control, drafting, round_of
from tests.support.drawn_requests import NATIVE, World, believed


def beside(contention: Contention | None = None, world: World = NATIVE) -> DepthControl:
    return DepthControl(replace(believed(world), contention=contention), 4, pipelined=True)


def overlapped(width: int, emitted: int, *, slower: float = 1.0) -> RoundRecord:
    return replace(round_of(width, emitted, factor=slower), overlapped=True, draft_forwards=3, source="model")


def test_pipelined_drafting_allows_one_more_token_and_sets_no_gate() -> None:
    answer = drafting(beside())
    allowance = answer.allow("model", 1)
    assert (allowance.depth, allowance.gate, allowance.window, allowance.patience_s) == (5, None, None, math.inf)
    assert answer.why_off("model") is None
    copies = answer.allow_free("lookup")
    assert copies.depth == 4
    assert copies.gate is not None


def test_only_a_pipelined_policy_drafts_during_the_prompt() -> None:
    assert beside().answer(prompt_tokens=9).allow("model", 9).depth == 5
    assert control().answer(prompt_tokens=9).allow("model", 9).depth == 0


def test_contention_that_eats_the_gain_makes_drafting_hopeless() -> None:
    own = beside(Contention(target_factor=6.0, drafter_factor=3.0))
    answer = begun(own)
    assert answer.allow("model").depth == 0
    why = answer.why_off("model")
    assert why is not None
    assert why.code == "no_drafter_pays"
    own.replan(believed(NATIVE), 4, pipelined=True)
    drafting(own)


def test_pipelined_rounds_slower_than_plain_pause_drafting() -> None:
    answer = drafting(beside())
    rounds = 0
    while answer.allow("model", 1).depth:
        answer.record(overlapped(4, 2, slower=4.0))
        rounds += 1
    assert rounds < 8
    good = drafting(beside(Contention(target_factor=1.4, drafter_factor=1.4)))
    for _ in range(30):
        assert good.allow("model", 1).depth == 5
        good.record(overlapped(4, 3, slower=1.4))


def test_overlapped_rounds_never_count_as_plain_rounds() -> None:
    own = beside()
    answer = drafting(own)
    answer.record(round_of())
    plain = own.answer(prompt_tokens=0).plain_tokens_per_s
    for _ in range(PLAIN_EVERY):
        assert answer.allow("model", 1).depth == 5
        answer.record(overlapped(1, 2, slower=1.2))
    assert own.answer(prompt_tokens=0).plain_tokens_per_s == plain
    assert answer.allow("model", 1).depth == 0, "plain decoding is timed in this round"
    answer.record(round_of())
    assert answer.allow("model", 1).depth == 5


def test_reading_in_parallel_costs_only_the_targets_slowdown() -> None:
    own = beside()
    own.lengths = Lengths([100] * 20)
    assert begun(own, 100_000).allow("model", 100_000).depth == 5
    crowded = beside(Contention(target_factor=1.3, drafter_factor=1.3))
    crowded.lengths = Lengths([100] * 20)
    assert begun(crowded, 10).allow("model", 10).depth == 5
    assert begun(crowded, 100_000).allow("model", 100_000).depth == 0
