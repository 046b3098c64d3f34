"""Are a wheel's kernels, compiled by zig, as fast as those of this machine's compiler?

Both libraries in one process, forwards of width 1 and of width 8 of one model, in the order A B B A. A turn's ratio
is that of the sums; the interval is a bootstrap over turns.

    python scripts/build_wheels.py --only manylinux_2_17_x86_64
    python benchmarks/wheel_kernels.py dist/edgespec-*manylinux_2_17_x86_64.whl MODEL.gguf [--turns N] [--threads N]

Prints one JSON object: for each width the milliseconds of both and the ratio wheel / local. Requires an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.files.gguf.header import read_header
from edgespec.files.model_file import read_model_file
from edgespec.interfaces.model import Sequence
from edgespec.runtimes.native.layout import read_layout
from edgespec.runtimes.native.library import DIGEST_SUFFIX, LIBRARY_NAMES, NativeLibrary, load, load_from
from edgespec.runtimes.native.model import NativeModel, NativeSettings, describe_native
from edgespec.runtimes.native.weights import ModelPart, load_weights

WIDTHS = (1, 8)
FORWARDS = 8  # of a turn's part: at least a tenth of a second for a model of a billion parameters
RESAMPLED = 2000


@contextlib.contextmanager
def opened(library: NativeLibrary, path: Path, threads: int) -> Iterator[Sequence]:
    """A sequence of the model with that library's kernels and its fastest level.

    The process otherwise uses the installed library, which also describes the model here.
    """
    file, settings = read_model_file(path), NativeSettings(threads=threads, sidecar=False)
    facts = describe_native(file, settings)
    facts = replace(facts, build=library.build, settings={**facts.settings, "level": library.levels[-1]})
    part = ModelPart(load_weights(library, file.header, read_layout(file.header), threads))
    with NativeModel(part, file, settings, facts) as model, model.open(256) as sequence:
        yield sequence


def timed(sequence: Sequence, tokens: list[int]) -> float:
    """Seconds of the forwards in a turn's part."""

    def forwards() -> float:
        started = time.perf_counter()
        for _ in range(FORWARDS):
            sequence.forward(tokens, len(tokens))
            sequence.rewind(64)
        return time.perf_counter() - started

    return sequence.run(forwards)


def compared(wheel: Sequence, local: Sequence, width: int, turns: int, vocabulary: int) -> dict[str, Any]:
    tokens = random.Random(width).choices(range(vocabulary), k=64 + width)
    for sequence in (wheel, local):
        sequence.rewind(0)
        sequence.forward(tokens[:64], 0)
        timed(sequence, tokens[64:])
    ratios, seconds = [], {"wheel": list[float](), "local": list[float]()}
    for _ in range(turns):
        parts = [timed(sequence, tokens[64:]) for sequence in (wheel, local, local, wheel)]
        ratios.append((parts[0] + parts[3]) / (parts[1] + parts[2]))
        seconds["wheel"] += parts[::3]
        seconds["local"] += parts[1:3]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    return {
        "wheel_ms": 1e3 * statistics.median(seconds["wheel"]) / FORWARDS,
        "local_ms": 1e3 * statistics.median(seconds["local"]) / FORWARDS,
        "ratio": statistics.median(ratios),
        "ci95": [medians[RESAMPLED // 40], medians[-RESAMPLED // 40]],
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    local = load()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        with zipfile.ZipFile(arguments.wheel) as file:
            (member,) = [n for n in file.namelist() if Path(n).name in LIBRARY_NAMES]
            file.extract(member + DIGEST_SUFFIX, name)
            wheel = load_from(Path(file.extract(member, name)))
        of_wheel, of_local = (
            stack.enter_context(opened(each, arguments.model, arguments.threads)) for each in (wheel, local)
        )
        vocabulary = read_header(arguments.model).vocabulary_size
        report: dict[str, Any] = {
            "model": arguments.model.name,
            "threads": arguments.threads,
            "level": local.levels[-1],
            "wheel": wheel.build,
            "local": local.build,
        }
        for width in WIDTHS:
            report[f"T({width})"] = compared(of_wheel, of_local, width, arguments.turns, vocabulary)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
