"""What the default depth policy may lose: on drawn machines, texts and requests, singly and on average.

`python -m benchmarks.simulated_requests --check` draws thousands.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import pytest

from tests.support.drawn_requests import NATIVE, Request, draw_scenario
from tests.support.request_bounds import LEAST, LEAST_MEAN, OF_A_SCENARIO, ORDER, SOON_TOKENS, order, serve_drawn
from tests.support.simulated_clock import Controlled, Served, serve_each


def bought_at(served: Served) -> int | None:
    """Tokens of the answer before its first round that drafted with the model; None if there was no such round."""
    return next((at for at, own in zip(served.tokens_at, served.records, strict=True) if own.source == "model"), None)


def ended_after(request: Request, tokens: int) -> Request:
    """The same answer, ended after ``tokens`` tokens."""
    known = request.right[:tokens], request.copied[:tokens]
    behind = [False] * (len(request.right) - tokens)
    return replace(request, tokens=tokens, right=known[0] + behind, copied=known[1] + behind)


@pytest.mark.slow
def test_an_answer_that_ends_right_after_a_purchase_is_at_most_a_tenth_slower() -> None:
    """The worst end for a purchase, with a drafter that is wrong from then on."""
    bought = 0
    for seed, place in itertools.product(range(12), range(0, 24, 4)):
        scenario = draw_scenario(seed)
        before, request = [scenario.request(index) for index in range(place)], scenario.request(place)
        tokens = bought_at(serve_each(scenario, Controlled(scenario), [*before, request], keep=True)[-1])
        if tokens is None:
            continue
        bought += 1
        wrong = replace(request, right=[*request.right[:tokens], *[False] * (len(request.right) - tokens)])
        for more in (1, 2, 6):
            ended = ended_after(wrong, min(request.tokens, tokens + more))
            served = serve_each(scenario, Controlled(scenario), [*before, ended])[-1]
            assert served.ratio >= LEAST, f"{seed}, {place}: bought after {tokens} tokens, ended after {ended.tokens}"
    assert bought >= 3


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_random_requests_stay_above_the_speed_bound_singly_and_on_average(first: int) -> None:
    drawn = serve_drawn(Controlled, 10 * OF_A_SCENARIO, first)
    assert drawn.requests == 400
    assert drawn.worst[0][0] >= LEAST
    for lengths, ratios in drawn.learned.items():
        assert statistics.fmean(ratios) >= LEAST_MEAN, lengths


@pytest.mark.parametrize(("kind", "before"), [("code", "translation"), ("translation", "code")])
def test_a_text_is_drafted_equally_well_after_twenty_of_another_kind(kind: str, before: str) -> None:
    one = order(Controlled, NATIVE, kind, before)
    assert one.off > -ORDER
    if kind == "code":
        assert statistics.median(one.first_drafts) <= SOON_TOKENS
