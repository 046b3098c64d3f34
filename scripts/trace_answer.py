"""Which files of ours an answer enters between ``generate`` and its first accepted draft token, on all threads.

    .venv/bin/python scripts/trace_answer.py [--most N] [--by model] [--loading]

The default pair, greedy, serial; calibrates first if this machine is not. The drafter is in memory, or with
``--loading`` it is loaded when the answer buys that. Prints the files in the order in which they are entered, and
their number. It fails if no token was accepted, and with ``--most`` if there are more files. ``--by`` traces until
a token of that drafter is accepted; without it any drafter's token ends the trace.
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
    """Names each file at the first call into it, until a round with an accepted token is counted.

    ``by`` names whose token it is to be; None: anybody's. ``accepted_from`` is whose it was.
    """

    def __init__(self, by: str | None = None) -> None:
        self.by = by
        self.accepted_from: str | None = None
        self.on = False
        self.entered: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if not self.on or event != "call" or not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return
        self.entered.setdefault(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))
        if frame.f_code is COUNTED:
            record = frame.f_locals["record"]
            if record.accepted and self.by in (None, record.source):
                self.on, self.accepted_from = False, record.source


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, help="fail if more files are entered")
    parser.add_argument("--by", choices=("model", "lookup"), help="whose accepted token ends the trace")
    parser.add_argument("--loading", action="store_true", help="the drafter is not in memory")
    arguments = parser.parse_args()
    trace = Trace(arguments.by)
    threading.setprofile(trace)
    sys.setprofile(trace)
    loaded = Engine.load(profile="laptop", mode="serial", calibrate=True, download=True)
    with loaded as engine, engine.session() as session:
        if not arguments.loading:
            engine.pair.pool.drafter_model().wait()
        trace.on = True
        for _ in session.generate(PROMPT, max_tokens=256):
            if not trace.on:
                break
    print("\n".join(trace.entered))
    if trace.accepted_from is None:
        print("no draft token was accepted: the files of a whole answer")
        return 1
    print(f"{len(trace.entered)} files, up to a token of {trace.accepted_from}")
    return 1 if arguments.most is not None and len(trace.entered) > arguments.most else 0


if __name__ == "__main__":
    sys.exit(main())
