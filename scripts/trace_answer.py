"""Which files of ours an answer enters between ``generate`` and its first accepted draft token, on all threads.

    .venv/bin/python scripts/trace_answer.py [--most N]

The default pair, greedy, serial; calibrates first if this machine is not. Prints the files in the order in which they
are entered, and their number; with ``--most`` it fails if there are more.
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path
from types import FrameType

import edgespec
from edgespec import DecodeStats, Engine

PACKAGE = Path(edgespec.__file__).parent
COUNTED = DecodeStats.add_round.__code__
PROMPT = "Write a Python function that returns the n smallest numbers of a list, with a docstring and two examples."


class Trace:
    """Names each file at the first call into it, until a round with an accepted token is counted."""

    def __init__(self) -> None:
        self.on = False
        self.entered: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if not self.on or event != "call" or not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return
        self.entered.setdefault(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))
        if frame.f_code is COUNTED and frame.f_locals["record"].accepted > 0:
            self.on = False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, help="fail if more files are entered")
    most: int | None = parser.parse_args().most
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    loaded = Engine.load(profile="laptop", mode="serial", calibrate=True, download=True)
    with loaded as engine, engine.session() as session:
        trace.on = True
        for _ in session.generate(PROMPT, max_tokens=128):
            if not trace.on:
                break
    print("\n".join(trace.entered))
    print(f"{len(trace.entered)} files")
    return 1 if most is not None and len(trace.entered) > most else 0


if __name__ == "__main__":
    sys.exit(main())
