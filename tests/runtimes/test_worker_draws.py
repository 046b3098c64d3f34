"""Draws that cross to a worker process: unchanged, and refused if impossible."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgespec.errors import WorkerLostError
from edgespec.interfaces.drawing import Drawn, DrawRequest, Measure
from edgespec.runtimes.process.draws import describe_drawn, describe_request, read_drawn, read_request
from edgespec.runtimes.process.frames import Frame, ids_bytes
from tests.support.score_rows import by_numpy, score_rows

ASKED = DrawRequest(
    key=(1, 2, 3, 4),
    wanted=3,
    measure=Measure.ENTROPY,
    seen={5: 2},
    repeat_penalty=1.1,
    bias=((3, 0.5), (4, -math.inf)),
)
DRAWN = Drawn((7, 2, 9), (0.5, 0.3, 0.2), 1.25)


def crossed(described: tuple[dict[str, Any], bytes]) -> Frame:
    header, body = described
    return Frame(json.loads(json.dumps(header, allow_nan=False)), bytearray(body))


def changed(described: tuple[dict[str, Any], bytes], change: Mapping[str, Any], body: bytes | None) -> Frame:
    header, own = described
    return crossed(({**header, **change}, own if body is None else body))


def test_a_draw_request_survives_the_pipe_unchanged() -> None:
    for row in score_rows(21, 300):
        seen = {token: count for token, count in row.request.seen.items() if token >= 0}
        request = replace(row.request, seen=seen)
        assert read_request(crossed(describe_request(request))) == request


def test_numpy_numbers_in_a_draw_request_can_cross_the_pipe() -> None:
    request = replace(ASKED, temperature=np.float32(0.7), top_k=np.int64(4), wanted=np.int64(3))  # type: ignore[arg-type]
    found = read_request(crossed(describe_request(request)))
    assert (found.temperature, found.top_k, found.wanted) == (float(np.float32(0.7)), 4, 3)
    assert found.scale == request.scale


def test_a_draw_result_survives_the_pipe_unchanged() -> None:
    compared = 0
    for row in score_rows(22, 300):
        drawn = by_numpy(row)
        if drawn is not None:
            compared += 1
            highest = max(drawn.tokens) + 1
            assert read_drawn(crossed(describe_drawn(drawn)), row.request, highest) == drawn
    assert compared > 200


NUMBERS = describe_request(ASKED)[0]["request"]


@pytest.mark.parametrize(
    ("change", "body"),
    [
        ({"request": None}, None),
        ({"request": {}}, None),
        ({"request": {**NUMBERS, "top_k": 1.0}}, None),
        ({"request": {**NUMBERS, "wanted": True}}, None),
        ({"request": {**NUMBERS, "measure": 3}}, None),
        ({"request": {**NUMBERS, "more": 1}}, None),
        ({"bias": None}, None),
        ({"bias": [[1]]}, None),
        ({"bias": [[1, "2"]]}, None),
        ({"bias": [[1.0, 2.0]]}, None),
        ({"bias": [[-1, 2.0]]}, None),
        ({"bias": [[2**31, 2.0]]}, None),
        ({"bias": [[1, 2.0], [1, 3.0]]}, None),
        ({"key": 5}, None),
        ({"key": [1, 2, 3]}, None),
        ({"key": [1, 2, 3, 2**32]}, None),
        ({"key": [1, 2, 3, -1]}, None),
        ({}, ids_bytes(np.array([5, 2, 1]))),
        ({}, b"123"),
    ],
)
def test_an_invalid_draw_request_is_refused(change: dict[str, Any], body: bytes | None) -> None:
    assert read_request(crossed(describe_request(ASKED))) == ASKED
    with pytest.raises(WorkerLostError):
        read_request(changed(describe_request(ASKED), change, body))


@pytest.mark.parametrize(
    ("change", "body"),
    [
        ({"odds": None}, None),
        ({"odds": [0.5, 0.5]}, None),
        ({"odds": [0.5, 0.5, "0"]}, None),
        ({"odds": [0.5, 0.5, 0]}, None),
        ({"entropy": None}, None),
        ({"entropy": 1}, None),
        ({}, ids_bytes(np.array([], dtype=np.int64))),
        ({}, ids_bytes(np.array([1, 2, 3, 4]))),
        ({}, ids_bytes(np.array([1, 2, 10]))),
        ({}, ids_bytes(np.array([1, 2, -1]))),
    ],
)
def test_an_impossible_draw_result_is_refused(change: dict[str, Any], body: bytes | None) -> None:
    assert read_drawn(crossed(describe_drawn(DRAWN)), ASKED, 10) == DRAWN
    with pytest.raises(WorkerLostError):
        read_drawn(changed(describe_drawn(DRAWN), change, body), ASKED, 10)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_draw_with_odds_or_entropy_that_are_not_finite_is_refused(bad: float) -> None:
    header, body = describe_drawn(DRAWN)
    for change in ({"odds": [bad, 0.3, 0.2]}, {"entropy": bad}):
        with pytest.raises(WorkerLostError):
            read_drawn(Frame({**header, **change}, bytearray(body)), ASKED, 10)
    with pytest.raises(WorkerLostError):
        read_drawn(Frame(header, bytearray(body)), replace(ASKED, measure=Measure.MASS), 10)
