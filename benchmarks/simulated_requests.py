"""How far whole requests fall below plain decoding, by cause and kind of text, on a simulated clock.

Machines, beliefs about them, prompts, answers and texts are drawn (tests/support/drawn_requests.py); the depth
policy is the real one. Printed: the share of requests below the bound, by kind and by the cause that took most; the
mean over each distribution of lengths after the first requests of it; and what the order of texts does.

    python -m benchmarks.simulated_requests [--policy calibrated|plain] [--requests 4000] [--seed 0] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.support.drawn_requests import LENGTHS, LLAMA, NATIVE, Scenario, World, believed, draw_scenario, prior_of
from tests.support.simulated_clock import Calibrated, Decider, Plain, Served, serve_all, serve_each

# The bounds of the issue.
LEAST = 0.89
LEAST_MEAN = 0.99
LEARNED_AFTER = 20
SOON_TOKENS = 24
ORDER = 0.05

# Requests of one scenario: twice as many as lengths are learned from.
OF_A_SCENARIO = 40

POLICIES: dict[str, Callable[[Scenario], Decider]] = {
    "calibrated": Calibrated,
    "plain": lambda scenario: Plain(),
}


@dataclass(slots=True)
class Drawn:
    """What a number of drawn requests came to."""

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


def serve_drawn(make: Callable[[Scenario], Decider], requests: int, seed: int) -> Drawn:
    drawn = Drawn()
    began = time.perf_counter()
    for one in range(max(1, requests // OF_A_SCENARIO)):
        scenario = draw_scenario(seed + one)
        served = serve_all(scenario, make(scenario), OF_A_SCENARIO)
        for place, answer in enumerate(served):
            drawn.add(answer, place, seed + one, first=place % scenario.process_requests == 0)
        learned = [answer.ratio for answer in served[LEARNED_AFTER:]]
        drawn.learned[scenario.lengths] += learned
        drawn.means.append((statistics.fmean(learned), seed + one, scenario.lengths))
    drawn.seconds = time.perf_counter() - began
    drawn.worst.sort()
    drawn.means.sort()
    return drawn


# ------------------------------------------------------------------------------------------------------- orders


def pages(world: World, kind: str, seed: int) -> Scenario:
    """Answers of one kind on a machine that is known, with a drafter of which something is known."""
    return Scenario(
        seed=seed,
        world=replace(world, load_s=0.0),
        costs=believed(world),
        prior=prior_of(0.7),
        kinds=(kind,),
        lengths="alike",
        length=2.0,
        shortest_prompt=100,
        longest_prompt=600,
    )


def tokens_per_round(served: list[Served]) -> float:
    tokens = sum(answer.request.tokens - 1 for answer in served)
    return tokens / max(1, sum(answer.rounds for answer in served))


def two_deep_at(served: Served) -> int:
    """Tokens of the answer before its first round that proposed two or more."""
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


def order(make: Callable[[Scenario], Decider], world: World, kind: str, before: str, seeds: int = 10) -> Order:
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


# ------------------------------------------------------------------------------------------------------- printing


def print_drawn(drawn: Drawn) -> None:
    causes = ("load", "reading", "rounds", "probing", "noise")
    each = 1e3 * drawn.seconds / drawn.requests
    print(f"{drawn.requests} requests in {drawn.seconds:.0f} s ({each:.1f} ms each)\n")
    columns = ("kind", "requests", f"below {LEAST}", *causes, "least", "1 %", "mean", "first of a process")
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for kind in (*sorted(drawn.of_kind), "all"):
        kinds = tuple(drawn.of_kind) if kind == "all" else (kind,)
        ratios = sorted(ratio for own in kinds for ratio in drawn.ratios[own])
        first = [ratio for own in kinds for ratio in drawn.first[own]]
        counts = [
            sum(count for (own, at), count in drawn.below.items() if own == cause and kind in ("all", at))
            for cause in causes
        ]
        shares = " | ".join(f"{100 * count / len(ratios):.1f} %" for count in (sum(counts), *counts))
        print(
            f"| {kind} | {len(ratios)} | {shares} | {ratios[0]:.2f} | {ratios[len(ratios) // 100]:.3f} "
            f"| {statistics.fmean(ratios):.3f} | {statistics.fmean(first):.3f} |"
        )
    print(f"\nMean of plain / planned seconds after {LEARNED_AFTER} requests, by distribution of lengths:")
    for lengths in LENGTHS:
        if drawn.learned[lengths]:
            means = [mean for mean, _, own in drawn.means if own == lengths]
            low = sum(mean < LEAST_MEAN for mean in means)
            print(
                f"  {lengths:8} {statistics.fmean(drawn.learned[lengths]):.3f}; "
                f"{low} of {len(means)} scenarios below {LEAST_MEAN}, the least {min(means):.3f}"
            )
    plain_s = drawn.spent["all of plain"]
    parts = ", ".join(
        f"{name} {100 * drawn.spent[name] / plain_s:.2f} %"
        for name in ("load", "reading", "drafting", "widening", "probing", "saved")
    )
    print(f"\nOf plain decoding's seconds: {parts}")
    print("Worst requests (ratio, scenario, place):", [(round(r, 3), s, p) for r, s, p in drawn.worst[:5]])
    print("Worst scenarios (mean, scenario, lengths):", [(round(m, 3), s, n) for m, s, n in drawn.means[:5]])


def print_orders(make: Callable[[Scenario], Decider]) -> None:
    print(
        f"\nTokens a round after {LEARNED_AFTER} texts of another kind, and tokens before the first two-deep draft:"
    )
    for name, world in (("ours", NATIVE), ("llama.cpp", LLAMA)):
        for kind, before in (("code", "translation"), ("translation", "code"), ("code", "foreign")):
            one = order(make, world, kind, before)
            print(
                f"  {name:9} {kind:11} alone {one.alone:.3f}, after {before:11} {one.after:.3f} "
                f"({100 * one.off:+.1f} %); two deep after {sorted(one.first_drafts)}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="calibrated")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the shares below the bound alone, as JSON")
    options = parser.parse_args()
    make = POLICIES[options.policy]
    drawn = serve_drawn(make, options.requests, options.seed)
    if options.json:
        below = {f"{cause} {kind}": count / drawn.of_kind[kind] for (cause, kind), count in drawn.below.items()}
        print(json.dumps({"requests": drawn.requests, "below": below}))
        return
    print_drawn(drawn)
    print_orders(make)


if __name__ == "__main__":
    main()
