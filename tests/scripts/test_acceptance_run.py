"""The runner of the acceptance steps, with replaced commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import acceptance_run
from scripts.acceptance import STEPS, Step

ROOT = Path(__file__).resolve().parents[2]

Report = dict[str, Any]


class Commands:
    """Replaces the processes: every command answers with its own report, or fails."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, ...]] = []
        self.homes: list[str | None] = []
        self.failing: set[str] = set()
        self.files: dict[str, str] = {}

    def __call__(self, command: tuple[str, ...], environment: dict[str, str]) -> Report:
        self.ran.append(command)
        self.homes.append(environment.get("EDGESPEC_HOME"))
        for path in (Path(word) for word in command if word.endswith(".toml")):
            self.files[path.name] = path.read_text(encoding="utf-8")
        if command[1] in self.failing:
            raise RuntimeError("no such model")
        return {"value": command[1], "pairs": [1], "plan": {"mode": "serial", "reasons": ["because"]}}


def step(name: str, *commands: tuple[str, ...], **more: Any) -> Step:
    holds = more.pop("holds", lambda reports: reports[0]["value"] == name)
    return Step(name, "It holds.", commands or (("edgespec", name),), holds, **more)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    commands = Commands()
    monkeypatch.setattr(acceptance_run, "run", commands)
    monkeypatch.setattr(acceptance_run, "source_digest", lambda: "digest")
    monkeypatch.delenv("UNSEEN_SUITE", raising=False)
    return commands


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run the script: (exit code, the steps of the results file)."""

    def start(steps: list[Step], *arguments: str) -> tuple[int, dict[str, Any]]:
        code = acceptance_run.main(list(arguments), steps=steps, folder=tmp_path / "acceptance")
        path = tmp_path / "acceptance" / "results.json"
        return code, json.loads(path.read_text(encoding="utf-8"))["steps"] if path.exists() else {}

    return start


Start = Callable[..., tuple[int, dict[str, Any]]]


def test_results_keep_reports_without_answers_and_a_second_run_skips_what_holds(
    commands: Commands, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    code, saved = start([step("a"), step("b")])
    assert code == 0
    assert saved["a"]["holds"] is True
    assert saved["a"]["reports"] == [{"command": "edgespec a", "report": {"value": "a", "reasons": ["because"]}}]
    assert start([step("a"), step("b"), step("c")])[0] == 0
    assert [command[1] for command in commands.ran] == ["a", "b", "c"]
    assert "a: holds (measured before)" in capsys.readouterr().out


def test_a_changed_source_makes_every_step_due_again(
    commands: Commands, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start([step("a")])
    monkeypatch.setattr(acceptance_run, "source_digest", lambda: "another")
    start([step("a")])
    assert [command[1] for command in commands.ran] == ["a", "a"]


@pytest.mark.parametrize(
    "name", ["edgespec/kernels/a.c", "edgespec/kernels/a.h", "edgespec/server/page.html", "docs/guide/agents.md"]
)
def test_kernels_and_pages_that_steps_read_are_part_of_the_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr(acceptance_run, "ROOT", tmp_path)
    monkeypatch.setattr(acceptance_run, "AGENTS", tmp_path / "docs/guide/agents.md")
    for path in (tmp_path / each for each in ("pyproject.toml", "docs/guide/agents.md", name)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("before")
    before = acceptance_run.source_digest()
    (tmp_path / name).write_text("after")
    assert acceptance_run.source_digest() != before


def test_a_failing_command_fails_its_step_with_the_reason_and_the_others_run(
    commands: Commands, start: Start
) -> None:
    commands.failing = {"a"}
    code, saved = start([step("a", ("edgespec", "first"), ("edgespec", "a")), step("b")])
    assert code == 1
    assert saved["a"]["holds"] is False
    assert saved["a"]["error"] == "RuntimeError: no such model"
    assert len(saved["a"]["reports"]) == 1
    assert saved["b"]["holds"] is True


def test_a_report_without_the_expected_key_fails_its_step(commands: Commands, start: Start) -> None:
    code, saved = start([step("a", holds=lambda reports: reports[0]["missing"])])
    assert (code, saved["a"]["holds"], saved["a"]["error"]) == (1, False, "KeyError: 'missing'")


def test_only_and_fresh_run_the_named_step_again_and_keep_the_other_results(commands: Commands, start: Start) -> None:
    steps = [step("a"), step("b")]
    start(steps)
    code, saved = start(steps, "--only", "b", "--fresh")
    assert (code, set(saved)) == (0, {"a", "b"})
    assert [command[1] for command in commands.ran] == ["a", "b", "b"]
    with pytest.raises(SystemExit):
        start(steps, "--only", "c")


def test_list_shows_the_results_and_runs_nothing(
    commands: Commands, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.failing = {"b"}
    steps = [step("a"), step("b"), step("c")]
    start(steps[:2])
    capsys.readouterr()
    assert start(steps, "--list")[0] == 0
    words = [line.split("It holds.")[0].split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [(name, verdict.strip()) for name, verdict in words] == [
        ("a", "holds"),
        ("b", "does not hold"),
        ("c", "due"),
    ]
    assert len(commands.ran) == 2


def test_a_step_with_the_unseen_suite_fails_with_a_sentence_if_it_is_not_set(
    commands: Commands, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needing = step("a", ("edgespec", "a", "{unseen}"))
    code, saved = start([needing])
    assert code == 1
    assert "this step needs UNSEEN_SUITE=FILE.jsonl" in saved["a"]["error"]
    assert not commands.ran
    monkeypatch.setenv("UNSEEN_SUITE", str(tmp_path / "suite.jsonl"))
    assert start([needing])[0] == 0
    assert commands.ran == [("edgespec", "a", str(tmp_path / "suite.jsonl"))]


def test_files_are_written_and_a_fresh_home_is_set_only_for_its_step(
    commands: Commands, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    profiled = step("a", ("edgespec", "a", "{work}/p.toml"), files={"p.toml": 'mode = "serial"'}, fresh_home=True)
    assert start([profiled, step("b")])[0] == 0
    assert commands.files == {"p.toml": 'mode = "serial"'}
    work = Path(commands.ran[0][2]).parent
    assert commands.homes == [str(work / "home"), str(tmp_path)]
    assert not work.exists()


def test_a_command_is_edgespec_with_json_or_a_module_of_benchmarks() -> None:
    assert acceptance_run.argv_of(("edgespec", "bench"))[1:] == ["-m", "edgespec", "bench", "--json"]
    assert acceptance_run.argv_of(("benchmarks/draws.py", "x"))[1:] == ["-m", "benchmarks.draws", "x"]


def test_the_script_lists_all_steps() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.acceptance_run", "--list"],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [step.name for step in STEPS]
