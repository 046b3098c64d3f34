"""Rounds in which target and drafter run in parallel (decoding/pipelined/loop.py), simulated event by event.

Events are the end of the target's forward, the drafter's start, each drafted token, and the arrival of the drafted
tokens. Between two events each side proceeds at its own pace, which is slower while the other side computes. Chance
decides only whether a token is accepted, so a pipe that is never emptied always takes the same course.
``expected_pipelined`` follows that course once, weighted with the probability of getting there. Everything here is
pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.curve import Curve, DraftCost, overlapped_tokens, window_by_rate

# A pipe reaching this share of all cycles adds less than float precision shows.
_NEVER = 1e-15

# Events closer than this share of the target's forward coincide: float sums differ in their last digits.
_TOGETHER = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPair:
    """Times and acceptance of a target and a drafter.

    ``curve`` is T(w) of the target alone and ``draft`` the drafter's times alone, in seconds. ``acceptance[i]`` is
    the probability that the i-th token after one of the target's own is accepted, if those before it were; the last
    entry is repeated. ``hand_over_s`` is the transfer to the drafter and back, once a round. ``contention`` slows
    each side only while both compute.
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
            raise ValueError("drafting and hand-over times are finite and not negative")

    def stands(self, position: int) -> float:
        """Probability that the token ``position`` positions after the target's own one is accepted."""
        return self.acceptance[min(position, len(self.acceptance) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRounds:
    """Totals of simulated rounds; for an expectation, the rounds from one empty pipe to the next.

    ``target_busy_s`` and ``drafter_busy_s`` are the seconds in which that side computed.
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
        """Share of the time in which the target computed, from 0 to 1."""
        return self.target_busy_s / self.seconds

    @property
    def drafter_busy(self) -> float:
        """Share of the time in which the drafter computed, from 0 to 1."""
        return self.drafter_busy_s / self.seconds


def expected_pipelined(pair: SimulatedPair, depth_cap: int) -> SimulatedRounds:
    """The long-run mean of our pipelined loop with a drafter that is always waited for.

    Covers the rounds from one empty pipe to the next; if every token is accepted, one period of the course. Raises
    ValueError below a cap of 1.

    The loop's own rules apply. A window of w tokens is verified at width w + 1, and the first token in flight is
    compared instead of a bonus. The drafter continues until the target is done and finishes its current token;
    surplus tokens stay proposed. A rejection empties the pipe; then one position is scored while the first tokens are
    drafted. Window and draft length maximise tokens a second by T(w) and acceptance, as
    planning/depth/pipeline_budget.py does once it has learned. Re-proposed tokens are left out, since their
    acceptance depends on the text: the loop is at least this fast.
    """
    if depth_cap < 1:
        raise ValueError("rounds that draft nothing are plain decoding")
    acceptance = learned_acceptance(pair)
    windows, laps = windows_by_rate(pair.curve, acceptance, depth_cap), Laps(pair, depth_cap, acceptance)
    totals, reached = _Totals(), 1.0
    pending = position = 0
    seen: dict[int, tuple[_Totals, float]] = {}
    while reached > _NEVER:
        if position >= len(pair.acceptance) - 1:
            if pending in seen:
                # From here the course repeats, each period less probable by the same ratio.
                before, then = seen[pending]
                turn, ratio = totals.less(before), reached / then
                if ratio >= 1.0:
                    return turn.result()
                return before.plus(turn.times(1.0 / (1.0 - ratio))).result()
            seen[pending] = totals.times(1.0), reached
        verified = windows[min(pending, depth_cap)]
        seconds, target_s, drafter_s, landed = laps.of(pending, verified)
        totals.add(reached, seconds, target_s, drafter_s)
        pending += landed - (verified + 1)
        for _ in range(verified + 1):
            totals.tokens += reached  # accepted or corrected: a token either way
            reached *= pair.stands(position)
            position += 1
    return totals.result()


# ------------------------------------------------------------------------------------------------------ the parts


class Flight:
    """A proposal in flight: up to ``most`` tokens, at least one; ``hand_over_s`` is the transfer both ways.

    After each token the drafter checks whether the target is done, and stops if so.
    """

    __slots__ = ("_back_s", "_cost", "_left_s", "_most", "_phase", "drafted", "told")

    def __init__(self, cost: DraftCost, most: int, hand_over_s: float = 0.0) -> None:
        if most < 1:
            raise ValueError("a proposal has at least one token")
        self._cost = cost
        self._most = most
        self._back_s = hand_over_s / 2
        self._phase: Literal["there", "drafting", "back", "here"] = "there"
        self._left_s = hand_over_s / 2
        self.drafted = 0
        self.told = False

    @property
    def here(self) -> bool:
        """Whether the tokens have arrived."""
        return self._phase == "here"

    @property
    def drafting(self) -> bool:
        """Whether the drafter is computing, rather than a message being under way."""
        return self._phase == "drafting"

    @property
    def left_s(self) -> float:
        """Seconds to the next event, at the pace of a drafter that runs alone."""
        return math.inf if self.here else self._left_s

    def go_on(self, own_s: float) -> None:
        """Spend ``own_s`` of ``left_s`` without reaching the event."""
        self._left_s -= own_s

    def reach(self) -> None:
        """Move past the next event: the drafter starts, has a token, or the tokens arrive."""
        if self._phase == "there":
            self._phase, self._left_s = "drafting", self._cost.round_s + self._cost.token_s
        elif self._phase == "back":
            self._phase = "here"
        else:
            self.drafted += 1
            if self.drafted < self._most and not self.told:
                self._left_s = self._cost.token_s
            else:
                self._phase, self._left_s = "back", self._back_s


def lap(
    flight: Flight, target_s: float, contention: Contention, *, patience_s: float = math.inf
) -> tuple[float, float, float]:
    """Seconds of a round, and the seconds in which the target and the drafter computed.

    The target's forward takes ``target_s`` alone. The round ends when the flight has arrived too, or ``patience_s``
    after the target. A late flight continues in the next lap. Each side is slower while both compute.
    """
    target_factor, drafter_factor = max(1.0, contention.target_factor), max(1.0, contention.drafter_factor)
    seconds = target_busy_s = drafter_busy_s = waited_s = 0.0
    left_s, together_s = target_s, _TOGETHER * target_s
    while left_s > 0.0 or (not flight.here and waited_s < patience_s):
        forwarding, drafting = left_s > 0.0, flight.drafting
        both = forwarding and drafting
        target_slowdown, drafter_slowdown = (target_factor, drafter_factor) if both else (1.0, 1.0)
        target_step = left_s * target_slowdown if forwarding else math.inf
        flight_step = flight.left_s * drafter_slowdown
        step = min(target_step, flight_step, math.inf if forwarding else patience_s - waited_s)
        seconds += step
        if forwarding:
            target_busy_s += step
        else:
            waited_s += step
        if drafting:
            drafter_busy_s += step
        # The target first: a drafter that finishes a token at the same moment sees that the target is done.
        if target_step <= step + together_s:
            left_s = 0.0
            flight.told = True
        elif forwarding:
            left_s -= step / target_slowdown
        if flight_step <= step + together_s:
            flight.reach()
        elif not flight.here:
            flight.go_on(step / drafter_slowdown)
    return seconds, target_busy_s, drafter_busy_s


@dataclass(slots=True)
class _Totals:
    rounds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    target_busy_s: float = 0.0
    drafter_busy_s: float = 0.0

    def add(self, weight: float, seconds: float, target_busy_s: float, drafter_busy_s: float) -> None:
        """Add a round, without its tokens."""
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


class Laps:
    """Rounds in which the drafter is waited for, cached by window and number of proposed tokens."""

    def __init__(self, pair: SimulatedPair, depth_cap: int, acceptance: float) -> None:
        """``acceptance`` decides how many tokens there is time for."""
        self.pair = pair
        self.depth_cap = depth_cap
        self._acceptance = acceptance
        self._known: dict[tuple[int, int], tuple[float, float, float, int]] = {}

    def flight(self, pending: int, window: int) -> Flight:
        """A flight of the tokens that there is time for, at most as many as then leave ``depth_cap`` in the pipe.

        ``pending`` tokens are in the pipe before the round. The round takes out ``window`` + 1: those it verifies,
        and one that it compares instead of a bonus.
        """
        pair = self.pair
        most = window + 1 + self.depth_cap - pending
        if most > 1:
            target_s = pair.curve.seconds(window + 1) * max(1.0, pair.contention.target_factor)
            drafting = pair.draft.scaled(max(1.0, pair.contention.drafter_factor))
            away = replace(drafting, round_s=drafting.round_s + pair.hand_over_s)
            most = overlapped_tokens(target_s, away, self._acceptance, most)
        return Flight(pair.draft, most, pair.hand_over_s)

    def of(self, pending: int, window: int) -> tuple[float, float, float, int]:
        """Seconds, those in which target and drafter computed, and the tokens drafted."""
        known = self._known.get((pending, window))
        if known is None:
            flight = self.flight(pending, window)
            times = lap(flight, self.pair.curve.seconds(window + 1), self.pair.contention)
            known = self._known[pending, window] = (*times, flight.drafted)
        return known


def windows_by_rate(curve: Curve, acceptance: float, depth_cap: int) -> tuple[int, ...]:
    """For 0 to ``depth_cap`` proposed tokens, the window with the most expected tokens a second."""
    forward_s = [curve.seconds(window + 1) for window in range(depth_cap + 1)]
    return tuple(window_by_rate(forward_s[: most + 1], acceptance) for most in range(depth_cap + 1))


def learned_acceptance(pair: SimulatedPair) -> float:
    """Share of the compared tokens that are accepted in a pipe: all but one from one rejection to the next."""
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
