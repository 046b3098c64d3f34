"""Are logits of the native kernels bit-equal at every width, position and number of threads?

    python -m benchmarks.native_rows MODEL

The reference is one token per forward on one thread. From each starting context 100 positions are computed again in
widths 1 to 32 and in random widths, on 1, 2, 3 and 7 threads. Prints one JSON object: rows compared, and the first
unequal rows.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

from benchmarks.score_distance import tokens_to_predict
from edgespec.files.home import home
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.table import runtime_of
from edgespec.store.locate import Locator
from edgespec.store.store import Store

WIDEST_ROW = 32
ROW_THREADS = (1, 2, 3, 7)
# 500 positions. Some of them cross the edge of a block of 256 positions, which attention reduces separately.
ROW_CONTEXTS, ROW_POSITIONS = (0, 240, 1000, 2040, 3990), 100


def random_widths(source: random.Random, count: int) -> Iterator[int]:
    """Widths of 1 to 32 that add up to ``count``."""
    while count:
        width = min(count, source.randint(1, WIDEST_ROW))
        yield width
        count -= width


def measure(model: str) -> dict[str, Any]:
    """Compare the bits of every row with the reference."""
    located = Locator(store=Store(home()), download=True).locate(model)
    source = random.Random(6)
    context = ROW_CONTEXTS[-1] + ROW_POSITIONS
    tokens = tokens_to_predict(located.path, context)
    compared, unequal = 0, []
    settings = NativeSettings(threads=1)
    with ExitStack() as stack:
        one = stack.enter_context(runtime_of(settings).load(located, settings))
        assert isinstance(one, NativeModel)
        models = {threads: stack.enter_context(one.with_settings(threads=threads)) for threads in ROW_THREADS}
        sequences = {n: stack.enter_context(closing(own.open(context))) for n, own in models.items()}
        plain = stack.enter_context(closing(one.open(context)))
        for start in ROW_CONTEXTS:
            for sequence in (plain, *sequences.values()):
                sequence.forward(tokens[sequence.length : start], 0) if start else None
            truth = []
            for at in range(start, start + ROW_POSITIONS):
                truth.append(plain.forward(tokens[at : at + 1], 1).logits(0).tobytes())
            plain.rewind(start)
            for threads, sequence in sequences.items():
                for mixture in (*([width] * (ROW_POSITIONS // width) for width in range(1, WIDEST_ROW + 1)), None):
                    at = start
                    for width in random_widths(source, ROW_POSITIONS) if mixture is None else mixture:
                        scored = sequence.forward(tokens[at : at + width], width)
                        for index in range(width):
                            compared += 1
                            if scored.logits(index).tobytes() != truth[at - start + index]:
                                unequal.append((threads, at, index, width))
                        at += width
                    sequence.rewind(start)
            print(f"context {start}: {compared} rows, {len(unequal)} unequal", file=sys.stderr, flush=True)
    return {"model": model, "compared": compared, "unequal": unequal[:20], "unequal_rows": len(unequal)}


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model of the store, or a path")
    print(json.dumps(measure(parser.parse_args().model)))


if __name__ == "__main__":
    main()
