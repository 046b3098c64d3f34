"""Is the text the same with every drafter, before and after three calibrations?

    python -m benchmarks.one_text SUITE TRIMMED ONNX

TRIMMED and ONNX are exported drafters. Two prompts of each category, twenty in all, are answered in every way,
greedy and seeded. The first calibration runs with two busy loops, the second and third with the exported drafters
and without loops. Measurements are stored in the present home. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from benchmarks.calibrate_busy import calibrate
from benchmarks.processes import Answers, answers, busy_loops
from edgespec.bench.suite import first_of_each, load_suite

DRAFTER = "qwen2.5-coder-0.5b"
TEXT_PROMPTS, TEXT_TOKENS = 20, "48"
SAMPLINGS = {"greedy": (), "seeded": ("--temperature", "0.7", "--top-p", "0.95", "--seed", "7")}


def text_prompts(suite: str, path: Path) -> str:
    """Write a suite with the first two prompts of each category, twenty in all."""
    prompts = first_of_each(load_suite(Path(suite)), 2)[:TEXT_PROMPTS]
    lines = [json.dumps({"id": own.id, "category": own.category, "prompt": own.prompt}) for own in prompts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def measure(suite_file: str, trimmed: str, onnx: str) -> dict[str, Any]:
    """Answers by way, the calibrations, and every answer that differs from plain decoding's."""
    # The arms of an engine: as planned, and what --plain asks for. A depth given as a number drafts in any case.
    ways: dict[str, tuple[str, ...]] = {
        "default": ("--arms", "planned,plain"),
        "--draft none": ("--draft", "none"),
        "--depth 0": ("--depth", "0"),
        f"--draft {DRAFTER}": ("--draft", DRAFTER),
        "--draft TRIMMED": ("--draft", trimmed),
        "--draft TRIMMED --depth 2": ("--draft", trimmed, "--depth", "2"),
        "--draft ONNX": ("--draft", onnx),
        "--draft ONNX --depth 2": ("--draft", onnx, "--depth", "2"),
    }
    found = Texts()
    with tempfile.TemporaryDirectory() as place:
        suite = text_prompts(suite_file, Path(place) / "prompts.jsonl")

        def take(when: str) -> None:
            for way, options in ways.items():
                for how, sampling in SAMPLINGS.items():
                    rows = answers(os.environ, suite, *options, "--max-tokens", TEXT_TOKENS, *sampling)
                    found.add(when, way, how, rows)

        take("before")
        calibrations = []
        for busy, options in ((2, ()), (0, ("--draft", trimmed)), (0, ("--draft", onnx))):
            with busy_loops(busy):
                calibrations.append({"busy_loops": busy, **calibrate(*options)})
        take("after")
    return {"ways": found.table(), "different": found.different(), "calibrations": calibrations}


class Texts:
    """Token ids by prompt and sampling, for each way and time."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, str], dict[tuple[str, str], tuple[int, ...]]] = defaultdict(dict)
        self._guesses: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)

    def add(self, when: str, way: str, how: str, rows: Answers) -> None:
        for row in rows:
            named = "--plain" if row["arm"] == "plain" else way
            self._ids[row["id"], how][when, named] = tuple(row["token_ids"])
            counted = {"guesses": row["proposed"], "right": row["accepted"]}
            self._guesses[when, named].update(counted | row["rounds_by_source"])

    def _first(self, key: tuple[str, str]) -> tuple[int, ...]:
        return self._ids[key]["before", "--plain"]

    def different(self) -> list[dict[str, Any]]:
        """Answers that differ from plain decoding before any measurement."""
        return [
            {"prompt": key[0], "sampling": key[1], "when": when, "way": way, "at": _parting(ids, self._first(key))}
            for key, own in self._ids.items()
            for (when, way), ids in own.items()
            if ids != self._first(key)
        ]

    def table(self) -> list[dict[str, Any]]:
        """A row for each way and time: the number of equal answers, and the number of guesses."""
        rows = []
        for (when, way), guesses in self._guesses.items():
            own = [(key, ids[when, way]) for key, ids in self._ids.items() if (when, way) in ids]
            same = sum(ids == self._first(key) for key, ids in own)
            tokens = sum(len(ids) for _, ids in own)
            rows.append({"when": when, "way": way, "same": same, "of": len(own), "tokens": tokens, **guesses})
        return rows


def _parting(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The first position at which the two differ."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("suite", "trimmed", "onnx"):
        parser.add_argument(name)
    given = parser.parse_args()
    print(json.dumps(measure(given.suite, given.trimmed, given.onnx)))


if __name__ == "__main__":
    main()
