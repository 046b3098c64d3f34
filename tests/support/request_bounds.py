"""The bounds on whole requests, and a depth policy's results on the simulated clock."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.support.drawn_requests import Scenario, World, believed, draw_scenario, prior_of
from tests.support.simulated_clock import Decider, Served, serve_all, serve_each

# No request is below LEAST of plain decoding's speed. After LEARNED_AFTER requests from a distribution of lengths the
# mean is at least LEAST_MEAN. Code after as many translations is drafted two deep within SOON_TOKENS; a text after
# other texts has at most ORDER fewer tokens a round than alone.
LEAST = 0.89
LEAST_MEAN = 0.99
LEARNED_AFTER = 20
SOON_TOKENS = 24
ORDER = 0.05

# Requests of one scenario: twice the number from which lengths are learned.
OF_A_SCENARIO = 40


Make = Callable[[Scenario], Decider]


@dataclass(slots=True)
class Drawn:
    """The results of a number of drawn requests."""

    requests: int = 0
    seconds: float = 0.0
    below: Counter[tuple[str, str]] = field(default_factory=Counter)
    of_kind: Counter[str] = field(default_factory=Counter)
    ratios: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    first: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    learned: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    means: list[tuple[float, int, str]] = field(default_factory=list)
    worst: list[tuple[float, int, int]] = field(default_factory=list)

    def add(self, served: Served, place: int, seed: int, *, first: bool) -> None:
        kind, ratio = served.request.kind, served.ratio
        self.requests += 1
        self.of_kind[kind] += 1
        self.ratios[kind].append(ratio)
        if first:
            self.first[kind].append(ratio)
        for cause, seconds in served.spent.items():
            self.spent[cause] += seconds
        self.spent["saved"] += served.saved_s
        self.spent["all of plain"] += served.plain_s
        if ratio < LEAST:
            self.below[served.cause, kind] += 1
        self.worst.append((ratio, seed, place))


def serve_drawn(make: Make, requests: int, seed: int) -> Drawn:
    drawn = Drawn()
    began = time.process_time()
    for one in range(max(1, requests // OF_A_SCENARIO)):
        scenario = draw_scenario(seed + one)
        served = serve_all(scenario, make(scenario), OF_A_SCENARIO)
        for place, answer in enumerate(served):
            drawn.add(answer, place, seed + one, first=place % scenario.process_requests == 0)
        learned = [answer.ratio for answer in served[LEARNED_AFTER:]]
        drawn.learned[scenario.lengths] += learned
        drawn.means.append((statistics.fmean(learned), seed + one, scenario.lengths))
    drawn.seconds = time.process_time() - began
    drawn.worst.sort()
    drawn.means.sort()
    return drawn


# ------------------------------------------------------------------------------------------------------- orders


def pages(world: World, kind: str, seed: int) -> Scenario:
    """Answers of one kind on a known machine, with a drafter of partly known acceptance."""
    return Scenario(
        seed=seed,
        world=replace(world, load_s=0.0),
        costs=believed(world),
        prior=prior_of(0.7),
        kinds=(kind,),
        lengths="similar",
        length=2.0,
        shortest_prompt=100,
        longest_prompt=600,
    )


def tokens_per_round(served: list[Served]) -> float:
    tokens = sum(answer.request.tokens - 1 for answer in served)
    return tokens / max(1, sum(answer.rounds for answer in served))


def two_deep_at(served: Served) -> int:
    """Tokens of the answer before the first round with two or more proposals."""
    places = (at for at, depth in zip(served.tokens_at, served.depths, strict=True) if depth >= 2)
    return next(places, served.request.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Texts of ``kind`` alone and after twenty of ``before``."""

    kind: str
    before: str
    alone: float
    after: float
    first_drafts: tuple[int, ...]

    @property
    def off(self) -> float:
        return self.after / self.alone - 1.0


def order(make: Make, world: World, kind: str, before: str, seeds: int = 10) -> Order:
    alone: list[Served] = []
    after: list[Served] = []
    soon = []
    for seed in range(seeds):
        later, sooner = pages(world, kind, 1000 + seed), pages(world, before, 2000 + seed)
        texts = [later.request(place) for place in range(8)]
        alone += serve_each(later, make(later), texts)
        others = [sooner.request(place) for place in range(LEARNED_AFTER)]
        served = serve_each(later, make(later), [*others, *texts])[LEARNED_AFTER:]
        soon.append(two_deep_at(served[0]))
        after += served
    return Order(
        kind=kind,
        before=before,
        alone=tokens_per_round(alone),
        after=tokens_per_round(after),
        first_drafts=tuple(soon),
    )
