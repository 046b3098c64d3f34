"""Does every answer have the token ids that it has alone, while 2, 4 and 8 clients ask by every API?

    python -m benchmarks.face_clients [--model MODEL] [--answers N] [--clients 2,4,8]

A server in this process answers each request alone first, then to several clients at a time. The API of a request,
its prompt, its length, whether it streams, and whether its tokens are drawn follow from its number. Prints one JSON
object: how many answers each API gave, and those with other ids, another text or another status.
"""

from __future__ import annotations

import json
import random
import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.batched_clients import closed_loop
from benchmarks.mixed_traffic import Answer, Asked, Client
from edgespec import Done, Engine
from edgespec.server.schema import Request
from tests.support.faces import ANSWERS, TEXTS
from tests.support.http_server import running

PROMPTS = (
    "Name three sorting algorithms.",
    "Write a Python function that reverses a list.",
    "Write one sentence about the sea.",
    "Here is a list.\n" + "\n".join(f"- item {number}" for number in range(60)) + "\nRepeat the third item.",
)
_DRAWN = {"temperature": 0.8, "top_p": 0.95}
# The APIs whose requests have a seed, and the member that has it.
_SEEDED = {"/v1/chat/completions": "", "/v1/completions": "", "/api/chat": "options", "/api/generate": "options"}
# A prompt ends with the request's number, by which the server's answers are found again.
_NUMBER = re.compile(r"\((\d+)\)")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request, and whether its answer streams."""

    asked: Asked
    stream: bool


def wanted(number: int) -> Wanted:
    """What the request of that number is, the same in every run."""
    source, ways = random.Random(number), [*ANSWERS.values(), *TEXTS.values()]
    way = ways[number % len(ways)]
    body = way.body(f"{source.choice(PROMPTS)}\n\n({number})", source.randint(4, 32))
    if way.path in _SEEDED and source.random() < 0.5:
        inside = _SEEDED[way.path]
        drawn = {**_DRAWN, "seed": number}
        body |= {inside: {**body[inside], **drawn}} if inside else drawn
    return Wanted(Asked(way, body), source.random() < 0.5)


class Ids:
    """The token ids of each request's answers, as the server made them."""

    def __init__(self) -> None:
        self.found: dict[int, list[int]] = {}

    def __call__(self, request: Request, answers: list[Done]) -> None:
        text = request.prompt if isinstance(request.prompt, str) else request.messages[-1]["content"]
        self.found[int(_NUMBER.findall(text)[-1])] = [each for done in answers for each in done.token_ids]


def measure(engine: Engine, answers: int, clients: Sequence[int]) -> dict[str, Any]:
    """The report. The engine is closed with the server."""
    asked, ids = [wanted(number) for number in range(answers)], Ids()
    with running(lambda: engine, content=ids) as server:
        server.wait_until(lambda: server.service.keeper.state == "ready")

        def run(count: int) -> tuple[dict[int, Answer], dict[int, list[int]]]:
            ids.found = {}
            names = iter(range(count))

            @contextmanager
            def client() -> Iterator[Client]:
                yield Client(server.url, f"client {next(names)}")

            def ask(own: Client, number: int) -> Answer:
                return own.ask(asked[number].asked, stream=asked[number].stream)

            return closed_loop(client, count, range(answers), ask), ids.found

        texts, alone = run(1)
        by_clients = {}
        for count in clients:
            said, found = run(count)
            by_clients[str(count)] = {
                "answers": len(found),
                "other_ids": [number for number in range(answers) if found.get(number) != alone.get(number)],
                "other_replies": [number for number in range(answers) if said[number] != texts[number]],
            }
    return {
        "answers": answers,
        "paths": Counter(each.asked.way.path for each in asked),
        "streamed": sum(each.stream for each in asked),
        "tokens": sum(map(len, alone.values())),
        "refused": sorted({asked[n].asked.way.path for n, (status, _) in texts.items() if status != 200}),
        "clients": by_clients,
    }


def main() -> None:
    """Print one JSON object."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--clients", default="2,4,8", help="numbers of clients at a time, separated by commas")
    given = parser.parse_args()
    report = measure(Engine.load(given.model), given.answers, [int(each) for each in given.clients.split(",")])
    json.dump({"model": given.model, **report}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
