"""How fast would a target decode with free guesses only? Rounds simulated on logs of `edgespec bench --log FILE`.

    python -m benchmarks.draft_rounds FILE.jsonl [--eight-rows 1.42]

Copies are edgespec's own (drafters/lookup.py), and so is the choice of what is verified. A forward of eight rows
takes ``--eight-rows`` plain steps, and T(w) is a line. The variants:

- `chain-3`, `chain-2`, `chain-1`: one copy after a match of at least 3, 2 or 1 tokens.
- `tree`: edgespec's proposals when it has no drafting model.
- `tree+recycled`: the same with the target's own earlier predictions below each node (Token Recycling, Luo et al.,
  2024): the four best after the same two tokens, else after the same one, with half of their probability.

Prints one JSON object: for each variant the speed as a multiple of plain decoding, as the geometric mean over
categories, and by category. Drafting takes no time in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.drafters.lookup import LookupDrafter, match_confidence
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import DraftRequest, DraftTree
from edgespec.planning.depth.price import choose_nodes

MOST_NODES = 7
RECYCLED_WORTH = 0.5  # recycled predictions are right about half as often as their odds say
REQUEST = DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=2**31 - 1, context_length=2**31 - 1)

Recycled = dict[tuple[int, ...], list[tuple[int, float]]]


def recycle(tree: DraftTree, tokens: list[int], known: Recycled) -> None:
    """Add recycled predictions below the text and below each node, as far as other guesses leave probability."""
    paths: list[list[int]] = []
    for node in range(-1, MOST_NODES):
        if node >= len(tree):
            break
        if node >= 0:
            above = tree.parents[node]
            paths.append([*(paths[above] if above >= 0 else []), tree.tokens[node]])
        end = [*tokens[-2:], *(paths[node] if node >= 0 else [])]
        for token, odds in known.get(tuple(end[-2:])) or known.get(tuple(end[-1:])) or []:
            tree.add(node, token, RECYCLED_WORTH * odds * tree.left_over(node), "recycled")


def guessed(variant: str, text: Context, state: Any, known: Recycled) -> DraftTree:
    tree = DraftTree(most_nodes=MOST_NODES)
    if variant.startswith("chain"):
        least = match_confidence(int(variant[-1]))
        idea = state.propose(text, MOST_NODES)
        if idea.tokens and idea.confidences[0] >= least:
            for place, (token, sure) in enumerate(zip(idea.tokens, idea.confidences, strict=True)):
                tree.add(place - 1, token, sure, "lookup")
    else:
        state.grow(text, tree, 0, float)
        if variant.endswith("recycled"):
            recycle(tree, text.tokens, known)
    return tree


def accepted(tree: DraftTree, nodes: Sequence[int], follows: Sequence[int]) -> int:
    """The number of right guesses on the path that the answer takes."""
    chosen = {(tree.parents[node], tree.tokens[node]): node for node in nodes}
    at, count = -1, 0
    while count < len(follows) and (at, follows[count]) in chosen:
        at, count = chosen[at, follows[count]], count + 1
    return count


def steps(line: dict[str, Any], variant: str, forward: Callable[[int], float]) -> float:
    """The time of one answer after its first token, in plain steps."""
    answer, target = line["token_ids"], line["target"]
    state = LookupDrafter().start(REQUEST)
    tokens, known = list(line["prompt_tokens"]), Recycled()
    spent, rate, place = 0.0, 1.0, 0
    times = [forward(rows) for rows in range(1, MOST_NODES + 2)]
    while place < len(answer):
        nodes: tuple[int, ...] = ()
        if place:  # the first token is the prompt's
            tree = guessed(variant, Context(tokens), state, known)
            nodes = choose_nodes(times, tree, min(MOST_NODES, len(answer) - place - 1), rate, 0.02).nodes
            right = accepted(tree, nodes, answer[place:-1])
            spent += times[len(nodes)]
            rate += 0.05 * ((right + 1) / times[len(nodes)] - rate)
        else:
            right = 0
        for _ in range(right + 1):
            for length in (1, 2):
                known[tuple(tokens[-length:])] = target[place]
            tokens.append(answer[place])
            place += 1
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--eight-rows", type=float, default=1.42, help="T(8) / T(1) (default: %(default)s)")
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.log.read_text(encoding="utf-8").splitlines()[1:]]
    report: dict[str, Any] = {"eight_rows": given.eight_rows}
    for variant in ("chain-3", "chain-2", "chain-1", "tree", "tree+recycled"):
        plain: dict[str, float] = defaultdict(float)
        taken: dict[str, float] = defaultdict(float)
        for line in lines:
            if len(line["token_ids"]) > 1:
                plain[line["category"]] += len(line["token_ids"]) - 1
                taken[line["category"]] += steps(
                    line, variant, lambda rows: 1 + (given.eight_rows - 1) * (rows - 1) / 7
                )
        speed = {category: round(plain[category] / taken[category], 3) for category in plain}
        report[variant] = {"speed": round(geometric_mean(speed.values()), 3), "by_category": speed}
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
