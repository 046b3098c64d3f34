"""What do shared parts of a step cost on equal cores, and what do they gain if one core is slow?

Forwards of one token, of eight and of a part of a prompt, with the product's shares of each step, and with equal
shares that other threads cannot take, alternately: the same weights, the same buffers, the same library. In half of
the turns one thread is slowed to a third of its speed by waiting after each part for twice the part's time. The ideal
is the time of equal threads times T / (T - 1 + 1/3): the work divided by speed. All turns must compute the same bits.

    python benchmarks/unequal_cores.py MODEL.gguf [--threads T] [--held N] [--context TOKENS] [--turns N]

Prints one JSON object. Requires an idle machine with a core for each thread; compare the ratios, and only if `again`,
equal shares against equal shares, is 1.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgespec.files.gguf.header import read_header
from edgespec.hardware.machine import describe_machine
from edgespec.kernels.compile import FOLDER, LIBRARY_NAME
from edgespec.runtimes.native.batch import NativeBatch
from edgespec.runtimes.native.cache import NativeCache, NativeCancel
from edgespec.runtimes.native.layout import read_layout
from edgespec.runtimes.native.library import load_from
from edgespec.runtimes.native.weights import ModelPart, load_weights

POOL = Path(__file__).with_name("unequal_pool.c")
SLOWNESS = 3  # as in unequal_pool.c
WIDTHS = {1: 8, 8: 6, 256: 1}  # tokens of a forward, and forwards of a turn
CACHE_BYTES = 2**30  # an upper bound, which allocates nothing


@dataclass(frozen=True)
class Arm:
    """How shares are assigned, and whether a thread is slowed."""

    equal_shares: bool
    held: bool = False


ARMS = {
    "equal": Arm(equal_shares=True),
    "again": Arm(equal_shares=True),
    "shared": Arm(equal_shares=False),
    "equal, one held": Arm(equal_shares=True, held=True),
    "shared, one held": Arm(equal_shares=False, held=True),
}


def build(folder: Path, flags: Sequence[str] = ()) -> Path:
    """The kernels of this checkout with the pool whose shares can be set."""
    sources = folder / "kernels"
    shutil.copytree(FOLDER, sources, ignore=shutil.ignore_patterns("*.so", "*.dylib", "__pycache__"))
    (sources / "pool.c").rename(sources / "pool_of_product.h")
    shutil.copy(POOL, sources / "pool.c")
    subprocess.run([sys.executable, sources / "compile.py", *flags], check=True)
    return sources / LIBRARY_NAME


def measure(
    path: Path, built: Path, *, threads: int, held: int, context: int, turns: int, widths: Sequence[int]
) -> dict[int, dict[str, list[float]]]:
    """Median seconds of a forward in each turn, by width and arm. Raises AssertionError if bits differ."""
    library, tell = load_from(built), ctypes.CDLL(str(built)).es_unequal
    header = read_header(path)
    part = ModelPart(load_weights(library, header, read_layout(header), threads))
    tokens = np.array(random.Random(1).choices(range(header.vocabulary_size), k=context + max(widths)))
    cache = NativeCache(
        part,
        NativeBatch(part, threads=threads, level=library.levels[-1], weight=1.0),
        context_length=len(tokens),
        cache_bytes=CACHE_BYTES,
        level=library.levels[-1],
        cancel=NativeCancel(),
    )
    seconds: dict[int, dict[str, list[float]]] = {width: {name: [] for name in ARMS} for width in widths}
    rows: dict[int, bytes] = {}
    try:
        for start in range(0, context, 256):
            cache.decode(tokens[start : min(start + 256, context)], start, 0)
        for turn in range(turns):
            for width in widths:
                names = list(ARMS)[turn % len(ARMS) :] + list(ARMS)[: turn % len(ARMS)]
                for name in names:
                    arm = ARMS[name]
                    tell(int(arm.equal_shares), held if arm.held else -1)
                    took = []
                    for _ in range(WIDTHS[width] + 1):  # the first forward warms up caches and threads
                        started = time.perf_counter()
                        cache.decode(tokens[context : context + width], context, width if width <= 32 else 1)
                        took.append(time.perf_counter() - started)
                    seconds[width][name].append(statistics.median(took[1:] or took))
                    assert rows.setdefault(width, cache.row(0).tobytes()) == cache.row(0).tobytes(), (name, width)
    finally:
        tell(0, -1)
        cache.free()
    return seconds


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """The median, and the interval of 95 % of the medians of as many resampled turns."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return {
        "median": round(statistics.median(ratios), 4),
        "from": round(medians[24], 4),
        "to": round(medians[974], 4),
    }


def report(seconds: dict[str, list[float]], threads: int) -> dict[str, object]:
    """Ratios, turn by turn, to equal shares, and to the ideal if a thread is slowed."""

    def ratio(name: str, base: str, factor: float = 1.0) -> dict[str, float]:
        return interval([own / (of * factor) for own, of in zip(seconds[name], seconds[base], strict=True)])

    ideal = threads / (threads - 1 + 1 / SLOWNESS)
    return {
        "ms": {name: round(statistics.median(turns) * 1e3, 3) for name, turns in seconds.items()},
        "again over equal": ratio("again", "equal"),
        "shared over equal": ratio("shared", "equal"),
        "equal, one held, over ideal": ratio("equal, one held", "shared", ideal),
        "shared, one held, over ideal": ratio("shared, one held", "shared", ideal),
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--held", type=int, default=1, help="the thread that is slowed; 0 is the calling thread")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--widths", type=int, nargs="+", choices=list(WIDTHS), default=list(WIDTHS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        seconds = measure(
            arguments.model,
            build(Path(name)),
            threads=arguments.threads,
            held=arguments.held,
            context=arguments.context,
            turns=arguments.turns,
            widths=arguments.widths,
        )
    result = {
        "model": arguments.model.name,
        "processor": describe_machine().processor,
        "threads": arguments.threads,
        "held": arguments.held,
        "context": arguments.context,
        "turns": arguments.turns,
        "widths": {width: report(turns, arguments.threads) for width, turns in seconds.items()},
    }
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
