"""Would it pay to choose a drafting model for each answer? Rounds simulated on two logs of the same answers.

    edgespec bench --suite SUITE --arms plain --passes 1 --draft A --log a.jsonl
    edgespec bench --suite SUITE --arms plain --passes 1 --draft B --log b.jsonl
    python -m benchmarks.draft_models a.jsonl 0.24 b.jsonl 0.10 [--four-rows 1.04] [--eight-rows 1.11]

The number after a log is the time of one forward of its drafter, in plain steps. Copies, the tree of all guesses, its
price, and the trust that pauses a model are edgespec's own. Reading the prompt takes no time in it, nor does looking
which model is right, so that choosing gains more here than it can in an answer. The ways to choose:

- `A`, `B`: one model in all answers.
- `best_answer`: for each answer the model that turned out faster. No choice between answers can gain more.
- `hindsight`: the model that is usually faster, until 14 tokens of the answer show which of the two is expected to be
  (the look of planning/depth).
- `recent`: at each round the model that is expected to be faster by the latest 32 tokens.

Prints one JSON object: tokens for each plain step, of all answers together and by category.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.draft_rounds import MOST_NODES, REQUEST, accepted
from edgespec.drafters.lookup import LookupDrafter
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import COPIES, MODEL, DraftTree
from edgespec.planning.cost.acceptance import Acceptance, AlternativeOdds
from edgespec.planning.cost.curve import Curve, DraftCost, drafting_speedup
from edgespec.planning.depth.experience import GOOD_RATE
from edgespec.planning.depth.price import HINDSIGHT, KNOWN_BEFORE, PricedGate, Rivals, Trust, choose_nodes

RECENT = 32  # tokens by which `recent` chooses: about two paragraphs' rounds
RATE_DECAY = 0.95  # as in planning/depth/answer.py
FADED = 2.0

Choose = Callable[[Sequence[int]], int]  # from how many recent tokens each model guessed to the model that drafts


@dataclass
class Known:
    """What answers taught about one drafting model, or about copies."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    odds: AlternativeOdds = field(default_factory=AlternativeOdds)


@dataclass(frozen=True)
class Machine:
    """T(1), T(2), ... in plain steps, and the time of one forward of each drafting model."""

    forward: tuple[float, ...]
    steps: tuple[float, ...]

    def speedup(self, model: int, rate: float) -> float:
        curve = Curve(widths=tuple(range(1, len(self.forward) + 1)), forward_s=self.forward)
        return drafting_speedup(curve, DraftCost(token_s=self.steps[model]), (min(1.0, rate),) * MOST_NODES)

    def better(self, rates: Sequence[float]) -> int:
        return max(range(len(rates)), key=lambda model: self.speedup(model, rates[model]))


class Replay:
    """Answers one after another. ``known`` holds what earlier ones taught, of each model and of copies (the last)."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.known = [Known() for _ in (*machine.steps, COPIES)]

    def steps(self, lines: Sequence[dict[str, Any]], choose: Callable[[int], int]) -> float:
        """Plain steps of one answer after its first token; ``choose`` names the model for the round at a place."""
        answer, forward = lines[0]["token_ids"], self.machine.forward
        state = LookupDrafter().start(REQUEST)
        text = [*lines[0]["prompt_tokens"], *answer[:1]]
        place, spent, trust, rivals, tokens, time = 1, 0.0, Trust(), Rivals(), 0.0, 0.0
        for own in self.known:
            own.acceptance.fade(FADED)
        trust.begin()
        while place < len(answer):
            rate = max(1.0, tokens / time) if time else 1.0
            if not trust.on and place >= trust.rests_until:
                trust.begin()
            model = choose(place)
            tree, drafting = self._free(state, text, answer[place:], rate), 0.0
            choice = choose_nodes(forward, tree, min(MOST_NODES, len(answer) - place - 1), rate, 0.02)
            drafts = rivals.see(choice.gain) and trust.on and place < len(answer) - 1
            if drafts:
                tree, choice, drafting = self._drafted(state, text, lines[model], place, model, rate)
            right = accepted(tree, choice.nodes, answer[place:-1])
            taken = forward[len(choice.nodes)] + drafting
            spent, tokens, time = spent + taken, RATE_DECAY * tokens + right + 1, RATE_DECAY * time + taken
            if drafts:
                rivals.learn(right - rate * (taken - 1.0))
                if not trust.add(rivals.steps_without(right + 1) - taken):
                    trust.end(place)
            text += answer[place : place + right + 1]
            place += right + 1
        return spent

    def _free(self, state: Any, text: list[int], follows: Sequence[int], rate: float) -> DraftTree:
        """The copies of the text; what follows teaches how often they are right."""
        copies, context = self.known[-1].acceptance, Context(text)
        idea = state.propose(context, MOST_NODES)
        hits = [a == b for a, b in zip(idea.tokens, follows, strict=False)]
        hits = hits[: hits.index(False) + 1] if False in hits else hits
        tree = DraftTree(most_nodes=MOST_NODES)
        state.grow(context, tree, 0, copies.given)
        copies.learn(idea.confidences[: len(hits)], hits)
        return tree

    def _drafted(
        self, state: Any, text: list[int], line: dict[str, Any], place: int, model: int, rate: float
    ) -> tuple[DraftTree, Any, float]:
        """The tree of a model's chain, the nodes worth verifying, and the time of drafting it.

        What the model would have said after a wrong token is not logged: what it said in that place stands for it.
        """
        known, step, answer = self.known[model], self.machine.steps[model], line["token_ids"]
        most = min(MOST_NODES, len(answer) - place - 1)
        gate = PricedGate(self.machine.forward, step, known.acceptance, most, rate, known.odds.worth)
        tree, drafting, on_path, sure, hits = DraftTree(most_nodes=MOST_NODES), step, True, [], []
        others: list[tuple[int, list[tuple[int, float]]]] = []
        for index in range(most):
            guesses = line["drafter"][place + index]
            if not guesses or not gate.admits(guesses[0][1], None):
                break
            token = guesses[0][0] if on_path else -1 - index
            tree.add(index - 1, token, gate.believed[-1], MODEL)
            if on_path:
                sure.append(guesses[0][1])
                hits.append(token == answer[place + index])
                said = [(odds, other == answer[place + index]) for other, odds in guesses[1:]]
                known.odds.learn([odds for odds, _ in said], [right for _, right in said])
                others.append((index, guesses[1:]))
            on_path = on_path and hits[-1]
            if index + 1 == most or not gate.goes_on():
                break
            drafting += step
        length = len(tree)
        for index, alternatives in others:
            for token, odds in alternatives:
                tree.add(index - 1, token, gate.believes_alternative(odds), MODEL)
        state.grow(Context(text), tree, length, self.known[-1].acceptance.given)
        known.acceptance.learn(sure, hits)
        return tree, gate.choose(tree, MOST_NODES), drafting


def guessed(line: dict[str, Any]) -> list[bool]:
    """Whether the drafter's first choice is the answer's token, at each place."""
    return [bool(own) and own[0][0] == token for own, token in zip(line["drafter"], line["token_ids"], strict=True)]


def way(name: str, machine: Machine, lines: Sequence[dict[str, Any]], usual: Sequence[float]) -> Callable[[int], int]:
    """How one answer chooses its model. ``usual``: how often each one was right in the answers before."""
    hits = [guessed(line) for line in lines]

    def rates(first: int, end: int) -> list[float]:
        return [
            (sum(own[first:end]) + KNOWN_BEFORE * before) / (max(0, end - first) + KNOWN_BEFORE)
            for own, before in zip(hits, usual, strict=True)
        ]

    if name == "hindsight":
        before, after = machine.better(usual), machine.better(rates(0, HINDSIGHT))
        return lambda place: before if place < HINDSIGHT else after
    if name == "recent":
        return lambda place: machine.better(rates(max(0, place - RECENT), place))
    return lambda _place: int(name)


def compared(logs: Sequence[Sequence[dict[str, Any]]], machine: Machine) -> dict[str, Any]:
    """Tokens for each plain step of every way to choose; the second pass over the answers counts."""
    spent: dict[str, list[float]] = {}
    for name in ("0", "1", "hindsight", "recent"):
        replay, right, seen = Replay(machine), [0.0] * len(logs), 0.0
        for _ in range(2):
            spent[name] = []
            for lines in zip(*logs, strict=True):
                usual = [(own + KNOWN_BEFORE * GOOD_RATE) / (seen + KNOWN_BEFORE) for own in right]
                spent[name].append(replay.steps(lines, way(name, machine, lines, usual)))
                right = [own + sum(guessed(line)) for own, line in zip(right, lines, strict=True)]
                seen += len(lines[0]["token_ids"])
    spent["best_answer"] = [min(pair) for pair in zip(spent["0"], spent["1"], strict=True)]
    names = {"0": "A", "1": "B"}
    tokens = [len(line["token_ids"]) - 1 for line in logs[0]]
    groups: dict[str, list[int]] = defaultdict(list)
    for number, line in enumerate(logs[0]):
        groups[line["category"]].append(number)
    report = {}
    for name, own in spent.items():
        by = {g: round(sum(tokens[i] for i in at) / sum(own[i] for i in at), 3) for g, at in groups.items()}
        report[names.get(name, name)] = {"speed": round(sum(tokens) / sum(own), 3), "by_category": by}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("a", "b"):
        parser.add_argument(f"log_{name}", type=Path)
        parser.add_argument(f"step_{name}", type=float)
    parser.add_argument("--four-rows", type=float, default=1.04, help="T(4) / T(1) (default: %(default)s)")
    parser.add_argument("--eight-rows", type=float, default=1.11, help="T(8) / T(1) (default: %(default)s)")
    given = parser.parse_args()
    logs = [_read(path) for path in (given.log_a, given.log_b)]
    if [line["token_ids"] for line in logs[0]] != [line["token_ids"] for line in logs[1]]:
        parser.error("the two logs hold different answers")
    curve = Curve(widths=(1, 4, 8), forward_s=(1.0, given.four_rows, given.eight_rows))
    forward = tuple(curve.seconds(width) for width in range(1, MOST_NODES + 2))
    json.dump(compared(logs, Machine(forward, (given.step_a, given.step_b))), sys.stdout, indent=1)
    print()


def _read(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return [line for line in lines if len(line["token_ids"]) > 1]


if __name__ == "__main__":
    main()
