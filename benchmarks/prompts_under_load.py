"""What happens to answers while prompts are read, and to prompts while answers run?

    python -m benchmarks.prompts_under_load [--model MODEL] [--turns N] [--threads N]

Two clients ask prompts of 50 to 500 tokens in a closed loop: the time to the first token, against one client alone. A
prompt of 1000 tokens arrives while one and three sampled answers run: how fast they are while it is read, against the
same tokens of the same answers without it, and the longest gap between two tokens. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.batched_clients import closed_loop
from edgespec import Done, Engine, Round, Sampling, Session
from edgespec.hardware.machine import describe_machine

TTFT_TOKENS = (50, 120, 200, 320, 500)
ANSWER_TOKENS = 24
LONG_TOKENS = 1000
BEFORE_S = 2.0
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


class Answers:
    """Answers in threads, the same in every run. ``times``: of their tokens so far."""

    def __init__(self, engine: Engine, count: int) -> None:
        self.times: list[list[float]] = [[] for _ in range(count)]
        self._engine, self._stop = engine, threading.Event()
        self._pool = ThreadPoolExecutor(count)
        self._running = [self._pool.submit(self._answer, number) for number in range(count)]

    def _answer(self, number: int) -> None:
        sampling = Sampling(temperature=0.8, seed=number)  # a greedy story repeats itself, and is copied
        with (
            self._engine.session() as session,
            session.generate(RUNNING, max_tokens=4000, sampling=sampling) as generation,
        ):
            for event in generation:
                if isinstance(event, Round):
                    self.times[number].extend([time.perf_counter()] * event.record.emitted)
                if self._stop.is_set():
                    return

    def wait_for(self, tokens: Sequence[int]) -> None:
        """Until every answer has as many tokens. Raises an answer's error, and RuntimeError if one ends before."""
        while any(len(own) < least for own, least in zip(self.times, tokens, strict=True)):
            for answer in self._running:
                if answer.done():
                    raise RuntimeError("an answer ended early") from answer.exception()
            time.sleep(0.01)

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        self._pool.shutdown()


def while_reading(engine: Engine, answers: int) -> dict[str, float]:
    """How fast that many answers are while a long prompt is read, against the same tokens without it; their gaps."""
    with Answers(engine, answers) as reading, engine.session() as session:
        reading.wait_for([8] * answers)
        time.sleep(BEFORE_S)
        asked = time.perf_counter()
        first_s = first_token_s(session, prompt_of(LONG_TOKENS, 3))
    # The first token after the prompt arrived, and the last before its answer began.
    spans = [(bisect_left(own, asked), bisect_left(own, asked + first_s) - 1) for own in reading.times]
    with Answers(engine, answers) as alone:
        alone.wait_for([last + 1 for _, last in spans])

    def seconds(times: Sequence[Sequence[float]]) -> float:
        return sum(own[last] - own[first] for own, (first, last) in zip(times, spans, strict=True))

    gaps = [
        after - before
        for own in reading.times
        for before, after in itertools.pairwise(own)
        if asked <= after and before <= asked + first_s
    ]
    return {"kept": seconds(alone.times) / seconds(reading.times), "longest_gap_s": max(gaps), "prompt_s": first_s}


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
            found.append(while_reading(engine, answers))
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
