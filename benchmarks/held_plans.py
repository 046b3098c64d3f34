"""Does a calibration beside other programs make later answers slower? One process a prompt, in two homes in turn.

    python -m benchmarks.held_plans SUITE [--prompts N] [--max-tokens N]

One home is calibrated with `calibrate --quick` while every processor runs a busy loop, the other one never. Then the
machine is quiet, and each process answers one prompt as planned and plainly. `gains` are plain decoding's seconds
over the planned ones, `tokens_per_round` and `modes` are the planned answers'. `ratio` is the geometric mean of the
calibrated home's gains over the other's. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import Answers, answers, busy_loops, edgespec, fresh_home, with_other_ids
from edgespec.bench.statistics import geomean
from edgespec.bench.suite import Prompt, load_suite
from edgespec.hardware.machine import usable_processors

HOMES = ("calibrated", "never")


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """``count`` prompts at equal distances, so that every kind is among them."""
    return [prompts[at * len(prompts) // count] for at in range(min(count, len(prompts)))]


def figures(rows: Answers) -> dict[str, Any]:
    """The figures of one home's rows, by prompt."""
    plain = {row["id"]: row for row in rows if row["arm"] == "plain"}
    planned = {row["id"]: row for row in rows if row["arm"] == "planned"}
    return {
        "gains": {prompt: plain[prompt]["decode_s"] / row["decode_s"] for prompt, row in planned.items()},
        "tokens_per_round": {prompt: row["tokens_per_round"] for prompt, row in planned.items()},
        "modes": {prompt: row["mode"] for prompt, row in planned.items()},
    }


def compared(rows: dict[str, Answers]) -> dict[str, Any]:
    """The figures of both homes, and of one against the other."""
    found = {name: figures(rows[name]) for name in HOMES}
    calibrated, never = (found[name]["gains"] for name in HOMES)
    return {
        **found,
        "ratio": geomean(calibrated[prompt] / never[prompt] for prompt in never),
        "identical": not with_other_ids([row for name in HOMES for row in rows[name]]),
    }


def measure(suite: str, count: int, max_tokens: int) -> dict[str, Any]:
    """Calibrate one of two new homes beside busy loops, then answer prompts in both."""
    rows: dict[str, Answers] = {name: [] for name in HOMES}
    with tempfile.TemporaryDirectory() as folder:
        homes = {name: fresh_home(Path(folder) / name) for name in HOMES}
        with busy_loops(usable_processors()):
            report = edgespec("calibrate", "--quick", "--profile", "laptop", environment=homes["calibrated"])
        for at, prompt in enumerate(spread(load_suite(Path(suite)), count)):
            one = Path(folder) / "one.jsonl"
            one.write_text(json.dumps({"id": prompt.id, "category": prompt.category, "prompt": prompt.prompt}) + "\n")
            both = ("--arms", "planned,plain", "--max-tokens", str(max_tokens))
            for name in HOMES if at % 2 == 0 else HOMES[::-1]:
                rows[name] += answers(homes[name], str(one), *both)
    return {"others_share": report["others_share"], **compared(rows)}


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=256)
    given = parser.parse_args()
    print(json.dumps(measure(given.suite, given.prompts, given.max_tokens)))


if __name__ == "__main__":
    main()
