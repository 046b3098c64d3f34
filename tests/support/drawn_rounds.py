"""Pipelined rounds, as in decoding/pipelined/loop.py, in which every token is drawn, and the expected serial round.

The planner's simulation (planning/cost/round_simulation.py) is compared with the mean of the drawn ones.
"""

from __future__ import annotations

import math
import random
from typing import Literal

from edgespec.planning.cost.curve import expected_tokens, round_seconds
from edgespec.planning.cost.round_simulation import (
    Flight,
    Laps,
    SimulatedPair,
    SimulatedRounds,
    lap,
    learned_acceptance,
    windows_by_rate,
)

# "all": verify every proposal, and draft until the target is done; "best": as many as give the most tokens a second
# by T(w) and acceptance, as the planner's simulation does.
WindowRule = Literal["all", "best"]


class _Totals:
    def __init__(self, rounds: int) -> None:
        self.rounds, self.tokens = rounds, 0
        self.seconds = self.target_busy_s = self.drafter_busy_s = 0.0

    def add(self, seconds: float, target_busy_s: float, drafter_busy_s: float) -> None:
        self.seconds += seconds
        self.target_busy_s += target_busy_s
        self.drafter_busy_s += drafter_busy_s

    def result(self) -> SimulatedRounds:
        return SimulatedRounds(
            rounds=self.rounds,
            tokens=self.tokens,
            seconds=self.seconds,
            target_busy_s=self.target_busy_s,
            drafter_busy_s=self.drafter_busy_s,
        )


def expected_serial(pair: SimulatedPair, depth: int) -> SimulatedRounds:
    """The expected serial round: Leviathan et al. (2023) with measured times. Raises ValueError below depth 1."""
    _check(depth)
    return SimulatedRounds(
        rounds=1.0,
        tokens=expected_tokens([pair.stands(place) for place in range(depth)]),
        seconds=round_seconds(pair.curve, pair.draft, depth) + pair.hand_over_s,
        target_busy_s=pair.curve.seconds(depth + 1),
        drafter_busy_s=pair.draft.seconds(depth),
    )


class _AllLaps(Laps):
    """Laps in which the drafter continues until the target is done or the window is full."""

    def flight(self, pending: int, window: int) -> Flight:
        return Flight(self.pair.draft, window + 1 + self.depth_cap - pending, self.pair.hand_over_s)


def simulate_pipelined(
    pair: SimulatedPair,
    depth_cap: int,
    *,
    window: WindowRule = "best",
    patience_s: float = math.inf,
    rounds: int = 100_000,
    seed: int = 0,
) -> SimulatedRounds:
    """Simulate ``rounds`` rounds of our pipelined loop. Raises ValueError below a cap of 1 or one round.

    Every token is drawn, by the rules of ``expected_pipelined``. The loop continues without a drafter that is later
    than ``patience_s``; the drafter's tokens still count if the text agrees with them.
    """
    _check(depth_cap, rounds)
    chance, acceptance = random.Random(seed), learned_acceptance(pair)
    windows, laps = tuple(range(depth_cap + 1)), _AllLaps(pair, depth_cap, acceptance)
    if window == "best":
        windows, laps = windows_by_rate(pair.curve, acceptance, depth_cap), Laps(pair, depth_cap, acceptance)
    totals = _Totals(rounds)
    pending = place = 0
    flight: Flight | None = None
    said, fits = 0, True  # of the flight: the target's tokens since its start, and whether they agreed
    for _ in range(rounds):
        verified = windows[min(pending, depth_cap)]
        if flight is None and patience_s == math.inf:
            seconds, target_s, drafter_s, landed = laps.of(pending, verified)
        else:
            if flight is None:
                flight, said, fits = laps.flight(pending, verified), 0, True
            seconds, target_s, drafter_s = lap(
                flight, pair.curve.seconds(verified + 1), pair.contention, patience_s=patience_s
            )
            landed = 0
            if flight.here:
                landed, flight = max(0, flight.drafted - said) if fits else 0, None
        totals.add(seconds, target_s, drafter_s)
        pending += landed
        compared = min(verified + 1, pending)
        kept = _run(pair, place, compared, chance)
        if kept < compared:
            totals.tokens += kept + 1
            pending = place = 0
            fits = False
        elif compared == verified:  # nothing was in flight for the last position: the target's own token, a bonus
            totals.tokens += compared + 1
            pending = 0
            same = chance.random() < pair.stands(place + kept)
            fits = fits and flight is not None and same
            said += 1
            place = place + kept + 1 if fits else 0
        else:
            totals.tokens += compared
            pending -= compared
            place += kept
    return totals.result()


def _run(pair: SimulatedPair, place: int, most: int, chance: random.Random) -> int:
    """The number of accepted tokens in a row, of ``most`` from ``place``."""
    draw = chance.random
    for kept in range(most):
        if draw() >= pair.stands(place + kept):
            return kept
    return most


def _check(depth: int, rounds: int = 1) -> None:
    if depth < 1:
        raise ValueError("rounds that draft nothing are plain decoding")
    if rounds < 1:
        raise ValueError("a simulation has at least one round")
