"""What happens to answers while prompts are read, and to prompts while answers run?

    python -m benchmarks.prompts_under_load [--model MODEL] [--turns N] [--threads N]

Two clients ask prompts of 50 to 500 tokens in a closed loop: the time to the first token, against one client alone. A
prompt of 1000 tokens arrives while one and three answers run: the speed of these answers while it is read, against
their speed before, and the longest gap between two tokens. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.batched_clients import closed_loop
from edgespec import Done, Engine, Round, Session
from edgespec.hardware.machine import describe_machine

TTFT_TOKENS = (50, 120, 200, 320, 500)
ANSWER_TOKENS = 24
LONG_TOKENS = 1000
BEFORE_S = 4.0
RUNNING = "Write a long story about a lighthouse keeper, with many details."


def prompt_of(tokens: int, number: int) -> str:
    """About that many tokens, different for each number."""
    words = " ".join(f"item {number * 7 + word}" for word in range(max(1, (tokens - 30) // 4)))
    return f"A list: {words}. Say something about item {number}."


def first_token_s(session: Session, prompt: str) -> float:
    """Seconds to the first token of a short answer."""
    session.clear(keep_cache=False)
    events = session.generate(prompt, max_tokens=ANSWER_TOKENS)
    done = next(event for event in events if isinstance(event, Done))
    assert done.stats.ttft_s is not None
    return done.stats.ttft_s


def first_tokens(engine: Engine, clients: int, numbers: Sequence[int]) -> list[float]:
    """The times of all prompts, which the clients take in turn."""

    def ask(session: Session, number: int) -> float:
        return first_token_s(session, prompt_of(TTFT_TOKENS[number % len(TTFT_TOKENS)], number))

    return list(closed_loop(engine.session, clients, numbers, ask).values())


def percentile95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def running(engine: Engine, answers: int) -> dict[str, float]:
    """Speeds and gaps of ``answers`` answers before and while a long prompt is read."""
    times: list[list[float]] = [[] for _ in range(answers)]
    stop = threading.Event()

    def answer(own: list[float]) -> None:
        with engine.session() as session, session.generate(RUNNING, max_tokens=2000) as generation:
            for event in generation:
                if isinstance(event, Round):
                    own.extend([time.perf_counter()] * event.record.emitted)
                if stop.is_set():
                    return

    threads = [threading.Thread(target=answer, args=(own,)) for own in times]
    for thread in threads:
        thread.start()
    while min(map(len, times)) < 8:
        time.sleep(0.01)
    begun = time.perf_counter()
    time.sleep(BEFORE_S)
    with engine.session() as session:
        asked = time.perf_counter()
        first_s = first_token_s(session, prompt_of(LONG_TOKENS, 3))
    stop.set()
    for thread in threads:
        thread.join()

    def rate(start: float, end: float) -> float:
        return sum(1 for own in times for at in own if start <= at < end) / (end - start)

    gaps = [
        after - before
        for own in times
        for before, after in itertools.pairwise(own)
        if asked <= after and before <= asked + first_s
    ]
    return {
        "kept": rate(asked, asked + first_s) / rate(begun, asked),
        "longest_gap_s": max(gaps),
        "prompt_s": first_s,
    }


def measure(engine: Engine, turns: int) -> dict[str, Any]:
    """The report."""
    numbers = range(2 * len(TTFT_TOKENS))
    alone: list[float] = []
    two: list[float] = []
    kept: dict[int, list[dict[str, float]]] = {1: [], 3: []}
    first_tokens(engine, 1, numbers[:2])
    for turn in range(turns):
        own = [turn * len(numbers) + number for number in numbers]
        alone += first_tokens(engine, 1, own)
        two += first_tokens(engine, 2, own)
        for answers, found in kept.items():
            found.append(running(engine, answers))
    return {
        "ttft_p95_s": {"one client": percentile95(alone), "two clients": percentile95(two)},
        "ttft_p95_ratio": percentile95(two) / percentile95(alone),
        "ttft_median_ratio": statistics.median(two) / statistics.median(alone),
        "while_reading": {
            f"{answers} running": {
                "kept": statistics.median(each["kept"] for each in found),
                "longest_gap_s": max(each["longest_gap_s"] for each in found),
                "all": found,
            }
            for answers, found in kept.items()
        },
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args()
    with Engine.load(given.model, threads=given.threads) as engine:
        engine.load_drafter()
        about = {"model": given.model, "processor": describe_machine().processor}
        json.dump({**about, **measure(engine, given.turns)}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
