"""Answers of one process, a JSON line each: what a user of the library gets who never calibrates.

    python scripts/answers.py SUITE [--category NAME] [--limit N] [--turns N] [--max-tokens N] [--draft MODEL|none]
                                    [--depth N] [--temperature T] [--top-p P] [--seed N] [--arms planned,plain]

Every prompt is a separate conversation and is read again for every answer. In each turn the arms answer in the
order given, then in the opposite order. ``plain`` is ``depth=0`` in a separate session.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from edgespec.bench.suite import BUILTIN_SUITES, Prompt, builtin_suite, first_of_each, load_suite
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.session import Session


def chosen(suite: str, categories: list[str], limit: int | None) -> list[Prompt]:
    """Prompts of those categories (all without any), at most ``limit`` of each."""
    prompts = builtin_suite(suite) if suite in BUILTIN_SUITES else load_suite(Path(suite))
    wanted = [prompt for prompt in prompts if not categories or prompt.category in categories]
    return wanted if limit is None else first_of_each(wanted, limit)


def answer(session: Session, prompt: Prompt, max_tokens: int, sampling: Sampling, *, plain: bool) -> Done:
    session.clear(keep_cache=False)
    events = session.generate(
        prompt.prompt, max_tokens=prompt.longest(max_tokens), sampling=sampling, depth=0 if plain else None
    )
    return next(event for event in events if isinstance(event, Done))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("--category", action="append", default=[])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--draft")
    parser.add_argument("--depth", type=int, help="of the whole engine, as the option of the commands")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--arms", default="planned")
    given = parser.parse_args()
    sampling = Sampling(temperature=given.temperature, top_p=given.top_p, seed=given.seed)
    started = time.perf_counter()
    with Engine.load(profile="laptop", download=True, draft=given.draft, depth=given.depth) as engine:
        loaded_s = time.perf_counter() - started
        arms = {name: engine.session() for name in given.arms.split(",")}
        for prompt in chosen(given.suite, given.category, given.limit):
            for turn in range(given.turns):
                order = [*arms] if turn % 2 == 0 else [*arms][::-1]
                for name in order:
                    done = answer(arms[name], prompt, given.max_tokens, sampling, plain=name == "plain")
                    row = {
                        "id": prompt.id,
                        "category": prompt.category,
                        "arm": name,
                        "turn": turn,
                        "loaded_s": loaded_s,
                        "mode": done.plan.mode,
                        "speculation_off": done.speculation_off,
                        "token_ids": list(done.token_ids),
                        **done.stats.as_json(),
                    }
                    print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
