"""numpy's draws from a row of scores against the specification; and the noise by itself."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest

from edgespec.decoding.sampling import Purpose
from edgespec.errors import NonFiniteLogitsError
from edgespec.interfaces import drawing as module
from edgespec.interfaces.drawing import (
    MOST_DRAWN,
    Drawn,
    DrawRequest,
    Measure,
    draw_from,
    exponentials,
    first_to_arrive,
    noise_bits,
    noise_key,
    seen_columns,
    uniforms,
    weights_of,
)
from tests.decoding.chi_square import chi_square, threshold
from tests.interfaces.draw_specification import specified, time, weight
from tests.support.score_rows import by_numpy, by_specification, score_rows, shaped

KEY = noise_key(3, 12345, Purpose.TOKEN)
IDS = np.arange(2000, dtype=np.int64)


# --------------------------------------------------------------------------------------- the specification


@pytest.mark.slow
def test_numpy_draws_equal_the_specification_to_the_bit() -> None:
    """8 000 rows of every kind: tokens, odds, peak and entropy to the bit."""
    asked = set[tuple[Measure, bool, bool, bool]]()
    for row in score_rows(1, 8_000, longest=30):
        drawn = by_numpy(row)
        assert drawn == by_specification(row), row
        if drawn is None:
            continue
        asked.add((row.request.measure, len(drawn.tokens) > 1, row.ids is None, row.request.key is None))
    assert len(asked) == 24


def test_numpy_draws_from_long_rows_equal_the_specification() -> None:
    """Rows so long that numpy computes few times fully, and sorts only 1024 candidates for top_p first."""
    for row in score_rows(2, 60, count=3000):
        assert by_numpy(row) == by_specification(row), row


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_numpy_and_specification_refuse_the_same_scores(spoilt: float) -> None:
    for row in score_rows(3, 40):
        scores = np.where(row.scores < np.inf, row.scores, np.float32(0))
        scores[len(scores) // 2] = spoilt
        assert specified(scores.tolist(), replace(row.request, seen={}, mask=None)) is None
        token = len(scores) // 2 if row.ids is None else row.ids[len(scores) // 2]
        with pytest.raises(NonFiniteLogitsError, match=f"hold {spoilt} at token id {token}"):
            draw_from(scores, replace(row.request, seen={}, mask=None), row.ids)
    nothing = np.full(4, -np.inf, dtype=np.float32)
    assert specified(nothing.tolist(), DrawRequest()) is None
    with pytest.raises(NonFiniteLogitsError):
        draw_from(nothing, DrawRequest(key=KEY))


def test_weights_are_powers_of_two_within_two_units_in_the_last_place() -> None:
    y = np.concatenate((-np.linspace(0, 40, 200_001), [-1e-9, -0.5, -1.5, -39.5])).astype(np.float32)
    weights = weights_of(y)
    assert np.abs(weights / np.exp2(y.astype(np.float64)) - 1).max() < 2.0**-22
    assert weights[0] == 1
    assert weights.max() == 1
    picked = range(0, len(y), 101)
    assert [weight(float(y[i])) for i in picked] == weights[picked].tolist()
    assert weights_of(np.array([-np.inf, -61.0], dtype=np.float32)).max() < 2.0**-59


def test_arrival_times_are_exponentially_distributed() -> None:
    numbers = np.concatenate(
        (2.0 ** -np.arange(1, 53.0), 1 - 2.0 ** -np.arange(1, 53.0), np.linspace(1e-6, 0.999999, 9999))
    )
    assert exponentials(numbers) == pytest.approx(-np.log1p(-numbers), rel=2.0**-40)
    assert (exponentials(numbers) >= numbers).all(), "the selection of candidates relies on this"


def test_a_default_draw_returns_the_best_token_without_measures() -> None:
    own = DrawRequest()
    assert (own.key, own.temperature, own.top_k, own.top_p, own.min_p) == (None, 1.0, 0, 1.0, 0.0)
    assert (own.repeat_penalty, own.presence_penalty, own.frequency_penalty, own.seen) == (1.0, 0.0, 0.0, {})
    assert (own.wanted, own.measure) == (1, Measure.NOTHING)
    assert draw_from(np.float32([1, 3, 3]), own) == Drawn((1,), (1.0,))
    drawn = Drawn((1,), (1.0,))
    assert drawn.entropy is None


def test_a_temperature_near_zero_draws_the_best_score() -> None:
    for temperature in (1e-300, 1e-30, 1e-6):
        request = DrawRequest(key=KEY, temperature=temperature, wanted=MOST_DRAWN, measure=Measure.ENTROPY)
        assert math.isfinite(request.scale)
        assert draw_from(np.float32([1, 2, -3e38, -np.inf]), request) == Drawn((1,), (1.0,), 0.0)


def test_seen_tokens_that_are_not_scored_have_no_column() -> None:
    seen = {3: 2, 5: 1, 9: 4, 77: 1, -1: 1}
    for ids, wanted in ((None, [[3, 5], [2, 1]]), (np.array([0, 5, 9, 11]), [[1, 2], [1, 4]])):
        columns, occurrences = seen_columns(seen, 6 if ids is None else 4, ids)
        assert [columns.tolist(), occurrences.tolist()] == wanted
    assert seen_columns({}, 6, None)[0].tolist() == []


# ------------------------------------------------------------------------------------------ measures and odds


def test_odds_and_entropy_equal_those_of_the_distribution() -> None:
    """The mathematical values; the exact numbers are compared with the specification."""
    for shape in ("flat", "text", "peaky", "tied"):
        scores = shaped(np.random.default_rng(5), shape, 500)
        for key in (None, KEY):
            drawn = draw_from(scores, DrawRequest(key=key, measure=Measure.ENTROPY, wanted=4, temperature=0.9))
            probs = np.exp((scores.astype(np.float64) - scores.max()) / 0.9)
            probs /= probs.sum()
            assert drawn.entropy == pytest.approx(
                -(probs * np.log(np.maximum(probs, 1e-300))).sum(), rel=1e-4, abs=1e-5
            )
            if key is None:
                assert drawn.odds == pytest.approx(probs[list(drawn.tokens)].tolist(), rel=1e-4)
            else:
                own = scores[list(drawn.tokens)] + 0.9 * gumbel(list(drawn.tokens))
                assert drawn.odds == pytest.approx((np.exp(own) / np.exp(own).sum()).tolist(), rel=1e-4)


def gumbel(tokens: list[int]) -> np.ndarray:
    """The noise of these tokens, under KEY."""
    return -np.log(exponentials(uniforms(KEY, np.array(tokens))))


# --------------------------------------------------------------------------------------------------- noise


def test_noise_is_a_pure_function_of_its_key() -> None:
    first = uniforms(KEY, IDS)
    assert first.tolist() == uniforms(KEY, IDS).tolist()
    picked = np.array([1500, 3, 3], dtype=np.int64)
    assert uniforms(KEY, picked).tolist() == first[picked].tolist(), "independent of the other ids"
    assert ((first > 0) & (first < 1)).all()
    assert exponentials(first[:3]).tolist() == [time(KEY, token) for token in range(3)]


def test_noise_has_known_values() -> None:
    """Changing the hash changes every seeded answer, so it must be deliberate."""
    assert noise_key(3, 12345, Purpose.ACCEPT) == KNOWN_KEY
    assert uniforms(noise_key(3, 12345, Purpose.ACCEPT), np.arange(3)) == pytest.approx(KNOWN_NUMBERS, abs=1e-8)


KNOWN_KEY = (147703183, 3489712508, 3722829994, 695250344)
KNOWN_NUMBERS = [0.74116856, 0.8264564, 0.43117908]


def test_noise_depends_on_seed_position_and_purpose() -> None:
    keys = [
        (seed, position, purpose)
        for seed in (0, 1, 2**64 - 1)
        for position in (0, 1, 2, 10**6)
        for purpose in Purpose
    ]
    streams = np.array([uniforms(noise_key(*key), IDS) for key in keys])
    assert len(np.unique(streams)) == streams.size, "no two numbers of any two streams coincide"
    # Independent streams of 2000 numbers correlate by about 1/sqrt(2000) = 0.022; five of those for 1128 pairs.
    correlations = np.corrcoef(streams) - np.eye(len(keys))
    assert np.abs(correlations).max() < 5 / math.sqrt(len(IDS))


CELLS = 16


def cells_of(numbers: np.ndarray) -> np.ndarray:
    return (numbers * CELLS).astype(np.int64)


@pytest.mark.slow
def test_noise_pairs_are_independent_along_ids_positions_seeds_and_purposes() -> None:
    """Chi-square of pairs in 16 x 16 cells, 40 000 to a million: along ids, positions, seeds and purposes.

    A false alarm in a million for each test. The correlation test alone would miss nonlinear dependence.
    """
    some = np.array([0, 1, 2, 3, 4, 8, 64, 1023, 1024, 32768, 151935], dtype=np.int64)
    positions = 40_000
    by_axis = {
        "positions": np.array([uniforms(noise_key(5, p, Purpose.TOKEN), some) for p in range(positions)]),
        "seeds": np.array([uniforms(noise_key(s, 5, Purpose.TOKEN), some) for s in range(positions)]),
        "purposes": np.array([uniforms(noise_key(5, p, Purpose.DRAFT), some) for p in range(positions)]),
    }
    pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {
        "neighbouring positions": (by_axis["positions"][1:], by_axis["positions"][:-1]),
        "neighbouring seeds": (by_axis["seeds"][1:], by_axis["seeds"][:-1]),
        "purposes": (by_axis["positions"], by_axis["purposes"]),
        "seeds and positions": (by_axis["positions"], by_axis["seeds"]),
    }
    for one, other in itertools.combinations(range(len(some)), 2):
        pairs[f"ids {some[one]} and {some[other]}"] = (by_axis["positions"][:, one], by_axis["positions"][:, other])
    row = uniforms(noise_key(7, 7, Purpose.TOKEN), np.arange(1_000_001))
    for apart in (1, 2, 3, 16, 4096):
        pairs[f"ids {apart} apart in one row"] = (row[apart:], row[:-apart])
    limit = threshold(CELLS**2 - 1)
    for name, (left, right) in pairs.items():
        counts = np.bincount((cells_of(left) * CELLS + cells_of(right)).ravel(), minlength=CELLS**2)
        assert chi_square(counts, np.full(CELLS**2, CELLS**-2)) < limit, name


@pytest.mark.slow
def test_draw_frequencies_match_the_weights() -> None:
    """60 000 draws over positions and seeds, of likely and of rare tokens, by their real ids."""
    ids = np.array([0, 1, 2, 700, 701, 65536, 151935], dtype=np.int64)
    scores = np.log(np.float32([8, 1, 4, 2, 0.5, 4, 0.01]))
    counts = np.zeros(len(ids), dtype=np.int64)
    place = {token: index for index, token in enumerate(ids.tolist())}
    weights = np.exp(scores.astype(np.float64))
    for seed in range(30):
        for position in range(2000):
            (token,), _ = first_to_arrive(ids, weights, noise_key(seed, position, Purpose.TOKEN), 1)
            counts[place[token]] += 1
    probs = weights / weights.sum()
    assert chi_square(counts, probs) < threshold(len(ids) - 1)
    other = np.exp(scores.astype(np.float64) / 1.1)
    assert chi_square(counts, other / other.sum()) > threshold(len(ids) - 1), (
        "a slightly wrong distribution is detected"
    )


def test_the_last_bits_of_noise_are_uniform_and_independent() -> None:
    """The last bits decide between rare tokens, and must not follow from the others."""
    numbers = uniforms(noise_key(9, 4, Purpose.TOKEN), np.arange(400_000))
    last = np.modf(numbers * 2.0**32)[0]
    for left, right in ((numbers, last), (last[1:], last[:-1]), (np.modf(numbers * 2.0**28)[0], last)):
        counts = np.bincount(cells_of(left) * CELLS + cells_of(right), minlength=CELLS**2)
        assert chi_square(counts, np.full(CELLS**2, CELLS**-2)) < threshold(CELLS**2 - 1)


def test_noise_bits_are_a_balanced_bijection_of_ids() -> None:
    bits = noise_bits(np.arange(2**18, dtype=np.uint32), *KEY[:2])
    assert len(np.unique(bits)) == len(bits)
    for place in range(32):
        ones = int(((bits >> np.uint32(place)) & np.uint32(1)).sum())
        assert abs(ones - len(bits) / 2) < 5 * math.sqrt(len(bits)) / 2, place


def test_computing_noise_raises_no_numpy_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uniforms(noise_key(2**64 - 1, 2**31, Purpose.CORRECTION), IDS)
        for row in score_rows(6, 300):
            by_numpy(row)


def test_a_draw_takes_the_lowest_id_on_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "uniforms", lambda key, ids: np.full(len(ids), 0.5))
    monkeypatch.setattr(module, "noise_bits", lambda ids, first, second: np.zeros(len(ids), dtype=np.uint32))
    for count in (2, 50):
        ids = np.arange(4, 4 + count)
        assert first_to_arrive(ids, np.full(count, 0.5), KEY, 1)[0] == [4]
        assert first_to_arrive(ids, np.full(count, 0.5), KEY, 2)[0] == [4, 5]
