"""The real pipelined loop on a simulated clock, compared with its simulation round for round.

Target and drafter only take time. Whether the draft token for a position is right is drawn once for each position, in
the same order as in the simulation, so both must give the same rounds, not only the same mean.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any, TypeVar

import pytest

from edgespec.decoding.pipelined.loop import PipelinedLoop
from edgespec.decoding.round_base import LoopLimits
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import ChainGate, DraftState, Proposal
from edgespec.interfaces.rows import Rows
from edgespec.planning.cost.curve import Curve, DraftCost
from edgespec.planning.cost.round_simulation import SimulatedPair
from edgespec.planning.depth.base import FixedDepth
from tests.support.budgets import FixedBudget
from tests.support.drawn_rounds import simulate_pipelined
from tests.support.simulated_decoding import FLAT, STEEP, WRONG, Truth

T = TypeVar("T")

ROUNDS = 400


class Clock:
    now_s = 0.0

    def read(self) -> float:
        return self.now_s


class Target:
    context_length = 10**9
    length = 0
    forwards = 0

    def __init__(self, curve: Curve, clock: Clock) -> None:
        self._curve, self._clock = curve, clock

    def forward(self, tokens: Sequence[int], rows: int) -> Rows:
        self._clock.now_s += self._curve.seconds(len(tokens))
        self.length += len(tokens)
        self.forwards += 1
        return Truth(self.length - rows + 1, rows)

    def rewind(self, length: int) -> None:
        self.length = length


class Drafter(DraftState):
    """Drafts from ``begun_s`` on, one token after the other, until it has enough or sees that it was stopped."""

    def __init__(self, clock: Clock, token_s: float, hand_over_s: float, right: list[bool]) -> None:
        self._clock, self._token_s, self._half_s, self._right = clock, token_s, hand_over_s / 2, right
        self.begun_s = self.ended_s = 0.0

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        told_s, at_s = self._clock.now_s, self.begun_s + self._half_s
        tokens: list[int] = []
        while True:
            at_s += self._token_s
            place = len(context) + len(tokens)
            tokens.append(place if self._right[place] else WRONG)
            if len(tokens) == depth or at_s >= told_s - 1e-12:
                break
        self.ended_s = at_s + self._half_s
        return Proposal(tokens=tuple(tokens), drafted_by="model", forwards=len(tokens))


class Landing(Future[T]):
    """Done when the clock says so; a caller waits ``patience_s``, once for each forward of the target."""

    def __init__(
        self, job: Callable[[], T], clock: Clock, target: Target, drafter: Drafter, patience_s: float
    ) -> None:
        super().__init__()
        self._job, self._clock, self._target, self._drafter = job, clock, target, drafter
        self._begun_s, self._patience_s = clock.now_s, patience_s
        self._made: list[T] = []
        self._asked = -1
        self._ended_s = 0.0

    def done(self) -> bool:
        if super().done():
            return True
        clock, drafter = self._clock, self._drafter
        if not self._made:
            drafter.begun_s = self._begun_s
            self._made = [self._job()]
            self._ended_s = drafter.ended_s
        if self._asked != self._target.forwards:
            self._asked = self._target.forwards
            clock.now_s = max(clock.now_s, min(self._ended_s, clock.now_s + self._patience_s))
        if clock.now_s >= self._ended_s - 1e-12:
            self.set_result(self._made[0])
        return super().done()


def decode(pair: SimulatedPair, depth_cap: int, patience_s: float, seed: int) -> tuple[list[int], float]:
    """Tokens of each of ROUNDS rounds of the real loop, and the seconds they took."""
    chance = random.Random(seed)
    right = [False, False]  # the prompt's token and the prefill's
    right += [chance.random() < pair.acceptance[0] for _ in range(ROUNDS * (depth_cap + 2))]
    clock = Clock()
    target: Any = Target(pair.curve, clock)
    drafter: Any = Drafter(clock, pair.draft.token_s, pair.hand_over_s, right)

    def submit(job: Callable[[], T], /) -> Future[T]:
        return Landing(job, clock, target, drafter, patience_s)

    loop = PipelinedLoop(
        target,
        drafter,
        FixedDepth(depth_cap),
        Chooser(Sampling()),
        [0],
        LoopLimits(max_tokens=None, depth_cap=depth_cap, vocabulary_size=2 * WRONG),
        submit=submit,
        budget=FixedBudget(most=depth_cap, ahead=depth_cap + 1, patience=0.0),
        clock=clock.read,
    )
    steps = loop.steps()
    next(steps)
    begun_s = clock.now_s
    emitted = [len(step.tokens) for step in islice(steps, ROUNDS)]
    spent_s = clock.now_s - begun_s
    steps.close()
    return emitted, spent_s


@pytest.mark.parametrize("patience_s", [math.inf, 0.0, 0.004])
@pytest.mark.parametrize(
    ("curve", "token_s", "acceptance", "depth_cap", "hand_over_s"),
    [
        (FLAT, 0.0091, 0.8, 5, 0.0),
        (FLAT, 0.0047, 0.95, 7, 0.0003),
        (FLAT, 0.0317, 0.7, 3, 0.0),
        (FLAT, 0.0731, 0.9, 4, 0.001),
        (FLAT, 0.0028, 0.5, 1, 0.0),
        (STEEP, 0.0113, 0.9, 6, 0.002),
        (STEEP, 0.0413, 0.6, 2, 0.0),
    ],
)
def test_the_pipelined_loop_does_the_simulated_rounds(
    curve: Curve, token_s: float, acceptance: float, depth_cap: int, hand_over_s: float, patience_s: float
) -> None:
    pair = SimulatedPair(
        curve=curve, draft=DraftCost(token_s=token_s), acceptance=(acceptance,), hand_over_s=hand_over_s
    )
    emitted, spent_s = decode(pair, depth_cap, patience_s, seed=3)
    simulated = simulate_pipelined(pair, depth_cap, window="all", patience_s=patience_s, rounds=len(emitted), seed=3)
    assert len(emitted) == ROUNDS
    assert simulated.tokens == sum(emitted)
    assert simulated.seconds == pytest.approx(spent_s)
    assert max(emitted) <= depth_cap + 1
