"""Does every answer have the tokens that it has alone, while 2, 4 and 8 answers are computed together?

    python -m benchmarks.batched_answers [--model MODEL] [--answers N] [--clients 2,4,8]

The prompt of an answer (of the built-in suites), its sampling (greedy or with a seed) and its drafting (as planned,
none, chains, or trees of as many nodes as a forward scores) follow from its number, also when it arrives and whether
it is left early. Each is computed alone first, then by several clients in a closed loop. Prints one JSON object: how
many rounds shared their forward with other answers and with prompts, and the answers with other tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.batched_clients import closed_loop
from edgespec import Done, Engine, Round, Sampling, Session, Text
from edgespec.bench.equality import FullTrees
from edgespec.bench.suite import builtin_suite
from edgespec.engine.pair.loaded_pair import Speculation
from edgespec.hardware.machine import describe_machine
from edgespec.interfaces.policy import RoundRecord

DEPTH = 8
SHORT, LONG = 500, 2400  # characters of a prompt: up to about 120 and 600 tokens
LATE_S = 0.3  # about ten plain steps of a 1.5B model


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One answer. ``drafting``: planned, plain, chains or trees. ``leave_after``: left after that many tokens."""

    prompt: str
    sampling: Sampling
    drafting: str
    tokens: int
    late_s: float
    leave_after: int | None


def wanted(number: int, prompts: Sequence[str]) -> Wanted:
    """What the answer of that number is, the same in every run."""
    source = random.Random(number)
    return Wanted(
        prompt=f"{source.choice(prompts)}\n\n({number})",
        sampling=Sampling() if source.random() < 0.5 else Sampling(temperature=0.8, top_p=0.95, seed=number),
        drafting=source.choice(("planned", "planned", "plain", "chains", "trees")),
        tokens=source.randint(4, 32),
        late_s=source.choice((0.0, source.uniform(0.0, LATE_S))),
        leave_after=source.randint(1, 12) if source.random() < 0.15 else None,
    )


@dataclass(frozen=True, slots=True)
class Client:
    """Sessions that draft as planned or chains, and trees."""

    planned: Session
    trees: Session


@contextmanager
def client(engine: Engine) -> Iterator[Client]:
    trees = Speculation(drafters=engine.drafters, policy=FullTrees(DEPTH, "model"), depth_cap=DEPTH)
    with ExitStack() as opened:
        sessions = [opened.enter_context(engine.session(_speculation=how)) for how in (None, trees)]
        yield Client(*sessions)


def shared(rounds: Sequence[RoundRecord]) -> dict[str, int]:
    """Which of the rounds shared their forward, and what they proposed."""
    return {
        "rounds": len(rounds),
        "with_other_answers": sum(record.company.answers > 0 for record in rounds),
        "with_a_prompt": sum(record.company.reading for record in rounds),
        "proposed": sum(record.proposed for record in rounds),
        "alternatives": sum(record.alternative_count for record in rounds),
    }


def answer(own: Client, each: Wanted, rounds: list[RoundRecord], *, late: bool) -> list[int]:
    """Its token ids, up to where it is left. Its rounds are added to ``rounds``."""
    if late:
        time.sleep(each.late_s)
    session = own.trees if each.drafting == "trees" else own.planned
    session.clear()
    depth = {"plain": 0, "chains": DEPTH}.get(each.drafting)
    found: list[int] = []
    with session.generate(each.prompt, max_tokens=each.tokens, sampling=each.sampling, depth=depth) as events:
        for event in events:
            if isinstance(event, Round):
                rounds.append(event.record)
            elif isinstance(event, Done):
                return list(event.token_ids)
            elif isinstance(event, Text):
                found.extend(each.id for each in event.tokens)
                if each.leave_after is not None and len(found) >= each.leave_after:
                    return found
    raise AssertionError("an answer ended without Done")


def is_same(each: Wanted, expected: Sequence[int], found: Sequence[int]) -> bool:
    """Whether the tokens are equal. An answer that is left may have been left a few tokens earlier or later."""
    if each.leave_after is None:
        return list(expected) == list(found)
    shorter = min(len(expected), len(found))
    return shorter > 0 and list(expected[:shorter]) == list(found[:shorter])


def measure(engine: Engine, prompts: Sequence[str], answers: int, clients: Sequence[int]) -> dict[str, Any]:
    """The report."""
    asked = [wanted(number, prompts) for number in range(answers)]

    def run(count: int) -> tuple[dict[int, list[int]], list[RoundRecord]]:
        rounds: list[RoundRecord] = []

        def ask(own: Client, number: int) -> list[int]:
            return answer(own, asked[number], rounds, late=count > 1)

        return closed_loop(lambda: client(engine), count, range(answers), ask), rounds

    alone, _ = run(1)
    by_clients = {}
    for count in clients:
        found, rounds = run(count)
        different = [number for number in range(answers) if not is_same(asked[number], alone[number], found[number])]
        by_clients[str(count)] = {**shared(rounds), "different": different}
    return {
        "answers": answers,
        "tokens": sum(map(len, alone.values())),
        "drafting": Counter(each.drafting for each in asked),
        "sampled": sum(not each.sampling.greedy for each in asked),
        "left": sum(each.leave_after is not None for each in asked),
        "clients": by_clients,
    }


def suite_prompts() -> list[str]:
    """Prompts of the built-in suites that are not long, and the starts of the long ones."""
    short = [each.prompt for name in ("short", "ours") for each in builtin_suite(name) if len(each.prompt) <= SHORT]
    return short + [each.prompt[:LONG] for each in builtin_suite("long-prompts")]


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--clients", default="2,4,8")
    options = parser.parse_args()
    machine = describe_machine()
    with Engine.load(options.model) as engine:
        engine.load_drafter()
        report = {
            "model": options.model,
            "processor": machine.processor,
            "cores": machine.physical_cores,
            "plan": engine.plan.mode,
            **measure(engine, suite_prompts(), options.answers, [int(count) for count in options.clients.split(",")]),
        }
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
