"""Reports and errors of the processes that benchmarks start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import agent_suite, calibrate_busy, processes, prompt_lengths


def ended(out: str, err: str = "", code: int = 1) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], code, out, err)


def test_a_command_gets_json_and_its_report_counts_even_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return ended('{"arms": {}}\n', "notes")

    monkeypatch.setattr(subprocess, "run", run)
    assert processes.edgespec("bench", "--cold") == {"arms": {}}
    assert ran == [[sys.executable, "-m", "edgespec", "bench", "--cold", "--json"]]


@pytest.mark.parametrize(
    ("out", "err", "words"),
    [
        ("", "x" * 5000 + "edgespec: no memory", "edgespec: no memory"),
        ("not json", "why", "why"),
        ('{"error": {"type": "E", "message": "no such file", "hint": null}}', "", "no such file"),
    ],
)
def test_a_process_without_a_report_raises_its_error(out: str, err: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=words) as caught:
        processes.report_of(ended(out, err))
    assert len(str(caught.value)) <= 2000


def test_a_failing_answers_script_raises_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended("", "no such suite"))
    with pytest.raises(RuntimeError, match="no such suite"):
        processes.answers({}, "suite")


def test_a_fresh_home_shares_only_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "usual"))
    (tmp_path / "usual" / "models").mkdir(parents=True)
    environment = processes.fresh_home(tmp_path / "fresh")
    assert environment["EDGESPEC_HOME"] == str(tmp_path / "fresh")
    assert [(each.name, each.resolve()) for each in (tmp_path / "fresh").iterdir()] == [
        ("models", (tmp_path / "usual" / "models").resolve())
    ]


def test_a_calibration_keeps_its_times_and_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"took_s": 44.0, "others_share": 0.5, "left_out": [], "stored": True, "plan": {"target": "t"}, "x": 1}
    monkeypatch.setattr(calibrate_busy, "edgespec", lambda *_: report)
    found = calibrate_busy.calibrate()
    assert found.pop("command_s") >= 0
    assert found == {"took_s": 44.0, "others_share": 0.5, "left_out": [], "stored": True, "target": "t"}


def test_the_suite_of_prompt_lengths_has_four_prompts_of_each_length() -> None:
    prompts = [json.loads(line) for line in prompt_lengths.lines()]
    assert len({prompt["id"] for prompt in prompts}) == len(prompts) == 12
    assert [prompt["category"] for prompt in prompts[::4]] == ["prompt 300", "prompt 1000", "prompt 3000"]


def test_the_agent_suite_has_eight_conversations_and_half_of_them_hold_real_files() -> None:
    found = agent_suite.requests()
    assert len({name for name, _, _ in found}) == 8
    assert [kind for _, kind, _ in found] == ["library"] * 4 + ["made-up"] * 4
    assert all("read_file(" in prompt and "run returned:" in prompt for _, _, prompt in found)
    assert "def rgb_to_yiq" in found[1][2]
    assert agent_suite.LOG.count("ERROR") == 3
