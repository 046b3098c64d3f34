"""The runner of the acceptance steps, with replaced commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import acceptance_run
from scripts.acceptance import Step

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
