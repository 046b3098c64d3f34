"""How fast do several clients of one engine answer simultaneously, compared with one?

    python -m benchmarks.batched_clients [--model MODEL] [--clients 1,2,4,8] [--tokens N] [--turns N]

Each client is a thread with a separate session, which asks one question after another: a closed loop. All clients
together ask the same number of questions for each number of clients. The arms are interleaved: each turn measures
every number of clients without drafting and as planned, in rotating order. Every answer is compared with the one
client's answer to the same question. Prints one JSON object.
Rates are tokens per second of all clients together, from the first question to the last answer, prompts included;
`entries_per_forward` counts sequences in a forward, the heaviest model first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from edgespec import Done, Engine, Session
from edgespec.hardware.machine import describe_machine
from edgespec.runtimes.native.batch import NativeBatch
from edgespec.runtimes.native.scheduler import Share

C = TypeVar("C")
T = TypeVar("T")

QUESTIONS = (
    "Write a Python function that merges two sorted lists.",
    "Explain how a hash table resolves collisions.",
    "Write a Python class for a stack with push, pop and peek.",
    "What is the difference between a process and a thread?",
    "Write a SQL query that counts the orders of each customer.",
    "Explain what a binary search does, and why it is fast.",
    "Write a shell script that renames all .txt files to .md.",
    "How does a compiler turn source code into machine code?",
)


def closed_loop(
    client: Callable[[], AbstractContextManager[C]], clients: int, numbers: Iterable[int], ask: Callable[[C, int], T]
) -> dict[int, T]:
    """What ``ask`` returns for each number. Each client takes the next one when its last answer is complete.

    ``client`` opens what a client asks, for example a session.

    Raises a client's error.
    """
    left, lock = iter(numbers), threading.Lock()
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            with client() as own:
                while True:
                    with lock:
                        number = next(left, None)
                    if number is None:
                        return
                    found[number] = ask(own, number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, name=f"client-{number}", daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def run_clients(engine: Engine, clients: int, tokens: int, depth: int | None) -> tuple[float, dict[int, list[int]]]:
    """Seconds for all questions, and the token ids of each answer."""

    def ask(session: Session, number: int) -> list[int]:
        session.clear()
        events = session.generate(QUESTIONS[number], max_tokens=tokens, depth=depth)
        return next(list(event.token_ids) for event in events if isinstance(event, Done))

    started = time.perf_counter()
    found = closed_loop(engine.session, clients, range(len(QUESTIONS)), ask)
    return time.perf_counter() - started, found


def arms(clients: Sequence[int]) -> dict[str, tuple[int, int | None]]:
    """Number of clients and depth (None: as planned) of each arm."""
    plain: dict[str, tuple[int, int | None]] = {f"{count} plain": (count, 0) for count in clients}
    return plain | {f"{count} planned": (count, None) for count in clients}


def rotated(names: Sequence[str], turns: int) -> Iterator[list[str]]:
    for turn in range(turns):
        first = turn % len(names)
        yield [*names[first:], *names[:first]]


class StepCounts:
    """Counts the entries of forwards, for each native model of this process."""

    def __init__(self) -> None:
        self.entries: dict[float, list[int]] = {}  # by the bytes that a forward reads
        compute, lock = NativeBatch._compute, threading.Lock()

        def counted(batch: NativeBatch, shares: Sequence[Share]) -> Sequence[int]:
            with lock:
                self.entries.setdefault(batch._scheduler._weight, []).append(len(shares))
            return compute(batch, shares)

        NativeBatch._compute = counted  # type: ignore[method-assign, assignment]

    def take(self) -> list[float]:
        """Entries per forward since the last call, the heaviest model first."""
        found = [statistics.mean(self.entries[weight]) for weight in sorted(self.entries, reverse=True)]
        self.entries.clear()
        return found


def measure(engine: Engine, counts: StepCounts, clients: Sequence[int], tokens: int, turns: int) -> dict[str, object]:
    """The report. Raises AssertionError if an answer differs."""
    chosen = arms(clients)
    rates: dict[str, list[float]] = {name: [] for name in chosen}
    entries: dict[str, list[list[float]]] = {name: [] for name in chosen}
    _, expected = run_clients(engine, 1, tokens, None)
    for names in rotated(list(chosen), turns):
        for name in names:
            count, depth = chosen[name]
            counts.take()
            seconds, found = run_clients(engine, count, tokens, depth)
            assert found == expected, f"an answer of {name} differs"
            rates[name].append(sum(map(len, found.values())) / seconds)
            entries[name].append(counts.take())
    medians = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "tokens_per_s": {name: round(rate, 2) for name, rate in medians.items()},
        "times_plain": {name: round(rate / medians["1 plain"], 3) for name, rate in medians.items()},
        "times_planned": {name: round(rate / medians["1 planned"], 3) for name, rate in medians.items()},
        "entries_per_forward": {
            name: [round(statistics.mean(model), 2) for model in zip(*found, strict=False)]
            for name, found in entries.items()
        },
        "all_tokens_per_s": {name: [round(rate, 2) for rate in found] for name, found in rates.items()},
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    clients = sorted({1, *map(int, options.clients.split(","))})
    machine, counts = describe_machine(), StepCounts()
    with Engine.load(options.model, threads=options.threads) as engine:
        engine.load_drafter()
        report = {
            "model": options.model,
            "processor": machine.processor,
            "cores": machine.physical_cores,
            "threads": engine.plan.target.threads,
            "plan": engine.plan.mode,
            "depth_cap": engine.plan.depth_cap,
            "questions": len(QUESTIONS),
            "tokens": options.tokens,
            **measure(engine, counts, clients, options.tokens, options.turns),
        }
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
