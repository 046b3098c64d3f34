"""Run the long checks of scripts/acceptance.py that have no result for this source yet.

    make acceptance
    make acceptance ARGS="--only native-speed --fresh"
    make acceptance ARGS=--list

Results go to acceptance/results.json after every step, so that an interrupted run continues with the next step. A
result belongs to the source it was measured on (a digest of the code and the tests): after a change every step is due
again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import fresh_home, report_of
from edgespec.files.home import home
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from scripts.acceptance import STEPS, TARGET, Command, Step

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "acceptance"

# What a result depends on: code, kernels, suites, and the page of the server.
SUFFIXES = (".py", ".toml", ".jsonl", ".sh", ".c", ".h", ".html", ".txt")
# The step of the coding agents reads its settings there.
AGENTS = ROOT / "docs" / "guide" / "agents.md"

# Parts of a report that results.json omits: every single answer, and what all reports of a machine share.
OMITTED = ("pairs", "plan", "machine")


def source_digest() -> str:
    """Identifies the code, the tests and the prompts that a result was measured with."""
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + AGENTS.read_bytes())
    for folder in ("edgespec", "tests", "benchmarks", "scripts"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """The results so far, saved after every change."""

    def __init__(self, folder: Path, *, fresh: bool) -> None:
        self.digest = source_digest()
        self.path = folder / "results.json"
        self.steps: dict[str, dict[str, Any]] = {}
        if self.path.exists() and not fresh:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            self.steps = {n: s for n, s in stored["steps"].items() if s.get("source") == self.digest}

    def save(self, name: str, **values: Any) -> None:
        """Replace the result of a step."""
        self.steps[name] = {"source": self.digest, **values}
        self.path.parent.mkdir(exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"schema_version": 2, "steps": self.steps}, indent=1), encoding="utf-8")
        temporary.replace(self.path)


def argv_of(command: Command) -> list[str]:
    """The process of a command: edgespec with ``--json``, or a module of benchmarks/."""
    program, *arguments = command
    if program == "edgespec":
        return [sys.executable, "-m", "edgespec", *arguments, "--json"]
    return [sys.executable, "-m", program.removesuffix(".py").replace("/", "."), *arguments]


def run(command: Command, environment: Mapping[str, str]) -> dict[str, Any]:
    """The report of one command. Raises RuntimeError with the command's errors if there is none."""
    done = subprocess.run(argv_of(command), cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    return report_of(done)


def filled(command: Command, work: Path) -> Command:
    """The command with the values of its placeholders. Raises RuntimeError if UNSEEN_SUITE is needed and not set."""
    words = []
    for word in command:
        if "{unseen}" in word and not os.environ.get("UNSEEN_SUITE"):
            raise RuntimeError("this step needs UNSEEN_SUITE=FILE.jsonl, a suite that nothing was tuned to")
        if word == "{target}":
            words.append(str(Locator(store=Store(home()), download=True).locate(TARGET).path))
        else:
            unseen = str(Path(os.environ.get("UNSEEN_SUITE", "")).resolve())
            words.append(word.replace("{work}", str(work)).replace("{unseen}", unseen))
    return tuple(words)


def brief(report: dict[str, Any]) -> dict[str, Any]:
    """A report as results.json keeps it: without single answers, and of its plan only the reasons."""
    kept = {key: value for key, value in report.items() if key not in OMITTED}
    plan = report.get("plan")
    return {**kept, "reasons": plan["reasons"]} if isinstance(plan, dict) and "reasons" in plan else kept


def perform(step: Step, results: Results) -> bool:
    """Run the commands of a step and save their reports and the verdict. An error is a verdict: the step fails."""
    started, reports, saved = time.monotonic(), [], {}
    holds = False
    try:
        with tempfile.TemporaryDirectory(prefix="edgespec acceptance ") as place:
            work = Path(place)
            commands = [filled(command, work) for command in step.commands]
            for name, text in step.files.items():
                (work / name).write_text(text, encoding="utf-8")
            environment = fresh_home(work / "home") if step.fresh_home else dict(os.environ)
            for number, command in enumerate(commands, 1):
                print(f"  {number}/{len(commands)} {' '.join(step.commands[number - 1])}", flush=True)
                reports.append(run(command, environment))
        holds = bool(step.holds(reports))
    except Exception as error:  # the other steps still run
        saved["error"] = f"{type(error).__name__}: {error}"
    results.save(
        step.name,
        holds=holds,
        **saved,
        reports=[
            {"command": " ".join(command), "report": brief(report)}
            for command, report in zip(step.commands, reports, strict=False)
        ],
        seconds=round(time.monotonic() - started, 1),
    )
    return holds


def run_steps(steps: Sequence[Step], results: Results, *, fresh: bool) -> bool:
    """Run the steps that are due; whether all steps hold."""
    for step in steps:
        if results.steps.get(step.name, {}).get("holds") and not fresh:
            print(f"{step.name}: holds (measured before)", flush=True)
            continue
        print(f"{step.name}: {step.says}", flush=True)
        verdict = "holds" if perform(step, results) else "DOES NOT HOLD"
        reason = results.steps[step.name].get("error")
        print(f"{step.name}: {verdict}{f' ({reason})' if reason else ''}", flush=True)
    return all(results.steps[step.name]["holds"] for step in steps)


def main(arguments: Sequence[str] | None = None, *, steps: Sequence[Step] = STEPS, folder: Path = OUT) -> int:
    """Run or list the steps; 0 if every step holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", choices=[step.name for step in steps], help="run this step (repeatable)"
    )
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--list", action="store_true", help="list the steps and their results")
    given = parser.parse_args(arguments)
    results = Results(folder, fresh=given.fresh and not given.only)
    chosen = [step for step in steps if not given.only or step.name in given.only]
    if given.list:
        for step in chosen:
            holds = results.steps.get(step.name, {}).get("holds")
            verdict = "due" if holds is None else "holds" if holds else "does not hold"
            print(f"{step.name:34} {verdict:14} {step.says}")
        return 0
    return 0 if run_steps(chosen, results, fresh=given.fresh) else 1


if __name__ == "__main__":
    sys.exit(main())
