"""The predicates of the acceptance steps: pure functions of the reports that a step's commands print.

Most are rows of limits; the other predicates compare several values of a report.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Report = dict[str, Any]
Reports = list[Report]
Holds = Callable[[Reports], bool]
Row = tuple[str, str, Any]


def not_below(gain: Mapping[str, Any], line: float) -> bool:
    """Whether a gain meets ``line``: its geometric mean, or the upper end of its interval."""
    return bool(max(gain["geomean"], gain["ci95"][1]) >= line)


COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "reaches": not_below,
    "has": lambda values, count: len(values) == count,
}


def limits(*rows: Row) -> Holds:
    """Every value at each row's path compares with its bound as the row says. There is at least one value.

    The parts of a path are separated by slashes; ``*`` stands for every part. A missing part raises KeyError.
    """

    def hold(report: Report) -> bool:
        return all(
            _compares(list(_at(report, path.split("/"))), COMPARISONS[how], bound) for path, how, bound in rows
        )

    return each(hold)


def _compares(values: list[Any], compare: Callable[[Any, Any], bool], bound: Any) -> bool:
    return bool(values) and all(compare(value, bound) for value in values)


def _at(value: Any, path: list[str]) -> Iterator[Any]:
    if not path:
        yield value
    elif path[0] == "*":
        for part in value if isinstance(value, list) else value.values():
            yield from _at(part, path[1:])
    else:
        yield from _at(value[path[0]], path[1:])


def every(*predicates: Holds) -> Holds:
    """All predicates hold on the same reports."""
    return lambda reports: all(predicate(reports) for predicate in predicates)


def only(first: int, last: int, predicate: Holds) -> Holds:
    """The predicate holds on the reports from ``first`` to before ``last``."""
    return lambda reports: predicate(reports[first:last])


def each(predicate: Callable[[Report], bool]) -> Holds:
    """The predicate holds on every report, and there is at least one."""
    return lambda reports: bool(reports) and all(predicate(report) for report in reports)


identical = limits(("identical_fraction", "==", 1.0))


def within(path: str, share: float) -> tuple[Row, Row]:
    """The value differs from 1 by at most ``share``."""
    return (path, ">=", 1 - share), (path, "<=", 1 + share)


def predicted(arm: str) -> Holds:
    """The measured speed of ``arm`` is within 15 % of the prediction."""
    return limits(*within(f"arms/{arm}/predicted_vs_measured", 0.15))


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


def faster_than_llama(least: float) -> Holds:
    """Than llama.cpp's plain decoding in the same run: ``least`` times in the mean, 1.8 on code, never below 0.97."""

    def fast(report: Report) -> bool:
        rival = next(arm for arm in report["arms"] if arm.startswith("llama:"))
        ours, theirs = (report["arms"][arm]["speedup"]["by_category"] for arm in ("planned", rival))
        gains = {category: ours[category]["geomean"] / theirs[category]["geomean"] for category in ours}
        return (
            statistics.geometric_mean(gains.values()) >= least
            and all(gains[category] >= 1.8 for category in ("code", "code-edit") if category in gains)
            and min(gains.values()) >= 0.97
        )

    return each(fast)


def faster_trimmed(reports: Reports) -> bool:
    """The median of the runs is 1.25 times faster: where a process puts the weights changes a run by some percent."""
    return bool(statistics.median(1 / report["runtimes"][1]["t1_ratio"] for report in reports) >= 1.25)


def loses_little(reports: Reports) -> bool:
    """The trimmed head (second report) loses at most five points of acceptance."""
    whole, trimmed = (report["arms"]["model-depth-2"]["accepted_per_proposed"] for report in reports)
    return bool(whole - trimmed <= 0.05)


def divergences_within_bound(report: Report) -> bool:
    return all(divergence["gap"] <= report["bound"] for divergence in report["divergences"])


def has_long_prompts(report: Report) -> bool:
    """At least eight prompts are longer than 700 tokens."""
    return len([result for result in report["results"] if result["prompt_tokens"] > 700]) >= 8


def as_deep_as_eight(report: Report) -> bool:
    return bool(max(report["depths"]) >= 8)


def near_llama_logits(report: Report) -> bool:
    """Where llama.cpp was compared too (with its float16 GELU table), it differs by less than 5e-3."""
    return all(own.get("llama_difference", 0.0) < 5e-3 for own in report["kinds"].values())


def twin_has_the_same_weights(report: Report) -> bool:
    """The export rounded no matrix to other values."""
    return not any("rounded" in text for text in report["manifest"]["tensors"].values())


def agrees_with_llama(report: Report) -> bool:
    """The native kernels agree with llama.cpp as it does with itself."""
    return bool(report["agreement_with_llama_at_1"] >= report["agreement_of_llama_at_1_and_8"] - 0.01)


def small_in_four_bits(reports: Reports) -> bool:
    """Each ONNX export is at most 1.15 times the GGUF after it, and its export reports its perplexity."""

    def size(report: Report) -> int:
        return sum(record["bytes"] for record in report["manifest"]["files"].values())

    return bool(reports) and all(
        0 < size(onnx) / size(gguf) <= 1.15 and (onnx["perplexity"] or {}).get("tokens", 0) > 0
        for onnx, gguf in zip(reports[::2], reports[1::2], strict=True)
    )


def drafts_on_its_device(report: Report) -> bool:
    return all(own["drafts"]["device"] == device for device, own in report["devices"].items())


def reasons_name_the_slowdown(report: Report) -> bool:
    return "times as long as alone" in " ".join(report["plan"]["reasons"])


def all_rows_drawn(report: Report) -> bool:
    return bool(report["rows"] == report["of"])


def order_changes_little(report: Report) -> bool:
    """In either order tokens a round are within 5 % of each kind alone."""
    alone = report["alone"]
    runs = (report["translations_first"], report["code_first"])
    return all(abs(run[kind] / alone[kind] - 1.0) <= 0.05 for run in runs for kind in alone)


def exported_drafters_propose(report: Report) -> bool:
    """Both exported drafters proposed where the depth is fixed."""
    drafted = [row for row in report["ways"] if "--depth 2" in row["way"]]
    return bool(drafted) and all(row.get("model", 0) > 0 for row in drafted)


def server_keeps_nothing(report: Report) -> bool:
    """At the end no more threads or descriptors than early."""
    early, late = report["early"], report["late"]
    return bool(late["threads"] <= early["threads"] and late["descriptors"] <= early["descriptors"])


def memory_stays_flat(report: Report) -> bool:
    """In the last ten minutes of at least fifty the memory is on average at most 60 MB above that of minutes 31 to
    40: one conversation more, whose cache takes up to 59 MB (docs/results/server.md)."""
    found = report["rss_mb_by_minute"]
    return len(found) >= 50 and statistics.mean(found[-10:]) <= statistics.mean(found[30:40]) + 60
