"""Trees on a simulated clock: a drafter and copies of the text, whose guesses are drawn apart from each other.

The right token at every position is the position itself (tests/support/simulated_decoding.py). At each place copies
exist with a chance, are as long as a draw says, and are right as often as their confidence says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.decoding.round_base import LoopLimits
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.combination import CombinationState
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, ChainGate, DraftState, DraftTree, Proposal
from edgespec.interfaces.policy import DepthPolicy, RoundRecord
from edgespec.interfaces.rows import Rows
from edgespec.planning.cost.curve import DraftCost
from tests.support.simulated_decoding import WRONG, Machine, Run, SimulatedDrafter, Target, Text, Time, Truth


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """Copies begin at a place with the chance ``offered``; each of their tokens is right with the chance ``rate``.

    A copy ends at its first wrong token. ``length`` tokens are guessed at a time.
    """

    offered: float
    rate: float
    length: int = 7


class Copies(DraftState):
    """A free source that grows trees. Its guesses at a place are a function of the place and the seed."""

    free = True
    grows_trees = True

    def __init__(self, copying: Copying, seed: int, prompt_tokens: int) -> None:
        self._copying, self._seed, self._prompt_tokens = copying, seed, prompt_tokens

    def _right(self, place: int) -> bool | None:
        """Whether the copy's token at a place is right; None: nothing is copied there."""
        chance = random.Random(
            f"copies {self._seed} {place // 8}"
        )  # runs of eight places are copied, or none of them
        if chance.random() >= self._copying.offered:
            return None
        return random.Random(f"copy {self._seed} {place}").random() < self._copying.rate

    def _guesses(self, place: int) -> list[int]:
        """What is copied from a position of the text on, up to the first wrong token."""
        guesses: list[int] = []
        for at in range(place, place + self._copying.length):
            right = self._right(at)
            if right is None:
                break
            guesses.append(at if right else WRONG + 1)
            if not right:
                break
        return guesses

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        guesses = tuple(self._guesses(len(context))[:depth])
        if not guesses:
            return NOTHING
        sure = (self._copying.rate,) * len(guesses)
        return Proposal(tokens=guesses, sources=("lookup",) * len(guesses), drafted_by="lookup", confidences=sure)

    def grow(self, context: Context, tree: DraftTree, chain: int, believes: Callable[[float], float]) -> None:
        for start in range(-1, chain):
            if start >= 0 and tree.tokens[start] >= WRONG:
                break  # not the text
            parent = start
            for token in self._guesses(len(context) + start + 1):
                parent = tree.add(parent, token, believes(self._copying.rate) * tree.left_over(parent), "lookup")


class TreeTarget(Target):
    """A target that scores trees in the time of as many rows."""

    def forward_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Rows:
        start = self.length
        self.forward(tokens, len(tokens))
        self.length = start
        levels: list[int] = []
        for parent in parents:
            levels.append(0 if parent < 0 else levels[parent] + 1)
        return _TreeTruth(start, levels)

    def keep(self, path: Sequence[int]) -> None:
        self.length += len(path)


class _TreeTruth(Truth):
    """Row i is that of a node: its best id is the position after the node's."""

    def __init__(self, start: int, levels: list[int]) -> None:
        super().__init__(start, len(levels))
        self._levels = levels

    def argmax_row(self, index: int) -> int:
        return self._first + self._levels[index] + 1


def decode_trees(
    policy: DepthPolicy,
    copying: Copying | None,
    drafter: tuple[Text, DraftCost] | None,
    machine: Machine,
    *,
    tokens: int = 512,
    depth_cap: int = 7,
    seed: int = 0,
) -> Run:
    """One answer whose rounds verify trees of the drafter's guesses and of copies."""
    time, prompt = Time(), 1
    target: Any = TreeTarget(machine, time, random.Random(f"target {seed}"), prompt)
    parts: list[tuple[str, Any]] = []
    if copying is not None:
        parts.append(("lookup", Copies(copying, seed, prompt)))
    if drafter is not None:
        text, cost = drafter
        parts.append(("model", SimulatedDrafter("model", text, cost, machine, time, seed, prompt)))
    history = list(range(prompt))
    own = policy.answer(prompt_tokens=prompt, most=tokens + 1)
    limits = LoopLimits(max_tokens=tokens + 1, depth_cap=depth_cap, vocabulary_size=2 * WRONG)
    state = CombinationState(parts, own)
    loop = DecodeLoop(target, state, own, Chooser(Sampling()), history, limits, clock=time.read, trees=True)
    records: list[RoundRecord] = []
    prefill_s = 0.0
    for step in loop.steps():
        if step.record is None:
            prefill_s = time.spent_s
        else:
            records.append(step.record)
    own.end()
    assert history == list(range(prompt + tokens + 1)), "drafting changes no text"
    plain_s = machine.curve.plain_s * tokens
    return Run(tokens=tokens, seconds=time.spent_s - prefill_s, plain_s=plain_s, records=tuple(records))
