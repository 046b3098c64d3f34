"""Rows of scores and sampling requests of every kind, on which draws are compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import NoneAllowedError, NonFiniteLogitsError
from edgespec.interfaces.drawing import MOST_DRAWN, Drawn, DrawRequest, Measure, draw_from, noise_key
from edgespec.runtimes.native.draws import NativeDraws
from tests.interfaces.draw_specification import specified

SHAPES = (
    "flat",
    "text",
    "peaky",
    "tied",
    "two",
    "infinities",
    "wide",
    "equal",
    "alone",
    "steps",
    "neighbours",
    "subnormal",
    "extreme",
    "spoilt",
)
ALMOST = 1 - 2.0**-53
LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """A row and its sampling request. ``ids`` are those of the scores, None for all in order."""

    scores: NDArray[np.float32]
    request: DrawRequest
    ids: NDArray[np.int64] | None


def shaped(draw: np.random.Generator, shape: str, count: int) -> NDArray[np.float32]:
    """``count`` scores of a shape."""
    scores = draw.standard_normal(count, dtype=np.float32)
    if shape == "flat":
        scores *= np.float32(0.1)
    if shape == "text":  # like those of a model of 150 000 tokens
        scores *= np.float32(3.0)
        scores[draw.integers(0, count, 5)] += np.float32(12.0)
    if shape == "peaky":
        scores *= np.float32(2.0)
        scores[draw.integers(0, count)] += np.float32(25.0)
    if shape == "tied":
        scores = np.round(scores * np.float32(2.0))
    if shape == "two":
        scores *= np.float32(1e-3)
        scores[draw.integers(0, count, 2)] = np.float32(9.0)
    if shape == "infinities":
        scores[draw.random(count) < 0.6] = -np.inf
        scores[draw.integers(0, count)] = np.float32(1.0)
    if shape == "wide":
        scores *= np.float32(10.0) ** draw.integers(-3, 5, count).astype(np.float32)
    if shape == "equal":
        scores[:] = scores[0]
    if shape == "alone":
        scores[:] = -np.inf
        scores[draw.integers(0, count)] = draw.standard_normal() * 1e3
    if shape == "steps":  # about eighths of an exponent, at temperature 1
        scores = np.float32(np.log(2) / 8) * draw.integers(-400, 1, count).astype(np.float32)
        scores = np.nextafter(scores, np.float32(1e9) * draw.integers(-1, 2, count).astype(np.float32))
    if shape == "neighbours":  # values that differ in the last bit or two
        scores[:] = np.abs(scores[0]) + np.float32(1.0)
        scores.view(np.int32)[...] += draw.integers(0, 4, count).astype(np.int32)
        scores *= draw.choice(np.array([-1.0, 1.0], dtype=np.float32))
    if shape == "subnormal":
        scores = (draw.integers(-9, 10, count) * 2.0**-149).astype(np.float32)
    if shape == "extreme":
        few = np.array([LARGEST, -LARGEST, -np.inf, 0.0, -0.0, 1e-38, -60.0, 1e30], dtype=np.float32)
        scores = draw.choice(few, size=count)
        scores[draw.integers(0, count)] = draw.choice(np.array([LARGEST, 0.0, -LARGEST], dtype=np.float32))
    if shape == "spoilt":
        scores[draw.integers(0, count, 2)] = draw.choice(np.array([np.nan, np.inf, -np.inf], dtype=np.float32))
    return scores


def requested(draw: np.random.Generator, ids: NDArray[np.int64] | None, count: int) -> DrawRequest:
    """A random sampling request for ``count`` scores."""

    def one_of(*values: float) -> float:
        return values[int(draw.integers(len(values)))]

    seed, position = int(draw.integers(2**63)), int(draw.integers(10**5))
    request = DrawRequest(
        key=noise_key(seed, position, int(draw.integers(4))) if draw.random() < 0.9 else None,
        temperature=one_of(0.7, 1.0, 1.0, 0.2, 1.5, 30.0, 100.0, 1e-4, 1e-6, 5e-324, float(draw.uniform(0.3, 2.0))),
        top_k=int(one_of(0, 0, 1, 2, 5, 40, 200, count, count + 3)),
        top_p=one_of(1.0, 1.0, 1.0, 0.95, 0.9, 0.5, 1e-9, 5e-324, 0.9999999, ALMOST, float(draw.uniform(0.01, 1.0))),
        min_p=one_of(0.0, 0.0, 0.0, 0.05, 0.3, 1.0, ALMOST, 0.125, 2.0**-40, 1e-6, 1e-30, 5e-324),
        wanted=int(one_of(1, 1, 1, 2, 4, MOST_DRAWN)),
        measure=Measure(int(draw.integers(3))),
    )
    among = np.arange(count + 2) if ids is None else np.unique(np.append(ids, [0, ids[-1] + 1]))
    if draw.random() < 0.2:
        named = draw.choice(among, size=min(len(among), int(draw.integers(1, 6))), replace=False).tolist()
        biases = [one_of(-math.inf, -100.0, 100.0, 0.3, -1e-9, 5.0) for _ in named]
        request = replace(request, bias=tuple(zip(named, biases, strict=True)))
    if draw.random() < 0.3:
        request = replace(request, mask=masked(draw, int(among[-1]) + 1))
    if draw.random() < 0.7:
        return request
    seen = Counter(draw.choice(among, size=int(draw.integers(1, 12))).tolist())
    return replace(
        request,
        seen={token: count - 1 for token, count in seen.items()},  # some are in the prompt alone
        repeat_penalty=one_of(1.0, 1.1, 0.5, 10.0, 5e-324),
        presence_penalty=one_of(0.0, 0.7, -1.3),
        frequency_penalty=one_of(0.0, 0.1, -0.2),
    )


def masked(draw: np.random.Generator, tokens: int) -> NDArray[np.uint32]:
    """A mask for a number of ``tokens`` that allows none, one, few or most, and may be too short or too long."""
    words = max(0, (tokens + 31) // 32 + int(draw.integers(-1, 2)))
    share = (0.0, 0.01, 0.1, 0.5, 0.95, 1.0)[int(draw.integers(6))]
    bits = draw.random(32 * words) < share
    if words and draw.random() < 0.5:
        bits[draw.integers(0, 32 * words)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def score_rows(seed: int, number: int, longest: int = 80, count: int | None = None) -> Iterator[ScoreRow]:
    """``number`` rows, of ``count`` scores or of 1 to ``longest``."""
    draw = np.random.default_rng(seed)
    for _ in range(number):
        own = int(draw.integers(1, longest + 1)) if count is None else count
        ids = None
        if draw.random() < 0.3:
            ids = np.sort(draw.choice(4 * own, size=own, replace=False)).astype(np.int64)
        scores = shaped(draw, SHAPES[int(draw.integers(len(SHAPES)))], own)
        yield ScoreRow(scores=scores, request=requested(draw, ids, own), ids=ids)


def or_nothing(draw: Callable[[], Drawn]) -> Drawn | None:
    """The drawn token of the specification; None if a score is not finite or no token is allowed."""
    try:
        return draw()
    except (NonFiniteLogitsError, NoneAllowedError):
        return None


def by_numpy(row: ScoreRow) -> Drawn | None:
    return or_nothing(lambda: draw_from(row.scores, row.request, row.ids))


def by_specification(row: ScoreRow) -> Drawn | None:
    return specified(row.scores.tolist(), row.request, None if row.ids is None else row.ids.tolist())


def by_kernels(draws: NativeDraws, row: ScoreRow) -> Drawn | None:
    return or_nothing(lambda: natively(draws, row))


def natively(draws: NativeDraws, row: ScoreRow) -> Drawn:
    """The kernels' draw, which must leave the scores unchanged."""
    before = row.scores.tobytes()
    try:
        return draws.draw(row.scores.ctypes.data, len(row.scores), row.request, row.ids)
    finally:
        assert row.scores.tobytes() == before
