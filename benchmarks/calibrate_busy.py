"""Seconds of `edgespec calibrate --quick` while every processor runs a busy loop, three times.

    python -m benchmarks.calibrate_busy

Measurements are stored in the present home. Prints one JSON object.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

from benchmarks.processes import busy_loops, edgespec
from edgespec.hardware.machine import usable_processors

RUNS = 3


def calibrate(*options: str) -> dict[str, Any]:
    """What `calibrate --quick` measured and omitted. Raises RuntimeError with the command's errors."""
    started = time.monotonic()
    report = edgespec("calibrate", "--quick", "--profile", "laptop", *options)
    command_s = time.monotonic() - started
    kept = {key: report[key] for key in ("took_s", "others_share", "left_out", "stored")}
    return {**kept, "command_s": command_s, "target": report["plan"]["target"]}


def measure() -> dict[str, Any]:
    """All runs."""
    with busy_loops(usable_processors()):
        return {"runs": [calibrate() for _ in range(RUNS)]}


def main() -> None:
    """Print one JSON object."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    print(json.dumps(measure()))


if __name__ == "__main__":
    main()
