"""How far whole requests fall below plain decoding, by cause and kind of text, on a simulated clock.

Machines, stored costs, prompts, answers and texts are drawn (tests/support/drawn_requests.py); the depth policy is
the real one. Printed: the share of requests below the bound, by kind and by main cause; the mean over each
distribution of lengths after its first requests; the effect of the order of texts; and every bound, held or broken.
With ``--check`` a broken bound gives exit status 1.

    python -m benchmarks.simulated_requests [--policy planned|plain] [--requests 4000] [--seed 0] [--check]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.drawn_requests import LENGTHS, LLAMA, NATIVE
from tests.support.request_bounds import (
    LEARNED_AFTER,
    LEAST,
    LEAST_MEAN,
    ORDER,
    SOON_TOKENS,
    Drawn,
    Make,
    Order,
    order,
    serve_drawn,
)
from tests.support.simulated_clock import Controlled, Plain

POLICIES: dict[str, Make] = {
    "planned": Controlled,
    "plain": lambda scenario: Plain(),
}


# ------------------------------------------------------------------------------------------------------- printing


def print_drawn(drawn: Drawn) -> None:
    causes = ("load", "reading", "rounds", "noise")
    each = 1e3 * drawn.seconds / drawn.requests
    print(f"{drawn.requests} requests in {drawn.seconds:.0f} s of one core ({each:.1f} ms each)\n")
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
        mean_first = f"{statistics.fmean(first):.3f}" if first else "-"
        shares = " | ".join(f"{100 * count / len(ratios):.1f} %" for count in (sum(counts), *counts))
        print(
            f"| {kind} | {len(ratios)} | {shares} | {ratios[0]:.2f} | {ratios[len(ratios) // 100]:.3f} "
            f"| {statistics.fmean(ratios):.3f} | {mean_first} |"
        )
    print(f"\nMean of plain / planned seconds after {LEARNED_AFTER} requests, by distribution of lengths:")
    for lengths in LENGTHS:
        if lengths in drawn.learned:
            means = [mean for mean, _, own in drawn.means if own == lengths]
            low = sum(mean < LEAST_MEAN for mean in means)
            print(
                f"  {lengths:8} {statistics.fmean(drawn.learned[lengths]):.3f}; "
                f"{low} of {len(means)} scenarios below {LEAST_MEAN}, the least {min(means):.3f}"
            )
    plain_s = drawn.spent["all of plain"]
    parts = ", ".join(
        f"{name} {100 * drawn.spent[name] / plain_s:.2f} %"
        for name in ("load", "reading", "drafting", "widening", "saved")
    )
    print(f"\nOf plain decoding's seconds: {parts}")
    print("Worst requests (ratio, scenario, place):", [(round(r, 3), s, p) for r, s, p in drawn.worst[:5]])
    print("Worst scenarios (mean, scenario, lengths):", [(round(m, 3), s, n) for m, s, n in drawn.means[:5]])


def print_orders(orders: list[tuple[str, Order]]) -> None:
    print(f"\nTokens a round after {LEARNED_AFTER} other texts, and tokens before the first draft two deep:")
    for name, one in orders:
        print(
            f"  {name:9} {one.kind:11} alone {one.alone:.3f}, after {one.before:11} {one.after:.3f} "
            f"({100 * one.off:+.1f} %); two deep after {sorted(one.first_drafts)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A bound: the requirement and the measured value."""

    name: str
    asked: str
    came: str
    holds: bool


def bounds(drawn: Drawn, orders: list[tuple[str, Order]]) -> Iterator[Bound]:
    below, least = sum(drawn.below.values()), drawn.worst[0][0]
    yield Bound(
        name="every request",
        asked=f">= {LEAST} of plain",
        came=f"{below} of {drawn.requests} below, the least {least:.3f}",
        holds=not below,
    )
    for lengths, ratios in drawn.learned.items():
        mean = statistics.fmean(ratios)
        yield Bound(
            name=f"mean of {lengths} answers", asked=f">= {LEAST_MEAN}", came=f"{mean:.3f}", holds=mean >= LEAST_MEAN
        )
    for name, one in orders:
        # If the drafter is not faster on this text alone, its first draft cannot be late.
        if (one.kind, one.before) == ("code", "translation") and one.alone > 1.0 + ORDER:
            late = sum(at > SOON_TOKENS for at in one.first_drafts)
            yield Bound(
                name=f"code after translations, {name}",
                asked=f"two deep within {SOON_TOKENS} tokens",
                came=f"{late} of {len(one.first_drafts)} later",
                holds=not late,
            )
        if one.before != "foreign":
            yield Bound(
                name=f"{one.kind} after {one.before}, {name}",
                asked=f"no more than {100 * ORDER:.0f} % fewer tokens a round than alone",
                came=f"{100 * one.off:+.1f} %",
                holds=one.off >= -ORDER,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="planned")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="exit status 1 if a bound does not hold")
    options = parser.parse_args()
    make = POLICIES[options.policy]
    drawn = serve_drawn(make, options.requests, options.seed)
    texts = (("code", "translation"), ("translation", "code"), ("code", "foreign"))
    machines = (("ours", NATIVE), ("llama.cpp", LLAMA))
    orders = [(name, order(make, world, *pair)) for name, world in machines for pair in texts]
    print_drawn(drawn)
    print_orders(orders)
    print("\nBounds:")
    all_hold = True
    for bound in bounds(drawn, orders):
        print(f"  {'held' if bound.holds else 'BROKEN':6} {bound.name}: {bound.asked}; {bound.came}")
        all_hold &= bound.holds
    return 0 if all_hold or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
