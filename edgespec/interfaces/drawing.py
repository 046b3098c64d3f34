"""From scores to a token: penalties, truncation, and a draw by keyed noise.

The result of every operation is independent of order and library, so that the kernels, numpy and the scalar
specification in the tests give the same token. Weights are float32 powers of two, elementwise. Sums are of
weights rounded to multiples of 2^-32, which float64 adds exactly. Weights below 2^-40 of the highest one are never
drawn: in a vocabulary of 150 000 they have less than 2 x 10^-7 of the mass together.

Noise is a pure function of a key and a token id. Each token arrives after an exponentially distributed time, at
the rate of its weight; the first token to arrive is drawn. That is the Gumbel-max trick: minus the logarithm of the
time is the logarithm of the weight plus Gumbel noise. A time has 52 random bits, so that even the smallest weight is
drawn with its probability, to one part in 4096; with 32 bits it would be never, or 256 times too often.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import NoneAllowedError, NonFiniteLogitsError

FloatArray = NDArray[np.float64]
LogitsArray = NDArray[np.float32]
IdArray = NDArray[np.int64]
UintArray = NDArray[np.uint32]
NoiseKey = tuple[int, int, int, int]

MOST_DRAWN = 8  # ES_MOST_DRAWN of the kernels
LOG_2 = 0.6931471805599453  # written out: libraries may differ in the last bit
UNIT = 2.0**-32  # sums are of multiples of it; exact for up to 2^21 tokens
LEAST_EXPONENT = np.float32(-40.0)

_LARGEST_SCALE = 2.0**60  # for a temperature near 0; differences of scores times this stay above -infinity
_LEAST_FINITE = np.float32(-60.0)  # replaces -infinity: the weight of this exponent rounds to 0
_ROUNDER = np.float32(1.5 * 2.0**23)  # adding it to a float32 leaves an integer in the last bits
# 2^f for f in -0.5 .. 0.5, from the highest power down: the Cephes library's exp2f (Moshier, 1989).
POWER_OF_TWO = tuple(
    np.float32(own)
    for own in (
        1.535336188319500e-4,
        1.339887440266574e-3,
        9.618437357674640e-3,
        5.550332471162809e-2,
        2.402264791363012e-1,
        6.931472028550421e-1,
        1.0,
    )
)


class Seen(Mapping[int, int]):
    """Number of occurrences of each token. ``arrays``: the distinct tokens and their counts, of one length."""

    def __init__(self, tokens: IdArray, occurrences: IdArray) -> None:
        self.arrays = tokens, occurrences

    @classmethod
    def of(cls, seen: Mapping[int, int]) -> Seen:
        if isinstance(seen, Seen):
            return seen
        tokens = np.fromiter(seen.keys(), dtype=np.int64, count=len(seen))
        return cls(tokens, np.fromiter(seen.values(), dtype=np.int64, count=len(seen)))

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __iter__(self) -> Iterator[int]:
        return iter(self.arrays[0].tolist())

    def __getitem__(self, token: int) -> int:
        tokens, occurrences = self.arrays
        for index in np.flatnonzero(tokens == token):
            return int(occurrences[index])
        raise KeyError(token)


class Measure(IntEnum):
    """What is summed over the distribution while drawing from it."""

    NOTHING = 0
    MASS = 1  # so that odds without noise are probabilities
    ENTROPY = 2  # and the mass


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRequest:
    """How a token is drawn from a row of scores.

    ``bias`` has distinct tokens, and what is added to the score of each: -infinity bans a token. Next, ``seen`` has
    the tokens that are penalised and how often each is in the answer: ``repeat_penalty`` is for all of them,
    ``presence_penalty`` and ``frequency_penalty`` for those of the answer. ``mask`` then leaves the allowed tokens:
    bit i % 32 of word i // 32 is that of token i, tokens behind its end are not allowed; None: all are. Scores are
    then divided by ``temperature``, and cut to the ``top_k`` best (0: all), to the smallest set of the best that
    holds ``top_p`` of the mass, and to weights of at least ``min_p`` times the highest. Noise of ``key`` draws the
    token. Without a key the best score is taken without truncation, and ``temperature`` only affects odds and
    entropy. ``wanted`` is the number of tokens to return, at most MOST_DRAWN.
    """

    key: NoiseKey | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seen: Mapping[int, int] = field(default_factory=dict)
    bias: tuple[tuple[int, float], ...] = ()
    mask: UintArray | None = field(default=None, compare=False)
    wanted: int = 1
    measure: Measure = Measure.NOTHING

    @property
    def scale(self) -> float:
        """Float32 factor that turns differences of scores into logarithms to base 2."""
        return float(np.float32(min(1 / LOG_2 / self.temperature, _LARGEST_SCALE)))


@dataclass(frozen=True, slots=True)
class Drawn:
    """The result of a draw: ``tokens[0]`` is the token, ``tokens[1]`` the next choice without it, and so on.

    ``odds`` without noise: the tokens' probabilities, or their weights if nothing is measured. With noise: the
    softmax over these tokens of score plus Gumbel noise times the temperature. A model with the same noise, whose
    scores differ by independent Gumbel noise, draws each token with these odds (the Gumbel-max trick again).
    ``entropy`` is that of the truncated distribution, in nats; None if not asked for.
    """

    tokens: tuple[int, ...]
    odds: tuple[float, ...]
    entropy: float | None = None

    @classmethod
    def of(cls, tokens: list[int], values: list[float], request: DrawRequest, mass: float, spread: float) -> Drawn:
        """``values`` are times of arrival, or weights without noise; ``mass`` and ``spread`` are sums in units."""
        if request.key is None:
            odds = [value / (mass * UNIT) for value in values] if mass else values
        else:
            rates = [(values[0] / value) ** request.temperature for value in values]
            total = math.fsum(rates)
            odds = [rate / total for rate in rates]
        entropy = None
        if request.measure >= Measure.ENTROPY:
            entropy = math.log(mass * UNIT) - LOG_2 * (spread / mass)
        return cls(tuple(tokens), tuple(odds), entropy)


def draw_from(scores: LogitsArray, request: DrawRequest, ids: IdArray | None = None) -> Drawn:
    """Draw with numpy. ``ids`` are the tokens of the scores, ascending; None: 0, 1, 2, ...

    Raises NonFiniteLogitsError if a score is NaN or the highest infinite, and NoneAllowedError.
    """
    scores, ids = within_mask(penalised(scores, request, ids), request, ids)
    if request.key is None:
        return _best_from(scores, request, ids)
    columns, weights, exponents = truncated(scores, request, ids)
    mass, spread = _measured(weights, exponents, request.measure)
    own = columns if ids is None else ids[columns]
    tokens, times = first_to_arrive(own, weights.astype(np.float64), request.key, request.wanted)
    return Drawn.of(tokens, times, request, mass, spread)


def _best_from(scores: LogitsArray, request: DrawRequest, ids: IdArray | None) -> Drawn:
    best = _best_finite(scores, request, ids)
    exponents = _exponents(scores, scores[best], request)
    columns = np.array([best])
    if request.wanted > 1:
        columns = _ranked(scores, request.wanted)
    weights = np.where(exponents[columns] < LEAST_EXPONENT, 0.0, weights_of(exponents[columns]))
    mass = spread = 0.0
    if request.measure:
        live = exponents[exponents >= LEAST_EXPONENT]
        mass, spread = _measured(weights_of(live), live, request.measure)
    tokens = columns if ids is None else ids[columns]
    return Drawn.of(tokens.tolist(), weights.tolist(), request, mass, spread)


# ------------------------------------------------------------------------------------------------- weights


def penalised(scores: LogitsArray, request: DrawRequest, ids: IdArray | None = None) -> LogitsArray:
    """The scores with bias and with the penalties of tokens seen; a copy if there are any."""
    if request.bias:
        scores = np.array(scores, dtype=np.float32)
        add_bias(scores, request, ids)
    if not request.seen:
        return scores
    columns, occurrences = seen_columns(request.seen, len(scores), ids)
    scores = np.array(scores, dtype=np.float32)
    own = scores[columns].astype(np.float64)
    with np.errstate(over="ignore"):
        own = np.where(own > 0, own / request.repeat_penalty, own * request.repeat_penalty)
        answered = own - request.presence_penalty - request.frequency_penalty * occurrences.astype(np.float64)
        own = np.where(occurrences > 0, answered, own)
        scores[columns] = own.astype(np.float32)
    return scores


def within_mask(
    scores: LogitsArray, request: DrawRequest, ids: IdArray | None = None
) -> tuple[LogitsArray, IdArray | None]:
    """The scores of the tokens that the mask allows, and these tokens. Raises NoneAllowedError."""
    if request.mask is None:
        return scores, ids
    tokens = np.arange(len(scores)) if ids is None else ids
    kept = np.flatnonzero(are_allowed(request.mask, tokens))
    if not len(kept):
        raise none_allowed()
    return scores[kept], tokens[kept]


def are_allowed(mask: UintArray, tokens: IdArray) -> NDArray[np.bool_]:
    """Whether the mask allows each of the tokens: of their shape."""
    words = tokens >> 5
    inside = words < len(mask)
    bits = (
        mask[np.where(inside, words, 0)] >> (tokens & 31).astype(np.uint32) if len(mask) else np.zeros(1, np.uint32)
    )
    found: NDArray[np.bool_] = inside & ((bits & 1) == 1)
    return found


def none_allowed() -> NoneAllowedError:
    """The error for a row without an allowed token."""
    return NoneAllowedError("the form of the answer allows none of the scored tokens")


def add_bias(scores: LogitsArray, request: DrawRequest, ids: IdArray | None) -> tuple[IdArray, LogitsArray]:
    """Add the bias to ``scores`` in place; returns the columns and what they held. As draw_from."""
    tokens = np.array([token for token, _ in request.bias], dtype=np.int64)
    values = np.array([value for _, value in request.bias])
    columns, inside = _columns(tokens, len(scores), ids)
    before = scores[columns]
    with np.errstate(invalid="ignore"):  # a banned infinity is a NaN, which no draw takes
        scores[columns] = (before.astype(np.float64) + values[inside]).astype(np.float32)
    return columns, before


def seen_columns(seen: Mapping[int, int], count: int, ids: IdArray | None) -> tuple[IdArray, IdArray]:
    """Columns, in a row of ``count`` scores, of the tokens in ``seen``, and their occurrences: int64, same length.

    ``ids``: the token of each column, ascending; None if columns are token ids. Tokens without a column are left out.
    """
    tokens, occurrences = Seen.of(seen).arrays
    columns, inside = _columns(tokens, count, ids)
    return columns, occurrences[inside]


def _columns(tokens: IdArray, count: int, ids: IdArray | None) -> tuple[IdArray, NDArray[np.bool_]]:
    """The columns of the tokens that have one, and which of the tokens these are."""
    if ids is None:
        inside = (tokens >= 0) & (tokens < count)
        return tokens[inside], inside
    columns = np.minimum(np.searchsorted(ids, tokens), count - 1)
    inside = ids[columns] == tokens
    return columns[inside], inside


def _best_finite(scores: LogitsArray, request: DrawRequest, ids: IdArray | None) -> int:
    best = int(np.argmax(scores))  # numpy counts NaN as the maximum
    if not np.isfinite(scores[best]):
        raise not_finite(scores[best], best if ids is None else int(ids[best]), request)
    return best


def not_finite(score: float, token: int, request: DrawRequest) -> NonFiniteLogitsError | NoneAllowedError:
    """The error for a row with this score: NaN, or the highest one. All tokens that a mask allows may be banned."""
    if request.mask is not None and score == -math.inf:
        return none_allowed()
    return NonFiniteLogitsError(f"the logits hold {score} at token id {token}")


def _exponents(scores: LogitsArray, best: np.float32, request: DrawRequest) -> LogitsArray:
    """Base-2 logarithms of the weights, float32."""
    with np.errstate(over="ignore"):
        exponents: LogitsArray = (scores - best) * np.float32(request.scale)
    return exponents


def weights_of(exponents: LogitsArray) -> LogitsArray:
    """2^exponent for exponents of at most 0, within 2 units in the last place; 1 exactly for 0: float32."""
    y = np.maximum(exponents, _LEAST_FINITE)
    shifted = y + _ROUNDER
    y -= shifted - _ROUNDER
    weights: LogitsArray = np.full_like(y, POWER_OF_TWO[0])
    for coefficient in POWER_OF_TWO[1:]:
        weights *= y
        weights += coefficient
    weights.view(np.int32)[...] += shifted.view(np.int32) << 23
    return weights


def _units(weights: LogitsArray) -> FloatArray:
    units: FloatArray = np.rint(weights.astype(np.float64) / UNIT)
    return units


def _measured(weights: LogitsArray, exponents: LogitsArray, measure: Measure) -> tuple[float, float]:
    """Sums of the weights, and of their products with their exponents, in units."""
    if measure < Measure.MASS:
        return 0.0, 0.0
    units = _units(weights)
    spread = float(np.rint(units * exponents.astype(np.float64)).sum()) if measure >= Measure.ENTROPY else 0.0
    return float(units.sum()), spread


# ---------------------------------------------------------------------------------------------- truncation


def truncated(
    scores: LogitsArray, request: DrawRequest, ids: IdArray | None = None
) -> tuple[IdArray, LogitsArray, LogitsArray]:
    """Truncate penalised scores: the kept columns, ascending, their weights and exponents. ``ids`` as in draw_from.

    Raises NonFiniteLogitsError if a score is NaN or the highest infinite.
    """
    exponents = _exponents(scores, scores[_best_finite(scores, request, ids)], request)
    columns = np.flatnonzero(exponents >= LEAST_EXPONENT)
    if 0 < request.top_k < len(columns):
        columns = np.sort(columns[_ranked(scores[columns], request.top_k)])
    exponents = exponents[columns]
    weights = weights_of(exponents)
    if request.top_p < 1:
        kept = _nucleus(scores[columns], weights, request.top_p)
        columns, weights, exponents = columns[kept], weights[kept], exponents[kept]
    if request.min_p > 0:
        likely = weights.astype(np.float64) >= request.min_p
        columns, weights, exponents = columns[likely], weights[likely], exponents[likely]
    return columns, weights, exponents


def _ranked(scores: LogitsArray, count: int) -> IdArray:
    """Columns of the ``count`` highest scores above -infinity, best first; ties go to the lowest column."""
    if count <= MOST_DRAWN:  # one argmax each: 1/8 of a partition's time at 150 000 scores
        left, best = scores.copy(), list[int]()
        while len(best) < count and left[index := int(np.argmax(left))] > -np.inf:
            best.append(index)
            left[index] = -np.inf
        return np.array(best, dtype=np.int64)
    return highest(scores, count)


def highest(scores: FloatArray | LogitsArray, count: int) -> IdArray:
    """Columns of the ``count`` highest scores, at most of all, best first; ties go to the lowest column."""
    if count < len(scores):
        # All at the border, so that ties there are decided by column, not by chance.
        border = np.partition(scores, len(scores) - count)[len(scores) - count]
        columns = np.flatnonzero(scores >= border)
    else:
        columns = np.arange(len(scores))
    order: IdArray = columns[np.argsort(-scores[columns], kind="stable")][:count]
    return order


# Candidates sorted first when cutting to top_p. A nucleus of 0.95 has a few hundred tokens with the models tried;
# sorting a vocabulary of 150 000 takes about 10 ms a token.
_NUCLEUS_GUESS = 1024


def _nucleus(scores: LogitsArray, weights: LogitsArray, top_p: float) -> IdArray:
    """Columns, ascending, of the smallest set of highest scores that holds ``top_p`` of the mass."""
    wanted = top_p * float(_units(weights).sum())
    for count in (_NUCLEUS_GUESS, len(scores)):
        order = _ranked(scores, count)
        running = np.cumsum(_units(weights[order]))
        if running[-1] >= wanted:
            break
    return np.sort(order[: int(np.searchsorted(running, wanted)) + 1])


# --------------------------------------------------------------------------------------------------- noise

_WORD = 2**64 - 1
# SplitMix64 (Steele, Lea, Flood, 2014): the increment and the two multipliers of its finaliser.
INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _mix(state: int) -> int:
    state = (state ^ (state >> 30)) * _MULTIPLIERS[0] & _WORD
    state = (state ^ (state >> 27)) * _MULTIPLIERS[1] & _WORD
    return state ^ (state >> 31)


def noise_key(seed: int, position: int, purpose: int) -> NoiseKey:
    """The key of one position's noise for one purpose: four numbers of 32 bits."""
    state = seed
    for part in (position, purpose):
        state = _mix((state + INCREMENT + part * _MULTIPLIERS[1]) & _WORD)
    high, low = _mix((state + INCREMENT) & _WORD), _mix((state + 2 * INCREMENT) & _WORD)
    return high & 0xFFFFFFFF, high >> 32, low & 0xFFFFFFFF, low >> 32


def noise_bits(ids: UintArray, first: int, second: int) -> UintArray:
    """32 bits per id, a bijection of ids for each key: Wellons's triple32, with the key added before two rounds."""
    x = ids + np.uint32(first)
    x ^= x >> np.uint32(17)
    x *= np.uint32(0xED5AD4BB)
    x += np.uint32(second)
    x ^= x >> np.uint32(11)
    x *= np.uint32(0xAC4C1B51)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x31848BAB)
    x ^= x >> np.uint32(14)
    return x


def uniforms(key: NoiseKey, ids: IdArray) -> FloatArray:
    """One number in (0, 1) per id, of 52 bits: float64, the shape of ``ids``."""
    own = ids.astype(np.uint32)
    low = (noise_bits(own, key[2], key[3]) >> np.uint32(12)).astype(np.float64)
    high = noise_bits(own, key[0], key[1]).astype(np.float64)
    numbers: FloatArray = (high * 2.0**20 + low + 0.5) * 2.0**-52
    return numbers


# The series of 2 artanh(f) / f in squares of f, from the highest power down.
ARTANH = (2 / 15, 2 / 13, 2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0)


def exponentials(numbers: FloatArray) -> FloatArray:
    """-log(1 - number) within a relative 2^-40: float64, exponentially distributed where the numbers are uniform.

    With 1 - number = z * 2^e it is 2 artanh((1 - z) / (1 + z)) - e log 2.
    """
    z, e = np.frexp(1.0 - numbers)
    below = z < math.sqrt(0.5)
    z, e = np.where(below, z * 2.0, z), np.where(below, e - 1, e)
    near = numbers < 0.25  # there 1 - number has lost bits of the number
    f = np.where(near, numbers / (2.0 - numbers), (1.0 - z) / (1.0 + z))
    squares = f * f
    series = np.full_like(f, ARTANH[0])
    for coefficient in ARTANH[1:]:
        series *= squares
        series += coefficient
    times: FloatArray = np.where(near, 0.0, -e * LOG_2) + series * f
    return times


# A time is at least its noise's first 32 bits as a fraction, over the weight; this factor covers rounding.
_MARGIN = 1.0 + 2.0**-20
_FEW = 64  # up to this many ids, computing all times is as fast as filtering first


def first_to_arrive(ids: IdArray, weights: FloatArray, key: NoiseKey, wanted: int) -> tuple[list[int], list[float]]:
    """The first ``wanted`` ids to arrive, earliest first, ties by lowest id, and their times. ``ids`` ascend.

    Only ids whose noise can be early enough get a full computation.
    """
    wanted = min(wanted, len(ids))
    if len(ids) > _FEW:
        earliest = noise_bits(ids.astype(np.uint32), key[0], key[1]) * UNIT / weights
        likely = [int(np.argmin(earliest))] if wanted == 1 else np.argpartition(earliest, wanted)[:wanted]
        known = exponentials(uniforms(key, ids[likely])) / weights[likely]
        close = np.flatnonzero(earliest <= float(known.max()) * _MARGIN)
        ids, weights = ids[close], weights[close]
    times = exponentials(uniforms(key, ids)) / weights
    order = np.argsort(times, kind="stable")[:wanted]
    return ids[order].tolist(), times[order].tolist()
