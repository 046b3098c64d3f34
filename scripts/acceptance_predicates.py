"""The predicates of the acceptance steps: pure functions of the reports that a step's commands print.

A limit named "not below X" is met unless the whole confidence interval is below X.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

Report = dict[str, Any]
Reports = list[Report]
Holds = Callable[[Reports], bool]


def every(*predicates: Holds) -> Holds:
    """All predicates hold on the same reports."""
    return lambda reports: all(predicate(reports) for predicate in predicates)


def only(first: int, last: int, predicate: Holds) -> Holds:
    """The predicate holds on the reports from ``first`` to before ``last``."""
    return lambda reports: predicate(reports[first:last])


def each(predicate: Callable[[Report], bool]) -> Holds:
    """The predicate holds on every report, and there is at least one."""
    return lambda reports: bool(reports) and all(predicate(report) for report in reports)


def at_most(limit: float, *keys: str) -> Holds:
    """The number at ``keys`` of every report is at most ``limit``."""
    return each(lambda report: bool(at(report, *keys) <= limit))


def at_least(limit: float, *keys: str) -> Holds:
    """The number at ``keys`` of every report is at least ``limit``."""
    return each(lambda report: bool(at(report, *keys) >= limit))


def at(report: Report, *keys: str) -> Any:
    """The value at a path of keys."""
    found: Any = report
    for key in keys:
        found = found[key]
    return found


identical = each(lambda report: report["identical_fraction"] == 1.0)


def not_below(gain: Mapping[str, Any], line: float) -> bool:
    """Whether a gain meets ``line``: its geometric mean, or the upper end of its interval."""
    return bool(max(gain["geomean"], gain["ci95"][1]) >= line)


def categories_at_least(limit: float, *keys: str) -> Holds:
    """Every category's geometric mean of the gain at ``keys`` is at least ``limit``."""
    return each(lambda report: all(own["geomean"] >= limit for own in at(report, *keys, "by_category").values()))


def categories_not_below(line: float, *keys: str) -> Holds:
    """No category of the gain at ``keys`` is below ``line`` with its whole interval."""
    return each(lambda report: all(not_below(own, line) for own in at(report, *keys, "by_category").values()))


def predicted(arm: str, within: float = 0.15) -> Holds:
    """The measured speed of ``arm`` is within 15 % of the prediction."""
    return each(lambda report: abs(report["arms"][arm]["predicted_vs_measured"] - 1) <= within)


def oracle_depth_near_best(report: Report) -> bool:
    """The mean depth with a drafter that is always right is within 1 of the best fixed depth."""
    fixed = {
        int(arm.removeprefix("oracle-depth-")): own["speedup"]["geomean"]
        for arm, own in report["arms"].items()
        if arm.startswith("oracle-depth-")
    }
    best = max(fixed, key=lambda depth: fixed[depth])
    return bool(abs(report["arms"]["oracle"]["mean_depth"] - best) <= 1)


def sampled_keeps_gain(reports: Reports) -> bool:
    """Top-p keeps 85 % of greedy's gain; with top-p no category, and with top-k and min-p no mean, is below 0.98."""
    greedy, top_p, top_k, min_p = (report["arms"]["planned"]["speedup"] for report in reports)
    return (
        top_p["geomean"] >= 0.85 * greedy["geomean"]
        and all(not_below(own, 0.98) for own in top_p["by_category"].values())
        and not_below(top_k, 0.98)
        and not_below(min_p, 0.98)
    )


def over_llama(report: Report) -> dict[str, float]:
    """How many times faster the plan is than llama.cpp's plain decoding in the same run, by category."""
    rival = next(arm for arm in report["arms"] if arm.startswith("llama:"))
    ours, theirs = (report["arms"][arm]["speedup"]["by_category"] for arm in ("planned", rival))
    return {category: ours[category]["geomean"] / theirs[category]["geomean"] for category in ours}


def faster_than_llama(least: float) -> Holds:
    """``least`` times faster in the mean, 1.8 times on code, and in no category slower than 0.97."""

    def fast(report: Report) -> bool:
        gains = over_llama(report)
        return (
            statistics.geometric_mean(gains.values()) >= least
            and all(gains[category] >= 1.8 for category in ("code", "code-edit") if category in gains)
            and min(gains.values()) >= 0.97
        )

    return each(fast)


def times_faster(report: Report) -> float:
    """Plain forward of the whole head over that of the trimmed head."""
    return float(1 / report["runtimes"][1]["t1_ratio"])


def faster_trimmed(reports: Reports) -> bool:
    """The median of the runs is 1.25 times faster: where a process puts the weights changes a run by some percent."""
    return statistics.median(times_faster(report) for report in reports) >= 1.25


def loses_little(reports: Reports) -> bool:
    """The trimmed head (second report) loses at most five points of acceptance."""
    whole, trimmed = (report["arms"]["model-depth-2"]["accepted_per_proposed"] for report in reports)
    return bool(whole - trimmed <= 0.05)


def near_within_bound(report: Report) -> bool:
    """Near exactness is reported as N, tokens were proposed, and every divergence is within the bound."""
    gaps = [divergence["gap"] for divergence in report["divergences"]]
    return bool(report["level"] == "N" and report["proposed"] > 0) and all(gap <= report["bound"] for gap in gaps)


def verified(report: Report) -> bool:
    """All 40 prompts are identical, with proposals, and at least eight are longer than 700 tokens."""
    long_prompts = sum(result["prompt_tokens"] > 700 for result in report["results"])
    return bool(report["identical"] == report["prompts"] == 40 and report["proposed"] > 0) and long_prompts >= 8


def as_deep_as_eight(report: Report) -> bool:
    return bool(max(report["depths"]) >= 8)


def bitwise(report: Report) -> bool:
    """The exactness level is W: bit-equal widths."""
    return bool(report["level"] == "W")


def same_logits(report: Report) -> bool:
    """Every kind's largest difference is below 1e-3 (below 5e-3 with a float16 GELU table), of logits that vary."""
    return bool(report["kinds"]) and all(
        own.get("largest_difference", 1.0) < 1e-3 and own.get("llama_difference", 0.0) < 5e-3 and own["spread"] > 0.1
        for own in report["kinds"].values()
    )


def twin_has_the_same_weights(report: Report) -> bool:
    """The export rounded no matrix to other values."""
    return not any("rounded" in text for text in report["manifest"]["tensors"].values())


def onnx_equals_llama(report: Report) -> bool:
    """ONNX Runtime is as accurate as llama.cpp on the same weights, and no worse than with edgespec's cache."""
    return bool(
        (report["tokens"], report["kl_tokens"]) == (4096, 512)
        and abs(report["perplexity_ratio"] - 1) <= 0.005
        and report["perplexity_ratio_our_cache"] - 1 <= 0.005
        and report["kl_ratio"] <= 1.5
        and report["kl_ratio_our_cache"] <= 1.5
    )


def native_equals_llama(report: Report) -> bool:
    """The native kernels are as close to float32 as llama.cpp, and agree with it as it does with itself."""
    return bool(
        abs(report["perplexity_ratio"] - 1) <= 0.005
        and report["kl_ratio"] <= 1
        and report["agreement_with_llama_at_1"] >= report["agreement_of_llama_at_1_and_8"] - 0.01
    )


def size(report: Report) -> int:
    """Bytes of an export's files."""
    return sum(record["bytes"] for record in report["manifest"]["files"].values())


def small_in_four_bits(reports: Reports) -> bool:
    """Each ONNX export is at most 1.15 times the GGUF after it, and its export reports its perplexity."""
    return bool(reports) and all(
        0 < size(onnx) / size(gguf) <= 1.15 and (onnx["perplexity"] or {}).get("tokens", 0) > 0
        for onnx, gguf in zip(reports[::2], reports[1::2], strict=True)
    )


def optimum_answers(reports: Reports) -> bool:
    """Both exports (float32, q4) answer and draft; float32 answers as llama.cpp does.

    Reports: the text of llama.cpp, the tokens without a drafter, then the export, its answer and its drafts for each.
    """
    same_weights, alone, *exports = reports
    pairs = list(zip(exports[1::3], exports[2::3], strict=True))
    return (
        len(pairs) == 2
        and pairs[0][0]["text"] == same_weights["text"]
        and all(
            answer["text"].strip() and drafted["token_ids"] == alone["token_ids"] and drafted["stats"]["accepted"] > 0
            for answer, drafted in pairs
        )
    )


def fixed_shapes_hold(report: Report) -> bool:
    """On every device: scores within 0.02 nats and 90 % equal best tokens, drafts accepted, and texts unchanged.

    The limits find mistakes in the graph: another order of rounding costs 0.001 nats, bfloat16 in OpenVINO 0.003.
    """
    return bool(report["devices"]) and all(
        own["scores"]["mean_kl_nats"] <= 0.02
        and own["scores"]["agreeing"] >= 0.9
        and own["drafts"]["device"] == device
        and own["drafts"]["rounds_of_the_model"] > 0
        and own["drafts"]["accepted"] > 0
        and all(own["drafts"]["identical"])
        for device, own in report["devices"].items()
    )


def reaches_its_bound(report: Report) -> bool:
    """At every ratio: identical, 90 % of the bound, and a gain within 10 % of the simulation."""
    return all(
        own["identical"] and own["of_bound"] >= 0.9 and abs(own["gain_of_simulated"] - 1) <= 0.1
        for own in report["ratios"]
    )


def one_device_is_not_pipelined(report: Report) -> bool:
    """The plan is not pipelined, and the reasons name the mutual slowdown."""
    plan = report["plan"]
    return plan["mode"] != "pipelined" and "times as long as alone" in " ".join(plan["reasons"])


def native_is_fast(report: Report) -> bool:
    """Plain decoding is not slower than llama.cpp, prompts are twice as fast, and wide forwards are cheap."""
    ratios = report["ratio_to_plain"]["native"]
    return bool(
        report["plain_speedup_over_fastest_llama"] >= 1
        and report["prompt_speedup_over_fastest_llama"] >= 2
        and ratios["4"] <= 1.25
        and ratios["8"] <= 1.9
    )


def memory_within_limits(report: Report) -> bool:
    """Peak memory is within its limit; loading takes 6 s without a sidecar and 1 s with it."""
    runs = report["runs"]
    written_s, mapped_s = runs["sidecar_written"]["load_s"], runs["sidecar_mapped"]["load_s"]
    return bool(report["peak_over_limit"] <= 1 and written_s <= 6 and mapped_s <= 1)


def rows_equal(report: Report) -> bool:
    return report["compared"] > 0 and not report["unequal"]


def draws_equal(report: Report) -> bool:
    return not report["different"] and report["rows"] == report["of"]


def second_process_gains(report: Report) -> bool:
    """The first process drafts and is not slower; the second gains 1.15, 1.3 on code, and no category loses 3 %."""
    return bool(
        report["identical"]
        and report["drafted"]
        and report["first"] >= 1.0
        and report["by_category"]["coding"] >= 1.3
        and report["second"] >= 1.15
        and min(report["by_category"].values()) >= 0.97
    )


def cut_answers_lose_little(report: Report) -> bool:
    """Each of ten answers takes at most 1 / 0.88 of plain's time."""
    return len(report["ratios"]) == 10 and min(report["ratios"].values()) >= 0.88


def order_changes_little(report: Report) -> bool:
    """In either order tokens a round are within 5 % of each kind alone."""
    alone = report["alone"]
    runs = (report["translations_first"], report["code_first"])
    return all(abs(run[kind] / alone[kind] - 1.0) <= 0.05 for run in runs for kind in alone)


def same_with_every_drafter(report: Report) -> bool:
    """No text differs, and both exported drafters proposed where the depth is fixed."""
    drafted = [row for row in report["ways"] if "--depth 2" in row["way"]]
    return not report["different"] and bool(drafted) and all(row.get("model", 0) > 0 for row in drafted)


def left_quickly(report: Report) -> bool:
    """The longest leaving takes at most 150 ms."""
    return all(seconds <= 0.15 for own in report["longest_s"].values() for seconds in own.values())


def nothing_remains(report: Report) -> bool:
    """No object and no thread remains. 500 kept answers would take 50 MB; at most 32 MiB more are in use."""
    return all(
        own["left"] == 0 and own["threads_more"] <= 0 and own["bytes_more"] < 32 * 2**20
        for own in report["forms"].values()
    )


def sessions_continue(report: Report) -> bool:
    """All twenty saved sessions continue with the same tokens, from their caches."""
    return bool(report["conversations"] == report["identical"] == 20 and report["read_again"] == 0)


def every_client_works(report: Report) -> bool:
    return len(report["clients"]) == 4 and all(own["code"] == 0 for own in report["clients"].values())


def batches_change_nothing(report: Report) -> bool:
    """No answer has other tokens, and rounds of 2, 4 and 8 clients shared their forwards."""
    by_clients = report["clients"]
    return (
        report["answers"] >= 200
        and by_clients.keys() >= {"2", "4", "8"}
        and all(
            not own["different"]
            and min(own[key] for key in ("with_other_answers", "with_a_prompt", "alternatives")) > 0
            for own in by_clients.values()
        )
    )


def prompts_ride_along(report: Report) -> bool:
    """Answers keep 0.7 of their speed without gaps above 0.25 s; a first token takes at most 2.2 times as long."""
    reading = report["while_reading"].values()
    return report["ttft_p95_ratio"] <= 2.2 and all(
        own["kept"] >= 0.70 and own["longest_gap_s"] <= 0.25 for own in reading
    )


def traffic_changes_nothing(report: Report) -> bool:
    """No wrong and no stuck answer; at most 20 MB more at the end than early, and no more threads or descriptors."""
    early, late = report["early"], report["late"]
    return bool(
        report["requests"]["answer"] > 0
        and report["problem_count"] == 0
        and report["same_afterwards"]
        and late["rss_mb"] <= early["rss_mb"] + 20
        and late["threads"] <= early["threads"]
        and late["descriptors"] <= early["descriptors"]
    )


def every_run_within_a_minute(report: Report) -> bool:
    return len(report["runs"]) == 3 and all(run["command_s"] <= 60 for run in report["runs"])


def clone_works(report: Report) -> bool:
    """`make chat` answers twice, the second start takes 3 s, and `make test` passes within 25 minutes."""
    return bool(
        report["chat_exit_code"] == report["test_exit_code"] == 0
        and len(report["status_lines"]) == 2
        and len(report["answers"]) >= 2
        and report["second_start_s"] < 3
        and report["test_s"] < 25 * 60
    )


def measured(report: Report) -> bool:
    """The step only measures."""
    return bool(report)
