"""Reports of invented answers against hand-computed figures: no model, no clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.bench.report import arm_report, bench_report, compared_json, noise_json
from edgespec.bench.run import Answer
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, ContextCurves, Curve, DraftCost
from tests.support.bench_answers import answered
from tests.support.planning import a_round

# A plain forward takes 10 ms, a further row 1 ms; at 200 tokens of context twice as long.
FLAT = Curve(widths=(1, 2, 4), forward_s=(0.010, 0.011, 0.013))
CURVES = ContextCurves(contexts=(100, 200), curves=(FLAT, FLAT.scaled(2.0)))
TOKEN_S = 0.002
COSTS = Costs(curves=CURVES, drafts={"lookup": FREE, "model": DraftCost(token_s=TOKEN_S, lag_token_s=0.5)})
TARGET = SimpleNamespace(bytes_per_forward=1000, cache_bytes=lambda tokens: 2 * tokens)
DRAFTER = SimpleNamespace(bytes_per_forward=250)


def engine(costs: Costs = COSTS, drafter: object = DRAFTER) -> Any:
    """What a report reads of an engine."""
    return SimpleNamespace(
        pair=SimpleNamespace(
            measurements=SimpleNamespace(costs=lambda: costs, target=TARGET, drafter=drafter),
            machine=SimpleNamespace(as_json=lambda: {"processor": "A processor"}),
        ),
        plan=SimpleNamespace(as_json=lambda: {"reasons": ["because"]}),
    )


COMPARED = ("speedup", "request_speedup", "ttft_ratio")


def arm(answers: Sequence[Answer], name: str, *, read_bytes_per_s: float | None = None) -> dict[str, Any]:
    return arm_report(engine(), name, answers, read_bytes_per_s)


# ------------------------------------------------------------------------------------------------- speed-ups


def test_an_arms_speedup_is_the_geometric_mean_of_prompt_medians() -> None:
    answers = []
    for prompt, category, ratios in (
        ("a", "chat", (2.0, 2.0, 9.0)),
        ("b", "qa", (0.5,) * 3),
        ("c", "qa", (4.0,) * 3),
    ):
        for number, ratio in enumerate(ratios):
            for turn in (2 * number, 2 * number + 1):
                answers.append(answered(prompt=prompt, category=category, turn=turn))
                answers.append(
                    answered("planned", prompt=prompt, category=category, turn=turn, decode_s=0.1 / ratio)
                )  # fmt: skip
    found = compared_json(answers, "planned", "plain")["speedup"]
    assert found["geomean"] == pytest.approx(4 ** (1 / 3))
    assert (found["prompts"], found["passes"]) == (3, 3)
    wider = 2.447 / 1.96  # Student's t of six degrees of freedom, over the normal distribution
    assert found["ci95"] == [
        pytest.approx(4 ** (1 / 3)),
        pytest.approx(4 ** (1 / 3) * 4.5 ** (wider / 3), rel=1e-3),
    ]
    assert (found["told_apart"], found["narrow"]) == (True, False)
    assert list(found["by_category"]) == ["chat", "qa"]
    assert found["by_category"]["chat"]["geomean"] == pytest.approx(2.0)
    assert found["by_category"]["qa"]["geomean"] == pytest.approx(2**0.5)
    assert found["by_category"]["qa"]["prompts"] == 2
    assert compared_json(answers, "plain", "planned")["speedup"]["geomean"] == pytest.approx(4 ** (-1 / 3))
    assert compared_json(answers, "plain", "absent") == dict.fromkeys(COMPARED)


def test_an_arms_speed_ignores_answers_without_a_speed() -> None:
    answers = [answered(decode_s=0.1), answered(turn=1, decode_s=0.025), answered(turn=2, tokens=1, decode_s=0.0)]
    found = arm(answers, "plain")
    assert found["decode_tokens_per_s_geomean"] == pytest.approx(250)
    assert found["speedup"] is None, "plain is the baseline of the other arms"
    assert found["identical_fraction"] == 1.0


def test_an_arms_speed_is_the_baselines_times_its_ratio() -> None:
    # The second prompt was run again, so that it has more answers than the first.
    slow = [answered(name, prompt="b", turn=turn, decode_s=0.4) for name in ("plain", "planned") for turn in range(6)]
    fast = [answered(decode_s=0.1), answered("planned", decode_s=0.05)]
    plain, planned = (arm([*fast, *slow], name) for name in ("plain", "planned"))
    ratio = planned["decode_tokens_per_s_geomean"] / plain["decode_tokens_per_s_geomean"]
    assert ratio == pytest.approx(planned["speedup"]["geomean"]) == pytest.approx(2**0.5)


def test_one_of_four_differing_answers_gives_identical_fraction_0_75() -> None:
    answers = [answered("planned", turn=turn, identical=turn != 2) for turn in range(4)]
    assert arm(answers, "planned")["identical_fraction"] == 0.75


def test_never_slower_compares_with_the_fastest_plain_arm() -> None:
    answers = [
        answered(decode_s=0.1, ttft_s=0.1),
        answered("fastest", decode_s=0.08, ttft_s=0.05, identical=False),
        answered("planned", decode_s=0.04, ttft_s=0.1),
    ]
    found = bench_report(engine(), {}, answers, read_bytes_per_s=None)
    assert found["baseline"] == "fastest"
    assert found["speedup"]["geomean"] == pytest.approx(2.0)
    assert found["arms"]["fastest"]["speedup"] is None
    assert found["arms"]["plain"]["speedup"]["geomean"] == pytest.approx(0.8)
    assert found["arms"]["planned"]["ttft_ratio"]["geomean"] == pytest.approx(2.0)
    assert found["identical_fraction"] == 1.0, "another setting does not promise the text"
    assert bench_report(engine(), {}, answers[::2], read_bytes_per_s=None)["baseline"] == "plain"


# ------------------------------------------------------------------------------------------- the A/A arm


def again(*speeds: float) -> list[Answer]:
    """Answers of the plain arm and of the again arm, at ``ratios`` times plain's speed."""
    answers = []
    for number, speed in enumerate(speeds):
        answers.append(answered(prompt=str(number)))
        answers.append(answered("again", prompt=str(number), decode_s=0.1 / speed))
    return answers


def test_errors_of_both_signs_make_a_run_noisy() -> None:
    answers = [
        answered(arm, turn=turn, decode_s=0.1 * (factor if arm == "again" else 1))
        for turn, factor in enumerate((1.1, 1.1, 1 / 1.1, 1 / 1.1, 1, 1))
        for arm in ("plain", "again")
    ]
    found = noise_json(answers)
    assert found["aa_geomean"] == pytest.approx(1)
    assert found["noisy"]


def test_without_the_again_arm_noise_is_unknown() -> None:
    assert noise_json([answered()]) == {"aa_ci95": None, "noisy": None}


@pytest.mark.parametrize(
    ("speeds", "noisy"),
    [((1.0, 1.0, 1.0), False), ((1.02, 1.0, 1.0), False), ((1.2, 1.2, 1.2), True), ((0.98, 0.98, 1.0), True)],
)
def test_a_run_is_noisy_if_plain_differs_from_itself_by_over_one_per_cent(
    speeds: tuple[float, ...], noisy: bool
) -> None:
    answers = again(*speeds)
    found = noise_json(answers)
    assert found["noisy"] is noisy
    assert (abs(found["aa_geomean"] - 1) > 0.01) is noisy
    judged = compared_json(answers, "again", "plain")["speedup"]
    assert (found["aa_geomean"], found["aa_ci95"]) == (judged["geomean"], judged["ci95"])


def test_the_report_has_the_noise_of_every_prompt() -> None:
    answers = again(1.0, 1.05)
    for turn in (2, 4):
        answers += [answered(prompt="1", turn=turn), answered("again", prompt="1", turn=turn, decode_s=0.1)]
    found = noise_json(answers)
    assert found["by_prompt"] == [
        {"id": "0", "ratio": 1.0, "passes": 1},
        {"id": "1", "ratio": pytest.approx(1.0), "passes": 3},
    ]
    assert found["disturbed"] == []
    assert noise_json(again(1.0, 1.05))["disturbed"] == ["1"]


def test_cold_runs_report_the_noise_of_requests() -> None:
    answers = [answered(decode_s=0.1, ttft_s=0.9), answered("again", decode_s=0.3, ttft_s=0.7)]
    assert noise_json(answers)["aa_geomean"] == pytest.approx(1.0)


# ------------------------------------------------------------------------------- the memory-bound profile


def test_an_arms_memory_traffic_and_busy_shares_are_reported() -> None:
    rounds = [
        a_round(proposed=3, accepted=3, context=100, forwards=3, draft_s=0.01, verify_s=0.02, source="model"),
        a_round(proposed=1, accepted=0, context=104, forwards=1, draft_s=0.01, verify_s=0.02, source="model"),
        a_round(context=105, verify_s=0.02),
    ]
    found = arm([answered("planned", tokens=7, decode_s=0.1, rounds=rounds)], "planned", read_bytes_per_s=100_000.0)
    assert found["tokens_per_round"] == pytest.approx(2.0)
    assert found["accepted_per_proposed"] == pytest.approx(3 / 4)
    assert found["mean_depth"] == pytest.approx(4 / 3)
    # 4 drafter forwards in 3 rounds, each with a quarter of the target's bytes.
    assert found["mbsu"] == pytest.approx(2.0 / (1 + 4 / 3 * 0.25))
    read = 3 * 1000 + 2 * (100 + 104 + 105) + 4 * 250
    assert found["bytes_per_token"] == pytest.approx(read / 6)
    assert found["bandwidth_used"] == pytest.approx(read / 0.1 / 100_000)
    assert found["share_draft"] == pytest.approx(0.2)
    assert found["share_verify"] == pytest.approx(0.6)
    assert found["share_idle"] == pytest.approx(0.2)


def test_the_reported_depth_excludes_alternatives() -> None:
    rounds = [replace(a_round(proposed=5, accepted=1), alternative_count=3), a_round()]
    found = arm([answered("planned", tokens=4, rounds=rounds)], "planned")
    assert (found["mean_depth"], found["accepted_per_proposed"]) == (1.0, 0.2)
    answers = [answered(), answered("planned", tokens=4, rounds=[*rounds, a_round(proposed=4)])]
    pairs = bench_report(engine(), {}, answers, read_bytes_per_s=None)["pairs"]
    assert [pair["rounds_by_depth"] for pair in pairs] == [[], [1, 0, 1, 0, 1]]


def test_plain_decoding_has_mbsu_one_and_reads_the_weights_once_per_token() -> None:
    found = arm([answered(tokens=3, decode_s=0.02, rounds=[a_round(context=0)] * 2)], "plain")
    assert (found["mbsu"], found["tokens_per_round"], found["mean_depth"]) == (1.0, 1.0, 0.0)
    assert found["bytes_per_token"] == 1000
    assert found["accepted_per_proposed"] is None, "nothing was proposed"
    assert found["bandwidth_used"] is None, "no bandwidth was measured"
    assert found["share_idle"] == pytest.approx(0.0)


def test_a_drafter_without_a_model_reads_no_bytes() -> None:
    rounds = [a_round(proposed=1, accepted=1, source="lookup", context=0)]
    found = arm_report(engine(drafter=None), "lookup", [answered("lookup", tokens=3, rounds=rounds)], None)
    assert found["mbsu"] == 2.0
    assert found["bytes_per_token"] == 500


def test_the_idle_share_is_never_negative() -> None:
    found = arm([answered(tokens=2, decode_s=0.01, rounds=[a_round(verify_s=0.02)])], "plain")
    assert found["share_idle"] == 0.0


def test_a_compared_models_arm_uses_its_own_bytes_and_promises_no_identity() -> None:
    other: Any = SimpleNamespace(bytes_per_forward=300, cache_bytes=lambda tokens: 8 * tokens)
    rounds = [a_round(), a_round()]
    answers = [
        answered(decode_s=0.1, tokens=3, rounds=rounds),
        answered("again", decode_s=0.1, tokens=3, rounds=rounds),
        answered("onnx:a", decode_s=0.05, tokens=3, identical=False, rounds=rounds),
    ]
    found = bench_report(engine(), {}, answers, read_bytes_per_s=None, compared={"onnx:a": other})
    own = found["arms"]["onnx:a"]
    assert own["speedup"]["geomean"] == pytest.approx(2.0)
    assert own["identical_fraction"] == 0.0
    assert own["same_class"] is False
    assert own["bytes_per_token"] == pytest.approx(300 + 8 * 100)
    assert found["arms"]["plain"]["bytes_per_token"] == pytest.approx(1000 + 2 * 100)
    assert (own["predicted_vs_measured"], own["calibrated_vs_measured"]) == (None, None)
    assert found["arms"]["plain"]["predicted_vs_measured"] is not None
    assert found["identical_fraction"] == 1.0, "another file does not promise the text"
    without = bench_report(engine(), {}, answers, read_bytes_per_s=None)
    assert without["identical_fraction"] == 0.5
    assert without["arms"]["onnx:a"]["same_class"] is True
    fastest = bench_report(engine(), {}, [*answers, answered("fastest")], read_bytes_per_s=None)
    assert fastest["arms"]["fastest"]["same_class"] is False


@pytest.mark.parametrize("answer", [answered(tokens=1, decode_s=0.0), answered(tokens=0, decode_s=0.0)])
def test_an_answer_of_one_token_has_no_decoding_figures(answer: Answer) -> None:
    found = arm([answer], "plain", read_bytes_per_s=1.0)
    for key in ("decode_tokens_per_s_geomean", "speedup", "tokens_per_round", "mbsu",
                "accepted_per_proposed", "mean_depth", "bytes_per_token", "bandwidth_used", "share_draft",
                "share_verify", "share_idle", "ttft_ratio", "request_speedup"):  # fmt: skip
        assert found[key] is None, key


# ------------------------------------------------------------------------------------------ whole requests


def test_request_speedups_are_paired_by_pass_and_grouped_by_category() -> None:
    answers = []
    for prompt, category, plain, planned in (
        ("a", "qa", (1.0, 1.0), (1.5, 0.5)),  # 1.5 times as long to the first token, the same request speed
        ("b", "qa", (2.0, 2.0), (2.0, 0.0)),  # the same time to the first token, twice as fast
        ("c", "chat", (1.0, 7.0), (1.1, 0.9)),  # 1.1 times, four times as fast
    ):
        for turn in range(6):
            for name, (ttft_s, decode_s) in (("plain", plain), ("planned", planned)):
                answers.append(
                    answered(name, prompt=prompt, category=category, turn=turn, ttft_s=ttft_s, decode_s=decode_s)
                )
    found = arm(answers, "planned")
    assert found["request_speedup"]["geomean"] == pytest.approx(2.0)
    assert found["request_speedup"]["by_category"]["qa"]["geomean"] == pytest.approx(2**0.5)
    assert found["request_speedup"]["by_category"]["chat"]["geomean"] == pytest.approx(4.0)
    assert found["ttft_ratio"]["geomean"] == pytest.approx(1.65 ** (1 / 3))
    assert found["ttft_ratio"]["by_category"]["chat"]["geomean"] == pytest.approx(1.1)
    assert (found["ttft_ratio"]["passes"], found["ttft_ratio"]["prompts"]) == (3, 3)


def test_warm_answers_have_no_request_times() -> None:
    found = arm([answered(), answered("planned")], "planned")
    assert (found["ttft_ratio"], found["request_speedup"]) == (None, None)


def test_the_plan_is_compared_with_every_other_model() -> None:
    other: Any = SimpleNamespace(bytes_per_forward=300, cache_bytes=lambda tokens: 8 * tokens)
    answers = [
        answered(ttft_s=1.0, decode_s=1.0),
        answered("planned", ttft_s=1.0, decode_s=0.5),
        answered("llama:a", ttft_s=3.0, decode_s=1.0, identical=False),
        answered("llama:a for prompts", ttft_s=1.0, decode_s=2.0, identical=False),
    ]
    compared = {"llama:a": other, "llama:a for prompts": other}
    found = bench_report(engine(), {}, answers, read_bytes_per_s=None, compared=compared)["against"]
    assert list(found) == list(compared)
    assert found["llama:a"]["speedup"]["geomean"] == pytest.approx(2.0)
    assert found["llama:a"]["request_speedup"]["geomean"] == pytest.approx(4.0 / 1.5)
    assert found["llama:a"]["request_speedup"]["by_category"]["chat"]["geomean"] == pytest.approx(4.0 / 1.5)
    assert found["llama:a"]["ttft_ratio"]["geomean"] == pytest.approx(1 / 3)
    assert found["llama:a for prompts"]["request_speedup"]["geomean"] == pytest.approx(2.0)
    alone = [answer for answer in answers if answer.arm != "planned"]
    assert bench_report(engine(), {}, alone, read_bytes_per_s=None, compared=compared)["against"] == {}
    assert bench_report(engine(), {}, answers[:2], read_bytes_per_s=None)["against"] == {}


# -------------------------------------------------------------------------------------------- the report


def fixed(speeds: dict[str, dict[str, float]]) -> list[Answer]:
    """One answer for each arm and category, at the given multiples of plain's speed."""
    answers = []
    for name, categories in {"plain": dict.fromkeys(speeds["planned"], 1.0), **speeds}.items():
        for category, speed in categories.items():
            answers.append(answered(name, prompt=category, category=category, decode_s=0.1 / speed))
    return answers


def test_regret_compares_the_plan_with_the_best_fixed_depth() -> None:
    answers = fixed(
        {
            "planned": {"chat": 1.2, "qa": 0.9, "code": 2.0},
            "depth-1": {"chat": 1.5, "qa": 0.8, "code": 1.0},
            "depth-2": {"chat": 1.1, "qa": 0.7, "code": 1.6},
            "oracle": {"chat": 9.0, "qa": 9.0, "code": 9.0},
            "oracle-depth-2": {"chat": 9.0, "qa": 9.0, "code": 9.0},
        }
    )
    found = bench_report(engine(), {}, answers, read_bytes_per_s=None)["regret"]
    assert list(found) == ["chat", "qa", "code"]
    assert found["chat"]["best"] == "depth-1"
    assert found["chat"]["best_speedup"] == pytest.approx(1.5)
    assert found["chat"]["planned_speedup"] == pytest.approx(1.2)
    assert found["chat"]["loss"] == pytest.approx(0.2)
    assert (found["qa"]["best"], found["qa"]["loss"]) == ("plain", pytest.approx(0.1))
    assert (found["code"]["best"], found["code"]["loss"]) == ("depth-2", pytest.approx(-0.25))


@pytest.mark.parametrize("arms", [{"planned": {"qa": 1.0}}, {"planned": {"qa": 1.0}, "oracle-depth-2": {"qa": 1.0}}])
def test_without_fixed_depth_arms_there_is_no_regret(arms: dict[str, dict[str, float]]) -> None:
    assert bench_report(engine(), {}, fixed(arms), read_bytes_per_s=None)["regret"] is None


def test_without_the_planned_arm_there_is_no_regret_and_no_headline() -> None:
    answers = [a for a in fixed({"planned": {"qa": 1.0}, "depth-1": {"qa": 1.0}}) if a.arm != "planned"]
    found = bench_report(engine(), {}, answers, read_bytes_per_s=None)
    assert (found["regret"], found["speedup"], found["predicted_vs_measured"]) == (None, None, None)


def test_a_whole_bench_report_has_the_expected_values() -> None:
    answers = [*again(1.0, 1.0), answered("planned", prompt="0", decode_s=0.05), answered("planned", prompt="1")]
    answers[1] = answered("again", prompt="0", identical=False)
    suite = {"name": "mine", "sha256": "0" * 64}
    found = bench_report(engine(), suite, answers, read_bytes_per_s=5e9)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["machine"] == {"processor": "A processor", "read_bytes_per_s": 5e9}
    assert found["suite"] == suite
    assert list(found["arms"]) == ["plain", "again", "planned"]
    assert found["speedup"] == found["arms"]["planned"]["speedup"]
    assert found["speedup"]["geomean"] == pytest.approx(2**0.5)
    assert found["identical_fraction"] == 0.75, "plain decoding against itself is not evidence"
    assert found["plan"] == {"reasons": ["because"]}
    assert found["pairs"][1] == {
        "id": "0", "category": "chat", "arm": "again", "turn": 0, "prompt_tokens": 7, "tokens": 11, "decode_s": 0.1,
        "ttft_s": None, "tokens_per_round": None, "proposed": 0, "accepted": 0, "rounds_by_depth": [],
        "identical_to_plain": False,
    }  # fmt: skip
    assert len(found["pairs"]) == len(answers)


def test_a_report_of_plain_decoding_alone_has_no_comparison() -> None:
    found = bench_report(engine(), {}, [answered()], read_bytes_per_s=None)
    assert found["identical_fraction"] is None
    assert found["noise"] == {"aa_ci95": None, "noisy": None}
    assert found["regret"] is None
