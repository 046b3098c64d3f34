"""Is a text written with random drafts plain decoding's, over 100 000 tokens?

A tiny model of random weights writes texts plainly, at temperature 1. It writes them again with random trees of
guesses, some of them right. Between pieces of some tokens its cache is saved and restored into another one, copied to
a branch that continues, or rewound, at random. Windows and blocks of attention are crossed.

    python -m benchmarks.random_drafts [--model qwen3moe] [--tokens N]

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.decoding.round_base import LoopLimits
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.decoding.serial import DecodeLoop
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import ChainGate, Proposal
from edgespec.planning.depth.base import FixedDepth
from edgespec.runtimes.native.model import NativeModel, NativeSettings, load_native
from edgespec.runtimes.native.sequence import NativeSequence
from tests.support.loading import located
from tests.support.native_models import SHARING
from tests.support.scripted_drafters import Scripted
from tests.support.tiny_gguf import write_tiny_gguf

TOKENS = 100_000
MODELS: dict[str, dict[str, Any]] = {
    "qwen3moe": {"architecture": "qwen3moe", "experts": (40, 5), "quant": "Q4_0"},
    "gpt-oss": {"architecture": "gpt-oss", "window": 50, "experts": (32, 4), "quant": "MXFP4"},
    "qwen35": {"architecture": "qwen35", "layers": 4, "interval": 4, "quant": "Q8_0"},
    "gemma4": {**SHARING, "quant": "Q8_0"},
    "gemma3": {"architecture": "gemma3", "window": 50, "layers": 7, "kv_heads": 1, "quant": "Q8_0"},
}
# Each text ends beyond two blocks of attention.
PROMPT, TEXT = 20, 700
MOST_PIECE, MOST_NODES, DEPTH, RIGHT = 60, 24, 12, 0.7


class RandomTrees(Scripted):
    """Proposes random trees, or chains if asked for them; ``RIGHT`` of the nodes have the token of ``text`` there."""

    def __init__(self, text: Sequence[int], vocabulary_size: int, chance: random.Random) -> None:
        super().__init__(lambda _tokens, _depth: ())
        self._text, self._vocabulary_size, self._chance = text, vocabulary_size, chance

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        chance, tokens, parents, levels = self._chance, list[int](), list[int](), list[int]()
        for _ in range(chance.randint(0, min(MOST_NODES, context.most_nodes))):
            parent = len(tokens) - 1
            if context.wants_tree:
                parent = chance.choice((parent, chance.randrange(-1, len(tokens))))
            level = 1 if parent < 0 else levels[parent] + 1
            place = len(context) + level - 1
            token = chance.randrange(self._vocabulary_size)
            if place < len(self._text) and chance.random() < RIGHT:
                token = self._text[place]
            if level <= depth and (parent, token) not in zip(parents, tokens, strict=True):
                tokens.append(token)
                parents.append(parent)
                levels.append(level)
        tree = tuple(parents) if context.wants_tree else None
        return Proposal(tokens=tuple(tokens), parents=tree, drafted_by="random")


def write(
    sequence: NativeSequence,
    history: list[int],
    limits: LoopLimits,
    seed: int,
    drafter: Scripted,
    counts: Counter[str],
    *,
    trees: bool,
) -> None:
    """Extend the text by as many tokens as the limits allow."""
    chooser = Chooser(Sampling(temperature=1.0, seed=seed))
    for step in DecodeLoop(sequence, drafter, FixedDepth(DEPTH), chooser, history, limits, trees=trees).steps():
        if step.record is not None:
            counts["proposed"] += step.record.proposed
            counts["accepted"] += step.record.accepted
            counts["experts"] += step.record.experts


def moved(model: NativeModel, sequence: NativeSequence, history: list[int], chance: random.Random) -> tuple[str, Any]:
    """What happens to the cache between two pieces, and the Sequence that continues."""
    kind = chance.choice(("kept", "saved", "branched", "rewound"))
    other = sequence
    if kind == "saved":
        count, length = sequence.part_sizes(sequence.length)[0], sequence.length
        parts = [sequence.read_part(part, length) for part in range(count)]
        other = model.open(PROMPT + TEXT + chance.randint(0, 100))
        other.restore(parts, length)
    elif kind == "branched":
        other = sequence.fork()
    elif kind == "rewound":
        del history[max(PROMPT, len(history) - chance.randint(1, 100)) :]
    if other is not sequence:
        sequence.close()
    return kind, other


def compared(model: NativeModel, seed: int, counts: Counter[str]) -> int | None:
    """Write one text both ways; the position of the first other token, None if there is none."""
    chance, size, trees = random.Random(seed), model.facts.vocabulary_size, model.facts.can_branch
    prompt = chance.choices(range(size), k=PROMPT)
    text, history = list(prompt), list(prompt)
    limits = LoopLimits(max_tokens=TEXT, depth_cap=DEPTH, vocabulary_size=size)
    with model.open(PROMPT + TEXT) as plain:
        write(plain, text, limits, seed, Scripted(lambda _tokens, _depth: ()), Counter(), trees=trees)
    drafter, sequence = RandomTrees(text, size, chance), model.open(PROMPT + TEXT)
    while len(history) < len(text):
        count = min(chance.randint(1, MOST_PIECE), len(text) - len(history))
        write(sequence, history, replace(limits, max_tokens=count), seed, drafter, counts, trees=trees)
        counts["compared"] += count
        if history != text[: len(history)]:
            return next(at for at, token in enumerate(history) if token != text[at])
        kind, sequence = moved(model, sequence, history, chance)
        counts[kind] += 1
    sequence.close()
    return None


def measure(kind: str, tokens: int) -> dict[str, Any]:
    """Counts, and the texts that differ, with the position of their first other token."""
    counts, different = Counter[str](), list[tuple[int, int]]()
    with tempfile.TemporaryDirectory() as place:
        path = write_tiny_gguf(Path(place) / "tiny.gguf", **MODELS[kind])
        with load_native(located(path), NativeSettings(threads=2)) as model:
            for seed in range(max(1, tokens // TEXT)):
                at = compared(model, seed, counts)
                if at is not None:
                    different.append((seed, at))
                print(f"{counts['compared']} tokens, {len(different)} texts differ", file=sys.stderr, flush=True)
    return {"model": kind, **counts, "different": different[:20], "different_texts": len(different)}


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3moe")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    given = parser.parse_args()
    print(json.dumps(measure(given.model, given.tokens)))


if __name__ == "__main__":
    main()
