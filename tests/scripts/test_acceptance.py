"""The table of acceptance steps, and the predicates of their reports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.arms import parse_arms
from edgespec.bench.suite import BUILTIN_SUITES, builtin_suite
from scripts import acceptance_predicates as p
from scripts.acceptance import STEPS, Step

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {step.name: step for step in STEPS}
COMMANDS = sorted({command for step in STEPS for command in step.commands})
HELP = (ROOT / "tests" / "golden" / "snapshot" / "help.txt").read_text(encoding="utf-8")

Report = dict[str, Any]


# --------------------------------------------------------------------------------------------------- the table


def test_step_names_are_unique() -> None:
    assert len(BY_NAME) == len(STEPS)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_step_has_one_sentence_and_at_least_one_command(step: Step) -> None:
    assert step.says.endswith(".")
    assert step.commands


@pytest.mark.parametrize("command", [command for command in COMMANDS if command[0] == "edgespec"], ids=" ".join)
def test_every_option_of_a_command_is_in_its_help(command: tuple[str, ...]) -> None:
    known = HELP.split(f"=== edgespec {command[1]} --help\n")[1].split("\n=== ")[0]
    for option in (word for word in command[2:] if re.match(r"--?[a-z]", word)):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", known), option
    assert "--json" in known


def option(command: tuple[str, ...], name: str, default: str) -> str:
    return command[command.index(name) + 1] if name in command else default


@pytest.mark.parametrize("command", [command for command in COMMANDS if command[1:2] == ("bench",)], ids=" ".join)
def test_every_bench_command_has_known_arms_suites_and_categories(command: tuple[str, ...]) -> None:
    suite = option(command, "--suite", "quick")
    assert parse_arms(option(command, "--arms", ""))[0] == "plain"
    if suite not in BUILTIN_SUITES:
        assert re.match(r"\{(work|unseen)\}", suite)
        return
    categories = {command[index + 1] for index, word in enumerate(command) if word == "--category"}
    assert categories <= {prompt.category for prompt in builtin_suite(suite)}


def test_every_program_of_the_table_is_a_benchmark() -> None:
    programs = {command[0] for command in COMMANDS} - {"edgespec"}
    assert all((ROOT / program).is_file() for program in programs)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_no_step_holds_without_a_report(step: Step) -> None:
    assert not held(step.holds, [])


# -------------------------------------------------------------------------------------------------- predicates


def held(holds: p.Holds, reports: list[Report]) -> bool:
    """As the runner sees it: a missing value fails the step."""
    try:
        return holds(reports)
    except (KeyError, ValueError):
        return False


REPORT = {"answers": 200, "level": "W", "by_kind": {"code": {"gain": 1.5}, "chat": {"gain": 0.9}}, "runs": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("path", "how", "bound", "holds"),
    [
        ("answers", ">=", 200, True),
        ("answers", ">", 200, False),
        ("answers", "<=", 200, True),
        ("answers", "<", 200, False),
        ("level", "==", "W", True),
        ("level", "!=", "W", False),
        ("by_kind/chat/gain", ">=", 0.9, True),
        ("by_kind/*/gain", ">=", 0.9, True),
        ("by_kind/*/gain", ">=", 1.0, False),
        ("runs/*", "<=", 2.0, True),
        ("runs/*", "<", 2.0, False),
        ("runs", "has", 2, True),
        ("runs", "has", 3, False),
    ],
)
def test_a_limit_holds_for_every_value_at_its_path(path: str, how: str, bound: Any, holds: bool) -> None:
    assert p.limits((path, how, bound))([REPORT]) is holds
    assert not p.limits((path, how, bound), ("answers", "==", 0))([REPORT]), "every row counts"


@pytest.mark.parametrize("report", [{"runs": []}, {"runs": [float("nan")]}, {"runs": {}}])
def test_no_value_and_not_a_number_meet_no_limit(report: Report) -> None:
    assert not p.limits(("runs/*", "<=", 1.0))([report])
    assert not p.limits(("runs/*", ">=", 1.0))([report])


def test_a_limit_on_a_missing_value_raises() -> None:
    with pytest.raises(KeyError):
        p.limits(("by_kind/text/gain", ">=", 1.0))([REPORT])


def test_a_gain_reaches_a_line_with_its_mean_or_its_interval() -> None:
    reaches = p.limits(("gain", "reaches", 1.0))
    for mean, high, holds in ((1.0, 0.9, True), (0.9, 1.0, True), (0.9, 0.99, False)):
        assert reaches([{"gain": {"geomean": mean, "ci95": [0.8, high]}}]) is holds


def test_predicates_are_joined_restricted_and_asked_of_each_report() -> None:
    one, two = p.limits(("a", "==", 1)), p.limits(("a", "<", 3))
    assert p.every(one, two)([{"a": 1}])
    assert not p.every(one, two)([{"a": 2}])
    assert p.only(1, 3, two)([{"a": 9}, {"a": 1}, {"a": 2}, {"a": 9}])
    assert not p.each(bool)([{"a": 1}, {}])
    assert not p.each(bool)([])


@pytest.mark.parametrize(("speed", "holds"), [(0.85, True), (1.15, True), (0.84, False), (1.16, False)])
def test_a_prediction_holds_within_15_percent(speed: float, holds: bool) -> None:
    assert p.predicted("oracle")([{"arms": {"oracle": {"predicted_vs_measured": speed}}}]) is holds


def gain(value: float) -> Report:
    own = {"geomean": value, "ci95": [value - 0.05, value]}
    return {**own, "by_category": {"chat": own, "coding": own}}


@pytest.mark.parametrize(("depth", "holds"), [(1.0, True), (3.0, True), (0.9, False), (3.01, False)])
def test_the_mean_depth_is_near_the_best_fixed_depth(depth: float, holds: bool) -> None:
    fixed = {f"oracle-depth-{own}": {"speedup": gain(1.4 if own == 2 else 1.2)} for own in range(1, 7)}
    assert p.oracle_depth_near_best({"arms": {**fixed, "oracle": {"mean_depth": depth}}}) is holds


@pytest.mark.parametrize(
    ("gains", "holds"),
    [
        ((1.5, 1.3, 0.98, 0.98), True),
        ((1.5, 1.27, 0.98, 0.98), False),
        ((1.0, 0.97, 0.98, 0.98), False),
        ((1.5, 1.3, 0.97, 0.98), False),
        ((1.5, 1.3, 0.98, 0.97), False),
    ],
)
def test_sampling_keeps_most_of_greedys_gain(gains: tuple[float, ...], holds: bool) -> None:
    assert p.sampled_keeps_gain([{"arms": {"planned": {"speedup": gain(own)}}} for own in gains]) is holds


@pytest.mark.parametrize(
    ("code", "qa", "stock", "trimmed"),
    [(2.0, 1.1, True, True), (1.8, 0.97, True, False), (1.7, 1.5, False, False), (2.5, 0.96, False, False)],
)
def test_the_suite_is_compared_with_llama_cpp_by_category(code: float, qa: float, stock: bool, trimmed: bool) -> None:
    def categories(**gains: float) -> Report:
        return {"speedup": {"by_category": {name: {"geomean": own} for name, own in gains.items()}}}

    arms = {"planned": categories(code=code, qa=qa), "llama:m": categories(code=1.0, qa=1.0)}
    report = {"arms": arms, "identical_fraction": 1.0}
    assert BY_NAME["native-suite-stock"].holds([report]) is stock
    assert BY_NAME["native-suite-trimmed"].holds([{}, report]) is trimmed


def test_a_trimmed_head_is_fast_enough_if_two_of_three_runs_are() -> None:
    def runs(*ratios: float) -> list[Report]:
        return [{"runtimes": [{}, {"t1_ratio": own}]} for own in ratios]

    assert p.faster_trimmed(runs(0.9, 0.8, 0.8))
    assert not p.faster_trimmed(runs(0.9, 0.8, 0.81))


def accepted(share: float) -> Report:
    return {"arms": {"model-depth-2": {"accepted_per_proposed": share}}}


EXPORT: Report = {"manifest": {"files": {"m": {"bytes": 100}}}, "perplexity": None}
SMALL: Report = {"manifest": {"files": {"m": {"bytes": 115}}}, "perplexity": {"tokens": 512}}
HELD = {"threads": 12, "descriptors": 10}
HOUR = [300.0] * 30 + [400.0] * 20 + [460.0] * 10
ORDER = {name: {"code": 3.6, "text": 1.0} for name in ("alone", "translations_first", "code_first")}


@pytest.mark.parametrize(
    ("predicate", "good", "bad"),
    [
        (p.divergences_within_bound, {"bound": 1, "divergences": [{"gap": 1}]}, {"divergences": [{"gap": 1.1}]}),
        (p.has_long_prompts, {"results": [{"prompt_tokens": 701}] * 8}, {"results": [{"prompt_tokens": 700}] * 8}),
        (p.as_deep_as_eight, {"depths": [1, 8]}, {"depths": [1, 7]}),
        (p.near_llama_logits, {"kinds": {"a": {}}}, {"kinds": {"a": {"llama_difference": 5e-3}}}),
        (
            p.twin_has_the_same_weights,
            {"manifest": {"tensors": {"a": "Q4_0"}}},
            {"manifest": {"tensors": {"a": "F16, rounded from Q6_K"}}},
        ),
        (
            p.agrees_with_llama,
            {"agreement_with_llama_at_1": 0.961, "agreement_of_llama_at_1_and_8": 0.97},
            {"agreement_of_llama_at_1_and_8": 0.972},
        ),
        (
            p.drafts_on_its_device,
            {"devices": {"cpu": {"drafts": {"device": "cpu"}}}},
            {"devices": {"OpenVINO": {"drafts": {"device": "cpu"}}}},
        ),
        (
            p.reasons_name_the_slowdown,
            {"plan": {"reasons": ["takes 1.9 times as long as alone"]}},
            {"plan": {"reasons": []}},
        ),
        (p.all_rows_drawn, {"rows": 9, "of": 9}, {"rows": 8}),
        (p.order_changes_little, ORDER, {"code_first": {"code": 3.4, "text": 1.0}}),
        (p.order_changes_little, ORDER, {"translations_first": {"code": 3.6, "text": 1.06}}),
        (p.exported_drafters_propose, {"ways": [{"way": "--depth 2", "model": 5}, {"way": "default"}]}, {"ways": []}),
        (p.exported_drafters_propose, {"ways": [{"way": "--depth 2", "model": 5}]}, {"ways": [{"way": "--depth 2"}]}),
        (p.server_keeps_nothing, {"early": HELD, "late": HELD}, {"late": HELD | {"threads": 13}}),
        (p.server_keeps_nothing, {"early": HELD, "late": HELD}, {"late": HELD | {"descriptors": 11}}),
        (p.memory_stays_flat, {"rss_mb_by_minute": HOUR}, {"rss_mb_by_minute": [*HOUR[:-1], 461.0]}),
        (p.memory_stays_flat, {"rss_mb_by_minute": HOUR}, {"rss_mb_by_minute": HOUR[:49]}),
    ],
)
def test_a_predicate_of_one_report_finds_a_bad_value(predicate: Any, good: Report, bad: Report) -> None:
    assert predicate(good) is True
    assert predicate(good | bad) is False


@pytest.mark.parametrize(
    ("predicate", "good", "bad"),
    [
        (p.loses_little, [accepted(0.8), accepted(0.76)], [accepted(0.8), accepted(0.74)]),
        (p.small_in_four_bits, [SMALL, EXPORT], [SMALL | {"perplexity": None}, EXPORT]),
        (p.small_in_four_bits, [SMALL, EXPORT] * 2, [SMALL, SMALL, EXPORT, EXPORT]),
    ],
)
def test_a_predicate_of_several_reports_finds_a_bad_one(
    predicate: p.Holds, good: list[Report], bad: list[Report]
) -> None:
    assert predicate(good) is True
    assert predicate(bad) is False
