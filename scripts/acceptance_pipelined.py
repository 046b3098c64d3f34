"""The acceptance steps of drafting and verifying at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from acceptance_bench import Results, brief, edgespec, identical
from acceptance_equality import PROMPTS, row_of, verification_prompts

ROOT = Path(__file__).resolve().parent.parent

# What the issue asks for.
EQUALITY_TOKENS = 64
OF_BOUND = 0.9
GAIN_WITHIN = 0.10


def equality(results: Results, name: str) -> bool:
    """At once, the default pair writes plain decoding's text: 40 prompts, greedy and sampled."""
    from edgespec.bench.equality import PromptResult, check_equality
    from edgespec.engine.engine import Engine

    rows: dict[str, Any] = {}
    with Engine.load(profile="laptop", mode="pipelined", download=True, calibrate=True) as engine:

        def keep(result: PromptResult) -> None:
            rows[result.prompt_id] = row_of(result)
            results.save(name, prompts=rows)
            print(f"  {len(rows)}/{PROMPTS} {result.prompt_id}: {not result.divergences}", flush=True)

        # The deepest chunk: shallower ones are parts of it, and tests go through all of them on tiny models.
        deepest = (engine.pair.depth_cap_allowed,)
        report = check_equality(
            engine, verification_prompts(), max_tokens=EQUALITY_TOKENS, depths=deepest, on_result=keep
        )
    results.save(name, identical=report.identical, of=len(report.results), level=report.level, depths=deepest)
    return report.kept and report.identical == PROMPTS and report.level == "W"


def sleeping_drafter(results: Results, name: str) -> bool:
    """Beside a drafter that competes for nothing, the loop reaches what the times of its parts allow."""
    command = [sys.executable, "benchmarks/sleeping_drafter.py"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    report: dict[str, Any] = json.loads(done.stdout)
    results.save(name, report=report)
    return all(
        own["identical"] and own["of_bound"] >= OF_BOUND and abs(own["gain_of_simulated"] - 1) <= GAIN_WITHIN
        for own in report["ratios"]
    )


def one_device(results: Results, name: str) -> bool:
    """On one device the planner keeps to turns or to plain decoding, for what both at once cost."""
    arms = "again,planned,model-depth-2,pipelined-depth-2"
    report = edgespec("bench", "--arms", arms, "--limit", "1", "--passes", "2", "--max-tokens", "64")
    results.save(name, report=brief(report))
    said = " ".join(report["plan"]["reasons"])
    return identical(report) and report["plan"]["mode"] != "pipelined" and "times as long as alone" in said


PIPELINED_STEPS: dict[str, Callable[[Results, str], bool]] = {
    "pipelined-equality": equality,
    "sleeping-drafter": sleeping_drafter,
    "pipelined-one-device": one_device,
}
