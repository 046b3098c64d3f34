"""How much faster are several answers to one request (``n``) than the same answers one after another?

    python -m benchmarks.choices [--model MODEL] [--n 2,4] [--tokens N] [--turns N] [--temperature T]

A server that keeps no answers reads each question, then answers it with ``n`` and as ``n`` requests with the same
seeds, in alternating order. The texts of both are compared. Prints one JSON object: for each ``n`` the tokens a
second of both ways, and how many times as fast ``n`` is (the geometric mean over questions and turns, and all).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.batched_clients import QUESTIONS
from benchmarks.beginnings import ready
from benchmarks.processes import serving
from edgespec.hardware.machine import describe_machine


def ask(client: httpx.Client, prompt: str, **body: Any) -> tuple[list[str], int]:
    """The texts of the answers, and how many tokens they have."""
    asked = {"messages": [{"role": "user", "content": prompt}], **body}
    reply = client.post("/v1/chat/completions", json=asked).raise_for_status().json()
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    return texts, reply["usage"]["completion_tokens"]


def timed(
    client: httpx.Client, prompt: str, count: int, *, at_once: bool, **body: Any
) -> tuple[float, list[str], int]:
    """Seconds of ``count`` answers, their texts, and how many tokens they have."""
    started = time.perf_counter()
    if at_once:
        texts, tokens = ask(client, prompt, n=count, seed=1, **body)
    else:
        single = [ask(client, prompt, seed=1 + index, **body) for index in range(count)]
        texts, tokens = [text for own, _ in single for text in own], sum(own for _, own in single)
    return time.perf_counter() - started, texts, tokens


def measure(client: httpx.Client, count: int, turns: int, **body: Any) -> dict[str, Any]:
    """Both ways for every question. Raises AssertionError if a text differs."""
    ratios, seconds, tokens = list[float](), {True: 0.0, False: 0.0}, 0
    for turn in range(turns):
        for number, question in enumerate(QUESTIONS):
            ask(client, question, **{**body, "max_tokens": 1})  # both find the prompt read
            first = (turn + number) % 2 == 0
            order = (first, not first)
            found = {at_once: timed(client, question, count, at_once=at_once, **body) for at_once in order}
            assert found[True][1:] == found[False][1:], question
            ratios.append(found[False][0] / found[True][0])
            tokens += found[True][2]
            for at_once, (own_s, _, _) in found.items():
                seconds[at_once] += own_s
    return {
        "at_once_tokens_per_s": round(tokens / seconds[True], 2),
        "in_turn_tokens_per_s": round(tokens / seconds[False], 2),
        "times": round(statistics.geometric_mean(ratios), 3),
        "all_times": [round(ratio, 3) for ratio in ratios],
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--n", default="2,4")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.8)
    options = parser.parse_args()
    body = {"max_tokens": options.tokens, "temperature": options.temperature}
    os.environ["EDGESPEC_HISTORY"] = "false"  # the second way would copy the answers of the first
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), options.model) as (url, _):
        ready(url)
        with httpx.Client(base_url=url, timeout=None, trust_env=False) as client:
            ask(client, QUESTIONS[0], **body)  # the drafter is loaded
            found = {count: measure(client, int(count), options.turns, **body) for count in options.n.split(",")}
    report = {"model": options.model, "processor": machine.processor, "cores": machine.physical_cores}
    print(json.dumps({**report, "tokens": options.tokens, "temperature": options.temperature, "n": found}, indent=1))


if __name__ == "__main__":
    main()
