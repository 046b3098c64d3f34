"""How much a drafter reads before it drafts, and how its hits in hindsight count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.interfaces.policy import AnswerPolicy
from edgespec.planning.depth.base import OFF
from edgespec.planning.depth.control import DepthControl
from edgespec.planning.depth.price import (
    HINDSIGHT,
    LEAST_READ,
    LEAST_RIGHT,
    PLACES_JUDGED,
    rate_in_hindsight,
    readings,
    worth_of,
)
from tests.support.drawn_requests import NATIVE, believed


def test_a_drafter_that_skipped_text_is_right_less_often() -> None:
    assert worth_of(0, 100) == 1.0
    assert worth_of(100, 100) == worth_of(200, 100) == 0.0
    # As measured: relative to the whole text 0.84 with two fifths of it, 0.4 to 0.66 with a tenth or less.
    assert worth_of(60, 100) == pytest.approx(0.84, abs=0.05)
    assert 0.4 < worth_of(92, 100) < 0.66


def test_all_half_or_a_quarter_of_the_text_may_be_read() -> None:
    assert readings(400, 0, 400) == [400, 200, 100]
    assert readings(40, 0, 400) == [40, 20]
    assert readings(2 * LEAST_READ, 0, 40) == [2 * LEAST_READ, LEAST_READ]
    assert readings(3, 0, 3) == [3]
    assert readings(8, 380, 400) == [400, 200, 100, 8], "from scratch, or only the lag"
    assert readings(8, 250, 400) == [400, 200, 8], "a quarter is less than it has"


def test_hits_in_hindsight_outweigh_the_earlier_rate() -> None:
    every, none = [True] * HINDSIGHT, [False] * HINDSIGHT
    assert rate_in_hindsight(every, 1.0, 0.5) > 0.85
    assert rate_in_hindsight(none, 1.0, 0.75) < 0.2
    assert rate_in_hindsight([], 1.0, 0.75) == 0.75
    assert rate_in_hindsight([True, False] * 7, 0.6, 0.75) > 0.75, "it had read little"
    assert rate_in_hindsight(every, 0.5, 1.0) == 1.0


@pytest.mark.parametrize(
    ("right", "translated", "places", "off"),
    [
        (5, True, PLACES_JUDGED, True),
        (5, True, PLACES_JUDGED - 1, False),
        (12, True, PLACES_JUDGED, False),
        (5, False, PLACES_JUDGED, False),
    ],
    ids=["few of enough places", "few of too few places", "a share worth its price", "the target's vocabulary"],
)
def test_a_translated_drafter_that_does_not_know_the_text_is_off_for_the_answer(
    right: int, translated: bool, places: int, off: bool
) -> None:
    assert right / PLACES_JUDGED < LEAST_RIGHT
    known = replace(believed(NATIVE), translated=frozenset({"model"} if translated else ()))
    control = DepthControl(known, NATIVE.depth_cap)

    def begun() -> AnswerPolicy:
        answer = control.answer(prompt_tokens=100)
        answer.began(10.0, NATIVE.forward_s(1, 100))
        return answer

    answer = begun()
    hits = [True] * right + [False] * (places - right)
    answer.learn_hindsight("model", hits[:HINDSIGHT])
    answer.learn("model", (), hits[HINDSIGHT:])
    why = answer.why_off("model")
    assert (why is not None and why.text.endswith("too few to pay: off until the next")) is off
    if off:
        assert f"guessed {right} of {places} tokens" in str(why)
        assert answer.allow("model") == OFF
        assert not answer.buys_load("model")
    again = begun().why_off("model")
    assert again is None or "until the next" not in again.text
