"""Does an answer that the caller drops without closing leave memory, threads or objects behind?

    python -m benchmarks.forgotten

Five hundred answers of the default pair are dropped in each of three forms: in reference cycles, in threads, and in
asyncio tasks. Prints one JSON object.
"""

from __future__ import annotations

import json
import threading
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

import psutil

from edgespec.engine.answer import Generation
from edgespec.engine.engine import Engine
from tests.support.forgetting import Forget, alive, eager_collector, in_cycles, in_tasks, in_threads

WARM_UP, FORGOTTEN = 40, 500
PAUSE_S = 0.03  # about a forward of the target


def measure() -> dict[str, Any]:
    """What remains after the answers of each form."""
    forms: dict[str, Forget] = {"in cycles": in_cycles, "in threads": in_threads, "in asyncio tasks": in_tasks}
    found: dict[str, dict[str, Any]] = {}
    with Engine.load(profile="laptop", download=True, lookup=False) as engine:
        engine.pair.pool.drafter_model().wait()
        for form, forget in forms.items():
            with eager_collector():
                forget(engine, WARM_UP, PAUSE_S)
                threads, bytes_before = threading.active_count(), psutil.Process().memory_info().rss
                started = time.monotonic()
                forget(engine, FORGOTTEN, PAUSE_S)
                seconds = time.monotonic() - started
                left = alive(Generation)
            found[form] = {
                "answers": FORGOTTEN,
                "left": left,
                "threads_more": threading.active_count() - threads,
                "bytes_more": psutil.Process().memory_info().rss - bytes_before,
                "seconds": seconds,
            }
    return {"forms": found}


def main() -> None:
    """Print one JSON object."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    print(json.dumps(measure()))


if __name__ == "__main__":
    main()
