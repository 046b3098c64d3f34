"""The verdicts of the acceptance steps that measure speed, on reports made by hand: nothing is measured here."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "acceptance_bench.py"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("acceptance_bench_under_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


module = loaded()


class Results:
    def __init__(self) -> None:
        self.saved: dict[str, Any] = {}

    def save(self, name: str, **values: Any) -> None:
        self.saved.setdefault(name, {}).update(values)


def gain(value: float) -> dict[str, Any]:
    return {"geomean": value, "ci95": [value, value], "by_category": {"chat": {"geomean": value}}}


def arm(speed: float = 1.5, **changes: Any) -> dict[str, Any]:
    usual = {
        "speedup": gain(speed),
        "predicted_vs_measured": 1.0,
        "mean_depth": 2.0,
        "request_speedup": gain(1.0),
        "ttft_ratio": gain(1.0),
    }
    return {**usual, **changes}


def report(**changes: Any) -> dict[str, Any]:
    """One with which every step holds."""
    arms = {name: arm() for name in ("planned", "oracle", "lookup", "depth-2", "worst")}
    arms |= {f"oracle-depth-{depth}": arm(1.4 if depth == 2 else 1.2) for depth in range(1, 7)}
    usual = {
        "arms": arms,
        "speedup": {"geomean": 1.2, "by_category": {"chat": {"geomean": 1.0}, "code": {"geomean": 1.3}}},
        "identical_fraction": 1.0,
        "regret": {"chat": {"loss": 0.0}, "code": {"loss": 0.05}},
        "noise": {"aa_ci95": [0.99, 1.01]},
        "plan": {"reasons": ["because"]},
        "took_s": 30.0,
        "plain": [],
        "pairs": [{"id": "a"}] * 1000,
        "machine": {"processor": "A processor"},
    }
    return {**usual, **changes}


class Program:
    """Stands for ``edgespec``: one report for each call, the last one for all that follow."""

    def __init__(self, *reports: dict[str, Any]) -> None:
        self.reports = list(reports)
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str) -> dict[str, Any]:
        self.calls.append(arguments)
        return copy.deepcopy(self.reports[min(len(self.calls), len(self.reports)) - 1])


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[bool, dict[str, Any], list[tuple[str, ...]]]]:
    """Run a step on these reports: (whether it holds, what it saved, what it ran)."""

    def run(step: str, *reports: dict[str, Any]) -> tuple[bool, dict[str, Any], list[tuple[str, ...]]]:
        program, results = Program(*(reports or (report(),))), Results()
        monkeypatch.setattr(module, "edgespec", program)
        holds = module.BENCH_STEPS[step](results, step)
        assert isinstance(holds, bool)
        assert list(results.saved) == [step]
        json.dumps(results.saved)
        return holds, results.saved[step], program.calls

    return run


Ask = Callable[..., tuple[bool, dict[str, Any], list[tuple[str, ...]]]]


def with_arm(name: str, **changes: Any) -> dict[str, Any]:
    found = report()
    found["arms"][name] |= changes
    return found


def option(call: Sequence[str], name: str) -> str:
    return call[list(call).index(name) + 1]


# ------------------------------------------------------------------------------------------------- all steps


STEPS = ("calibrate", "bench-quick", "bench-oracle-stable", "bench-oracle-near", "bench-copy-heavy", "bench-worst",
         "bench-requests", "bench-regret")  # fmt: skip


def test_these_are_all_the_steps() -> None:
    assert tuple(module.BENCH_STEPS) == STEPS


@pytest.mark.parametrize("step", STEPS)
def test_a_good_report_holds_and_its_noise_is_kept(step: str, ask: Ask) -> None:
    holds, saved, calls = ask(step)
    assert holds
    assert all(call[0] == ("calibrate" if step == "calibrate" else "bench") for call in calls)
    kept = [value for key, value in saved.items() if key.startswith("report")]
    assert len(kept) == (0 if step == "calibrate" else len(calls))
    for each in kept:
        assert each["noise"] == {"aa_ci95": [0.99, 1.01]}
        assert each["reasons"] == ["because"]
        assert not each.keys() & {"pairs", "plan", "machine"}


@pytest.mark.parametrize("step", [step for step in STEPS if step != "calibrate"])
def test_every_run_is_of_arms_and_suites_that_there_are(step: str, ask: Ask) -> None:
    from edgespec.bench.arms import parse_arms
    from edgespec.bench.suite import builtin_suite

    for call in ask(step)[2]:
        prompts = builtin_suite(option(call, "--suite"))
        arms = parse_arms(option(call, "--arms"))
        assert arms[0] == "plain"
        assert "again" in arms, "without it nothing says how noisy the run was"
        categories = [call[place + 1] for place, word in enumerate(call) if word == "--category"]
        assert set(categories) <= {prompt.category for prompt in prompts}


def test_a_report_is_kept_without_its_single_answers() -> None:
    whole = report()
    before = copy.deepcopy(whole)
    kept = module.brief(whole)
    assert whole == before
    assert kept["arms"] == whole["arms"]
    assert len(json.dumps(kept)) < len(json.dumps(whole)) / 2


# ---------------------------------------------------------------------------------------------- each verdict


@pytest.mark.parametrize(("took_s", "holds"), [(1.0, True), (60.0, True), (60.1, False)])
def test_calibrating_takes_a_minute(took_s: float, holds: bool, ask: Ask) -> None:
    found, saved, calls = ask("calibrate", report(took_s=took_s))
    assert found is holds
    assert calls == [("calibrate", "--quick")]
    assert saved == {"took_s": took_s, "reasons": ["because"], "plain": []}


def categories(**speeds: float) -> dict[str, Any]:
    return {"geomean": 2.0, "by_category": {name: {"geomean": speed} for name, speed in speeds.items()}}


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({"speedup": categories(chat=0.97, code=2.0)}, True),
        ({"speedup": categories(chat=0.969, code=2.0)}, False),
        ({"speedup": categories(chat=1.0, code=0.5)}, False),
        ({"identical_fraction": 0.999}, False),
        ({"identical_fraction": None}, False),
    ],
)
def test_quick_is_never_slower_in_any_category(changes: dict[str, Any], holds: bool, ask: Ask) -> None:
    assert ask("bench-quick", report(**changes))[0] is holds


@pytest.mark.parametrize("step", ["bench-oracle-stable", "bench-oracle-near"])
@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({"speedup": gain(1.35)}, True),
        ({"speedup": gain(1.34)}, False),
        ({"mean_depth": 3.0}, True),
        ({"mean_depth": 1.0}, True),
        ({"mean_depth": 3.01}, False),
        ({"mean_depth": 0.9}, False),
        ({"predicted_vs_measured": 1.149}, True),
        ({"predicted_vs_measured": 0.851}, True),
        ({"predicted_vs_measured": 1.16}, False),
        ({"predicted_vs_measured": 0.84}, False),
    ],
)
def test_the_oracle_gains_at_about_the_best_depth_as_predicted(
    step: str, changes: dict[str, Any], holds: bool, ask: Ask
) -> None:
    found, saved, _ = ask(step, with_arm("oracle", **changes))
    assert found is holds
    assert saved["best_fixed_depth"] == 2
    assert saved["mean_depth"] == changes.get("mean_depth", 2.0)


def test_the_best_depth_is_looked_for_where_it_may_be(ask: Ask) -> None:
    deep = report()
    deep["arms"]["oracle-depth-6"]["speedup"] = gain(2.0)
    deep["arms"]["oracle"]["mean_depth"] = 5.5
    holds, saved, (call,) = ask("bench-oracle-near", deep)
    assert (holds, saved["best_fixed_depth"]) == (True, 6)
    assert option(call, "--exactness") == "near"
    assert option(call, "--arms").split(",")[2:] == [f"oracle-depth-{depth}" for depth in range(1, 7)]
    holds, saved, (call,) = ask("bench-oracle-stable", deep)
    assert (holds, saved["best_fixed_depth"]) == (False, 2)
    assert "--exactness" not in call
    assert option(call, "--arms").split(",")[2:] == ["oracle-depth-1", "oracle-depth-2"]


@pytest.mark.parametrize(
    ("bad", "holds"),
    [
        (with_arm("lookup", speedup=gain(1.15)), True),
        (with_arm("lookup", speedup=gain(1.14)), False),
        (with_arm("lookup", predicted_vs_measured=1.2), False),
        (with_arm("depth-2", predicted_vs_measured=0.8), False),
        (with_arm("depth-2", speedup=gain(0.5)), True),
        (with_arm("planned", speedup=gain(0.5)), True),
        (report(identical_fraction=0.99), False),
    ],
)
def test_copies_pay_as_predicted(bad: dict[str, Any], holds: bool, ask: Ask) -> None:
    found, _, (call,) = ask("bench-copy-heavy", bad)
    assert found is holds
    assert option(call, "--category") == "code-edit"


@pytest.mark.parametrize(
    ("short", "long", "holds"),
    [(0.95, 0.97, True), (0.94, 1.0, False), (1.0, 0.969, False), (0.9, 0.9, False)],
)
def test_a_drafter_that_is_never_right_costs_little(short: float, long: float, holds: bool, ask: Ask) -> None:
    found, saved, calls = ask(
        "bench-worst", with_arm("worst", speedup=gain(short)), with_arm("worst", speedup=gain(long))
    )
    assert found is holds
    assert [option(call, "--max-tokens") for call in calls] == ["128", "512"], "both are measured, whatever the first"
    assert saved["report_128"]["arms"]["worst"]["speedup"]["geomean"] == short
    assert saved["report_512"]["arms"]["worst"]["speedup"]["geomean"] == long


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({"request_speedup": gain(0.97), "ttft_ratio": gain(1.03)}, True),
        ({"request_speedup": gain(0.96)}, False),
        ({"ttft_ratio": gain(1.04)}, False),
    ],
)
def test_whole_requests_of_every_length(place: int, changes: dict[str, Any], holds: bool, ask: Ask) -> None:
    reports = [report(), report(), report()]
    reports[place]["arms"]["planned"] |= changes
    found, saved, calls = ask("bench-requests", *reports)
    assert found is holds
    assert [option(call, "--max-tokens") for call in calls] == ["16", "128", "512"]
    assert all("--cold" in call for call in calls), "else there is no time to the first token"
    assert set(saved) == {"report_16", "report_128", "report_512"}


def test_nothing_holds_whose_text_differs(ask: Ask) -> None:
    for step in module.BENCH_STEPS:
        holds, _, _ = ask(step, report(identical_fraction=0.99))
        # Near exactness may differ at near-ties, and a calibration has no answers.
        assert holds is (step in ("calibrate", "bench-oracle-near", "bench-regret")), step


@pytest.mark.parametrize(("loss", "holds"), [(0.05, True), (-0.2, True), (0.051, False)])
def test_regret_in_every_category(loss: float, holds: bool, ask: Ask) -> None:
    found, _, (call,) = ask("bench-regret", report(regret={"chat": {"loss": 0.0}, "code": {"loss": loss}}))
    assert found is holds
    assert option(call, "--arms") == "again,planned,depth-1,depth-2,depth-3,depth-4,depth-5,depth-6"


@pytest.mark.parametrize(
    ("step", "missing"),
    [
        ("bench-quick", report(speedup=None)),
        ("bench-oracle-near", with_arm("oracle", predicted_vs_measured=None)),
        ("bench-copy-heavy", with_arm("depth-2", predicted_vs_measured=None)),
        ("bench-worst", with_arm("worst", speedup=None)),
        ("bench-requests", with_arm("planned", ttft_ratio=None)),
        ("bench-regret", report(regret=None)),
    ],
)
def test_what_was_not_measured_does_not_hold(step: str, missing: dict[str, Any], ask: Ask) -> None:
    """The runner counts an exception as a promise that does not hold."""
    with pytest.raises((TypeError, AttributeError)):
        ask(step, missing)


# --------------------------------------------------------------------------------------- running the program


def test_the_program_is_run_as_a_user_would(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(stdout='{"schema_version": 1, "arms": {}}\n', stderr="notes", returncode=1)

    monkeypatch.setattr(subprocess, "run", run)
    # An answer that differs ends it with 1; the report still counts.
    assert module.edgespec("bench", "--cold") == {"schema_version": 1, "arms": {}}
    assert ran == [[sys.executable, "-m", "edgespec", "bench", "--cold", "--profile", "laptop", "--json"]]


@pytest.mark.parametrize(
    ("out", "err", "words"),
    [
        ("", "x" * 5000 + "edgespec: no memory", "edgespec: no memory"),
        ("not json", "why", "why"),
        ('{"error": {"type": "E", "message": "no such file", "hint": null}}', "", "no such file"),
    ],
)
def test_a_program_without_a_report_raises_its_reason(
    monkeypatch: pytest.MonkeyPatch, out: str, err: str, words: str
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=out, stderr=err, returncode=1))
    with pytest.raises(RuntimeError, match=words) as caught:
        module.edgespec("bench")
    assert len(str(caught.value)) <= 2000
