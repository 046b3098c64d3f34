"""How much does a busy Python thread in the host application slow decoding?

Both arms share the processor with one spinning neighbour: a process, which only takes CPU time, or a thread of this
interpreter, which also competes for the interpreter lock. The arms' ratio is the cost of the lock. Decoding uses one
thread fewer than there are cores, so that the neighbour has its own core; arms are interleaved ABBA and compared pair
by pair.

    python benchmarks/busy_thread.py [--model MODEL] [--pairs N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from edgespec import Done, Engine, Session
from edgespec.hardware.machine import describe_machine

PROMPT = "Explain how a hash table resolves collisions."
TOKENS = 64


@contextmanager
def busy_process() -> Iterator[None]:
    """A spinning neighbour outside this interpreter."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        child.kill()
        child.wait()


@contextmanager
def busy_thread() -> Iterator[None]:
    """A spinning neighbour that competes for this interpreter's lock."""
    stop = False

    def spin() -> None:
        while not stop:
            pass

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()


def decode_tokens_per_s(session: Session) -> float:
    """Plain decoding speed of one answer."""
    session.clear()
    for event in session.generate(PROMPT, max_tokens=TOKENS, depth=0):
        if isinstance(event, Done):
            speed = event.stats.decode_tokens_per_s
            assert speed is not None
            return speed
    raise AssertionError("a generation ends with Done")


def measure(model: str, pairs: int, threads: int | None) -> dict[str, object]:
    """Ratios thread / process, pair by pair, and thread / no neighbour."""
    machine = describe_machine()
    with Engine.load(model, draft="none", depth=0, threads=threads, download=True) as engine, engine.session() as s:
        used = engine.plan.target.threads
        decode_tokens_per_s(s)
        alone, beside_process, beside_thread = list[float](), list[float](), list[float]()
        for pair in range(pairs):
            alone.append(decode_tokens_per_s(s))
            arms = [(busy_process, beside_process), (busy_thread, beside_thread)]
            for neighbour, speeds in arms if pair % 2 == 0 else reversed(arms):
                with neighbour():
                    speeds.append(decode_tokens_per_s(s))
    ratios = [thread / process for thread, process in zip(beside_thread, beside_process, strict=True)]
    return {
        "model": model,
        "processor": machine.processor,
        "cores": machine.physical_cores,
        "decoding_threads": used,
        "alone_tokens_per_s": alone,
        "beside_process_tokens_per_s": beside_process,
        "beside_thread_tokens_per_s": beside_thread,
        "thread_over_process_median": statistics.median(ratios),
        "thread_over_alone_median": statistics.median(t / a for t, a in zip(beside_thread, alone, strict=True)),
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    json.dump(measure(arguments.model, arguments.pairs, arguments.threads), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
