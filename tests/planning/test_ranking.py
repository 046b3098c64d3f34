"""Which way to run is ranked first, which are rejected, and that the reasons match the numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from edgespec.errors import MemoryLimitError
from edgespec.planning.choice.options import HEADROOM_BYTES, DrafterOption, Ranking, TargetOption
from edgespec.planning.choice.ranking import MODES, explain, rank, reasons
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.curve import FREE, Curve, DraftCost, choose_depth
from edgespec.planning.cost.margins import DRAFT_MARGIN
from edgespec.planning.cost.round_simulation import SimulatedPair, SimulatedRounds, expected_pipelined
from edgespec.planning.cost.widths import WIDEST
from tests.support.planning import GIB, drafter_option, model_facts, target_option

ROOMY = {"cpu": 32 * GIB, "GPU0": 32 * GIB}
APART = {("cpu", "GPU0"): Contention(), ("GPU0", "cpu"): Contention()}


def flat(plain_s: float) -> Curve:
    return Curve(widths=(1, 16), forward_s=(plain_s, plain_s))


def steep(plain_s: float) -> Curve:
    """Every row costs as much as the first."""
    return Curve(widths=(1,), forward_s=(plain_s,))


def target(
    device: str = "cpu", curve: Curve | None = None, *, depth_cap: int | None = 7, **facts: Any
) -> TargetOption:
    bytes_read = {"weight_bytes": 4 * GIB, "bytes_per_forward": 4 * GIB}
    large = model_facts("large", device=device, **{**bytes_read, **facts})
    return target_option(large, curve or flat(0.1), depth_cap_stable=depth_cap)


def drafter(
    device: str = "cpu", token_s: float = 0.01, *, acceptance: tuple[float, ...] = (0.8,), weight_bytes: int = GIB
) -> DrafterOption:
    small = model_facts("small", device=device, weight_bytes=weight_bytes, bytes_per_forward=GIB)
    return drafter_option(small, DraftCost(token_s=token_s), acceptance=acceptance)


def texts(ranking: Ranking) -> list[str]:
    return [reason.text for reason in reasons(ranking)]


def best_said(ranking: Ranking) -> list[str]:
    """The reasons of the best candidate."""
    return [reason.text for reason in ranking.best.why]


LOOKUP = DrafterOption(source="lookup", cost=FREE, acceptance=(0.3, 0.6))


def at_once(
    plain_s: float, token_s: float, acceptance: float, cap: int, **changes: Any
) -> dict[int, SimulatedRounds]:
    """Pipelined rounds by depth, with a target whose curve is flat."""
    pair = SimulatedPair(curve=flat(plain_s), draft=DraftCost(token_s=token_s), acceptance=(acceptance,), **changes)
    return {depth: expected_pipelined(pair, depth) for depth in range(1, cap + 1)}


def placed(ranking: Ranking) -> tuple[str, str, str | None]:
    best = ranking.best
    return best.mode, best.target.facts.device, best.drafter.device if best.drafter else None


def reason_for(ranking: Ranking, words: str) -> str:
    (found,) = [refusal.verdict.text for refusal in ranking.rejected if words in refusal.sentence]
    return found


# ------------------------------------------------------------------------------------------- the winner


def test_a_drafter_on_the_gpu_wins_if_the_target_does_not_fit_there() -> None:
    targets = [target("cpu"), target("GPU0", flat(0.02))]
    drafters = [drafter("cpu", 0.04), drafter("GPU0", 0.02)]
    ranking = rank(targets, drafters, {**ROOMY, "GPU0": 3 * GIB}, contention=APART)
    assert placed(ranking) == ("pipelined", "cpu", "GPU0")
    # Five tokens are drafted in a forward: four wait to be verified, and the fifth is the first one in flight.
    assert ranking.best.depth == 4
    assert ranking.best.tokens_per_round == pytest.approx(5 / (1 + 0.8 / (1 - 0.8**5)))
    assert "the target is busy 100 % of the time and the drafter 100 %" in best_said(ranking)
    assert "large on GPU0: needs 4.69 GiB on GPU0 and 3.00 GiB may be used" in texts(ranking)


def test_a_drafter_on_the_cpu_wins_if_the_target_fills_the_gpu() -> None:
    targets = [target("cpu"), target("GPU0", flat(0.02))]
    drafters = [drafter("cpu", 0.005), drafter("GPU0", 0.001)]
    ranking = rank(targets, drafters, {**ROOMY, "GPU0": 5 * GIB}, contention=APART)
    assert placed(ranking) == ("pipelined", "GPU0", "cpu")
    assert reason_for(ranking, "small on GPU0 drafting for large on GPU0") == (
        "needs 1.44 GiB on GPU0 and 0.31 GiB are free with the target loaded"
    )
    with_room = rank(targets, drafters, ROOMY, contention=APART)
    assert placed(with_room) == ("serial", "GPU0", "GPU0")


def test_plain_decoding_wins_if_no_drafter_pays() -> None:
    ranking = rank([target(curve=steep(0.1))], [drafter(token_s=0.05), LOOKUP], ROOMY)
    assert placed(ranking) == ("plain", "cpu", None)
    assert reason_for(ranking, "small on cpu") == "cannot speed this up here (0.80x at best): off"
    assert reason_for(ranking, "copies of the text") == "cannot speed this up here (1.00x at best): off"
    assert len(reasons(ranking)) == 3


def test_too_little_memory_rejects_the_drafter_with_the_sizes() -> None:
    ranking = rank([target()], [drafter()], {"cpu": 6 * GIB})
    assert placed(ranking) == ("plain", "cpu", None)
    assert "needs 1.44 GiB on cpu and 1.31 GiB are free with the target loaded" in " ".join(texts(ranking))
    assert placed(rank([target()], [drafter()], {"cpu": 7 * GIB})) == ("serial", "cpu", "cpu")


def test_a_drafter_never_takes_the_targets_memory() -> None:
    """The GPU holds either; the target gets the GPU, although moving the target would only cost time."""
    targets = [target("GPU0", flat(0.02)), target("cpu")]
    ranking = rank(targets, [drafter("GPU0", 0.001)], {"cpu": 8 * GIB, "GPU0": 5 * GIB})
    assert placed(ranking) == ("plain", "GPU0", None)


def test_two_devices_with_one_memory_share_its_size() -> None:
    integrated = drafter("Vulkan0")
    assert integrated.footprint is not None
    integrated = replace(integrated, footprint=replace(integrated.footprint, memory="cpu"))
    ranking = rank([target()], [integrated], {"cpu": 6 * GIB})
    assert "on cpu and 1.31 GiB are free with the target loaded" in reason_for(ranking, "Vulkan0")


def test_a_target_that_fits_nowhere_raises_an_error() -> None:
    with pytest.raises(MemoryLimitError, match=r"large fits nowhere: on cpu it needs 4\.69 GiB") as raised:
        rank([target(), target("GPU0")], [], {"cpu": 4 * GIB, "GPU0": GIB})
    assert raised.value.needed_bytes == 4 * GIB + GIB // 2 + HEADROOM_BYTES
    assert raised.value.available_bytes == 4 * GIB
    assert raised.value.hint
    with pytest.raises(MemoryLimitError, match="how much memory cpu has is not known"):
        rank([target()], [], {})
    with pytest.raises(ValueError, match="no target"):
        rank([], [], ROOMY)


def test_a_drafter_on_a_device_with_unknown_memory_is_rejected() -> None:
    ranking = rank([target()], [drafter("GPU0")], {"cpu": 32 * GIB}, contention=APART)
    assert reason_for(ranking, "GPU0") == "how much memory GPU0 has is not known"


def test_the_headroom_is_added_for_each_model() -> None:
    needed = 4 * GIB + GIB // 2 + HEADROOM_BYTES
    assert rank([target()], [], {"cpu": needed}).best.mode == "plain"
    with pytest.raises(MemoryLimitError):
        rank([target()], [], {"cpu": needed - 1})


# ------------------------------------------------------------------------------------- the class and its price


def test_a_slower_exact_setting_has_to_be_repaid_by_drafting() -> None:
    """Without repacking more widths are bit-equal, and plain decoding is slower: compared with the fastest plain."""
    fast = target(curve=flat(0.1), settings={"repack": True}, depth_cap=1)
    exact = target(curve=flat(0.125), settings={"repack": False}, depth_cap=6)
    ranking = rank([fast, exact], [drafter(token_s=0.01)], ROOMY)
    assert ranking.best.target is exact
    assert ranking.best.speedup == pytest.approx(
        choose_depth(exact.curve, DraftCost(token_s=0.01), (0.8,), 6).tokens_per_s * 0.1
    )
    assert "plain decoding takes 1.25x as long as on the fastest device" in best_said(ranking)[-1]
    assert "repack off" in ranking.best.what

    poor = drafter(token_s=0.01, acceptance=(0.1,))
    ranking = rank([replace(fast, depth_cap_stable=0), exact], [poor], ROOMY)
    assert (ranking.best.mode, ranking.best.target.facts.settings) == ("plain", {"repack": True})
    assert reason_for(ranking, "repack on") == "no guess keeps plain decoding's text identical there"
    slower = [candidate for candidate in ranking.candidates if candidate.target is exact]
    assert [candidate.mode for candidate in slower] == ["serial", "plain"]
    assert all(0.8 <= round(candidate.speedup, 9) < 0.85 for candidate in slower)


def test_the_exactness_level_follows_depth_and_probe() -> None:
    narrow, unknown = target(depth_cap=2), target(depth_cap=None)
    assert (rank([narrow], [drafter()], ROOMY).best.depth, rank([narrow], [drafter()], ROOMY).best.exactness) == (
        2,
        "W",
    )
    near = rank([narrow], [drafter()], ROOMY, exactness="near").best
    assert near.depth > 2
    assert near.exactness == "N"
    assert rank([unknown], [drafter()], ROOMY, exactness="any").best.exactness == "D"
    stable = rank([unknown], [drafter()], ROOMY)
    assert placed(stable) == ("plain", "cpu", None)
    assert "has not been measured" in reason_for(stable, "small")


def test_the_depth_limit_is_respected() -> None:
    free = drafter(token_s=0.0, acceptance=(1.0,))
    assert rank([target()], [free], ROOMY, exactness="near").best.depth == WIDEST - 1


# --------------------------------------------------------------------------------------- running both in parallel


def test_one_device_runs_both_models_in_parallel_only_if_that_was_measured() -> None:
    unknown = rank([target()], [drafter()], ROOMY, contention=APART)
    assert {candidate.mode for candidate in unknown.candidates} == {"plain", "serial"}
    assert not unknown.rejected
    measured = rank([target()], [drafter()], ROOMY, contention={("cpu", "cpu"): Contention(target_factor=1.8)})
    (in_turns,) = [refusal.verdict.text for refusal in measured.rejected]
    assert in_turns.startswith("pipelined ")


def test_pipelined_drafting_needs_a_known_contention() -> None:
    ranking = rank([target()], [drafter("GPU0", 0.02)], ROOMY)
    assert ranking.best.mode == "serial"
    assert reason_for(ranking, "pipelined") == "how much cpu and GPU0 slow each other down is not known"


def test_contention_slows_both_sides() -> None:
    crowded = {("cpu", "GPU0"): Contention(target_factor=1.5, drafter_factor=2.0)}
    ranking = rank([target()], [drafter("GPU0", 0.02)], ROOMY, contention=crowded, modes=["pipelined"])
    rounds = at_once(0.1, 0.02, 0.8, 7, contention=crowded["cpu", "GPU0"])
    assert ranking.best.tokens_per_s == pytest.approx(max(one.tokens_per_s for one in rounds.values()))
    assert ranking.best.tokens_per_s == pytest.approx(rounds[ranking.best.depth].tokens_per_s)
    assert "the target takes 1.50x and the drafter 2.00x as long as alone" in best_said(ranking)[1]
    apart = rank([target()], [drafter("GPU0", 0.02)], ROOMY, contention=APART, modes=["pipelined"])
    assert apart.best.tokens_per_s > ranking.best.tokens_per_s


def test_a_hand_over_slows_both_modes() -> None:
    far = {("cpu", "GPU0"): 0.05}
    near = rank([target()], [drafter("GPU0", 0.02)], ROOMY, contention=APART)
    ranking = rank([target()], [drafter("GPU0", 0.02)], ROOMY, contention=APART, hand_over_s=far)
    for mode in ("serial", "pipelined"):
        before = next(candidate for candidate in near.candidates if candidate.mode == mode)
        after = next(candidate for candidate in ranking.candidates if candidate.mode == mode)
        assert after.tokens_per_s < before.tokens_per_s
    serial = next(candidate for candidate in ranking.candidates if candidate.mode == "serial")
    assert serial.round_s == pytest.approx(0.1 + 0.05 + serial.depth * 0.02)
    pipelined = next(candidate for candidate in ranking.candidates if candidate.mode == "pipelined")
    assert pipelined.round_s == pytest.approx(at_once(0.1, 0.02, 0.8, 7, hand_over_s=0.05)[pipelined.depth].round_s)


def test_a_pipeline_may_verify_one_token_at_a_time() -> None:
    ranking = rank([target(depth_cap=1)], [drafter("GPU0")], ROOMY, contention=APART, modes=["pipelined"])
    assert (ranking.best.mode, ranking.best.depth) == ("pipelined", 1)
    assert ranking.best.tokens_per_s == pytest.approx(at_once(0.1, 0.01, 0.8, 1)[1].tokens_per_s)


def test_contention_that_makes_pipelining_lose_is_the_reason() -> None:
    crowded = {("cpu", "GPU0"): Contention(target_factor=6.0, drafter_factor=3.0)}
    ranking = rank([target()], [drafter("GPU0", 0.02)], ROOMY, contention=crowded)
    assert ranking.best.mode == "serial"
    in_turns = ranking.best.speedup
    (refusal,) = [one for one in ranking.rejected if one.verdict.code == "in_turns"]
    assert refusal.verdict.text == f"pipelined {refusal.speedup:.2f}x, serial {in_turns:.2f}x: serial"
    assert refusal.speedup is not None
    assert refusal.speedup < in_turns


@pytest.mark.parametrize("modes", [["plain"], ["plain", "serial"], ["pipelined"], []])
def test_only_requested_modes_and_plain_are_ranked(modes: list[Any]) -> None:
    ranking = rank([target()], [drafter("GPU0", 0.02)], ROOMY, contention=APART, modes=modes)
    assert {candidate.mode for candidate in ranking.candidates} == {"plain", *modes}


# ------------------------------------------------------------------------------------------- margin and ties


def test_a_gain_within_the_margin_is_rejected() -> None:
    # One token a round that is free to draft: 1.015x if it is always accepted.
    steep_beyond = target(curve=Curve(widths=(1, 2), forward_s=(0.1, 0.2 / 1.015)), depth_cap=1)
    ranking = rank([steep_beyond], [LOOKUP], ROOMY)
    assert ranking.best.mode == "plain"
    assert reason_for(ranking, "copies of the text") == "cannot speed this up here (1.01x at best): off"
    assert rank([steep_beyond], [LOOKUP], ROOMY, margin=1.01).best.mode == "serial"
    # Even without a margin a drafter without a possible gain is rejected.
    assert len(rank([target(curve=steep(0.1))], [LOOKUP], ROOMY, margin=1.0).candidates) == 1


def test_a_drafter_without_a_gain_yet_is_ranked_first_with_the_speed_of_plain_decoding() -> None:
    ranking = rank([target()], [replace(LOOKUP, acceptance=(0.0,))], ROOMY)
    assert [candidate.mode for candidate in ranking.candidates] == ["serial", "plain"]
    best, plain = ranking.candidates
    assert (best.tokens_per_s, best.tokens_per_round, best.depth) == (plain.tokens_per_s, 1.0, 0)
    assert best.verdict.code == "possible_gain"
    unknown = rank([target()], [replace(LOOKUP, acceptance=())], ROOMY).best
    assert (unknown.verdict.code, unknown.tokens_per_s) == ("gain_not_known", plain.tokens_per_s)


def test_copies_in_addition_to_a_model_change_neither_cost_nor_gain() -> None:
    alone, both = drafter(), replace(drafter(), copies=True)
    assert (alone.sources, both.sources) == (("model",), ("lookup", "model"))
    assert replace(LOOKUP, copies=True).sources == ("lookup",)
    ranking = rank([target()], [replace(LOOKUP, acceptance=()), both], ROOMY)
    assert ranking.best.sources == ("lookup", "model")
    assert ranking.best.tokens_per_s == rank([target()], [alone], ROOMY).best.tokens_per_s
    poor = rank([target()], [replace(LOOKUP, acceptance=()), replace(both, acceptance=(0.0,))], ROOMY)
    assert poor.best.sources == ("lookup", "model"), "a drafter that could pay is planned"


def test_a_requested_depth_is_ranked_first_whatever_its_speed() -> None:
    poor = drafter(token_s=0.09, acceptance=(0.1,))
    best = rank([target()], [poor], ROOMY, asked=3).best
    assert (best.mode, best.depth, best.verdict.code) == ("serial", 3, "depth_asked")
    assert best.speedup < 1
    assert best.verdict.text.startswith("depth 3 was asked for: 0.")
    assert rank([target(depth_cap=2)], [poor], ROOMY, asked=3).best.depth == 2
    assert rank([target()], [poor], ROOMY).best.depth != 3
    unknown = rank([target()], [replace(poor, acceptance=())], ROOMY, asked=3).best
    assert (unknown.mode, unknown.verdict.code) == ("serial", "depth_asked")


def test_ineligible_options_are_evaluated_but_never_ranked_first() -> None:
    here, there = target(curve=flat(0.1)), replace(target("GPU0", flat(0.01)), eligible=False)
    near, far = drafter(token_s=0.05), replace(drafter("GPU0", 0.001), eligible=False)
    ranking = rank([here, there], [near, far], ROOMY, contention=APART)
    assert placed(ranking) == ("serial", "cpu", "cpu")
    assert all(candidate.target is here for candidate in ranking.candidates)
    stays = {refusal.verdict.code: refusal for refusal in ranking.rejected}
    assert stays["target_stays"].speedup == pytest.approx(10)
    assert stays["target_stays"].verdict.text.startswith("plain decoding is 10.00x as fast there; the target moves")
    assert stays["drafter_stays"].drafter is far
    assert ranking.best.speedup == pytest.approx(ranking.best.tokens_per_s * 0.1), "against plain decoding here"
    assert not any("10.00x" in sentence for sentence in texts(ranking))


def test_of_equally_fast_ways_the_simpler_is_ranked_first() -> None:
    model = drafter(token_s=0.0, acceptance=LOOKUP.acceptance)
    ranking = rank([target()], [model, LOOKUP], ROOMY)
    assert ranking.candidates[0].tokens_per_s == ranking.candidates[1].tokens_per_s
    assert ranking.candidates[0].drafter is LOOKUP
    # All accepted and drafted in no time: 3 tokens of a round of 0.1 s, serial or pipelined.
    sure = drafter("GPU0", 0.0, acceptance=(1.0,))
    both = rank([target(depth_cap=2)], [sure], ROOMY, contention=APART)
    assert [candidate.mode for candidate in both.candidates] == ["serial", "plain"]
    assert reason_for(both, "pipelined") == "pipelined 3.00x, serial 3.00x: serial"


# ------------------------------------------------------------------------------------------------- in words


def test_every_candidate_and_every_rejection_is_explained() -> None:
    targets = [target("cpu"), target("GPU0", flat(0.02), weight_bytes=40 * GIB)]
    drafters = [drafter("GPU0", 0.02), drafter("cpu", 0.5), LOOKUP]
    ranking = rank(targets, drafters, ROOMY, contention=APART)
    lines = explain(ranking)
    assert len(lines) == len(ranking.candidates) + len(ranking.rejected)
    for candidate, line in zip(ranking.candidates, lines, strict=False):
        assert line.startswith(f"{candidate.what}: ")
        (rate,) = map(float, re.findall(r"([\d.]+) tokens/s", line))
        assert rate == pytest.approx(candidate.tokens_per_s, abs=0.051)
    assert all(line.startswith("not ") for line in lines[len(ranking.candidates) :])


def test_option_names_are_only_as_long_as_needed_to_differ() -> None:
    targets = [target(threads=4), target(threads=1, curve=flat(0.3)), target("GPU0", runtime="onnx")]
    names = {candidate.what for candidate in rank(targets, [], ROOMY).candidates}
    assert names == {"large on cpu (4 threads), plain", "large on cpu (1 thread), plain", "large on GPU0, plain"}
    targets = [target(), target(runtime="onnx", settings={"kv": "q8_0"})]
    names = {candidate.what for candidate in rank(targets, [], ROOMY).candidates}
    assert names == {"large on cpu (llama), plain", "large on cpu (onnx), plain"}
    targets = [target(settings={"kv": "q8_0"}), target(), target(runtime="onnx", settings={"level": 3})]
    names = {candidate.what for candidate in rank(targets, [], ROOMY).candidates}
    assert names == {
        "large on cpu (llama, kv q8_0), plain",
        "large on cpu (llama, kv by default), plain",
        "large on cpu (onnx), plain",
    }


def test_a_candidate_as_json() -> None:
    best = rank([target(bytes_per_forward=2 * GIB)], [drafter()], ROOMY).best
    found = best.as_json()
    assert found["predicted_tokens_per_s"] == best.tokens_per_s
    assert found["memory_bytes"] == {"cpu": 4 * GIB + GIB // 2 + GIB + GIB // 4 + 2 * HEADROOM_BYTES}
    assert found["memory_bound_speedup"] == pytest.approx(best.tokens_per_round / (1 + best.depth / 2))
    refused = rank([target(curve=steep(0.1))], [drafter()], ROOMY).rejected[0].as_json()
    assert refused["speedup"] < refused["possible_speedup"] < DRAFT_MARGIN
    assert refused["needed_bytes"] is None


@pytest.mark.parametrize(
    "changes", [{"acceptance": (1.1,)}, {"acceptance": (-0.1,)}, {"facts": None}, {"footprint": None}]
)
def test_an_invalid_drafter_option_is_refused(changes: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match="drafter"):
        replace(drafter(), **changes)


@pytest.mark.parametrize("factor", [0.5, 0.0, float("nan"), float("inf")])
def test_contention_below_one_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="faster"):
        Contention(target_factor=factor)
    with pytest.raises(ValueError, match="faster"):
        Contention(drafter_factor=factor)


# ----------------------------------------------------------------------------------------------- properties

seconds = st.floats(0.001, 0.5)
shapes = st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[TargetOption], list[DrafterOption], dict[str, int]]:
    targets = []
    for device in ("cpu", "GPU0"):
        plain_s = draw(seconds)
        growth = draw(shapes)
        times = [plain_s]
        for step in growth:
            times.append(times[-1] + step * plain_s)
        curve = Curve(widths=(1, 2, 4, 8), forward_s=tuple(times))
        targets.append(target(device, curve, depth_cap=draw(st.integers(0, 7))))
    drafters = [
        drafter(device, draw(seconds), acceptance=tuple(draw(shapes)), weight_bytes=draw(st.integers(0, 4)) * GIB)
        for device in ("cpu", "GPU0")
    ]
    memory = {"cpu": draw(st.integers(5, 12)) * GIB, "GPU0": draw(st.integers(0, 12)) * GIB}
    return targets, [*drafters, replace(LOOKUP, acceptance=tuple(draw(shapes)))], memory


def ranked(situation: Any, **options: Any) -> Ranking:
    return rank(*situation, contention=APART, **options)


@settings(max_examples=60, deadline=None)
@given(situation=situations(), more=shapes)
def test_more_acceptance_never_lowers_the_best_prediction(situation: Any, more: list[float]) -> None:
    targets, drafters, memory = situation
    raised = [
        replace(one, acceptance=tuple(max(a, b) for a, b in zip(one.acceptance, more, strict=True)))
        for one in drafters
    ]
    # The loop chooses its window by the mean acceptance: if acceptance differs by position, slightly worse.
    for modes, slack in ((["serial"], 1e-9), (MODES, 0.03)):
        before, after = (ranked((targets, d, memory), modes=modes).best for d in (drafters, raised))
        assert after.tokens_per_s >= before.tokens_per_s * (1 - slack)


@settings(max_examples=60, deadline=None)
@given(situation=situations(), cpu=st.integers(5, 12), gpu=st.integers(0, 12))
def test_less_memory_never_raises_the_best_prediction(situation: Any, cpu: int, gpu: int) -> None:
    targets, drafters, memory = situation
    less = {"cpu": min(memory["cpu"], cpu * GIB), "GPU0": min(memory["GPU0"], gpu * GIB)}
    before, after = (ranked((targets, drafters, m), margin=0.0).best for m in (memory, less))
    assert after.tokens_per_s <= before.tokens_per_s
    # A faster plain option that no longer fits no longer sets the bar, which is at most the margin above it.
    before, after = (ranked((targets, drafters, m)).best for m in (memory, less))
    assert after.tokens_per_s <= before.tokens_per_s * (DRAFT_MARGIN)


@settings(max_examples=60, deadline=None)
@given(situation=situations())
def test_random_rankings_are_sorted_and_consistent(situation: Any) -> None:
    targets, _, memory = situation
    ranking = ranked(situation)
    fitting = [one for one in targets if one.footprint.device_bytes + HEADROOM_BYTES <= memory[one.facts.device]]
    plain_rates = [candidate.tokens_per_s for candidate in ranking.candidates if candidate.mode == "plain"]
    assert plain_rates == pytest.approx(sorted((1 / one.curve.plain_s for one in fitting), reverse=True))
    # Sums in another order differ in the last digits.
    rates = [float(f"{candidate.tokens_per_s:.9g}") for candidate in ranking.candidates]
    assert rates == sorted(rates, reverse=True)
    for candidate in ranking.candidates:
        assert candidate.speedup == pytest.approx(candidate.tokens_per_s / plain_rates[0])
        assert candidate.tokens_per_s == pytest.approx(candidate.tokens_per_round / candidate.round_s)
        assert candidate.mode == "plain" or candidate.possible_speedup > DRAFT_MARGIN
        assert candidate.possible_speedup >= candidate.speedup * (1 - 1e-9)
        assert candidate.exactness == "W"
        assert candidate.depth <= candidate.target.depth_cap_stable
        assert all(taken <= memory[place] for place, taken in candidate.memory_bytes.items())
        assert candidate.mode in MODES


@settings(max_examples=40, deadline=None)
@given(plain_s=seconds, token_s=seconds, acceptance=st.floats(0.0, 1.0), cap=st.integers(2, 8))
def test_ranked_rates_equal_the_cost_model(plain_s: float, token_s: float, acceptance: float, cap: int) -> None:
    one = target(curve=flat(plain_s), depth_cap=cap)
    ranking = rank([one], [drafter("GPU0", token_s, acceptance=(acceptance,))], ROOMY, contention=APART, margin=0.0)
    cost = DraftCost(token_s=token_s)
    serial = choose_depth(one.curve, cost, (acceptance,), cap)
    rounds = at_once(plain_s, token_s, acceptance, cap).values()
    best = max(serial.tokens_per_s, *(each.tokens_per_s for each in rounds))
    assert ranking.best.tokens_per_s == pytest.approx(best)
