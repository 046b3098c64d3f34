"""The acceptance steps for drafters with a trimmed head: fewer bytes, faster, hardly fewer tokens accepted.

    python scripts/acceptance_trim.py [--only STEP]

Each step exports as a user would: the drafter re-quantised with its whole head, and the same with a head of the size
that ``--trim-vocab auto`` measures to be best. Both are timed taking turns, and both draft for the same target. A
quiet machine is needed, as for every measurement.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from acceptance_bench import edgespec

# What the issue asks for.
FASTER = 1.25
ACCEPTANCE_LOST = 0.05

RUNS = 3  # of the comparison of times


class Results(Protocol):
    def save(self, name: str, **values: Any) -> None: ...


def exported(model: str, folder: Path, *options: str) -> dict[str, Any]:
    """What one export says of itself."""
    report = edgespec("export", model, "-o", str(folder), *options, profile=False)
    return {key: report[key] for key in ("bytes_per_token", "quantisation", "trim")}


def faster(whole: Path, trimmed: Path) -> dict[str, Any]:
    """T(1) of both, and how many times faster the trimmed one is: in the middle of three runs.

    Where in memory a process lays the weights moves the ratio by some percent, and a run has only one of each.
    """
    runs = sorted((_side_by_side(whole, trimmed) for _ in range(RUNS)), key=lambda run: float(run["times_faster"]))
    return {**runs[RUNS // 2], "times_faster_of_each_run": [run["times_faster"] for run in runs]}


def _side_by_side(whole: Path, trimmed: Path) -> dict[str, Any]:
    report = edgespec(
        "bench", "--target", str(whole), "--draft", "none", "--compare", str(trimmed),
        "--arms", "again", "--category", "chat", "--limit", "1", "--passes", "1", "--max-tokens", "16",
    )  # fmt: skip
    own, other = report["runtimes"]
    return {
        "t1_whole_s": own["forward_s"][0],
        "t1_trimmed_s": other["forward_s"][0],
        "times_faster": 1 / other["t1_ratio"],
        "bytes_trimmed_over_whole": other["bytes_per_forward"] / own["bytes_per_forward"],
    }


def accepted(drafter: Path, *target: str) -> dict[str, Any]:
    """How much of what it drafts two deep the target accepts, and whether the text is plain decoding's."""
    report = edgespec(
        "bench", *target, "--draft", str(drafter), "--arms", "model-depth-2",
        "--limit", "2", "--passes", "1", "--max-tokens", "64",
    )  # fmt: skip
    arm = report["arms"]["model-depth-2"]
    return {
        "accepted_per_proposed": arm["accepted_per_proposed"],
        "identical_fraction": report["identical_fraction"],
        "speedup": arm["speedup"]["geomean"],
        "by_category": {name: own["geomean"] for name, own in arm["speedup"]["by_category"].items()},
    }


def trimmed_against_whole(
    results: Results, name: str, source: str, quant: tuple[str, ...], *target: str
) -> dict[str, Any]:
    """Everything that is compared of one drafter; saved as it becomes known."""
    with tempfile.TemporaryDirectory(prefix="edgespec trim ") as place:
        whole, trimmed = Path(place) / "whole", Path(place) / "trimmed"
        found: dict[str, Any] = {"whole": exported(source, whole, *quant)}
        found["trimmed"] = exported(source, trimmed, *quant, "--trim-vocab", "auto", *target)
        results.save(name, **found)
        found |= faster(whole, trimmed)
        results.save(name, **found)
        found["accepted_whole"] = accepted(whole, *target)
        found["accepted_trimmed"] = accepted(trimmed, *target)
        results.save(name, **found)
    return found


def loses_little(found: dict[str, Any]) -> bool:
    """Whether at most five points of acceptance are lost and every answer was plain decoding's."""
    whole, trimmed = found["accepted_whole"], found["accepted_trimmed"]
    lost = whole["accepted_per_proposed"] - trimmed["accepted_per_proposed"]
    return bool(lost <= ACCEPTANCE_LOST and whole["identical_fraction"] == trimmed["identical_fraction"] == 1.0)


def trim_gguf(results: Results, name: str) -> bool:
    """The default drafter as 4-bit GGUF."""
    found = trimmed_against_whole(results, name, "qwen2.5-coder-0.5b", ("--to", "gguf", "--quant", "q4_0"))
    return found["times_faster"] >= FASTER and loses_little(found)


def trim_onnx(results: Results, name: str) -> bool:
    """Its ONNX twin."""
    found = trimmed_against_whole(results, name, "qwen2.5-coder-0.5b", ("--to", "onnx", "--quant", "q4"))
    return found["times_faster"] >= FASTER and loses_little(found)


def trim_gemma(results: Results, name: str) -> bool:
    """A small model whose head is most of it, drafting for itself: its acceptance is told, not judged.

    It is never wrong about itself, so that every token its head lacks is a loss.
    """
    own = "gemma3-270m"
    found = trimmed_against_whole(results, name, own, ("--to", "gguf"), "--target", own)
    same = found["accepted_whole"]["identical_fraction"] == found["accepted_trimmed"]["identical_fraction"] == 1.0
    return bool(found["times_faster"] >= FASTER and same)


TRIM_STEPS: dict[str, Callable[[Results, str], bool]] = {
    "trim-gguf": trim_gguf,
    "trim-onnx": trim_onnx,
    "trim-gemma": trim_gemma,
}


class _Shown:
    """Prints what a step saves."""

    def save(self, name: str, **values: Any) -> None:
        print(f"{name}: {json.dumps(values, indent=1)}", flush=True)


def main() -> int:
    """Run the steps; 0 if all hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[*TRIM_STEPS], help="this step (repeatable)")
    failed = [name for name in parser.parse_args().only or TRIM_STEPS if not TRIM_STEPS[name](_Shown(), name)]
    print(f"not held: {', '.join(failed)}" if failed else "all hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
