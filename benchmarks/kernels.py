"""How long does the native runtime take to score w tokens in one forward, and how near is it to the memory's speed?

Forwards of each width at the start of a context, where attention takes almost no time: all matrix products of the
model, and the little work between them. Widths are interleaved, and each is the median of its passes. The read
bandwidth is measured in the same run, before and after, with as many threads.

    python benchmarks/kernels.py MODEL.gguf [--threads N] [--level LEVEL] [--context TOKENS] [--passes N]

Prints one JSON object. Requires an idle machine; compare the ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from edgespec.files.model_file import read_model_file
from edgespec.hardware.bandwidth import measure_read_bandwidth
from edgespec.runtimes.native.library import PORTABLE, load
from edgespec.runtimes.native.model import NativeSettings, load_native

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 256)


def time_widths(path: Path, settings: NativeSettings, context: int, passes: int) -> tuple[dict[int, float], int]:
    """Median seconds of a forward of each width after ``context`` tokens, and its bytes of weights."""
    file = read_model_file(path)
    tokens = random.Random(1).choices(range(file.header.vocabulary_size), k=context + max(WIDTHS))
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    with load_native(file, settings) as model, model.open(len(tokens)) as sequence:
        sequence.forward(tokens[:context], 0)

        def measure() -> None:
            for _ in range(passes):
                for width in WIDTHS:
                    # Only rows that verification scores: of a prompt only the last row needs logits.
                    rows = width if width <= 32 else 1
                    started = time.perf_counter()
                    sequence.forward(tokens[context : context + width], rows)
                    times[width].append(time.perf_counter() - started)
                    sequence.rewind(context)

        sequence.run(measure)  # one job, without a thread switch per forward
        read_bytes = model.facts.bytes_per_forward
    return {width: statistics.median(seconds) for width, seconds in times.items()}, read_bytes


def measure(model: Path, threads: int, level: str, context: int, passes: int) -> dict[str, Any]:
    """The times of one instruction set, and the read bandwidth before and after."""
    before = measure_read_bandwidth([threads]).by_threads[0].best_bytes_per_s
    forward_s, read_bytes = time_widths(model, NativeSettings(threads=threads, level=level), context, passes)
    after = measure_read_bandwidth([threads]).by_threads[0].best_bytes_per_s
    plain_s = forward_s[1]
    return {
        "model": model.name,
        "threads": threads,
        "level": level,
        "context": context,
        "forward_ms": {width: round(seconds * 1e3, 3) for width, seconds in forward_s.items()},
        "ratio_to_plain": {width: round(seconds / plain_s, 3) for width, seconds in forward_s.items()},
        "prompt_tokens_per_s": round(max(WIDTHS) / forward_s[max(WIDTHS)], 1),
        "weights_bytes": read_bytes,
        "plain_bytes_per_s": round(read_bytes / plain_s),
        "read_bytes_per_s": [round(before), round(after)],
        "share_of_read_bandwidth": round(read_bytes / plain_s / max(before, after), 3),
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--level", default="auto", help="auto: the fastest; all: each but portable C, one after the other"
    )
    parser.add_argument("--context", type=int, default=0)
    parser.add_argument("--passes", type=int, default=15)
    given = parser.parse_args()

    def report_of(level: str) -> dict[str, Any]:
        return measure(given.model, given.threads, level, given.context, given.passes)

    # Portable C is the reference of the tests and would take a quarter of an hour.
    levels = [level for level in reversed(load().levels) if level != PORTABLE] if given.level == "all" else ()
    report = {level: report_of(level) for level in levels} if levels else report_of(given.level)
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
