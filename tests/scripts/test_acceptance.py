"""The table of acceptance steps, its predicates on reports made by hand, and its runner with replaced commands."""

from __future__ import annotations

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.arms import parse_arms
from edgespec.bench.suite import BUILTIN_SUITES, builtin_suite
from scripts import acceptance_predicates, acceptance_run
from scripts.acceptance import STEPS, Step

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {step.name: step for step in STEPS}
COMMANDS = sorted({command for step in STEPS for command in step.commands})
HELP = (ROOT / "tests" / "golden" / "snapshot" / "help.txt").read_text(encoding="utf-8")
PROGRAMS = sorted({command[0] for command in COMMANDS} - {"edgespec"})

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
    categories = {command[place + 1] for place, word in enumerate(command) if word == "--category"}
    assert categories <= {prompt.category for prompt in builtin_suite(suite)}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_benchmark_of_the_table_exists_and_answers_help(program: str) -> None:
    assert (ROOT / program).is_file()
    assert "ArgumentParser" in (ROOT / program).read_text(encoding="utf-8"), "without a parser --help would measure"
    done = subprocess.run(
        [*acceptance_run.argv_of((program,)), "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


# -------------------------------------------------------------------------------------------------- predicates


def gain(value: float, high: float | None = None) -> Report:
    own = {"geomean": value, "ci95": [value - 0.05, value if high is None else high]}
    return {**own, "by_category": {"chat": own, "coding": own}}


def arm(**changes: Any) -> Report:
    usual = {
        "speedup": gain(1.5),
        "request_speedup": gain(1.1),
        "ttft_ratio": gain(1.0),
        "predicted_vs_measured": 1.0,
        "mean_depth": 2.0,
        "accepted_per_proposed": 0.8,
    }
    return usual | changes


BENCH = {
    "identical_fraction": 1.0,
    "arms": {
        **{name: arm() for name in ("planned", "oracle", "lookup", "depth-2", "worst", "model-depth-2")},
        **{f"oracle-depth-{depth}": arm(speedup=gain(1.4 if depth == 2 else 1.2)) for depth in range(1, 7)},
        "llama:m": arm(speedup=gain(0.75)),
    },
    "speedup": gain(1.2),
    "regret": {"chat": {"loss": 0.0}, "code": {"loss": 0.05}},
    "runtimes": [{}, {"t1_ratio": 0.8}],
    "plan": {"mode": "serial", "reasons": ["the target takes 1.9 times as long as alone"]},
}
VERIFY = {
    "level": "W",
    "bound": 0.1,
    "prompts": 40,
    "identical": 40,
    "proposed": 9,
    "depths": [1, 8],
    "divergences": [],
    "results": [{"prompt_tokens": 701}] * 8,
}
NEAR = VERIFY | {"level": "N", "divergences": [{"gap": 0.1}]}
KINDS = {"llama": {"largest_difference": 9e-4, "spread": 1.0}, "gemma3": {"largest_difference": 1e-5, "spread": 1.0}}
ONNX_QUALITY = {
    "tokens": 4096,
    "kl_tokens": 512,
    "perplexity_ratio": 1.004,
    "perplexity_ratio_our_cache": 0.98,
    "kl_ratio": 1.4,
    "kl_ratio_our_cache": 1.5,
}
NATIVE_QUALITY = {
    "perplexity_ratio": 1.004,
    "kl_ratio": 0.99,
    "agreement_with_llama_at_1": 0.961,
    "agreement_of_llama_at_1_and_8": 0.97,
}
DEVICE = {
    "scores": {"mean_kl_nats": 0.001, "agreeing": 0.97},
    "drafts": {"device": "cpu", "rounds_of_the_model": 5, "accepted": 3, "identical": [True, True]},
}
OPENVINO = DEVICE | {"drafts": DEVICE["drafts"] | {"device": "OpenVINO"}}
SLEEPING = {"ratios": [{"identical": True, "of_bound": 0.95, "gain_of_simulated": 0.97}] * 2}
SPEED = {
    "plain_speedup_over_fastest_llama": 1.6,
    "prompt_speedup_over_fastest_llama": 2.5,
    "ratio_to_plain": {"native": {"4": 1.2, "8": 1.8}},
}
MEMORY = {"peak_over_limit": 0.86, "runs": {"sidecar_written": {"load_s": 2.8}, "sidecar_mapped": {"load_s": 0.1}}}
FIRST = {"identical": True, "drafted": True, "first": 1.0, "second": 1.15, "by_category": {"coding": 1.3, "qa": 0.97}}
ORDER = {name: {"coding": 3.6, "translation": 1.0} for name in ("alone", "translations_first", "code_first")}
TEXTS = {"different": [], "ways": [{"way": "--draft ONNX --depth 2", "model": 5}, {"way": "default"}]}
BATCH: Report = {"with_other_answers": 1, "with_a_prompt": 1, "alternatives": 1, "different": []}
BATCHES: Report = {"answers": 200, "clients": {"2": BATCH, "4": BATCH, "8": BATCH}}
UNDER_LOAD: Report = {
    "ttft_p95_ratio": 2.2,
    "while_reading": {f"{answers} running": {"kept": 0.70, "longest_gap_s": 0.25} for answers in (1, 3)},
}
TRAFFIC: Report = {
    "requests": {"answer": 300},
    "problem_count": 0,
    "same_afterwards": True,
    "early": {"rss_mb": 400.0, "threads": 12, "descriptors": 10},
    "late": {"rss_mb": 420.0, "threads": 12, "descriptors": 10},
}
CLIENTS = {"clients": {name: {"code": 0} for name in ("litellm", "langchain", "llm", "schemathesis")}}
FORMS = {"forms": {"in cycles": {"left": 0, "threads_more": 0, "bytes_more": 2**20}}}
CLONE = {
    "chat_exit_code": 0,
    "test_exit_code": 0,
    "status_lines": ["1 tok/s"] * 2,
    "answers": ["a", "b"],
    "second_start_s": 0.1,
    "test_s": 900.0,
}
EXPORT = {"manifest": {"tensors": {"a": "Q4_0"}, "files": {"m": {"bytes": 100}}}, "perplexity": {"tokens": 512}}
SMALL_ONNX = EXPORT | {"manifest": {"files": {"m": {"bytes": 115}}}}
ANSWER = {"text": "An answer.", "token_ids": [1, 2], "stats": {"accepted": 3}}
CUT = {"ratios": {str(number): 0.88 for number in range(10)}}
LEAVING = {"longest_s": {"cancel": {"load": 0.149}}}
BUSY = {"runs": [{"command_s": 59.0}] * 3}

# Step, its reports that hold, and changes that each make the step fail: number of the report, path, value.
CASES: list[tuple[str, list[Report], list[tuple[int, str, Any]]]] = [
    ("busy-thread", [{"thread_over_process_median": 0.9}], [(0, "thread_over_process_median", 0.89)]),
    ("near", [NEAR], [(0, "level", "W"), (0, "divergences/0/gap", 0.11), (0, "proposed", 0)]),
    (
        "native-equality",
        [VERIFY],
        [(0, "identical", 39), (0, "prompts", 39), (0, "proposed", 0), (0, "depths", [1, 7]), (0, "results", [])],
    ),
    ("pipelined-equality", [VERIFY], [(0, "identical", 39), (0, "level", "N")]),
    (
        "export-transformers",
        [{"kinds": KINDS}],
        [
            (0, "kinds", {}),
            (0, "kinds/llama/largest_difference", 1e-3),
            (0, "kinds/llama/largest_difference", float("nan")),
            (0, "kinds/llama/spread", 0.1),
            (0, "kinds/gemma3/llama_difference", 5e-3),
            (0, "kinds/llama", {"error": "RuntimeError: no"}),
        ],
    ),
    (
        "quality-smollm2-135m-q8_0",
        [EXPORT, EXPORT, EXPORT, ONNX_QUALITY],
        [
            (1, "manifest/tensors/a", "F16, rounded from Q6_K"),
            (3, "tokens", 4095),
            (3, "kl_tokens", 511),
            (3, "perplexity_ratio", 0.9949),
            (3, "perplexity_ratio", float("nan")),
            (3, "perplexity_ratio_our_cache", 1.0051),
            (3, "kl_ratio", 1.51),
            (3, "kl_ratio_our_cache", float("nan")),
        ],
    ),
    ("export-q4", [SMALL_ONNX, EXPORT] * 2, [(0, "manifest/files/m/bytes", 116), (2, "perplexity", None)]),
    (
        "optimum-chats",
        [{}, {}, *[ANSWER] * 2, *[EXPORT, ANSWER, ANSWER] * 2],
        [
            (5, "text", "Another answer."),
            (8, "text", " "),
            (6, "token_ids", [1, 3]),
            (9, "token_ids", [1, 3]),
            (9, "stats/accepted", 0),
        ],
    ),
    (
        "static-cache",
        [EXPORT, EXPORT, {"devices": {"cpu": DEVICE, "OpenVINO": OPENVINO}}],
        [
            (2, "devices", {}),
            (2, "devices/OpenVINO/drafts/device", "cpu"),
            (2, "devices/cpu/drafts/identical", [True, False]),
            (2, "devices/cpu/drafts/accepted", 0),
            (2, "devices/cpu/drafts/rounds_of_the_model", 0),
            (2, "devices/cpu/scores/mean_kl_nats", 0.03),
            (2, "devices/cpu/scores/agreeing", 0.89),
        ],
    ),
    (
        "trim-gguf",
        [{}, {}, *[BENCH] * 5],
        [(6, "arms/model-depth-2/accepted_per_proposed", 0.74), (5, "identical_fraction", 0.99)],
    ),
    ("trim-gemma", [{}, {}, *[BENCH] * 5], [(6, "identical_fraction", 0.99)]),
    (
        "sleeping-drafter",
        [SLEEPING],
        [
            (0, "ratios/1/of_bound", 0.89),
            (0, "ratios/1/gain_of_simulated", 1.11),
            (0, "ratios/0/gain_of_simulated", 0.89),
            (0, "ratios/1/identical", False),
        ],
    ),
    (
        "pipelined-one-device",
        [BENCH],
        [(0, "plan/mode", "pipelined"), (0, "plan/reasons", ["not measured"]), (0, "identical_fraction", 0.99)],
    ),
    (
        "native-speed",
        [SPEED],
        [
            (0, "plain_speedup_over_fastest_llama", 0.99),
            (0, "prompt_speedup_over_fastest_llama", 1.9),
            (0, "ratio_to_plain/native/4", 1.26),
            (0, "ratio_to_plain/native/8", 1.91),
        ],
    ),
    ("native-levels", [{"avx2": {}}], []),
    (
        "native-memory",
        [MEMORY],
        [
            (0, "peak_over_limit", 1.01),
            (0, "runs/sidecar_written/load_s", 6.1),
            (0, "runs/sidecar_mapped/load_s", 1.1),
        ],
    ),
    (
        "native-quality-gemma3-270m",
        [EXPORT, NATIVE_QUALITY],
        [
            (1, "perplexity_ratio", 1.006),
            (1, "perplexity_ratio", 0.994),
            (1, "kl_ratio", 1.01),
            (1, "agreement_with_llama_at_1", 0.959),
        ],
    ),
    ("native-rows", [{"compared": 9, "unequal": []}], [(0, "compared", 0), (0, "unequal", [[1, 2, 3, 4]])]),
    ("native-suite-stock", [BENCH], [(0, "identical_fraction", 0.99), (0, "arms/llama:m/speedup", gain(1.2))]),
    ("native-suite-trimmed", [EXPORT, BENCH], [(1, "arms/llama:m/speedup", gain(1.04))]),
    ("sampling-draws", [{"rows": 9, "of": 9, "different": []}], [(0, "rows", 8), (0, "different", [1])]),
    (
        "requests-short",
        [BENCH],
        [
            (0, "arms/planned/request_speedup/geomean", 1.07),
            (0, "arms/planned/request_speedup/by_category/chat", {"geomean": 0.9, "ci95": [0.8, 0.97]}),
            (0, "arms/planned/ttft_ratio/geomean", 1.03),
            (0, "identical_fraction", None),
        ],
    ),
    (
        "short-answers",
        [{"prompts": 12}, *[BENCH] * 3],
        [(3, "arms/planned/request_speedup/by_category/chat/geomean", 0.95), (1, "identical_fraction", 0.9)],
    ),
    (
        "decode-unseen",
        [BENCH],
        [
            (0, "arms/planned/speedup/geomean", 1.41),
            (0, "arms/planned/speedup/by_category/chat", {"geomean": 0.9, "ci95": [0.8, 0.99]}),
        ],
    ),
    (
        "sampled-unseen",
        [BENCH] * 4,
        [
            (1, "arms/planned/speedup/geomean", 1.27),
            (1, "arms/planned/speedup/by_category/chat", gain(0.97)),
            (2, "arms/planned/speedup", gain(0.97)),
            (3, "arms/planned/speedup", gain(0.97)),
            (3, "identical_fraction", 0.99),
        ],
    ),
    (
        "first-answers",
        [FIRST],
        [
            (0, "identical", False),
            (0, "drafted", False),
            (0, "first", 0.99),
            (0, "second", 1.14),
            (0, "by_category/coding", 1.29),
            (0, "by_category/qa", 0.96),
        ],
    ),
    ("cut-after-a-purchase", [CUT], [(0, "ratios/3", 0.87), (0, "ratios", {"a": 1.0})]),
    ("order", [ORDER], [(0, "code_first/coding", 3.4), (0, "translations_first/translation", 1.06)]),
    ("one-text", [{}, {}, TEXTS], [(2, "different", [{}]), (2, "ways/0/model", 0), (2, "ways", [])]),
    ("leaving", [LEAVING], [(0, "longest_s/cancel/load", 0.151)]),
    ("server-clients", [CLIENTS], [(0, "clients/llm/code", 1), (0, "clients", {"llm": {"code": 0}})]),
    (
        "batched-answers",
        [BATCHES],
        [
            (0, "answers", 199),
            (0, "clients/8/different", [3]),
            (0, "clients/2/with_other_answers", 0),
            (0, "clients/4/with_a_prompt", 0),
            (0, "clients/4/alternatives", 0),
            (0, "clients", {"8": BATCH}),
        ],
    ),
    (
        "batched-clients",
        [{"times_plain": {"4 planned": 2.6}, "times_planned": {"4 planned": 1.5}}],
        [(0, "times_plain/4 planned", 2.59), (0, "times_planned/4 planned", 1.49)],
    ),
    (
        "prompts-under-load",
        [UNDER_LOAD],
        [
            (0, "ttft_p95_ratio", 2.21),
            (0, "while_reading/3 running/kept", 0.69),
            (0, "while_reading/1 running/longest_gap_s", 0.26),
        ],
    ),
    (
        "mixed-traffic",
        [TRAFFIC],
        [
            (0, "problem_count", 1),
            (0, "same_afterwards", False),
            (0, "requests/answer", 0),
            (0, "late/rss_mb", 420.1),
            (0, "late/threads", 13),
            (0, "late/descriptors", 11),
        ],
    ),
    (
        "forgotten",
        [FORMS],
        [
            (0, "forms/in cycles/left", 1),
            (0, "forms/in cycles/threads_more", 1),
            (0, "forms/in cycles/bytes_more", 2**25),
        ],
    ),
    (
        "saved-sessions",
        [{"conversations": 20, "identical": 20, "read_again": 0}],
        [(0, "identical", 19), (0, "conversations", 19), (0, "read_again", 1)],
    ),
    ("calibrate-busy", [BUSY], [(0, "runs/1/command_s", 60.1), (0, "runs", [])]),
    ("calibrate", [{"took_s": 60.0}], [(0, "took_s", 60.1)]),
    (
        "bench-quick",
        [BENCH],
        [(0, "speedup/by_category/chat/geomean", 0.969), (0, "identical_fraction", 0.999)],
    ),
    (
        "bench-oracle-stable",
        [BENCH],
        [
            (0, "arms/oracle/speedup/geomean", 1.34),
            (0, "arms/oracle/mean_depth", 3.01),
            (0, "arms/oracle/mean_depth", 0.9),
            (0, "arms/oracle/predicted_vs_measured", 1.16),
            (0, "arms/oracle/predicted_vs_measured", 0.84),
            (0, "identical_fraction", 0.99),
        ],
    ),
    ("bench-oracle-near", [BENCH], [(0, "arms/oracle-depth-6/speedup", gain(2.0))]),
    (
        "bench-copy-heavy",
        [BENCH],
        [
            (0, "arms/lookup/speedup/geomean", 1.14),
            (0, "arms/lookup/predicted_vs_measured", 1.2),
            (0, "arms/depth-2/predicted_vs_measured", 0.8),
        ],
    ),
    (
        "bench-worst",
        [BENCH] * 2,
        [(0, "arms/worst/speedup/geomean", 0.94), (1, "arms/worst/speedup/geomean", 0.969)],
    ),
    (
        "bench-requests",
        [BENCH] * 3,
        [(1, "arms/planned/request_speedup/geomean", 0.96), (2, "arms/planned/ttft_ratio/geomean", 1.04)],
    ),
    ("bench-regret", [BENCH], [(0, "regret/code/loss", 0.051)]),
    (
        "fresh-clone",
        [CLONE],
        [
            (0, "chat_exit_code", 1),
            (0, "test_exit_code", 1),
            (0, "status_lines", []),
            (0, "answers", ["a"]),
            (0, "second_start_s", 3.0),
            (0, "test_s", 1500.0),
        ],
    ),
]
# Steps with the predicate of another step.
SAME_PREDICATE = {"trim-onnx", "requests-unseen"} | {
    step.name for step in STEPS if step.name.startswith(("quality-", "native-quality-"))
}


def changed(reports: list[Report], number: int, path: str, value: Any) -> list[Report]:
    """The reports, one of them with another value at a path."""
    own = copy.deepcopy(reports[number])
    found: Any = own
    *outer, last = path.split("/")
    for key in outer:
        found = found[int(key) if isinstance(found, list) else key]
    found[last] = value
    return [*reports[:number], own, *reports[number + 1 :]]


@pytest.mark.parametrize(("name", "reports"), [case[:2] for case in CASES], ids=[case[0] for case in CASES])
def test_a_step_holds_on_good_reports_of_its_commands(name: str, reports: list[Report]) -> None:
    step = BY_NAME[name]
    assert len(reports) == len(step.commands)
    assert step.holds(reports) is True


@pytest.mark.parametrize(
    ("name", "reports", "number", "path", "value"),
    [
        pytest.param(name, reports, *change, id=f"{name}-{change[1]}-{change[2]}"[:80])
        for name, reports, changes in CASES
        for change in changes
    ],
)
def test_a_step_does_not_hold_with_one_bad_value(
    name: str, reports: list[Report], number: int, path: str, value: Any
) -> None:
    assert not BY_NAME[name].holds(changed(reports, number, path, value))


def test_every_step_has_a_good_report_and_a_bad_value() -> None:
    without_limits = {"native-levels"}
    assert set(BY_NAME) == {case[0] for case in CASES} | SAME_PREDICATE
    assert {name for name, _, changes in CASES if not changes} == without_limits
    assert not BY_NAME["native-levels"].holds([{}])


def test_a_trimmed_head_is_fast_enough_if_two_of_three_runs_are() -> None:
    reports: list[Report] = [{}, {}, *[BENCH] * 5]
    one_slow = changed(reports, 2, "runtimes/1/t1_ratio", 0.9)
    assert BY_NAME["trim-gguf"].holds(one_slow)
    assert not BY_NAME["trim-gguf"].holds(changed(one_slow, 4, "runtimes/1/t1_ratio", 0.81))


def test_near_exactness_needs_no_identical_texts_and_finds_the_best_deep_depth() -> None:
    deep = changed([BENCH | {"identical_fraction": 0.9}], 0, "arms/oracle-depth-6/speedup", gain(2.0))
    assert BY_NAME["bench-oracle-near"].holds(changed(deep, 0, "arms/oracle/mean_depth", 5.5))
    assert BY_NAME["bench-regret"].holds(deep)


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


def test_a_predicate_on_no_report_does_not_hold() -> None:
    assert not acceptance_predicates.identical([])
