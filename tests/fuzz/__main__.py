"""Run the fuzzers, each for some minutes.

    make fuzz
    python -m tests.fuzz --seconds 600 --seed 7 --only server

Prints the seed, what happened, and what is wrong. The exit code is 1 if anything is.
"""

from __future__ import annotations

import argparse
import logging
import random
import secrets
import sys
import time
from collections.abc import Iterator

from tests.fuzz import forgotten, forms, gguf, kernels, models, scheduler, server, tool_calls
from tests.fuzz.findings import Findings, Fuzzer

FUZZERS: dict[str, Fuzzer] = {
    module.__name__.rpartition(".")[2].replace("_", "-"): module.fuzz
    for module in (kernels, scheduler, tool_calls, forms, gguf, models, forgotten, server)
}
SECONDS = 120.0


def until(end: float) -> Iterator[int]:
    """Numbers until a time of ``time.monotonic``."""
    number = 0
    while time.monotonic() < end:
        yield number
        number += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each fuzzer")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--only", action="append", choices=sorted(FUZZERS), help="repeatable")
    given = parser.parse_args()
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every write to a client that has left
    failed = False
    for name in given.only or FUZZERS:
        print(f"{name}: seed {given.seed}", flush=True)
        findings = Findings()
        FUZZERS[name](random.Random(f"{given.seed} {name}"), until(time.monotonic() + given.seconds), findings)
        print(
            f"{name}: {', '.join(f'{count} {what}' for what, count in sorted(findings.counts.items()))}", flush=True
        )
        for sentence in findings.wrong:
            print(f"{name}: WRONG: {sentence}", flush=True)
        failed = failed or bool(findings.wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
