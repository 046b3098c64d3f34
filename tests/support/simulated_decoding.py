"""Decoding on a simulated clock: the real loop and combination, and a target and drafters that only take time.

The right token at every position is the position itself, so no weights are needed; whether a draft token is right,
and its confidence, are drawn from a text model with a seed. Times of forwards come from a curve.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from edgespec.decoding.round_base import LoopLimits
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.combination import CombinationState
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, ChainGate, DraftState, Proposal
from edgespec.interfaces.policy import DepthPolicy, RoundRecord
from edgespec.interfaces.rows import Rows
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, ContextCurves, Curve, DraftCost

# Measured on two cores, 1.5B target at four bits: a kernel made for a few rows, and another one.
_MEASURED = (1, 2, 3, 4, 5, 8, 16)
_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 16)


def curve_of(*forward_ms: float) -> Curve:
    """A curve from times at widths 1, 2, 3, 4, 5, 8 and 16."""
    some = Curve(widths=_MEASURED, forward_s=tuple(ms / 1000 for ms in forward_ms))
    return Curve(widths=_WIDTHS, forward_s=tuple(some.seconds(width) for width in _WIDTHS))


FLAT = curve_of(28.0, 28.0, 29.6, 30.1, 32.6, 45.7, 87.7)
STEEP = curve_of(34.7, 56.8, 75.6, 91.2, 113.0, 212.0, 246.0)

# A 0.5B drafter's time for a token with a kernel of that kind.
MODEL = DraftCost(token_s=0.005)

# The same with this project's kernels, and a drafter with 0.4 of the target's bytes that catches up.
NATIVE = curve_of(40.0, 42.8, 44.8, 46.8, 49.2, 58.8, 92.0)
READING = DraftCost(token_s=0.0168, lag_token_s=0.0011)

WRONG = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of text for one drafter: ``rate`` of its tokens are right, and the meaning of its confidence.

    ``informative``: each token is right as often as its confidence says, with confidences between 0 and 1;
    ``useless``: the confidence is unrelated; ``none``: there is none. ``offered``: the share of rounds in which the
    drafter has proposals.
    """

    rate: float
    confidence: Literal["informative", "useless", "none"] = "informative"
    offered: float = 1.0

    def token(self, chance: random.Random) -> tuple[bool, float]:
        if self.confidence == "informative" and 0 < self.rate < 1:
            sure = chance.betavariate(2 * self.rate, 2 * (1 - self.rate))
            return chance.random() < sure, sure
        if self.confidence == "none":
            return chance.random() < self.rate, 0.5
        sure = self.rate if self.confidence == "informative" else chance.random()
        return chance.random() < self.rate, sure


Text = Callable[[int], Kind]
"""The kind of text at an answer's n-th token."""


def always(rate: float, confidence: Literal["informative", "useless", "none"] = "informative") -> Text:
    kind = Kind(rate=rate, confidence=confidence)
    return lambda place: kind


def in_turn(*kinds: tuple[int, Kind]) -> Text:
    """(tokens, kind) one after the other; the last kind never ends."""

    def text(place: int) -> Kind:
        for tokens, kind in kinds[:-1]:
            if place < tokens:
                return kind
            place -= tokens
        return kinds[-1][1]

    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """``curve``: true times; ``slower(width, place)`` multiplies forwards and ``drafter_slower(place)`` drafts.

    ``noise``: standard deviation of the logarithm of every time. ``stalls``: factors by a forward's number.
    ``clock_jumps``: the clock's error from a forward's number (NaN: for that reading only).
    """

    curve: Curve = FLAT
    slower: Callable[[int, int], float] = lambda width, place: 1.0
    drafter_slower: Callable[[int], float] = lambda place: 1.0
    noise: float = 0.0
    stalls: dict[int, float] = field(default_factory=dict)
    clock_jumps: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class Time:
    """``spent_s``: the true time; ``read``: the clock's reading."""

    spent_s: float = 0.0
    wrong_by_s: float = 0.0
    garbled: bool = False

    def read(self) -> float:
        return math.nan if self.garbled else self.spent_s + self.wrong_by_s


class Truth(Rows):
    """Scores whose best id is the next position."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__(count, lambda index: (_ for _ in ()).throw(NotImplementedError))
        self._first = first

    def argmax_row(self, index: int) -> int:
        return self._first + index


class Target:
    """A Sequence that holds a number of tokens and takes time."""

    context_length = 10**9

    def __init__(self, machine: Machine, time: Time, chance: random.Random, prompt_tokens: int) -> None:
        self._machine, self._time, self._chance = machine, time, chance
        self._prompt_tokens = prompt_tokens
        self.length = prompt_tokens - 1
        self.forwards = 0

    def forward(self, tokens: Sequence[int], rows: int) -> Rows:
        width, machine = len(tokens), self._machine
        self.forwards += 1
        seconds = machine.curve.seconds(width) * machine.slower(width, self.length + 1 - self._prompt_tokens)
        seconds *= noise(machine.noise, self._chance) * machine.stalls.get(self.forwards, 1.0)
        self._time.spent_s += seconds
        jump = machine.clock_jumps.get(self.forwards, 0.0)
        self._time.garbled = math.isnan(jump)
        self._time.wrong_by_s += 0.0 if math.isnan(jump) else jump
        self.length += width
        return Truth(self.length - rows + 1, rows)

    def rewind(self, length: int) -> None:
        self.length = length


def noise(deviation: float, chance: random.Random) -> float:
    return math.exp(chance.gauss(0.0, deviation)) if deviation else 1.0


class SimulatedDrafter(DraftState):
    """A drafter with the accuracy and confidence of ``text`` and the times of ``cost``."""

    def __init__(
        self, kind: str, text: Text, cost: DraftCost, machine: Machine, time: Time, seed: int, prompt_tokens: int
    ) -> None:
        self.kind, self._text, self._cost, self._machine, self._time = kind, text, cost, machine, time
        self._chance = random.Random(f"{kind} {seed}")
        self._prompt_tokens = prompt_tokens
        self._known = 0

    @property
    def free(self) -> bool:
        return self._cost == FREE

    def lag(self, context: Context) -> int:
        return 0 if self.free else max(0, len(context) - 1 - self._known)

    def _spend(self, seconds: float, place: int) -> None:
        factor = self._machine.drafter_slower(place) * noise(self._machine.noise, self._chance)
        self._time.spent_s += factor * seconds

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        place = len(context) - self._prompt_tokens
        text = self._text(place)
        if self._chance.random() >= text.offered:
            return NOTHING
        before_s = self._time.spent_s
        lag = self.lag(context) if context.window is None else min(context.window, self.lag(context))
        self._spend(self._cost.round_s + lag * self._cost.lag_token_s + self._cost.token_s, place)
        sync_s = self._time.spent_s - before_s if lag > 1 and not self.free else 0.0
        tokens: list[int] = []
        confidences: list[float] = []
        forwards = 1
        while True:
            right, sure = text.token(self._chance)
            if gate is not None and not gate.admits(sure, None):
                break
            tokens.append(len(context) + len(tokens) if right else WRONG)
            confidences.append(sure)
            if len(tokens) == depth or (gate is not None and not gate.goes_on()):
                break
            self._spend(self._cost.token_s, place)
            forwards += 1
        seen = range(place - min(context.hindsight, lag), place)
        right_ones = next((i for i, token in enumerate(tokens) if token == WRONG), len(tokens))
        self._known = len(context) + min(right_ones, forwards - 1)
        return Proposal(
            tokens=tuple(tokens),
            sources=(self.kind,) * len(tokens),
            drafted_by=self.kind,
            sync_s=sync_s,
            hindsight=tuple(self._text(at).token(self._chance)[0] for at in seen if at >= 0),
            forwards=0 if self.free else forwards,
            confidences=() if text.confidence == "none" and self.free else tuple(confidences),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``speedup``: against the same tokens at width 1 on the same machine, without stalls and noise."""

    tokens: int
    seconds: float
    plain_s: float
    records: tuple[RoundRecord, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def speedup(self) -> float:
        return self.plain_s / self.seconds

    @property
    def depths(self) -> list[int]:
        return [record.proposed for record in self.records]

    @property
    def mean_depth(self) -> float:
        return sum(self.depths) / len(self.depths)

    def drafted_at(self) -> list[int]:
        """Tokens already emitted at each round with a proposal."""
        places, emitted = [], 0
        for record in self.records:
            if record.proposed:
                places.append(emitted)
            emitted += record.emitted
        return places


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A simulated drafter: its cost and its text."""

    text: Text
    cost: DraftCost = MODEL
    kind: str = "model"


def costs_of(sources: Sequence[Source], curve: Curve = FLAT) -> Costs:
    """The result of an exact calibration."""
    return Costs(
        curves=ContextCurves(contexts=(128,), curves=(curve,)),
        drafts={source.kind: source.cost for source in sources},
    )


def decode(
    policy: DepthPolicy,
    sources: Sequence[Source],
    machine: Machine | None = None,
    *,
    tokens: int = 512,
    depth_cap: int = 7,
    prompt_tokens: int = 1,
    seed: int = 0,
) -> Run:
    """One answer of ``tokens`` tokens, without its prefill."""
    machine = machine or Machine()
    time = Time()
    target: Any = Target(machine, time, random.Random(f"target {seed}"), prompt_tokens)
    parts = [
        (own.kind, SimulatedDrafter(own.kind, own.text, own.cost, machine, time, seed, prompt_tokens))
        for own in sources
    ]
    history = list(range(prompt_tokens))
    limits = LoopLimits(max_tokens=tokens + 1, depth_cap=depth_cap, vocabulary_size=2 * WRONG)
    own = policy.answer(prompt_tokens=prompt_tokens, most=tokens + 1)
    drafter = CombinationState(parts, own)
    loop = DecodeLoop(target, drafter, own, Chooser(Sampling()), history, limits, clock=time.read)
    records: list[RoundRecord] = []
    prefill_s = 0.0
    for step in loop.steps():
        if step.record is None:
            prefill_s = time.spent_s
        else:
            records.append(step.record)
    own.end()
    assert history == list(range(prompt_tokens + tokens + 1)), "drafting changes no text"
    plain_s = sum(machine.curve.plain_s * machine.slower(1, place) for place in range(1, tokens + 1))
    return Run(tokens=tokens, seconds=time.spent_s - prefill_s, plain_s=plain_s, records=tuple(records))
