"""Do the kernels of every instruction set and numpy draw the token that the specification says, on a million rows?

    python -m benchmarks.draws_checked

Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

from edgespec.runtimes.native.draws import NativeDraws
from edgespec.runtimes.native.library import load
from tests.support.score_rows import by_kernels, by_numpy, by_specification, score_rows

# Rows by number of scores, a million in all; 0: 1 to 80 scores.
ROWS = {0: 976_000, 300: 20_000, 3000: 3_500, 151_936: 500}


def measure() -> dict[str, Any]:
    """Counts, and the first rows with a difference."""
    library = load()
    by_level = {level: NativeDraws(library.api, level) for level in library.levels}
    compared, refused, different = 0, 0, []
    for count, rows in ROWS.items():
        for number, row in enumerate(score_rows(100 + count, rows, count=count or None)):
            expected = by_specification(row)
            found = {level: by_kernels(own, row) for level, own in by_level.items()} | {"numpy": by_numpy(row)}
            different += [(count, number, level) for level, own in found.items() if own != expected]
            compared += 1
            refused += expected is None
        note = f"{compared} rows, {refused} of these not finite, {len(different)} differences"
        print(note, file=sys.stderr, flush=True)
    return {
        "rows": compared,
        "of": sum(ROWS.values()),
        "not_finite": refused,
        "levels": list(by_level),
        "different": different[:20],
    }


def main() -> None:
    """Print one JSON object."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    print(json.dumps(measure()))


if __name__ == "__main__":
    main()
