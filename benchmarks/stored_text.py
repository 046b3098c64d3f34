"""What a history and learned text bring: answers with and without them, guessed from other prompts only.

    python -m benchmarks.stored_text SUITE [--target MODEL] [--max-tokens 96] [--passes 2] [--limit N]

SUITE is a file of prompts. First every prompt is answered without stored text. Then each prompt is answered in the
ways `off`, `history` (the answers to all other prompts), `datastore` (the text of all other prompts) and `both`, in
ABBA order. A prompt's own text and answer are never in what it is guessed from, nor are those of equal prompts.
Needs a calibrated pair. Prints one JSON object: for each way the geometric mean of the speed of decoding over `off`
with its standard error, by category too, and whether all texts are equal.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from edgespec.bench.statistics import geomean
from edgespec.bench.suite import Prompt, first_of_each, load_suite
from edgespec.drafters.stored import DATASTORE, HISTORY, StoredTextDrafter
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.pair.loaded_pair import Speculation
from edgespec.engine.session import Session
from edgespec.files.stored_text import StoredText, Text
from edgespec.planning.cost.curve import FREE
from edgespec.planning.depth.control import DepthControl

WAYS = {"off": (), "history": (HISTORY,), "datastore": (DATASTORE,), "both": (HISTORY, DATASTORE)}
VOCABULARY = bytes(32)  # nothing is saved


class Texts:
    """The stored texts of the prompt that is measured now."""

    def __init__(self) -> None:
        self.now: Mapping[str, StoredText] = {}

    def drafter(self, kind: str) -> StoredTextDrafter:
        return StoredTextDrafter(kind, lambda: self.now.get(kind))


def without(prompt: Prompt, prompts: Sequence[Prompt], tokens: Mapping[str, Sequence[int]], size: int) -> StoredText:
    """The ``tokens`` of all other prompts, by id."""
    others = [
        other.id for other in prompts if other.id != prompt.id and other.prompt.strip() != prompt.prompt.strip()
    ]
    return StoredText.of(VOCABULARY, size, [Text(np.array(tokens[name], dtype=np.uint32)) for name in others])


def open_way(engine: Engine, way: str, texts: Texts) -> Session:
    """A session that also drafts from the stored texts of ``way``, with a separate policy."""
    pair = engine.pair
    planned, kinds = pair.speculation(), WAYS[way]
    costs = pair.costs()
    costs = replace(costs, drafts={**costs.drafts, **dict.fromkeys(kinds, FREE)})
    policy = DepthControl(costs, planned.depth_cap, pair.measurements.priors, pair.measurements.history)
    drafters = [drafter for drafter in planned.drafters if drafter.kind not in (HISTORY, DATASTORE)]
    place = next((number for number, drafter in enumerate(drafters) if drafter.kind == "model"), len(drafters))
    drafters[place:place] = [texts.drafter(kind) for kind in kinds]
    return engine.session(
        _speculation=Speculation(drafters=tuple(drafters), policy=policy, depth_cap=planned.depth_cap)
    )


def answered(session: Session, prompt: Prompt, max_tokens: int) -> Done:
    """The answer in an empty conversation, whose cache is empty too."""
    session.clear(keep_cache=False)
    *_, done = session.generate(prompt.prompt, max_tokens=prompt.longest(max_tokens))
    assert isinstance(done, Done)
    return done


def per_token_s(done: Done) -> float | None:
    """Seconds of a token after the first; None for an answer of one token."""
    tokens, seconds = done.stats.emitted_tokens - 1, done.stats.decode_s
    return None if seconds is None or tokens < 1 else seconds / tokens


def summary(ratios: Sequence[float]) -> dict[str, float | int | None]:
    """The geometric mean of the ratios and the standard error of its logarithm."""
    logs = [math.log(ratio) for ratio in ratios]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None
    return {"geomean": geomean(list(ratios)), "standard_error": error, "prompts": len(ratios)}


def measured(engine: Engine, prompts: Sequence[Prompt], max_tokens: int, passes: int) -> dict[str, object]:
    """The report."""
    texts, size = Texts(), engine.tokenizer.vocabulary_size
    asked = {prompt.id: engine.tokenizer.encode(prompt.prompt) for prompt in prompts}
    seconds: dict[tuple[str, str], list[float]] = {}
    sources: dict[str, dict[str, int]] = {way: {} for way in WAYS}
    equal = True
    with ExitStack() as opened:
        sessions = {way: opened.enter_context(open_way(engine, way, texts)) for way in WAYS}
        plain = {prompt.id: answered(sessions["off"], prompt, max_tokens).token_ids for prompt in prompts}
        for _ in range(passes):
            for prompt in prompts:
                texts.now = {
                    HISTORY: without(prompt, prompts, plain, size),
                    DATASTORE: without(prompt, prompts, asked, size),
                }
                for way in [*WAYS, *reversed(WAYS)]:
                    done = answered(sessions[way], prompt, max_tokens)
                    equal = equal and done.token_ids == plain[prompt.id]
                    taken = per_token_s(done)
                    if taken is not None:
                        seconds.setdefault((way, prompt.id), []).append(taken)
                    for source, rounds in done.stats.rounds_by_source.items():
                        sources[way][source] = sources[way].get(source, 0) + rounds
    report: dict[str, object] = {"prompts": len(prompts), "passes": passes, "max_tokens": max_tokens}
    for way in WAYS:
        ratios = {
            prompt: statistics.median(seconds["off", prompt.id]) / statistics.median(seconds[way, prompt.id])
            for prompt in prompts
            if (way, prompt.id) in seconds
        }
        categories = sorted({prompt.category for prompt in ratios})
        report[way] = {
            **summary(list(ratios.values())),
            "by_category": {
                name: summary([ratio for prompt, ratio in ratios.items() if prompt.category == name])
                for name in categories
            },
            "rounds_by_source": sources[way],
        }
    return {**report, "texts_equal": equal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--target", help="a MODEL; without it the profile's")
    parser.add_argument("--draft", default="auto", help="a MODEL, auto or none")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--limit", type=int, help="most prompts of each category")
    chosen = parser.parse_args()
    prompts = list(load_suite(chosen.suite))
    if chosen.limit is not None:
        prompts = first_of_each(prompts, chosen.limit)
    with Engine.load(chosen.target, draft=chosen.draft, calibrate=True) as engine:
        engine.load_drafter()
        print(json.dumps(measured(engine, prompts, chosen.max_tokens, chosen.passes), indent=1))


if __name__ == "__main__":
    main()
