"""Rounds of decoding, simulated event by event: in turns, at once as decoding/pipelined/loop.py does, and as PEARL
does.

Events are the end of the target's forward, the drafter's start, each of its tokens, and the moment its tokens are
back. Between two events each side goes on at its own pace, which is slower while the other one is at work too. Chance
decides only whether a token stands, so a pipe that nothing empties always takes the same course:
``expected_pipelined`` follows that course once and weighs it with the probability of getting there, which is the mean
that the drawn rounds of ``simulate_pipelined`` come near. Everything here is pure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.curve import Curve, DraftCost, expected_tokens, round_seconds, tokens_beside
from edgespec.planning.cost.round_events import Flight, lap

__all__ = [
    "SimulatedPair",
    "SimulatedRounds",
    "WindowRule",
    "expected_pipelined",
    "expected_serial",
    "simulate_pearl",
    "simulate_pipelined",
    "simulate_serial",
    "windows_by_rate",
]

# "all": verify everything that is put forward, and draft until the target is done; "best": as much of either as
# brings the most tokens a second by T(w) and acceptance, as planning.pipeline_budget.MeasuredBudget does once it has
# learned.
WindowRule = Literal["all", "best"]

# A pipe that reaches this share of all cycles adds less than any float of the result shows.
_NEVER = 1e-15


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPair:
    """A target and a drafter.

    ``curve`` is T(w) of the target alone and ``draft`` what the drafter takes alone, in seconds. ``acceptance[i]`` is
    the probability that the i-th token after one that the target said itself stands, given that those before it did;
    the last entry goes on. ``hand_over_s`` is the way to the drafter and back, once a round. ``contention`` slows
    each side only while both are at work.
    """

    curve: Curve
    draft: DraftCost
    acceptance: tuple[float, ...]
    hand_over_s: float = 0.0
    contention: Contention = field(default_factory=Contention)

    def __post_init__(self) -> None:
        if not self.acceptance or not all(0 <= probability <= 1 for probability in self.acceptance):
            raise ValueError("a simulation needs acceptance probabilities, each from 0 to 1")
        times = (self.hand_over_s, self.draft.token_s, self.draft.round_s)
        if not all(0 <= seconds < math.inf for seconds in times):
            raise ValueError("drafting and handing over take no less than no time, and not for ever")

    def stands(self, place: int) -> float:
        """Probability that the token ``place`` places behind the target's own one stands."""
        return self.acceptance[min(place, len(self.acceptance) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRounds:
    """What so many rounds came to; of an expectation, the rounds from one empty pipe to the next.

    ``target_busy_s`` and ``drafter_busy_s`` are the seconds in which the side was at work.
    """

    rounds: float
    tokens: float
    seconds: float
    target_busy_s: float
    drafter_busy_s: float

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds

    @property
    def round_s(self) -> float:
        """Mean seconds of a round."""
        return self.seconds / self.rounds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def target_busy(self) -> float:
        """Share of the time in which the target was at work, from 0 to 1."""
        return self.target_busy_s / self.seconds

    @property
    def drafter_busy(self) -> float:
        """Share of the time in which the drafter was at work, from 0 to 1."""
        return self.drafter_busy_s / self.seconds

    @property
    def target_idle(self) -> float:
        return 1.0 - self.target_busy

    @property
    def drafter_idle(self) -> float:
        return 1.0 - self.drafter_busy


# ------------------------------------------------------------------------------------------------------- in turns


def expected_serial(pair: SimulatedPair, depth: int) -> SimulatedRounds:
    """A serial round: Leviathan et al. (2023) with measured times. Raises ValueError below depth 1."""
    _check(depth)
    draft_s, verify_s = pair.draft.seconds(depth), pair.curve.seconds(depth + 1)
    return SimulatedRounds(
        rounds=1.0,
        tokens=expected_tokens([pair.stands(place) for place in range(depth)]),
        seconds=round_seconds(pair.curve, pair.draft, depth) + pair.hand_over_s,
        target_busy_s=verify_s,
        drafter_busy_s=draft_s,
    )


def simulate_serial(pair: SimulatedPair, depth: int, *, rounds: int = 100_000, seed: int = 0) -> SimulatedRounds:
    """So many serial rounds, each of ``depth`` drafted tokens. Raises ValueError below depth 1 or one round."""
    _check(depth, rounds)
    chance = random.Random(seed)
    tokens = sum(1 + _run(pair, 0, depth, chance) for _ in range(rounds))
    one = expected_serial(pair, depth)
    return SimulatedRounds(
        rounds=rounds,
        tokens=tokens,
        seconds=rounds * one.seconds,
        target_busy_s=rounds * one.target_busy_s,
        drafter_busy_s=rounds * one.drafter_busy_s,
    )


# -------------------------------------------------------------------------------------------------------- at once


def simulate_pipelined(
    pair: SimulatedPair,
    depth_cap: int,
    *,
    window: WindowRule = "best",
    patience_s: float = math.inf,
    rounds: int = 100_000,
    seed: int = 0,
) -> SimulatedRounds:
    """So many rounds of our pipelined loop, each token drawn. Raises ValueError below a cap of 1 or one round.

    The loop's own rules: a window of w tokens is verified at width w + 1, and the first token in flight is compared
    in place of a bonus; the drafter goes on until the target is done and finishes the token it is at; what is beyond
    stays put forward; a rejection empties the pipe, and then one place is scored while the first tokens are drafted.
    A drafter that is later than ``patience_s`` is gone on without; its tokens count if the text went its way
    meanwhile. Branches, and tokens put forward again at another place, are left out: how often they are right depends
    on the text, so the loop is at least as fast as this.
    """
    _check(depth_cap, rounds)
    chance, windows, laps = (
        random.Random(seed),
        _windows(pair, depth_cap, window),
        _Laps(pair, depth_cap, _learned_acceptance(pair) if window == "best" else None),
    )
    totals = _Totals()
    pending = place = 0
    flight: Flight | None = None
    said, fits = 0, True  # of the flight: tokens that the target has said since, and whether they were the same
    for _ in range(rounds):
        verified = windows(pending)
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
        totals.add(1.0, seconds, target_s, drafter_s)
        pending += landed
        compared = min(verified + 1, pending)
        stood = _run(pair, place, compared, chance)
        if stood < compared:
            totals.tokens += stood + 1
            pending = place = 0
            fits = False
        elif compared == verified:  # nothing was in flight for the last place: the target's own word, a bonus
            totals.tokens += compared + 1
            pending = 0
            same = chance.random() < pair.stands(place + stood)
            fits = fits and flight is not None and same
            said += 1
            place = place + stood + 1 if fits else 0
        else:
            totals.tokens += compared
            pending -= compared
            place += stood
    return totals.result()


def expected_pipelined(pair: SimulatedPair, depth_cap: int, *, window: WindowRule = "best") -> SimulatedRounds:
    """What ``simulate_pipelined`` comes near with ever more rounds and a drafter that is always waited for.

    From an empty pipe to the next; where every token stands, one turn of the course that it settles in. Raises
    ValueError below a cap of 1.
    """
    _check(depth_cap)
    windows, laps = (
        _windows(pair, depth_cap, window),
        _Laps(pair, depth_cap, _learned_acceptance(pair) if window == "best" else None),
    )
    totals, reached = _Totals(), 1.0
    pending = place = 0
    seen: dict[int, tuple[_Totals, float]] = {}
    while reached > _NEVER:
        if place >= len(pair.acceptance) - 1:
            if pending in seen:
                # From here the course repeats itself, each turn less probable by the same ratio.
                before, then = seen[pending]
                turn, ratio = totals.less(before), reached / then
                if ratio >= 1.0:
                    return turn.result()
                return before.plus(turn.times(1.0 / (1.0 - ratio))).result()
            seen[pending] = totals.times(1.0), reached
        verified = windows(pending)
        seconds, target_s, drafter_s, landed = laps.of(pending, verified)
        totals.add(reached, seconds, target_s, drafter_s)
        pending += landed - (verified + 1)
        for _ in range(verified + 1):
            totals.tokens += reached  # stood or corrected: a token either way
            reached *= pair.stands(place)
            place += 1
    return totals.result()


def simulate_pearl(pair: SimulatedPair, chunk: int, *, rounds: int = 100_000, seed: int = 0) -> SimulatedRounds:
    """So many passes of PEARL (Liu et al., 2024). Raises ValueError for a chunk below 2 or no pass.

    Each pass drafts a whole ``chunk``. Pre-verify compares the first of its tokens; the pass after it the rest of the
    chunk, further ones a chunk each; there is no bonus, and a rejection leads back to pre-verify. This is not our
    loop: ``cost.pipelined_tokens_per_round`` is its closed form, with a T(w) that is flat.
    """
    if chunk < 2:
        raise ValueError("a pipelined chunk has at least two tokens")
    _check(chunk, rounds)
    chance, totals = random.Random(seed), _Totals()
    passes = {}
    for compared in (1, chunk - 1, chunk):
        flight = Flight(pair.draft, chunk, pair.hand_over_s, whole=True)
        passes[compared] = lap(flight, pair.curve.seconds(compared), pair.contention)
    compared = 1
    place = 0
    for _ in range(rounds):
        totals.add(1.0, *passes[compared])
        stood = _run(pair, place, compared, chance)
        if stood < compared:
            totals.tokens += stood + 1
            compared, place = 1, 0
        else:
            totals.tokens += compared
            # The first pass with a chunk to verify has compared its first token already.
            compared, place = chunk - 1 if place == 0 else chunk, place + compared
    return totals.result()


# ------------------------------------------------------------------------------------------------------ the parts


@dataclass(slots=True)
class _Totals:
    rounds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    target_busy_s: float = 0.0
    drafter_busy_s: float = 0.0

    def add(self, weight: float, seconds: float, target_busy_s: float, drafter_busy_s: float) -> None:
        """A round, without its tokens."""
        self.rounds += weight
        self.seconds += weight * seconds
        self.target_busy_s += weight * target_busy_s
        self.drafter_busy_s += weight * drafter_busy_s

    def times(self, factor: float) -> _Totals:
        return _Totals(*(factor * each for each in self._each()))

    def plus(self, other: _Totals) -> _Totals:
        return _Totals(*(own + theirs for own, theirs in zip(self._each(), other._each(), strict=True)))

    def less(self, other: _Totals) -> _Totals:
        return self.plus(other.times(-1.0))

    def result(self) -> SimulatedRounds:
        rounds, tokens, seconds, target_busy_s, drafter_busy_s = self._each()
        return SimulatedRounds(
            rounds=rounds,
            tokens=tokens,
            seconds=seconds,
            target_busy_s=target_busy_s,
            drafter_busy_s=drafter_busy_s,
        )

    def _each(self) -> tuple[float, float, float, float, float]:
        return self.rounds, self.tokens, self.seconds, self.target_busy_s, self.drafter_busy_s


class _Laps:
    """Rounds in which the drafter is waited for. They are alike wherever window and tokens put forward are."""

    def __init__(self, pair: SimulatedPair, depth_cap: int, acceptance: float | None) -> None:
        """``acceptance`` decides how many tokens there is time for; None: as many as the next round can verify."""
        self._pair = pair
        self._depth_cap = depth_cap
        self._acceptance = acceptance
        self._known: dict[tuple[int, int], tuple[float, float, float, int]] = {}

    def flight(self, pending: int, window: int) -> Flight:
        """As far as the next round can verify and there is time for, with the token that this one compares."""
        pair = self._pair
        most = window + 1 + self._depth_cap - pending
        if self._acceptance is not None and most > 1:
            target_s = pair.curve.seconds(window + 1) * max(1.0, pair.contention.target_factor)
            drafting = pair.draft.scaled(max(1.0, pair.contention.drafter_factor))
            away = replace(drafting, round_s=drafting.round_s + pair.hand_over_s)
            most = tokens_beside(target_s, away, self._acceptance, most)
        return Flight(pair.draft, most, pair.hand_over_s)

    def of(self, pending: int, window: int) -> tuple[float, float, float, int]:
        """Seconds, those of the target and of the drafter at work, and the tokens drafted."""
        known = self._known.get((pending, window))
        if known is None:
            flight = self.flight(pending, window)
            times = lap(flight, self._pair.curve.seconds(window + 1), self._pair.contention)
            known = self._known[pending, window] = (*times, flight.drafted)
        return known


def _windows(pair: SimulatedPair, depth_cap: int, rule: WindowRule) -> Callable[[int], int]:
    """The window by the number of tokens put forward."""
    if rule == "all":
        return lambda pending: min(pending, depth_cap)
    best = windows_by_rate(pair.curve, _learned_acceptance(pair), depth_cap)
    return lambda pending: best[min(pending, depth_cap)]


def windows_by_rate(curve: Curve, acceptance: float, depth_cap: int) -> tuple[int, ...]:
    """The window for 0 to ``depth_cap`` tokens put forward: the one with the most expected tokens a second.

    A window of w tokens scores w + 1 places, each of which gives a token if all before it stood.
    """
    rates = [expected_tokens([acceptance] * window) / curve.seconds(window + 1) for window in range(depth_cap + 1)]
    return tuple(max(range(most + 1), key=rates.__getitem__) for most in range(depth_cap + 1))


def _learned_acceptance(pair: SimulatedPair) -> float:
    """Share of the compared tokens that stand in a pipe: all but one of those from one rejection to the next."""
    compared, reached = 0.0, 1.0
    for probability in pair.acceptance[:-1]:
        compared += reached
        reached *= probability
    last = pair.acceptance[-1]
    if last >= 1.0 and reached > 0.0:
        return 1.0
    if last < 1.0:
        compared += reached / (1.0 - last)
    return 1.0 - 1.0 / compared


def _run(pair: SimulatedPair, place: int, most: int, chance: random.Random) -> int:
    """How many tokens in a row stand, of ``most`` from ``place`` on."""
    draw = chance.random
    for stood in range(most):
        if draw() >= pair.stands(place + stood):
            return stood
    return most


def _check(depth: int, rounds: int = 1) -> None:
    if depth < 1:
        raise ValueError("rounds that draft nothing are plain decoding")
    if rounds < 1:
        raise ValueError("a simulation has at least one round")
