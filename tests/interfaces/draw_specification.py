"""How a token is drawn from a row of scores: the whole rule, one number at a time.

``interfaces/drawing.py`` computes the rule with numpy and ``kernels/row_draw.h`` with vectors; tests compare both to
this specification. ``f32`` rounds to float32: the float64 sum, difference or product of two float32, rounded so,
equals the float32 operation (Figueroa, 1995).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from edgespec.interfaces.drawing import ARTANH, LOG_2, POWER_OF_TWO, Drawn, DrawRequest, Measure, NoiseKey

_WORD = 2**32 - 1
_FLOAT = struct.Struct("f")


def f32(value: float) -> float:
    """The nearest float32, infinite if ``value`` is too large."""
    try:
        number: float = _FLOAT.unpack(_FLOAT.pack(value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return number


def specified(scores: Sequence[float], request: DrawRequest, ids: Sequence[int] | None = None) -> Drawn | None:
    """The draw from float32 ``scores``; None if a score is NaN or the highest is infinite, or none is allowed."""
    ids = range(len(scores)) if ids is None else ids
    if request.mask is not None:
        bits = {
            32 * word + bit for word, own in enumerate(request.mask.tolist()) for bit in range(32) if own >> bit & 1
        }
        kept_places = [place for place, i in enumerate(ids) if i in bits]
        scores, ids = [scores[place] for place in kept_places], [ids[place] for place in kept_places]
        if not ids:
            return None
    bias = dict(request.bias)
    biased = [f32(score + bias[i]) if i in bias else score for score, i in zip(scores, ids, strict=True)]
    own = [penalised(score, request.seen.get(i), request) for score, i in zip(biased, ids, strict=True)]
    best = max(own)
    if any(math.isnan(score) for score in own) or math.isinf(best):
        return None
    y = [f32(f32(score - best) * f32(request.scale)) for score in own]
    weights = [weight(exponent) for exponent in y]
    kept = ranked = sorted(range(len(own)), key=lambda place: (-own[place], ids[place]))
    if request.key is not None:
        kept = truncated(ranked, weights, request)
        arrival = {place: time(request.key, ids[place]) / weights[place] for place in kept}
        first = sorted(kept, key=lambda place: (arrival[place], ids[place]))[: request.wanted]
        values = [arrival[place] for place in first]
    else:
        first = [place for place in ranked if own[place] > -math.inf][: request.wanted]
        values = [weights[place] for place in first]
    asked = request.measure > Measure.NOTHING
    mass = sum(units(weights[place]) for place in kept) if asked else 0
    spread = sum(round(units(weights[place]) * y[place]) for place in kept if weights[place]) if asked else 0
    return Drawn.of([ids[place] for place in first], values, request, float(mass), float(spread))


def penalised(score: float, occurrences: int | None, request: DrawRequest) -> float:
    """The score of a token that the answer has so often; None: a token that is not penalised."""
    if occurrences is None:
        return score
    score = score / request.repeat_penalty if score > 0 else score * request.repeat_penalty
    if occurrences:
        score = score - request.presence_penalty - request.frequency_penalty * occurrences
    return f32(score)


def truncated(ranked: Sequence[int], weights: Sequence[float], request: DrawRequest) -> list[int]:
    """The places that truncation keeps, best first."""
    kept = [place for place in ranked[: request.top_k or None] if weights[place] > 0]
    if request.top_p < 1:
        wanted, running, count = request.top_p * sum(units(weights[place]) for place in kept), 0, 0
        while running < wanted:
            running += units(weights[kept[count]])
            count += 1
        kept = kept[:count]
    return [place for place in kept if weights[place] >= request.min_p]


def weight(y: float) -> float:
    """2^y, and 0 below 2^-40."""
    if y < -40:
        return 0.0
    n = round(y)  # to even, as everything here
    f, p = f32(y - n), POWER_OF_TWO[0].item()
    for coefficient in POWER_OF_TWO[1:]:
        p = f32(f32(p * f) + coefficient.item())
    return math.ldexp(p, n)


def units(own: float) -> int:
    """A weight in the units of sums."""
    return round(math.ldexp(own, 32))


def noise(x: int, first: int, second: int) -> int:
    """32 bits of a token id."""
    x = (x + first) & _WORD
    x = ((x ^ x >> 17) * 0xED5AD4BB + second) & _WORD
    x = (x ^ x >> 11) * 0xAC4C1B51 & _WORD
    x = (x ^ x >> 15) * 0x31848BAB & _WORD
    return x ^ x >> 14


def time(key: NoiseKey, token: int) -> float:
    """-log(1 - v) of a number v in (0, 1) of 52 bits: the arrival time of a token of weight 1."""
    v = ((noise(token, *key[:2]) << 20) + (noise(token, *key[2:]) >> 12) + 0.5) / 2**52
    if v < 0.25:
        twos, f = 0.0, v / (2 - v)
    else:
        z, exponent = math.frexp(1 - v)
        if z < math.sqrt(0.5):
            z, exponent = 2 * z, exponent - 1
        twos, f = -exponent * LOG_2, (1 - z) / (1 + z)
    square, series = f * f, ARTANH[0]
    for coefficient in ARTANH[1:]:
        series = series * square + coefficient
    return twos + series * f
