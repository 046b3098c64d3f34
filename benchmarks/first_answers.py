"""Requests in new processes: the first answers of a home, answers cut short, and the order of texts.

    python -m benchmarks.first_answers SUITE first [--limit N]
    python -m benchmarks.first_answers SUITE cut|order

`first`: in a new home, one coding answer in the first process, then all prompts in a second process, or the first N
of each category, planned and plain; `second` is the latter's plain seconds over planned seconds. `cut`: plain seconds
over planned seconds of ten answers that end after their first round with the drafter; it needs a new home in
EDGESPEC_HOME. `order`: tokens a round of code and of translations, alone and in both orders, each in a new home.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import Answers, answers, fresh_home, with_other_ids
from edgespec.bench.statistics import geomean
from edgespec.bench.suite import load_suite
from edgespec.engine.engine import Engine
from edgespec.engine.events import Round
from edgespec.engine.session import Session

CUT_PROMPTS = 10


def seconds(row: dict[str, Any]) -> float:
    """Seconds of the whole request."""
    return float(row["ttft_s"] + row["decode_s"])


def request_gains(rows: Answers) -> dict[str, float]:
    """Plain seconds over planned seconds by prompt, the geometric mean over the turns."""
    gains: dict[str, list[float]] = {}
    plain = {(row["id"], row["turn"]): seconds(row) for row in rows if row["arm"] == "plain"}
    for row in rows:
        if row["arm"] == "planned":
            gains.setdefault(row["id"], []).append(plain[row["id"], row["turn"]] / seconds(row))
    return {prompt: geomean(own) for prompt, own in gains.items()}


def first_answers(suite: str, limit: int | None = None) -> dict[str, Any]:
    """Gains of the first answer and of the second process, by category, and whether all ids are equal."""
    both = ("--arms", "planned,plain", "--turns", "2")
    few = () if limit is None else ("--limit", str(limit))
    with tempfile.TemporaryDirectory() as folder:
        environment = fresh_home(Path(folder) / "home")
        first = answers(environment, suite, "--category", "coding", "--limit", "1", *both)
        second = answers(environment, suite, "--max-tokens", "96", *few, *both)
    return first_gains(first, second)


def first_gains(first: Answers, second: Answers) -> dict[str, Any]:
    """The figures of the rows of both processes."""
    categories = {row["id"]: row["category"] for row in second}
    gains = request_gains(second)
    by_category = {
        category: geomean(gain for prompt, gain in gains.items() if categories[prompt] == category)
        for category in sorted(set(categories.values()))
    }
    opening = {row["arm"]: row for row in first if row["turn"] == 0}
    return {
        "first": seconds(opening["plain"]) / seconds(opening["planned"]),
        "drafted": bool(opening["planned"]["proposed"]),
        "second": geomean(gains.values()),
        "by_category": by_category,
        "identical": same_ids(first) and same_ids(second),
    }


def same_ids(rows: Answers) -> bool:
    return not with_other_ids(rows)


def cut(suite_file: str) -> dict[str, Any]:
    """Plain seconds over planned seconds, by prompt; answers end before the drafter's loading is earned back."""
    suite = load_suite(Path(suite_file))
    ratios: dict[str, float] = {}
    engine = Engine.load(profile="laptop")
    with engine, engine.session() as planned, engine.session() as plain:
        engine.load_drafter()
        for prompt in suite[:: max(1, len(suite) // 13)]:
            turns = []
            for _ in range(3):
                tokens, bought_s = _until_drafted(planned, prompt.prompt)
                if tokens:
                    plain.clear(keep_cache=False)
                    started = time.perf_counter()
                    with plain.generate(prompt.prompt, max_tokens=tokens, depth=0) as generation:
                        sum(1 for _ in generation)
                    turns.append((time.perf_counter() - started) / bought_s)
            if turns and len(ratios) < CUT_PROMPTS:
                ratios[prompt.id] = statistics.median(turns)
    return {"ratios": ratios}


def _until_drafted(session: Session, prompt: str) -> tuple[int, float]:
    """Tokens and seconds of an answer that ends after its first round with the drafter; 0 without such a round."""
    session.clear(keep_cache=False)
    tokens, started = 1, time.perf_counter()
    with session.generate(prompt, max_tokens=256) as generation:
        for event in generation:
            if isinstance(event, Round):
                tokens += event.record.emitted
                if event.record.source == "model":
                    return tokens, time.perf_counter() - started
    return 0, 0.0


def order(suite: str) -> dict[str, Any]:
    """Tokens a round by category: each kind alone, then both kinds in both orders."""
    kinds = ("translation", "coding")

    def tokens_a_round(sequence: Sequence[str]) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            environment = fresh_home(Path(folder) / "home")
            rows: dict[str, Answers] = {}
            answers(environment, suite, "--category", "stem", "--limit", "1")  # the first answer of a home differs
            for kind in sequence:
                rows[kind] = answers(environment, suite, "--category", kind, "--max-tokens", "128")
        return {kind: geomean(row["tokens_per_round"] for row in own) for kind, own in rows.items()}

    alone = {kind: tokens_a_round([kind])[kind] for kind in kinds}
    return {"alone": alone, "translations_first": tokens_a_round(kinds), "code_first": tokens_a_round(kinds[::-1])}


PARTS: dict[str, Callable[[str], dict[str, Any]]] = {"cut": cut, "order": order}


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("part", choices=["first", *PARTS])
    parser.add_argument("--limit", type=int, metavar="N", help="of `first`: prompts of each category")
    given = parser.parse_args()
    if given.limit is not None and given.part != "first":
        parser.error("--limit is for `first`")
    found = first_answers(given.suite, given.limit) if given.part == "first" else PARTS[given.part](given.suite)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
